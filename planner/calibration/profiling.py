"""A machine's own profile from nothing to a file: which cases, measured, fitted, merged with what
the file had.

What runs a case is handed in by its name (`program`), since it belongs to the executor, above.
Every finished case is in the journal beside the file at once; the journal goes when the file is
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
from parplan.profiles.catalog import cluster_document, load_cluster, load_stack, with_gpus
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.measurements import Case, CaseFigures, CaseOutcome, Record
from parplan.profiles.machines.profile_records import rounded_records
from parplan.profiles.machines.shipped_profiles import analytic_profile, shipped_profile
from parplan.profiles.machines.user_profile import (
    PROFILE_VERSION,
    ProfileEnvironment,
    UserProfile,
    merged,
    read_profile,
    with_memory_facts,
    write_profile,
)
from parplan.profiles.models.spec import ModelEntry, Precision, TrainingSpec
from parplan.profiles.profiler.communication.comm_cases import ALL_REDUCE
from parplan.profiles.profiler.communication.comm_launch import comm_records
from parplan.profiles.profiler.environment import (
    ASSUMED_LINK,
    CPU,
    cluster_of,
    environment,
    fingerprint,
    lacking,
)
from parplan.profiles.profiler.fits.host_fit import host_speed
from parplan.profiles.profiler.fits.link_fit import links_of
from parplan.profiles.profiler.fits.profile_fit import fit_profile
from parplan.profiles.profiler.journal import Journal, beside, open_journal
from parplan.profiles.profiler.measuring_session import Measurements, run_session
from parplan.profiles.profiler.session_progress import OnProgress
from parplan.profiles.stack import Stack

STACK = "parplan"  # whose blocks are measured
Tell = Callable[[str], None]
MODULES = (
    "torch",
    "torch.distributed",
)  # what every measurement needs, and takes seconds to import


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What is to be measured, and how.

    device       cpu or cuda
    models       whose shapes; none: a few that say most
    cases        instead, exactly these
    program      what measures a case: module:function, of (Case, device) -> Measured
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
    """The file's profile; the cases that the budget or Ctrl-C did not reach; remarks on what was
    found on the way.
    """

    profile: UserProfile
    missed: tuple[Case, ...] = ()
    interrupted: bool = False
    notes: tuple[str, ...] = ()


def measure_operators(wanted: ProfileRequest, on_progress: OnProgress | None) -> Profiled:
    """Measure what the file and its journals lack of the operators on one device, and write the
    file. Raises ConfigError.

    Every case twice, at two moments, where the budget has room for that, since what disturbs a
    machine for a second shifts all repeats of a case: of each pass the faster one counts. All of
    them or none, since one operator is compared with another.
    """
    here, known = environment(wanted.device), known_profile(wanted)
    begins_s = time.monotonic()
    ends_s = begins_s + 60 * wanted.minutes
    with (
        closing(_journal(wanted, here, "")) as first,
        closing(_journal(wanted, here, ".again")) as second,
    ):
        seen = {record.case.key: record for record in known.records} if known else {}
        first.records.update(seen | first.records)
        found = _session(wanted, cases_wanted(wanted, here), here, first, ends_s, on_progress)
        missing = lacking(here, found.records) if found.records else "anything"
        if missing is not None and found.interrupted:
            raise KeyboardInterrupt  # no profile can be made yet; the journal keeps what there is
        if not found.records:
            raise ConfigError(
                "nothing was measured before it ended", hint="give it more time with --minutes"
            )
        if missing is not None and found.missed:
            raise ConfigError(
                f"the time was over before {missing} was measured, so nothing says how fast "
                f"{here.device} is",
                hint="give it more time with --minutes: the same command goes on",
            )
        fresh = [
            record.case
            for record in found.records
            if record.case.key not in seen and record.outcome is CaseOutcome.MEASURED
        ]
        roomy = 2 * (time.monotonic() - begins_s) < ends_s - begins_s or bool(second.records)
        if fresh and roomy and not found.missed and not found.interrupted:
            again = _session(wanted, fresh, here, second, math.inf, on_progress)
            records = found.records if again.interrupted else faster(found.records, again.records)
            found = replace(found, records=records, interrupted=again.interrupted)
        profile = kept(wanted.output, known, found.records, here, wanted.precision)
        second.delete()
        first.delete()
        return Profiled(
            profile=profile,
            missed=found.missed,
            interrupted=found.interrupted,
            notes=(*first.notes, *second.notes),
        )


def _journal(wanted: ProfileRequest, here: ProfileEnvironment, which: str) -> Journal:
    asked = {"fingerprint": fingerprint(here, wanted.precision), "device": here.device}
    return open_journal(
        beside(wanted.output.with_name(wanted.output.name + which)), asked, restart=wanted.restart
    )


def faster(records: Sequence[Record], others: Sequence[Record]) -> tuple[Record, ...]:
    """The records, with the faster timing of every pass that both have."""
    again = {record.case.key: record.measured for record in others if record.measured}
    return tuple(_faster(record, again.get(record.case.key)) for record in records)


def _faster(record: Record, again: CaseFigures | None) -> Record:
    if record.measured is None or again is None:
        return record
    times = {
        name: min(once, again.times.get(name, once), key=lambda one: one.median_us)
        for name, once in record.measured.times.items()
    }
    return replace(record, measured=replace(record.measured, times=times))


def measure_links(wanted: ProfileRequest, minutes: float, told: Tell) -> Profiled:
    """Measure the communication of this node's devices, and write the file. Raises PlannerError.

    Interrupted, it goes on when it is started again: its own journal has what was measured.
    """
    here, known = environment(wanted.device), known_profile(wanted)
    beside_it = comm_path(wanted.output)
    found = comm_records(
        here.num_devices,
        beside_it,
        device=wanted.device,
        minutes=minutes,
        restart=wanted.restart,
        told=told,
    )
    profile = kept(wanted.output, known, found.records, here, wanted.precision)
    beside_it.unlink(missing_ok=True)
    return Profiled(profile=profile)


def comm_path(output: Path) -> Path:
    """Where the communication's records are until the profile has them."""
    return output.with_name(output.name + ".comm")


def has_links(output: Path, num_ranks: int) -> bool:
    """Whether the file has all that can be measured of the communication of one node of
    `num_ranks`.
    """
    if not output.exists() or beside(comm_path(output)).exists():
        return False
    sizes = [
        dict(record.case.sizes)
        for record in read_profile(output).records
        if record.case.work == ALL_REDUCE
    ]
    return any(found["nodes"] == 1 and found["ranks_per_node"] == num_ranks for found in sizes)


def add_records(
    output: Path, records: Sequence[Record], device: str | None, where: str
) -> Profiled:
    """Put records that something else measured into a profile that is there. Raises ConfigError:
    none is, or of another device.
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
    return Profiled(
        profile=kept(output, known, records, known.environment, Precision(known.precision))
    )


def known_profile(wanted: ProfileRequest) -> UserProfile | None:
    """What the file has already, None where it is to be made anew. Raises ConfigError."""
    return read_profile(wanted.output) if wanted.output.exists() and not wanted.restart else None


def cases_wanted(wanted: ProfileRequest, here: ProfileEnvironment) -> tuple[Case, ...]:
    """Those that were asked for, or of the models, on the node that this is."""
    if wanted.cases is not None:
        return wanted.cases
    cluster, stack = nominal_cluster(here), load_stack(STACK)
    training = training_of(wanted.precision, stack)
    workloads = [
        ProfiledWorkload(
            model=entry.spec,
            training=replace(
                training, global_batch_size=entry.global_batch_size, seq_length=entry.seq_length
            ),
        )
        for entry in wanted.models
    ]
    return cases_of(workloads or default_workloads(cluster, training), cluster)


def training_of(precision: Precision, stack: Stack) -> TrainingSpec:
    """How the shapes that are measured are trained; batch and sequence are the models'."""
    return TrainingSpec(
        global_batch_size=1,
        seq_length=1,
        precision=precision,
        attention=stack.attention,
        stack=stack,
        overlap_grad_reduce=stack.overlap_grad_reduce,
    )


def nominal_cluster(here: ProfileEnvironment) -> Cluster:
    """The node that this is before anything was measured: what a datasheet says, or what is
    assumed, with its number of devices.
    """
    try:
        return cluster_of(here)
    except ConfigError:  # no datasheet
        base = load_cluster(CPU if here.device == CPU else ASSUMED_LINK)
        memory_bytes = here.memory_bytes or base.device.memory_bytes
        return with_gpus(
            replace(base, device=replace(base.device, memory_bytes=memory_bytes)),
            here.num_devices,
            here.num_devices,
        )


def _session(
    wanted: ProfileRequest,
    cases: Sequence[Case],
    here: ProfileEnvironment,
    journal: Journal,
    ends_s: float,
    on_progress: OnProgress | None,
) -> Measurements:
    """Measure: on CPUs one case at a time, since they share the memory; on GPUs one on each."""
    devices = (
        [CPU] if wanted.device == CPU else [f"cuda:{index}" for index in range(here.num_devices)]
    )
    return run_session(
        cases,
        wanted.program,
        devices,
        journal,
        deadline_s=ends_s - time.monotonic(),
        hang_limit_s=wanted.hang_limit_s,
        on_progress=on_progress,
        retry_failed=wanted.retry_failed,
        modules=(*MODULES, wanted.program.split(":")[0]),
    )


def kept(
    output: Path,
    known: UserProfile | None,
    records: Sequence[Record],
    here: ProfileEnvironment,
    precision: Precision,
) -> UserProfile:
    """Write the file with new records beside those it has, and every curve fitted to all. Raises
    ConfigError.
    """
    new = UserProfile(
        profile_version=PROFILE_VERSION,
        device=nominal_cluster(here).device.name,
        precision=precision.value,
        environment=here,
        records=rounded_records(tuple(records)),
    )
    whole = (
        new
        if known is None
        else merged(replace(known, calibration=None, fingerprint="", runs=()), new)
    )
    whole = fitted(whole)
    write_profile(whole, output)
    return whole


def fitted(profile: UserProfile) -> UserProfile:
    """The profile with cluster and curves of its records. Raises ConfigError: nothing that says how
    fast the device is.
    """
    here, precision = profile.environment, profile.precision
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
