"""The worst cases of a plan and of others where a figure is off, and the plan of least regret."""

from __future__ import annotations

from collections.abc import Iterator

from parplan.planner.plan.prediction import Corner, Robustness, RobustPlan
from parplan.report.plans.runner_up_lines import runner_up_name
from parplan.report.text import gib_text, joined, labelled, percent, seconds_text, table_lines

UNFIT = "no fit"
HEADING = ("step", "longest", "GiB", "regret", "speeds", "worst where", "plan")
LEGEND = (
    "regret: how much longer its step is than the best of these plans, in its worst case; speeds: "
    "the same without the cases of memory; longest: its longest step"
)
_TEXT = ("worst where", "plan")
CORNER_NAMES = {
    "compute": "compute",
    "inside_node": "links in a node",
    "across_nodes": "links across nodes",
    "memory": "memory",
}


def robust_lines(robust: Robustness, width: int, *, most: int | None = None) -> Iterator[str]:
    """Yields a sentence about the least regret, then the plan and others by their regret.

    most   the number of plans, None for all of them
    """
    yield joined(robust_sentence(robust).split(" "), " ", width, start=labelled("robust"))
    names = robust_names(robust)
    rows = [_row(robust, plan, names[place]) for place, plan in _in_order(robust)][:most]
    if rows:
        yield from table_lines(HEADING, rows, width, left=_TEXT)
        yield joined(LEGEND.split(" "), " ", width, start="  ")


def robust_names(robust: Robustness) -> list[str]:
    """Returns a name of each plan; one with the mesh of an earlier plan has other layers."""
    names: list[str] = []
    told = set[str]()
    for plan in robust.plans:
        name = runner_up_name(plan.plan)
        shown = f"{name}, other layers" if name in told else name
        names.append(shown if names else "this plan")
        told.add(name)
    return names


def robust_sentence(robust: Robustness) -> str:
    """Returns what was varied, and which plan has the least regret."""
    off = f"where compute, a bandwidth or memory is {100 * robust.share:g} % off"
    least = robust.least_regret
    if least is None:
        return f"{off}, every plan fails to fit in some case where another fits"
    plan = robust.plans[least]
    assert plan.regret is not None, "the least regret is finite"
    name = robust_names(robust)[least]
    text = f"{off}, the least regret is {percent(plan.regret)}: {name}"
    unproven = [corner_text(each) for each in robust.corners if not each.proven]
    return f"{text}; not searched to the end: {', '.join(unproven)}" if unproven else text


def corner_text(corner: Corner) -> str:
    """Returns the name of a figure and its factor."""
    return f"{CORNER_NAMES[corner.what]} x {corner.factor:.3g}"


def worst_text(robust: Robustness, plan: RobustPlan) -> str:
    """Returns the corner of the worst regret."""
    if plan.worst_corner is None:
        return "as priced"
    return corner_text(robust.corners[plan.worst_corner])


def _in_order(robust: Robustness) -> Iterator[tuple[int, RobustPlan]]:
    """Yields the plan of the file, then the others by their regret."""
    first, *others = enumerate(robust.plans)
    yield first
    yield from sorted(others, key=lambda each: _sort_key(each[1]))


def _sort_key(plan: RobustPlan) -> tuple[float, float]:
    unfit = float("inf")
    return (
        unfit if plan.regret is None else plan.regret,
        unfit if plan.speed_regret is None else plan.speed_regret,
    )


def _row(robust: Robustness, plan: RobustPlan, name: str) -> tuple[str, ...]:
    return (
        seconds_text(plan.plan.step_time_s.value),
        seconds_text(plan.worst_step_s),
        gib_text(plan.plan.peak_memory_gib),
        regret_text(plan.regret),
        regret_text(plan.speed_regret),
        worst_text(robust, plan),
        name,
    )


def regret_text(regret: float | None) -> str:
    """Formats a regret; None is a plan that does not fit where another does."""
    return UNFIT if regret is None else percent(regret)
