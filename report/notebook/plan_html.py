"""A plan as a notebook shows it: the facts of its summary, its step by cause, its memory."""

from __future__ import annotations

from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.report.notebook import html_pieces as html
from parplan.report.plans.coverage_notes import coverage_notes, coverage_of_profile
from parplan.report.plans.memory_table import CLASSES, fullest, layers_text, rows
from parplan.report.plans.notes import remarks, warnings
from parplan.report.plans.plan_facts import facts
from parplan.report.plans.plan_header import header
from parplan.report.plans.robust_table import robust_lines
from parplan.report.plans.runner_up_lines import runner_up_cells, tie_lines
from parplan.report.plans.stage_waits import wait_lines
from parplan.report.plans.step_lines import redundant_parts, step_parts
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.text import gib_text

_ONE_LINE = 10_000  # characters; a notebook breaks its lines itself
_RUNNERS_UP = ("step", "slower", "peak", "plan")


def plan_html(plan: AnyPlan) -> str:
    """Returns the facts of `plan show`, without those of single layers."""
    measured = None if isinstance(plan, TracedPlan) else coverage_of_profile(plan)
    covered: tuple[str, ...] = ()
    if measured and not isinstance(plan, TracedPlan):
        covered = tuple(coverage_notes(measured, plan, "", ""))
    redundancy = plan.predicted.redundancy_gib
    unit = "s" if plan.predicted.step_time_s.value >= 1 else "ms"
    return html.whole(
        header(plan, _ONE_LINE),
        html.facts(facts(plan, SummaryContext(), measured)),
        *(html.line(f"note: {warning}") for warning in warnings(plan)),
        html.heading(f"Step by cause, {unit}"),
        html.bar(step_parts(plan)),
        *map(_line, wait_lines(plan, _ONE_LINE)),
        html.heading("Memory of a GPU by stage, GiB"),
        _stages(plan),
        html.heading(f"Redundant memory over all GPUs, GiB: {gib_text(redundancy.total)}"),
        html.bar([(name, size, gib_text(size)) for name, size in redundant_parts(plan)]),
        *_runners_up(plan),
        html.folded("Notes", (*remarks(plan), *covered)),
    )


def _line(line: str) -> str:
    """Returns a line of the summary without the spaces that align it."""
    return html.line(" ".join(line.split()))


def _stages(plan: AnyPlan) -> str:
    shown, worst = rows(plan), fullest(plan).stage
    return html.table(
        ("stage", "layers", *CLASSES, "of"),
        [
            (
                row.stages,
                row.shards or layers_text(row, short=False),
                *row.numbers,
                gib_text(row.memory.capacity),
            )
            for row in shown
        ],
        texts=("stage", "layers"),
        marked=[
            number
            for number, row in enumerate(shown)
            if len(shown) > 1 and row.first <= worst <= row.last
        ],
    )


def _runners_up(plan: AnyPlan) -> tuple[str, ...]:
    cells = [runner_up_cells(runner_up, plan) for runner_up in plan.search.runners_up]
    if not cells:
        return ()
    robust = plan.search.robust
    return (
        html.heading("Runners-up"),
        html.table(_RUNNERS_UP, cells, texts=("plan",)),
        *map(_line, tie_lines(plan, _ONE_LINE)),
        *(map(_line, robust_lines(robust, _ONE_LINE)) if robust else ()),
    )
