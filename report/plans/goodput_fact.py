"""The lines of a summary that say what failures leave of the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parplan.costmodels.usage.goodput import Failures, Goodput
from parplan.planner.plan.plan_goodput import plan_failures, plan_goodput
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.units import counted, format_bytes, format_number
from parplan.report.text import percent, seconds_text

_UNITS = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputDocument:
    """The part of a cluster's time that remains for a run.

    share          share of the time in which the run advances: running_share x ready_share
    failure_s      seconds between two failures of the cluster
    checkpoint_s   seconds to write a checkpoint, in which nothing is computed
    interval_s     seconds of steps between two checkpoints
    running_share  share of the time with enough nodes in which the run advances
    spare_nodes    nodes that wait to replace a failed one
    short_share    share of the failures that find no spare node
    wait_s         mean seconds of the wait for a node after such a failure
    ready_share    share of the time in which enough nodes work
    """

    share: float
    kind: Literal["analytic"] = "analytic"
    failure_s: float
    checkpoint_s: float
    interval_s: float
    running_share: float
    spare_nodes: int
    short_share: float
    wait_s: float
    ready_share: float


def span_text(seconds: float) -> str:
    """Formats a time span in the unit that a person would choose: `3.1 h`, `45 min`."""
    scale, unit = next((pair for pair in _UNITS if seconds >= 2 * pair[0]), _UNITS[-1])
    return f"{format_number(seconds / scale, 2 if seconds < 100 * scale else 3)} {unit}"


def goodput_facts(plan: AnyPlan, failures: Failures | None) -> Iterator[tuple[str, str, str]]:
    """Yields the line, none where no failures are stated."""
    failures = plan_failures(plan, failures)
    if failures is None:
        return
    result = plan_goodput(plan, failures)
    size = format_bytes(failures.storage_bytes_per_s * result.checkpoint_s)
    spares = counted(result.spare_nodes, "spare node") if result.spare_nodes else "no spare nodes"
    yield (
        "goodput",
        f"{percent(result.share)} of the time (analytic)",
        f"a failure every {span_text(result.failure_s)}, a checkpoint of {size} in "
        f"{span_text(result.checkpoint_s)} every {span_text(result.interval_s)}, {spares}",
    )
    if choice := plan.search.spares:
        early = "" if choice.finished else ", ended early"
        given = "" if choice.is_proven else " if no number needs less work than one node"
        yield (
            "spares",
            f"{plan.cluster.num_gpus:,} of {choice.gpus:,} GPUs train",
            f"{seconds_text(choice.advance_s)} for a step with failures, gap "
            f"{percent(choice.gap)}{given}; {choice.searched} of "
            f"{counted(choice.considered, 'number')} of nodes searched{early}; "
            f"without spare nodes goodput is {percent(choice.goodput_without)}",
        )


def goodput_document(result: Goodput) -> GoodputDocument:
    """Returns a goodput for `--json`, with its kind."""
    return GoodputDocument(
        share=round(result.share, 6),
        failure_s=round(result.failure_s, 6),
        checkpoint_s=round(result.checkpoint_s, 6),
        interval_s=round(result.interval_s, 6),
        running_share=round(result.running_share, 6),
        spare_nodes=result.spare_nodes,
        short_share=round(result.short_share, 6),
        wait_s=round(result.wait_s, 6),
        ready_share=round(result.ready_share, 6),
    )
