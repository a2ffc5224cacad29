"""The clusters that meet a deadline, as a table for people and as JSON values for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.search.cluster_size import ClusterSize, TrainingRun
from parplan.profiles.units import counted, format_number
from parplan.report.json_result import JsonResult, KindedNumber
from parplan.report.names import plan_phrase
from parplan.report.plans.goodput_fact import GoodputDocument, goodput_document, span_text
from parplan.report.plans.plan_header import short_assumed
from parplan.report.text import joined, labelled, percent, print_table, say

_J_PER_MWH = 3.6e9


@dataclass(frozen=True, slots=True, kw_only=True)
class MissedRow:
    """A kind of GPU of which no searched number meets the deadline, and why in words."""

    gpu: str
    searched_gpus: tuple[int, ...]
    gpus: None = None
    missed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """The least searched number of GPUs of a kind that meets the deadline.

    searched_gpus   the numbers of GPUs that were searched
    tokens          of the run
    mfu             share of the peak FLOP/s of all GPUs
    goodput         null where no failures are stated
    failures        expected number of failures in the run
    gpu_hours       of all GPUs, spare nodes too
    cost            in the currency of --price, null without a price of this kind
    energy_mwh      of the boards at their greatest power, null where that is unknown
    """

    gpu: str
    searched_gpus: tuple[int, ...]
    gpus: int
    days: float
    tokens: float
    tokens_per_s: float
    step_time_s: KindedNumber
    mfu: float
    goodput: GoodputDocument | None
    failures: float
    gpu_hours: float
    cost: float | None
    energy_mwh: float | None
    mesh: Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesDocument(JsonResult):
    """The clusters that meet a deadline, cheapest or smallest first.

    elapsed_s    seconds of all searches
    unanswered   kinds without an answer, because Ctrl-C came first
    """

    elapsed_s: float
    unanswered: tuple[str, ...]
    sizes: tuple[SizeRow | MissedRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSizes:
    """The answers of a search for the least clusters, in the order of their print.

    unanswered   kinds without an answer, because Ctrl-C came first
    per_hour     price of a GPU-hour by kind
    elapsed_s    seconds of all searches
    """

    sizes: tuple[ClusterSize, ...]
    unanswered: tuple[str, ...]
    per_hour: Mapping[str, float]
    elapsed_s: float


def print_sizes(
    found: FoundSizes, assumed: Sequence[str], out: Console, *, whole: bool = False
) -> None:
    """Print the least cluster of each kind, and what its figures are.

    whole   every default, the plan and the failures of every kind, and how numbers are searched
    """
    if assumed:
        every = joined(assumed, ", ", out.width, start="assumed: ")
        say(out, every if whole else short_assumed(assumed, out.width, listed=True), "dim")
        say(out)
    rows = [_cells(one.run, one.kind, found.per_hour) for one in found.sizes if one.run]
    if rows:
        shown = [name for name in rows[0] if any(row[name] for row in rows)]
        print_table(out, shown, [[row[name] for name in shown] for row in rows], left=("GPU",))
        say(out)
    for label, text in _facts(found, whole=whole):
        say(out, joined(text.split(" "), " ", out.width, start=labelled(label)))


def _cells(run: TrainingRun, kind: str, per_hour: Mapping[str, float]) -> dict[str, str]:
    """Returns the cells of a row by the name of their column, empty where a figure is unknown."""
    plan = run.plan
    price, energy_j = per_hour.get(kind), run.energy_j
    return {
        "GPU": kind,
        "GPUs": f"{plan.cluster.num_gpus:,}",
        "days": format_number(run.days, 3),
        "tokens/s": f"{run.tokens_per_s:,.0f}",
        "MFU": percent(plan.predicted.mfu.value),
        "goodput": percent(run.goodput.share) if run.goodput else "",
        "GPU-hours": f"{run.gpu_hours:,.0f}",
        "cost": "" if price is None else f"{price * run.gpu_hours:,.0f}",
        "MWh": "" if energy_j is None else format_number(energy_j / _J_PER_MWH, 3),
    }


def _facts(found: FoundSizes, *, whole: bool) -> Iterator[tuple[str, str]]:
    """Yields the lines under the table: kinds that miss the deadline, failures, and notes.

    whole   of every kind, not of the first row alone
    """
    sizes = found.sizes
    detailed = sizes if whole else sizes[:1]
    label = "plan"
    for one in detailed:
        if one.run:
            yield label, f"{one.kind}: {plan_phrase(one.run.plan)}"
            label = ""
    label = "missed"
    for one in sizes:
        if one.run is None:
            yield label, f"{one.kind}: {_why(one)}"
            label = ""
    label = "failures"
    for one in detailed:
        if one.run and one.run.goodput:
            spares = counted(one.run.goodput.spare_nodes, "spare node")
            yield (
                label,
                f"{one.kind}: one every {span_text(one.run.goodput.failure_s)}, "
                f"{one.run.failures:,.0f} in the run, {spares}, a checkpoint every "
                f"{span_text(one.run.goodput.interval_s)}",
            )
            label = ""
    if found.unanswered:
        yield "stopped", f"early (Ctrl-C): no answer yet for {', '.join(found.unanswered)}"
    searches = sum(len(one.tried) for one in sizes)
    how = (
        "; a cluster is not searched where 15 % more of each GPU than a larger one has, or the "
        "lower bound of its step, would still miss"
    )
    yield (
        "searched",
        f"{counted(searches, 'number')} of GPUs in {found.elapsed_s:.1f} s: powers of two and "
        f"three times those{how if whole else ''}",
    )
    if not any(one.run for one in sizes):
        yield "note", "the least times are predicted, not measured"
        return
    kinds = sorted({str(one.run.plan.predicted.step_time_s.kind) for one in sizes if one.run})
    yield (
        "note",
        f"all values are predicted ({', '.join(kinds)}); GPU-hours, cost and energy "
        "count spare nodes; MWh is of the boards at their greatest power, without hosts and "
        "cooling",
    )


def _why(one: ClusterSize) -> str:
    if one.nearest is not None:
        return (
            f"{one.nearest.days:,.0f} days on {one.nearest.plan.cluster.num_gpus:,} GPUs is the "
            f"least that was found"
        )
    assert one.error is not None, "a kind without a plan has an error"
    return one.error.message


def size_document(found: FoundSizes) -> SizesDocument:
    """Returns the sizes for `--json`."""
    return SizesDocument(
        elapsed_s=round(found.elapsed_s, 3),
        unanswered=found.unanswered,
        sizes=tuple(_row(one, found.per_hour.get(one.kind)) for one in found.sizes),
    )


def _row(one: ClusterSize, price: float | None) -> SizeRow | MissedRow:
    run = one.run
    if run is None:
        return MissedRow(gpu=one.kind, searched_gpus=one.tried, missed=_why(one))
    step, energy_j = run.plan.predicted.step_time_s, run.energy_j
    return SizeRow(
        gpu=one.kind,
        searched_gpus=one.tried,
        gpus=run.plan.cluster.num_gpus,
        days=round(run.days, 4),
        tokens=run.tokens,
        tokens_per_s=round(run.tokens_per_s, 3),
        step_time_s=KindedNumber(value=step.value, kind=str(step.kind)),
        mfu=run.plan.predicted.mfu.value,
        goodput=goodput_document(run.goodput) if run.goodput else None,
        failures=round(run.failures, 3),
        gpu_hours=round(run.gpu_hours, 3),
        cost=None if price is None else round(price * run.gpu_hours, 2),
        energy_mwh=None if energy_j is None else round(energy_j / _J_PER_MWH, 4),
        mesh=run.plan.mesh,
    )
