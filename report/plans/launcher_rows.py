"""The lines of a summary that set the best plans of launchers side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.launchers.best_of_each import LauncherPlan, LauncherTable
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import InfeasibleError
from parplan.report.names import (
    blocks_by_plan,
    graph_of,
    recompute_text,
    schedule_name,
    zero_text,
)
from parplan.report.plans.memory_table import fullest
from parplan.report.text import (
    aligned,
    band_text,
    gib_text,
    joined,
    labelled,
    percent,
    seconds_text,
)

_LEVELS = ("none", "selective", "full")
_LEFT = {0, 1, 4}
_AXES = ("pp", "dp", "cp", "tp", "ep")


def table_lines(table: LauncherTable, width: int) -> Iterator[str]:
    """Yields the table of several launchers with plans, and the notes on all of them."""
    if len(table.plans) > 1:
        yield from _rows(table, width)
    yield from _notes(table, width)


def _rows(table: LauncherTable, width: int) -> Iterator[str]:
    """Yields the heading and a row for each launcher with a plan, the chosen one marked."""
    rows = [_row(each, each.launcher == table.chosen) for each in table.entries if each.plan]
    capacity = max(fullest(plan).capacity for plan in table.plans)
    heading = ("  launcher", "step", f"GiB of {capacity:.1f}", "gap", "layout")
    yield from aligned((heading, *rows), width, left=_LEFT, indent=0)


def _row(each: LauncherPlan, chosen: bool) -> tuple[str, ...]:
    plan = each.plan
    assert plan is not None, "a launcher without a plan has no row"
    band = plan.predicted.error_band
    of_step = f" {band_text(band.time.share)}" if band else ""
    return (
        f"{'*' if chosen else ' '} {each.launcher}",
        f"{seconds_text(plan.predicted.step_time_s.value)}{of_step}",
        gib_text(fullest(plan).total),
        percent(plan.search.gap),
        layout_text(plan),
    )


def layout_text(plan: Plan) -> str:
    """Returns the degrees, the pipeline, the ZeRO stages and the recompute of a plan in short."""
    mesh, pipeline = plan.mesh, plan.pipeline
    degrees = [f"{axis} {getattr(mesh, axis)}" for axis in _AXES]
    divided = [text for text in degrees if not text.endswith(" 1")] or ["one GPU"]
    schedule = [_schedule_text(pipeline)] if mesh.pp > 1 else []
    halves = [f"halves at level {pipeline.tp_overlap}"] if pipeline.tp_overlap else []
    return ", ".join((*divided, *schedule, *halves, *_layers(plan)))


def _schedule_text(pipeline: PipelinePlan) -> str:
    if pipeline.schedule is Schedule.INTERLEAVED:
        return "interleaved"
    return schedule_name(pipeline.schedule)


def _layers(plan: Plan) -> Iterator[str]:
    """Yields the ZeRO stages and the recompute of the blocks; the summary of one plan has more."""
    graph = graph_of(plan)
    used = [plan.layer_plans[name] for name in blocks_by_plan(plan)]
    stages = sorted({zero_text(each, chunk_states=False) for each in used})
    yield f"ZeRO {' and '.join(stages)}"
    levels = {recompute_text(each, graph).partition(" (")[0] for each in used}
    if len(levels) > 1:
        yield "recompute by block"
    elif levels != {"none"}:
        (level,) = levels
        yield f"recompute {level if level in _LEVELS else 'of chosen operators'}"
    if any(each.keep_on_host for each in used):
        yield "activations on the host"


def _notes(table: LauncherTable, width: int) -> Iterator[str]:
    """Yields lines about launchers that cannot be told apart, and about those without a plan."""
    if len(table.tied) > 1:
        every = len(table.tied) == len(table.plans)
        whole = "both launchers" if len(table.tied) == 2 else f"all {len(table.tied)} launchers"
        names = whole if every else ", ".join(table.tied)
        text = f"{names} (the error of their ratio is {percent(table.ratio_share)})"
        words = text.replace(" %", "\N{NO-BREAK SPACE}%").split(" ")
        line = joined(words, " ", width, start="  cannot tell apart: ", indent=4)
        yield line.replace("\N{NO-BREAK SPACE}", " ")
    if table.chosen != table.entries[0].launcher:
        yield f"  preferred: {table.chosen}"
    for reason, launchers in _without_plan(table.entries):
        words = f"{', '.join(launchers)}: {reason}".split(" ")
        yield joined(words, " ", width, start=labelled("no plan"))
    if table.unsearched:
        words = (
            f"{', '.join(table.unsearched)}: the searches were ended before it had a plan".split(
                " "
            )
        )
        yield joined(words, " ", width, start=labelled("no plan"))


def _without_plan(entries: Sequence[LauncherPlan]) -> Iterator[tuple[str, list[str]]]:
    """Yields each reason for no plan, with the launchers that have it."""
    reasons: dict[str, list[str]] = {}
    for each in entries:
        if each.error is not None:
            fits = not isinstance(each.error, InfeasibleError)
            reason = each.error.message if fits else "nothing fits"
            reason = reason.removeprefix(f"{each.launcher} ").removeprefix(f"{each.launcher} ")
            reasons.setdefault(reason, []).append(each.launcher)
    yield from reasons.items()
