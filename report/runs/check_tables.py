"""The tables of `plan check`: bytes held and sent, predicted beside measured, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from parplan.planner.plan.plan import Plan
from parplan.planner.runs.rank_checks import (
    CLASSES,
    RankCheck,
    SentCheck,
    all_match,
    class_bytes,
    class_is_exact,
    class_names,
    sent_checks,
    worst_deviation,
)
from parplan.profiles.units import format_bytes
from parplan.report.text import joined, print_table, say


def print_check(plan: Plan, checks: Sequence[RankCheck], out: Console) -> None:
    """Print peaks of all stages, classes and collectives of the fullest, notes and the verdict."""
    full = max(checks, key=lambda check: check.found.held)
    say(
        out,
        f"{plan.model.name}, {plan.mesh}: one rank of {_stages(plan, checks)}, at full size on "
        f"tensors without data",
        "bold",
    )
    if len(checks) > 1:
        say(out)
        heading = ("stage", "predicted peak", "found", "deviation", "device")
        print_table(out, heading, [_peak_row(check) for check in checks], left=("stage", "device"))
    where = f"of stage {full.rank}, the fullest" if len(checks) > 1 else f"of stage {full.rank}"
    say(out)
    of_all = ("worst of all stages",) if len(checks) > 1 else ()
    heading = ("", "predicted", "found", "deviation", *of_all)
    say(out, f"  bytes {where}; {device_text(full)}", "dim")
    print_table(out, heading, list(_class_rows(full, checks)), left=("",))
    say(out)
    say(out, f"  collectives of a step {where}", "dim")
    print_table(
        out,
        ("axis", "collective", "calls", "found", "bytes", "found", "deviation"),
        [_sent_row(sent) for sent in sent_checks(full)],
        left=("axis", "collective"),
    )
    say(out)
    for note in (*_notes(checks), *_of_experts(plan)):
        say(out, joined(note.split(" "), " ", out.width, start="  note      ", indent=12))
    say(out, joined(verdict(checks).split(" "), " ", out.width, indent=2), "bold")


def _stages(plan: Plan, checks: Sequence[RankCheck]) -> str:
    if len(checks) < plan.mesh.pp:
        return f"stage {', '.join(str(check.rank) for check in checks)}"
    return "each stage" if plan.mesh.pp > 1 else "the one stage"


def _peak_row(check: RankCheck) -> tuple[str, ...]:
    sides = (format_bytes(use.held) for use in (check.predicted, check.found))
    return f"{check.rank}", *sides, share_text(check.share("held")), device_text(check)


def _class_rows(check: RankCheck, checks: Sequence[RankCheck]) -> Iterator[tuple[str, ...]]:
    for name in class_names(checks):
        sides = (format_bytes(class_bytes(use, name)) for use in (check.predicted, check.found))
        yield (
            name_text(name),
            *sides,
            _deviation(check, name),
            *((share_text(worst_deviation(checks, name)),) if len(checks) > 1 else ()),
        )
    kept = check.predicted.saved, check.found.saved
    share = _share(*kept)
    yield (
        "kept of a micro-batch",
        *map(format_bytes, kept),
        share_text(share),
        *(("",) if len(checks) > 1 else ()),
    )


def name_text(name: str) -> str:
    """Returns the printed name of a class; `held` is the peak."""
    return "peak" if name == "held" else name


def _deviation(check: RankCheck, name: str) -> str:
    return "equal" if class_is_exact((check,), name) else share_text(check.share(name))


def _share(predicted: int, measured: int) -> float | None:
    return measured / predicted - 1 if predicted else None


def device_text(check: RankCheck) -> str:
    """Returns the bytes that are free, or too much, at the measured peak with its reserve."""
    free = check.capacity - check.occupied
    return f"{format_bytes(free)} free" if check.fits_device else f"{format_bytes(-free)} too much"


def _sent_row(sent: SentCheck) -> tuple[str, ...]:
    predicted = sent.predicted.num_bytes
    measured = sent.found.num_bytes
    return (
        sent.axis,
        sent.kind,
        f"{sent.predicted.calls:,}",
        f"{sent.found.calls:,}",
        format_bytes(predicted),
        format_bytes(measured),
        "equal" if predicted == measured else share_text(_share(predicted, measured)),
    )


def share_text(share: float | None) -> str:
    """Formats a deviation as `+0.4 %`, with two decimals below 0.1 %."""
    if share is None:
        return "not predicted"
    return f"{100 * share:+.{1 if abs(share) >= 0.001 else 2}f} %"


def _notes(checks: Sequence[RankCheck]) -> Iterator[str]:
    short = [check for check in checks if check.micro_batches != (check.of,)]
    if short:
        most = max(short, key=lambda check: check.micro_batches)
        yield (
            f"counted on steps of {' and '.join(map(str, most.micro_batches))} micro-batches, of "
            f"{most.of}: "
            "what is sent is linear in their number, what is held stays"
        )
    old = [check for check in checks if check.outdated]
    if old:
        yield (
            f"the plan file predicts a peak of {format_bytes(old[0].planned)} on stage "
            f"{old[0].rank}, today's prices "
            f"{format_bytes(old[0].repriced)}: make the plan again"
        )
    if class_names(checks) != CLASSES:
        check = checks[0]
        yield (
            f"the host of the fullest node holds {format_bytes(check.node_host)} of "
            f"{format_bytes(check.node_host_capacity)}; a dry run has one memory, so that states "
            "which FSDP gathers from the host have no copy on the device before the gather"
        )
    yield (
        "found: one rank of the executor, its kernels' own workspace left out; predicted: what "
        "the stack of the plan holds "
        "and sends; temporaries: what the fullest moment holds beyond states and the most "
        "activations, which may never be there "
        "together; peak: tensors alone, the device also holds the reserve"
    )


def _of_experts(plan: Plan) -> Iterator[str]:
    imbalance = plan.training.expert_imbalance
    if imbalance > 1:
        yield (
            f"both columns are of experts that get equally many tokens; the plan is priced for "
            f"ranks with {imbalance:g} times as many (expert_imbalance)"
        )


def verdict(checks: Sequence[RankCheck]) -> str:
    """Returns one line: classes as predicted, deviations of the rest, and if the plan fits."""
    names = class_names(checks)
    equal = [name for name in names if class_is_exact(checks, name)]
    deviating = [
        f"{name_text(name)} {share_text(worst_deviation(checks, name))}"
        for name in names
        if name not in equal
    ]
    start = "matches" if all_match(checks) else "differs"
    parts = [f"{', '.join(map(name_text, equal))} to the byte"] if equal else []
    parts += [", ".join(deviating)] if deviating else []
    full = [check for check in checks if not check.fits_device]
    if full:
        most = max(full, key=lambda check: check.occupied)
        return (
            f"does not fit: stage {most.rank} needs {format_bytes(most.occupied)} of "
            f"{format_bytes(most.capacity)}, "
            f"{device_text(most)}; {'; '.join(parts)}"
        )
    if not checks[0].fits_host:
        needed, there = checks[0].node_host, checks[0].node_host_capacity
        return (
            f"does not fit: the host of a node needs {format_bytes(needed)} of "
            f"{format_bytes(there)}; {'; '.join(parts)}"
        )
    return f"{start}: {'; '.join(parts)}"
