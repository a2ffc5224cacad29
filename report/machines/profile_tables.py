"""The tables of `plan profile --show`: machine, curves with their errors, failed cases, figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console

from parplan.profiles.machines.curves import CollectiveCurve
from parplan.profiles.machines.measured_points import curves_of
from parplan.profiles.machines.measurements import CaseOutcome, Record
from parplan.profiles.machines.user_profile import ProfileEnvironment, UserProfile
from parplan.profiles.units import GB, TERA, US_PER_S, format_bytes, format_number
from parplan.report.machines.profile_series import CurveSeries, chip_of, series_of
from parplan.report.text import joined, labelled, percent, print_table, say, seconds_text


def print_profile(profile: UserProfile, out: Console) -> None:
    """Print a profile for a person; raises ConfigError if the machine lacks its precision."""
    measured = sum(record.outcome is CaseOutcome.MEASURED for record in profile.records)
    cases = (
        f"{measured:,} of {len(profile.records):,} cases measured"
        if profile.records
        else "nothing measured"
    )
    say(out, f"{', '.join(filter(None, (profile.device, profile.precision)))}: {cases}", "bold")
    for label, phrases in _facts(profile):
        say(out, joined(phrases, ", ", out.width, start=labelled(label), indent=len(labelled(""))))
    _print_curves(profile, out)
    _print_collectives(profile, out)
    _print_failures(profile, out)


def _facts(profile: UserProfile) -> Iterator[tuple[str, list[str]]]:
    """Yields the labelled lines above the tables."""
    here = profile.environment
    if here is not None:
        by = f"files of {here.tool}, " if here.tool else ""
        yield "measured", [f"{by}{here.date} on {here.num_devices} x {here.device}"]
        yield from ((label, phrases) for label, phrases in _machine(here) if phrases)
    chip = chip_of(profile)
    if chip is not None:
        yield (
            "shares of",
            [
                f"{format_number(chip.peak_flops_per_s / TERA, 3)} TFLOP/s",
                f"{format_number(chip.bytes_per_s / GB, 4)} GB/s",
            ],
        )
    yield from (
        (label, phrases)
        for label, phrases in (("memory", _memory(profile)), ("transfers", _rates(profile)))
        if phrases
    )
    contention = profile.profile and profile.profile.contention
    if contention is not None:
        yield (
            "overlap",
            [f"a second of communication costs the compute that it runs under {contention:.2g} s"],
        )
    in_step = profile.profile and profile.profile.in_step
    if in_step:
        yield (
            "in a step",
            [
                f"{in_step.stack}: kernels x {in_step.kernel_slowdown:.3g}",
                f"host {seconds_text(in_step.forward_s)} an operator forward, "
                f"{seconds_text(in_step.backward_s)} backward",
            ],
        )


def _machine(here: ProfileEnvironment) -> Iterator[tuple[str, list[str]]]:
    software = (
        ("torch", here.torch),
        ("CUDA", here.cuda),
        ("driver", here.driver),
        ("NCCL", here.nccl),
        ("cuDNN", here.cudnn),
        ("Python", here.python),
    )
    yield "software", [f"{name} {version}" for name, version in software if version]
    clocks = [
        f"{name} {_of(now, most)} MHz"
        for name, now, most in (
            ("SM", here.sm_clock_mhz, here.max_sm_clock_mhz),
            ("memory", here.memory_clock_mhz, here.max_memory_clock_mhz),
        )
        if now or most
    ]
    yield "clocks", [*clocks, *([f"limit {here.power_limit_w:g} W"] if here.power_limit_w else [])]
    host = [here.cpu, f"{here.num_cores} cores" if here.num_cores else None]
    yield (
        "host",
        [
            *filter(None, host),
            *([format_bytes(here.host_memory_bytes)] if here.host_memory_bytes else []),
        ],
    )
    yield (
        "links",
        [
            f"{count} x {kind} {what}"
            for what, kinds in (("between GPUs", here.gpu_links), ("to NICs", here.nic_links))
            for kind, count in kinds.items()
        ],
    )


def _of(now: float | None, most: float | None) -> str:
    return f"{now:g} of {most:g}" if now and most else f"{now or most:g}"


def _memory(profile: UserProfile) -> list[str]:
    texts = (
        ("reserved beyond allocated", profile.allocator_share, percent),
        ("context", profile.context_bytes, format_bytes),
        ("communicator", profile.communicator_bytes, format_bytes),
        ("granularity", profile.granularity_bytes, format_bytes),
    )
    return [f"{name} {text(value)}" for name, value, text in texts if value is not None]


def _rates(profile: UserProfile) -> list[str]:
    """Returns the figures of the machine: bandwidths, and the host's time for one operator."""
    texts = []
    for name, value in figures_of(profile).items():
        words = name.removesuffix("_bytes_per_s").removesuffix("_s").replace("_", " ")
        if name.endswith("_bytes_per_s"):
            texts.append(f"{words} {rate_text(value / GB)} GB/s")
        elif name.endswith("launch_s"):
            texts.append(f"{words} {seconds_text(value)}")
    return texts


def figures_of(profile: UserProfile) -> dict[str, float]:
    """Returns the largest value of each figure in the records, by name."""
    figures: dict[str, float] = {}
    for record in profile.records:
        for name, value in (record.measured.figures if record.measured else {}).items():
            shown = f"{record.case.work}_{name}" if name == "bytes_per_s" else name
            figures[shown] = max(value, figures.get(shown, value))
    return figures


def _print_curves(profile: UserProfile, out: Console) -> None:
    if profile.profile is None:
        return
    all_series = series_of(profile)
    say(out)
    heading = ("curve", "points", "from", "to", "rate there", "and there", "", "off by", "at worst")
    rows = [_cells(series) for series in all_series]
    print_table(out, heading, rows, left=("curve", "from", "to", ""), indent=0)
    with_points = {series.name for series in all_series}
    # named operations are left out: they may have one pass only
    fields_of = replace(profile.profile.compute, named={})
    assumed = [
        name
        for name, curve in curves_of(fields_of).items()
        if not curve.rows and name not in with_points
    ]
    if assumed:
        say(out, joined(assumed, ", ", out.width, start="assumed, not measured: ", indent=2), "dim")


def _cells(series: CurveSeries) -> tuple[str, ...]:
    first, last = series.points[0], series.points[-1]
    rates = (rate_text(point.rate / series.scale) for point in (first, last))
    curve = series.curve
    errors = (
        "-" if error is None else percent(error)
        for error in (curve.median_error, curve.worst_error)
    )
    return (
        series.name,
        str(len(series.points)),
        _sizes(series, first.sizes),
        _sizes(series, last.sizes),
        *rates,
        series.unit,
        *errors,
    )


def _sizes(series: CurveSeries, sizes: tuple[int, ...]) -> str:
    return format_bytes(sizes[0]) if series.unit == "GB/s" else " x ".join(map(str, sizes))


def collectives_of(profile: UserProfile) -> tuple[CollectiveCurve, ...]:
    """Returns the curves of collectives inside nodes, then those across nodes."""
    if profile.profile is None:
        return ()
    return (*profile.profile.intra.curves, *profile.profile.inter.crossing)


def placement_text(curve: CollectiveCurve) -> str:
    """`2 x 8 ranks, 4 groups`: nodes (if more than one), ranks on each, concurrent groups."""
    nodes = f"{curve.nodes} x " if curve.nodes > 1 else ""
    return f"{nodes}{curve.ranks} ranks" + (f", {curve.groups} groups" if curve.groups > 1 else "")


def _print_collectives(profile: UserProfile, out: Console) -> None:
    curves = collectives_of(profile)
    if not curves:
        return
    say(out)
    rows = [
        (
            curve.collective,
            placement_text(curve),
            str(len(curve.bytes)),
            format_bytes(curve.bytes[0]),
            seconds_text(curve.time_us[0] / US_PER_S),
            format_bytes(curve.bytes[-1]),
            f"{rate_text(curve.bytes[-1] / curve.time_us[-1] * US_PER_S / GB)} GB/s",
        )
        for curve in curves
    ]
    heading = ("collective", "group", "points", "from", "takes", "to", "bytes a second")
    print_table(out, heading, rows, left=("collective", "group"), indent=0)


def _print_failures(profile: UserProfile, out: Console) -> None:
    failed = [record for record in profile.records if record.outcome is not CaseOutcome.MEASURED]
    if not failed:
        return
    say(out)
    say(out, f"{len(failed)} of {len(profile.records)} cases not measured")
    rows = [
        (record.case.key, record.outcome.value.replace("_", " "), _first_line(record))
        for record in failed
    ]
    print_table(
        out, ("case", "outcome", "because"), rows, left=("case", "outcome", "because"), indent=2
    )


def _first_line(record: Record) -> str:
    return next(iter(record.detail.strip().splitlines()), "")


def rate_text(rate: float) -> str:
    """Formats a rate with three digits and no exponent: `1.29`, `154`, `1,810`."""
    return format_number(rate, 3)
