"""The lines of a summary about other plans: runners-up and ties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.communication.mesh import Mesh, MeshOrder
from parplan.planner.objective import Objective, Prefer
from parplan.planner.plan.prediction import ErrorBand, RunnerUp
from parplan.planner.plan.ties import Tie, preferred
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.report.names import pipeline_phrases
from parplan.report.plans.memory_table import fullest
from parplan.report.text import fact_lines, gib_text, joined, labelled, seconds_text


def runner_up_lines(
    plan: AnyPlan, width: int, *, most: int | None = None, columns: bool = True
) -> list[str]:
    """Returns the candidates that were nearly as good as the plan.

    most   the number of meshes, each with its best candidate; None for every candidate
    """
    runners_up = plan.search.runners_up
    if most is not None:
        runners_up = _best_of_each_mesh(runners_up)[:most]
    labels = ("also", *[""] * len(runners_up))
    rows = [
        (label, *runner_up_cells(runner_up, plan))
        for label, runner_up in zip(labels, runners_up, strict=False)
    ]
    return fact_lines(rows, width, right=(1, 2, 3), columns=columns)


def _best_of_each_mesh(runners_up: Sequence[RunnerUp]) -> tuple[RunnerUp, ...]:
    """Returns the first of the runners-up with the same degrees, in any order of the axes."""
    best: dict[Mesh, RunnerUp] = {}
    for runner_up in runners_up:
        best.setdefault(replace(runner_up.mesh, order=MeshOrder.PP_DP_TP), runner_up)
    return tuple(best.values())


def runner_up_cells(runner_up: RunnerUp, plan: AnyPlan) -> tuple[str, str, str, str]:
    """Returns step, difference to the plan, memory and name of a runner-up."""
    step_s = runner_up.step_time_s.value
    slower = step_s / plan.predicted.step_time_s.value - 1
    memory = f"{gib_text(runner_up.peak_memory_gib)} GiB"
    if plan.search.objective is Objective.MEMORY:
        memory += f", {gib_text(runner_up.redundancy_gib)} redundant"
    return (
        seconds_text(step_s),
        f"({100 * slower:+.1f} %{', tie' if is_tie(runner_up, plan) else ''})",
        memory,
        runner_up_name(runner_up),
    )


def runner_up_name(runner_up: RunnerUp) -> str:
    sequence = ("sequence parallel",) if runner_up.sequence_parallel else ()
    weights = ("weights over dp too",) if runner_up.weights_over_data else ()
    phrases = pipeline_phrases(runner_up.pipeline, runner_up.mesh)
    return ", ".join((str(runner_up.mesh), *phrases, *sequence, *weights))


def is_tie(runner_up: RunnerUp, plan: AnyPlan) -> bool:
    """Tells if the prices cannot say which is faster, with throughput as the objective."""
    return runner_up.inside_error_band and plan.search.objective is Objective.THROUGHPUT


def tie_lines(plan: AnyPlan, width: int) -> Iterator[str]:
    """Yields the number of ties, the leanest and the most robust of them and the plan."""
    ties = [runner_up for runner_up in plan.search.runners_up if is_tie(runner_up, plan)]
    band = plan.predicted.error_band
    if not ties or band is None:
        return
    count = "1 other plan is" if len(ties) == 1 else f"{len(ties)} other plans are"
    text = "; ".join(
        (f"{count} inside the error band of the ratio to it", *_extremes(plan, ties, band))
    )
    yield joined(text.split(" "), " ", width, start=labelled("ties"))


def _extremes(plan: AnyPlan, ties: Sequence[RunnerUp], band: ErrorBand) -> Iterator[str]:
    """Yields phrases that name the leanest and the most robust plan.

    Older files have no losses; then no plan is called the most robust.
    """
    step_s = plan.predicted.step_time_s.value
    choice = plan.search.preference
    loss = choice.worst_loss if choice else None
    rows = [(step_s, Tie(fullest(plan).total, loss or 0.0), "this plan")]
    for tie in ties:
        slower = 100 * (tie.step_time_s.value / step_s - 1)
        name = f"{runner_up_name(tie)} ({gib_text(tie.peak_memory_gib)} GiB, {slower:+.1f} %)"
        figures = Tie(tie.peak_memory_gib, tie.worst_loss or 0.0)
        rows.append((tie.step_time_s.value, figures, name))
    rows.sort(key=lambda row: row[0])
    titles = {Prefer.LEANEST: "the leanest"}
    if loss is not None:
        titles[Prefer.ROBUST] = "the most robust"
    named: dict[str, list[str]] = {}
    for prefer, title in titles.items():
        index = preferred(prefer, [figures for _, figures, _ in rows], band.memory.share)
        named.setdefault(rows[index][2], []).append(title)
    for name, titles_of in named.items():
        yield f"{' and '.join(titles_of)} is {name}"
