"""The tables of a page that have the plan's predictions: overview, step, memory, redundancy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parplan.planner.plan.prediction import Status, mean_idle_share
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan, model_name
from parplan.report.names import pipeline_phrases
from parplan.report.page.figures import Form, PlanFigures, part_forms
from parplan.report.page.memory_charts import CLASSES, alike
from parplan.report.page.reported_plan import ReportedPlan
from parplan.report.page.step_charts import IDEAL, SLOWER
from parplan.report.plans.block_phrases import layers_phrases
from parplan.report.plans.memory_table import fullest, layers_text, rows
from parplan.report.plans.plan_facts import proof
from parplan.report.plans.step_lines import STEP_CAUSES
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.text import band_text

_LONG = 20  # characters of a cell that is wrapped
Cells = tuple[str, ...]  # text, or HTML that `number` made


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table with a heading for each column; the first cell of a row names the row.

    texts   columns of words beside the first; all others are numbers
    """

    caption: str
    heading: Cells
    rows: tuple[Cells, ...]
    texts: frozenset[str] = frozenset()

    @property
    def prose(self) -> frozenset[str]:
        """The columns of words whose cells are long, which take more lines."""
        columns = zip(self.heading, *self.rows, strict=True)
        longest = {name: max(map(_length, cells), default=0) for name, *cells in columns}
        return frozenset(name for name in (self.heading[0], *self.texts) if longest[name] > _LONG)


def _length(cell: str) -> int:
    """Returns the characters of a cell that a reader sees."""
    return len(cell.striptags()) if hasattr(cell, "striptags") else len(cell)


@dataclass(frozen=True, slots=True)
class FiguredPlan:
    """A plan of the page and its numbers."""

    reported: ReportedPlan
    figures: PlanFigures


def overview_table(plans: Sequence[FiguredPlan]) -> PageTable:
    """Returns the plans side by side, one column each."""
    columns = [dict(_overview(each, plans[0])) for each in plans]
    labels = [label for label in columns[0] if any(column[label] for column in columns)]
    names = tuple(each.reported.name for each in plans)
    return PageTable(
        caption="The plans side by side" if len(plans) > 1 else "The plan",
        heading=("", *names),
        rows=tuple((label, *(column[label] for column in columns)) for label in labels),
        texts=frozenset(names),
    )


def _overview(each: FiguredPlan, first: FiguredPlan) -> Iterator[tuple[str, str]]:
    plan, figures = each.reported.plan, each.figures
    predicted = plan.predicted
    band = predicted.error_band
    yield "model and GPUs", each.reported.title
    yield "mesh", str(plan.mesh)
    yield "pipeline", ", ".join(pipeline_phrases(plan.pipeline, plan.mesh))
    zero, recompute = layers_phrases(plan)
    yield "states", zero
    yield "recompute", recompute.removeprefix("recompute ")
    yield "stack", plan.training.stack.name
    yield (
        "step time",
        figures("predicted.step_time_s.value", Form.SECONDS)
        + (f" {band_text(band.time.share)}" if band else ""),
    )
    yield "against the first", _against(each, first)
    yield speed_name(plan), figures("predicted.tokens_per_s_per_gpu.value", Form.COUNT)
    yield "MFU", figures("predicted.mfu.value", Form.SHARE)
    stage = predicted.memory_gib.index(fullest(plan))
    yield (
        "peak memory, GiB",
        figures(f"predicted.memory_gib.{stage}.total", Form.GIB)
        + " of "
        + figures(f"predicted.memory_gib.{stage}.capacity", Form.GIB)
        + (f" {band_text(band.memory.share)}" if band else ""),
    )
    yield "redundant, GiB over all GPUs", figures("predicted.redundancy_gib.total", Form.GIB)
    idle = mean_idle_share(predicted.waits)
    yield (
        "idle, mean of pipeline ranks",
        ""
        if idle is None
        else figures.derived(idle, Form.SHARE, "mean of predicted.waits.*.idle_share"),
    )
    yield "proven", "; ".join(proof(plan, SummaryContext(whole=True))[1:])


def speed_name(plan: AnyPlan) -> str:
    """Returns the unit of a plan's speed; a traced module may train on samples."""
    return f"{plan.traced.unit if isinstance(plan, TracedPlan) else 'tokens'}/s/GPU"


def _against(each: FiguredPlan, first: FiguredPlan) -> str:
    """Returns by how much a step is longer than the first plan's.

    It is empty for that one, and for another model or another number of tokens in a step.
    """
    mine, theirs = each.reported.plan, first.reported.plan
    tokens = theirs.training.tokens_per_step
    alike = model_name(mine) == model_name(theirs) and mine.training.tokens_per_step == tokens
    if each is first or not alike:
        return ""
    slower = mine.predicted.step_time_s.value / theirs.predicted.step_time_s.value - 1
    return each.figures.derived(slower, Form.MORE, "step time over that of the first plan - 1")


def key_figures(each: FiguredPlan) -> Iterator[tuple[str, str, str]]:
    """Yields the name of each number that a reader looks for first, the number and a remark."""
    figures, predicted = each.figures, each.reported.plan.predicted
    band = predicted.error_band
    worst = fullest(each.reported.plan)
    stage = predicted.memory_gib.index(worst)
    yield (
        "step time",
        figures("predicted.step_time_s.value", Form.SECONDS),
        f"{band_text(band.time.share) if band else 'band unknown'}, {predicted.step_time_s.kind}",
    )
    yield (
        speed_name(each.reported.plan),
        figures("predicted.tokens_per_s_per_gpu.value", Form.COUNT),
        figures("predicted.mfu.value", Form.SHARE) + " MFU",
    )
    free = figures.derived(worst.capacity - worst.total, Form.GIB, "capacity - total")
    yield (
        "peak GiB of a GPU",
        figures(f"predicted.memory_gib.{stage}.total", Form.GIB),
        free + " GiB free" + (f", {band_text(band.memory.share)}" if band else ""),
    )
    if each.reported.plan.search.status is Status.ESTIMATE:
        return
    yield (
        "gap to the bound",
        figures("search.gap", Form.SHARE),
        f"{each.reported.plan.search.status}, "
        + figures("search.candidates.considered", Form.COUNT)
        + " candidates",
    )


def step_table(each: FiguredPlan) -> PageTable:
    """Returns the parts of the step with their share and kind, from ideal to predicted."""
    figures, predicted = each.figures, each.reported.plan.predicted
    step_s = predicted.step_time_s.value
    ideal_s = step_s * predicted.mfu.value
    part, _ = part_forms(step_s)

    def row(name: str, key: str, value_s: float, kind: str) -> Cells:
        share = figures.derived(value_s / step_s, Form.SHARE, f"{key} / predicted.step_time_s")
        return (name, figures(f"{key}.value", part), share, kind)

    parts = [
        row(name, f"predicted.breakdown.{field}", quantity.value, quantity.kind)
        for name, field in STEP_CAUSES
        for quantity in (getattr(predicted.breakdown, field),)
    ]
    compute_s = predicted.breakdown.compute_s
    of_compute = (
        (
            f"of it {IDEAL}: the model's FLOPs at the device's peak",
            figures.derived(ideal_s, part, "predicted.step_time_s * predicted.mfu"),
            figures("predicted.mfu.value", Form.SHARE),
            predicted.mfu.kind,
        ),
        (
            f"of it {SLOWER}: kernels slower than the peak, and waits inside them",
            figures.derived(
                compute_s.value - ideal_s, part, "predicted.breakdown.compute_s - ideal"
            ),
            figures.derived(
                (compute_s.value - ideal_s) / step_s, Form.SHARE, "of predicted.step_time_s"
            ),
            compute_s.kind,
        ),
    )
    whole = row("step", "predicted.step_time_s", step_s, predicted.step_time_s.kind)
    return PageTable(
        caption="Seconds of the slowest pipeline rank by cause",
        heading=("cause", "time", "share", "kind"),
        rows=(parts[0], *of_compute, *parts[1:], whole),
        texts=frozenset({"kind"}),
    )


def memory_table(each: FiguredPlan) -> PageTable:
    """Returns GiB of each pipeline rank by class; equal neighbours share a row."""
    figures = each.figures
    host = any(stage.host for stage in each.reported.plan.predicted.memory_gib)
    names = (*CLASSES, "total", "capacity", *(("host",) if host else ()))
    lines = []
    for row in rows(each.reported.plan):
        key = f"predicted.memory_gib.{row.first}"
        classes = (figures(f"{key}.{name}", Form.GIB) for name in names)
        layers = row.shards or layers_text(row, short=False)
        lines.append((row.stages, layers, *classes, row.memory.kind))
    return PageTable(
        caption="GiB of one GPU by pipeline rank and class",
        heading=("pipeline rank", "layers", *names, "kind"),
        rows=tuple(lines),
        texts=frozenset({"layers", "kind"}),
    )


def waits_table(each: FiguredPlan) -> PageTable | None:
    """Returns idle share and micro-batches in flight by pipeline rank; None in older files."""
    waits = each.reported.document["predicted"]["waits"]
    if not waits:
        return None
    return PageTable(
        caption="Waiting by pipeline rank",
        heading=("pipeline rank", "idle share of the step", "micro-batches in flight"),
        rows=tuple(
            (
                _range(first, last),
                each.figures(f"predicted.waits.{first}.idle_share", Form.SHARE),
                each.figures(f"predicted.waits.{first}.in_flight", Form.COUNT),
            )
            for first, last in alike(waits, ("idle_share", "in_flight"))
        ),
    )


def redundancy_table(each: FiguredPlan) -> PageTable:
    """Returns GiB beyond one copy of everything, over all GPUs and for one GPU of each rank."""
    names = (*CLASSES[:5], "total")
    figures, redundancy = each.figures, each.reported.document["predicted"]["redundancy_gib"]
    key = "predicted.redundancy_gib"
    whole = (figures(f"{key}.{name}", Form.GIB) for name in names)
    stages = (
        (
            f"one GPU of pipeline rank {_range(first, last)}",
            *(
                figures(f"predicted.redundancy_gib.stages.{first}.{name}", Form.GIB)
                for name in names
            ),
        )
        for first, last in alike(redundancy["stages"], names)
    )
    return PageTable(
        caption="Redundant GiB: what is held beyond one copy",
        heading=("where", *names),
        rows=(("all GPUs", *whole), *stages),
    )


def _range(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"
