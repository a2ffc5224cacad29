"""Measures a machine's profile: chooses cases, measures, fits, and merges them into the file.

The function that measures a case belongs to the executor and is passed by its name (`program`).
Every finished case is at once in a journal beside the file, which is deleted when the file is
written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from parplan.planner.calibration.in_step import in_step_of
from parplan.planner.calibration.profile_cases import ProfiledWorkload, cases_of, default_workloads
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import (
    cluster_document,
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.machines.measured_points import with_unmeasured_of
from parplan.profiles.machines.measurements import Case, CaseFigures, CaseOutcome, Record
from parplan.profiles.machines.profile_records import rounded_records
from parplan.profiles.machines.shipped_profiles import analytic_profile, shipped_profile
from parplan.profiles.machines.speeds import Profile
from parplan.profiles.machines.user_profile import (
    PROFILE_VERSION,
    ProfileEnvironment,
    UserProfile,
    merge_profiles,
    read_profile,
    with_memory_facts,
    write_profile,
)
from parplan.profiles.models.spec import ModelEntry, Precision, TrainingSpec
from parplan.profiles.profiler.communication.comm_cases import ALL_REDUCE
from parplan.profiles.profiler.communication.comm_launch import CommOptions, comm_records
from parplan.profiles.profiler.environment import (
    ASSUMED_LINK,
    CPU,
    cluster_of,
    environment,
    fingerprint,
    missing_work,
)
from parplan.profiles.profiler.fits.host_fit import host_speed
from parplan.profiles.profiler.fits.link_fit import links_of
from parplan.profiles.profiler.fits.profile_fit import fit_profile
from parplan.profiles.profiler.journal import Journal, journal_path, open_journal
from parplan.profiles.profiler.measuring_session import Measurements, SessionOptions, run_session
from parplan.profiles.profiler.session_progress import OnProgress
from parplan.profiles.stack import Stack

STACK = "parplan"  # the stack of the measured blocks
Tell = Callable[[str], None]
MODULES = ("torch", "torch.distributed")  # needed by every measurement, and slow to import


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """A request to measure a profile.

    device   cpu or cuda
    models   models whose shapes are measured, empty for `default_workloads`
    cases    exactly the cases to measure, in place of models
    program  module:function that measures a case, (Case, device) -> Measured
    """

    output: Path
    device: str
    precision: Precision
    program: str
    models: tuple[ModelEntry, ...] = ()
    cases: tuple[Case, ...] | None = None
    minutes: float = 10.0
    hang_limit_s: float = 60.0
    restart: bool = False
    retry_failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The file's profile, with the cases that the budget or Ctrl-C did not reach, and remarks."""

    profile: UserProfile
    missed: tuple[Case, ...] = ()
    interrupted: bool = False
    notes: tuple[str, ...] = ()


def measure_operators(request: ProfileRequest, on_progress: OnProgress | None) -> Profiled:
    """Measure operators on one device that the file and its journals lack, and write the file.

    Every case is measured twice, at two moments, if the budget has room for it: a disturbance of a
    second shifts all repeats of a case. The faster time of each pass counts. Either all cases are
    measured twice or none, since operators are compared with each other. Raises ConfigError.
    """
    here = environment(request.device)
    known = known_profile(request)
    begins_s = time.monotonic()
    ends_s = begins_s + 60 * request.minutes
    with (
        closing(_journal(request, here, "")) as first,
        closing(_journal(request, here, ".again")) as second,
    ):
        seen = {record.case.key: record for record in known.records} if known else {}
        first.records.update(seen | first.records)
        cases = requested_cases(request, here)
        result = _session(request, cases, here, first, ends_s, on_progress)
        missing = missing_work(here, result.records) if result.records else "anything"
        if missing is not None and result.interrupted:
            raise KeyboardInterrupt  # the journal holds the records until a profile can be made
        if not result.records:
            raise ConfigError(
                "nothing was measured before it ended", hint="give it more time with --minutes"
            )
        if missing is not None and result.missed:
            raise ConfigError(
                f"the time was over before {missing} was measured, so nothing says how fast "
                f"{here.device} is",
                hint="give it more time with --minutes: the same command goes on",
            )
        fresh = [
            record.case
            for record in result.records
            if record.case.key not in seen and record.outcome is CaseOutcome.MEASURED
        ]
        roomy = 2 * (time.monotonic() - begins_s) < ends_s - begins_s or bool(second.records)
        if fresh and roomy and not result.missed and not result.interrupted:
            repeat = _session(request, fresh, here, second, math.inf, on_progress)
            records = result.records
            if not repeat.interrupted:
                records = faster(records, repeat.records)
            result = replace(result, records=records, interrupted=repeat.interrupted)
        profile = _write_merged(request.output, known, result.records, here, request.precision)
        second.delete()
        first.delete()
        return Profiled(
            profile=profile,
            missed=result.missed,
            interrupted=result.interrupted,
            notes=(*first.notes, *second.notes),
        )


def _journal(request: ProfileRequest, here: ProfileEnvironment, suffix: str) -> Journal:
    header = {"fingerprint": fingerprint(here, request.precision), "device": here.device}
    path = request.output.with_name(request.output.name + suffix)
    return open_journal(journal_path(path), header, restart=request.restart)


def faster(records: Sequence[Record], repeats: Sequence[Record]) -> tuple[Record, ...]:
    """Returns the records, with the faster timing of every pass that both sequences have."""
    repeated = {record.case.key: record.measured for record in repeats if record.measured}
    return tuple(_faster(record, repeated.get(record.case.key)) for record in records)


def _faster(record: Record, repeat: CaseFigures | None) -> Record:
    if record.measured is None or repeat is None:
        return record
    times = {
        name: min(once, repeat.times.get(name, once), key=lambda timing: timing.median_us)
        for name, once in record.measured.times.items()
    }
    return replace(record, measured=replace(record.measured, times=times))


def measure_links(request: ProfileRequest, minutes: float, told: Tell) -> Profiled:
    """Measure the communication of this node's devices, and write the file.

    An interrupted measurement goes on when it is started again: its journal has its records.
    Raises PlannerError.
    """
    here = environment(request.device)
    known = known_profile(request)
    path = comm_path(request.output)
    measured = comm_records(
        here.num_devices,
        path,
        CommOptions(device=request.device, minutes=minutes, restart=request.restart),
        told,
    )
    profile = _write_merged(request.output, known, measured.records, here, request.precision)
    path.unlink(missing_ok=True)
    return Profiled(profile=profile)


def comm_path(output: Path) -> Path:
    """Returns the file of the communication's records until the profile has them."""
    return output.with_name(output.name + ".comm")


def has_links(output: Path, num_ranks: int) -> bool:
    """True if the file has the whole communication of one node of `num_ranks`."""
    if not output.exists() or journal_path(comm_path(output)).exists():
        return False
    sizes = [
        dict(record.case.sizes)
        for record in read_profile(output).records
        if record.case.work == ALL_REDUCE
    ]
    return any(size["nodes"] == 1 and size["ranks_per_node"] == num_ranks for size in sizes)


def add_records(
    output: Path, records: Sequence[Record], device: str | None, where: str
) -> Profiled:
    """Add records of another program to an existing profile.

    Raises ConfigError when there is no profile, or when it is of another device.
    """
    if not output.exists():
        hint = f"measure operators first: plan profile --no-comm -o {output}"
        raise ConfigError(f"{output}: no such profile to add {where} to", hint=hint)
    known = read_profile(output)
    if known.environment is None or known.precision is None:
        raise ConfigError(
            f"{output}: it does not say what it was measured on",
            hint="make one with: plan profile -o FILE",
        )
    if device is not None and device != known.environment.device:
        raise ConfigError(
            f"{where}: it was measured on {device}, {output} on {known.environment.device}",
            hint="add it to a profile of its own device",
        )
    precision = Precision(known.precision)
    return Profiled(profile=_write_merged(output, known, records, known.environment, precision))


def known_profile(request: ProfileRequest) -> UserProfile | None:
    """Returns the existing profile, None without one or with `restart`. Raises ConfigError."""
    if request.output.exists() and not request.restart:
        return read_profile(request.output)
    return None


def requested_cases(request: ProfileRequest, here: ProfileEnvironment) -> tuple[Case, ...]:
    """Returns the cases of the request, by default those of its models on this node."""
    if request.cases is not None:
        return request.cases
    cluster = nominal_cluster(here)
    training = training_of(request.precision, load_stack(STACK))
    workloads = [
        ProfiledWorkload(
            model=entry.spec,
            training=replace(
                training, global_batch_size=entry.global_batch_size, seq_length=entry.seq_length
            ),
        )
        for entry in request.models
    ]
    return cases_of(workloads or default_workloads(cluster, training), cluster)


def training_of(precision: Precision, stack: Stack) -> TrainingSpec:
    """Returns the training of measured shapes; models replace its batch and sequence."""
    return TrainingSpec(
        global_batch_size=1,
        seq_length=1,
        precision=precision,
        attention=stack.attention,
        stack=stack,
        overlap_grad_reduce=stack.overlap_grad_reduce,
    )


def nominal_cluster(here: ProfileEnvironment) -> Cluster:
    """Returns this node before any measurement, from a datasheet or from assumptions."""
    try:
        return cluster_of(here)
    except ConfigError:  # no datasheet
        base = load_cluster(CPU if here.device == CPU else ASSUMED_LINK)
        memory_bytes = here.memory_bytes or base.device.memory_bytes
        cluster = replace(base, device=replace(base.device, memory_bytes=memory_bytes))
        return with_gpus(cluster, here.num_devices, here.num_devices)


def _session(
    request: ProfileRequest,
    cases: Sequence[Case],
    here: ProfileEnvironment,
    journal: Journal,
    ends_s: float,
    on_progress: OnProgress | None,
) -> Measurements:
    """Measures one case at a time on CPUs, which share their memory, and one on each GPU."""
    devices = [CPU]
    if request.device != CPU:
        devices = [f"cuda:{index}" for index in range(here.num_devices)]
    return run_session(
        cases,
        request.program,
        devices,
        journal,
        SessionOptions(
            deadline_s=ends_s - time.monotonic(),
            hang_limit_s=request.hang_limit_s,
            retry_failed=request.retry_failed,
            modules=(*MODULES, request.program.split(":")[0]),
        ),
        on_progress,
    )


def _write_merged(
    output: Path,
    known: UserProfile | None,
    records: Sequence[Record],
    here: ProfileEnvironment,
    precision: Precision,
) -> UserProfile:
    """Write the file with its old and new records, and fit every curve to all of them."""
    profile = UserProfile(
        profile_version=PROFILE_VERSION,
        device=nominal_cluster(here).device.name,
        precision=precision.value,
        environment=here,
        records=rounded_records(tuple(records)),
    )
    if known is not None:
        profile = merge_profiles(replace(known, calibration=None, fingerprint="", runs=()), profile)
    profile = fitted(profile)
    write_profile(profile, output)
    return profile


def fitted(profile: UserProfile) -> UserProfile:
    """Returns the profile with the cluster and curves of its records.

    Raises ConfigError when no record says how fast the device is.
    """
    here = profile.environment
    precision = profile.precision
    if here is None or precision is None:
        raise ConfigError(
            "the profile does not say what it was measured on",
            hint="measure it again with plan profile",
        )
    cluster = cluster_of(here, profile.records)
    base = shipped_profile(cluster.device.name) or analytic_profile(cluster.device.name)
    intra, inter, contention = links_of(profile.records, cluster)
    curves = fit_profile(
        profile.records,
        cluster,
        precision,
        intra=intra or base.intra,
        inter=inter or base.inter,
        contention=contention,
    )
    if here.tool is not None:
        curves = _of_tool(curves, base, f"files of {here.tool}, {here.date}")
    in_step = in_step_of(
        profile.records,
        curves,
        cluster,
        Precision(precision),
        load_stack(STACK),
        host_adds=here.device == CPU,
    )
    return with_memory_facts(
        replace(
            profile,
            device=cluster.device.name,
            cluster=cluster_document(cluster),
            profile=replace(curves, in_step=in_step, host=host_speed(profile.records)),
        )
    )


def _of_tool(curves: Profile, base: Profile, source: str) -> Profile:
    """Returns curves that another tool's files gave, and those of `base` for all else."""
    intra, inter = curves.intra, curves.inter
    return replace(
        curves,
        compute=with_unmeasured_of(base.compute, curves.compute, source),
        intra=intra if intra.curves == base.intra.curves else replace(intra, source=source),
        inter=replace(inter, source=source) if inter.crossing else inter,
    )
