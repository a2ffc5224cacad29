"""The picture of a page's front: step time against peak memory, or of the runners-up instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parplan.planner.plan.traced_plan import AnyPlan
from parplan.report.names import plan_phrase, search_text
from parplan.report.page.chart_theme import (
    COLOURS,
    INK,
    LIMIT,
    MUTED,
    PAGE,
    Row,
    colour_scale,
    colours,
    named_data,
    specification,
)
from parplan.report.page.plan_front import FrontEntry, front_entries
from parplan.report.page.reported_plan import ReportedPlan
from parplan.report.plans.memory_table import fullest
from parplan.report.plans.runner_up_lines import runner_up_name
from parplan.report.plots.front_plot import edge_s

if TYPE_CHECKING:
    import altair

_PIXELS = 300
_ON_FRONT, _FAR = "plan of the front", "plan of the front, far slower"
_SHAPES = {"plan": "diamond", "runner-up": "circle", _ON_FRONT: "circle", _FAR: "triangle-up"}
_MARKS = {"the front": MUTED, "memory of a device": LIMIT}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontCandidate:
    """A plan, a runner-up or a plan of the front as a point.

    number  of the plan on the front, empty for the others
    """

    file: str
    role: str
    name: str
    step_s: float
    peak_gib: float
    redundancy_gib: float
    number: str = ""


def candidates(reported: Iterable[ReportedPlan]) -> list[FrontCandidate]:
    """Returns every plan of the page and its runners-up; those of the front take their place."""
    reported = list(reported)
    entries = front_entries(reported)
    points = [_on_front(reported[entry.place].name, entry) for entry in entries]
    if entries:
        own = [] if reported[0].front is None else [_chosen(reported[0].name, reported[0].plan)]
        return [*own, *points]
    for each in reported:
        points.append(_chosen(each.name, each.plan))
        points += [
            FrontCandidate(
                file=each.name,
                role="runner-up",
                name=runner_up_name(other),
                step_s=other.step_time_s.value,
                peak_gib=other.peak_memory_gib,
                redundancy_gib=other.redundancy_gib,
            )
            for other in each.plan.search.runners_up
        ]
    return points


def _chosen(file: str, plan: AnyPlan) -> FrontCandidate:
    return FrontCandidate(
        file=file,
        role="plan",
        name=plan_phrase(plan),
        step_s=plan.predicted.step_time_s.value,
        peak_gib=fullest(plan).total,
        redundancy_gib=plan.predicted.redundancy_gib.total,
    )


def _on_front(file: str, entry: FrontEntry) -> FrontCandidate:
    point = entry.point
    return FrontCandidate(
        file=file,
        role=_ON_FRONT,
        name=f"{plan_phrase(point.plan)}, {search_text(point.plan.search)}",
        step_s=point.step_time_s,
        peak_gib=point.peak_memory_gib,
        redundancy_gib=point.redundancy_gib,
        number=str(entry.number),
    )


def pareto(points: Iterable[FrontCandidate]) -> list[FrontCandidate]:
    """Returns the points that no other beats in both step time and peak memory, by rising peak."""
    front: list[FrontCandidate] = []
    for point in sorted(points, key=lambda point: (point.peak_gib, point.step_s)):
        if not front or point.step_s < front[-1].step_s:
            front.append(point)
    return front


def front_palette(reported: Sequence[ReportedPlan]) -> dict[str, str]:
    """Returns the colour of each plan's points, the same for all plans of one front."""
    names = [each.name for each in reported]
    return dict.fromkeys(names, COLOURS[0]) if front_entries(reported) else colours(names)


def front_marks(reported: Sequence[ReportedPlan]) -> dict[str, str]:
    """Returns the colours of the chart's legend."""
    if len(reported) == 1 or front_entries(reported):
        return {**_MARKS, "plan": COLOURS[0]}
    return {**_MARKS, **front_palette(reported)}


def front_chart(reported: Sequence[ReportedPlan]) -> Row:
    """Returns the points, the line of the front through them, and the memory of a device.

    On a front a step that is far slower than the fastest is drawn at the upper edge.
    """
    import altair as alt

    points = candidates(reported)
    steps_s = sorted(point.step_s for point in points)
    top_s = edge_s(steps_s) if front_entries(reported) else steps_s[-1]
    rows = [
        {
            "file": point.file,
            "role": _FAR if point.number and point.step_s > top_s else point.role,
            "name": point.name,
            "number": point.number,
            "step": point.step_s,
            "drawn": min(point.step_s, top_s),
            "peak": point.peak_gib,
            "redundant": point.redundancy_gib,
        }
        for point in points
    ]
    steps = [
        {"peak": point.peak_gib, "drawn": min(point.step_s, top_s)} for point in pareto(points)
    ]
    line = (
        alt.Chart(named_data("front"))
        .mark_line(interpolate="step-after", color=MUTED, strokeWidth=1.2)
        .encode(**_axes())
    )
    capacities = {each.plan.predicted.memory_gib[0].capacity for each in reported}
    limit = (
        alt.Chart(named_data("limits"))
        .mark_rule(color=LIMIT, strokeWidth=2, strokeDash=[6, 3])
        .encode(x="peak:Q")
    )
    return specification(
        alt.layer(line, limit, _marks(front_palette(reported)), _numbers()),
        _PIXELS,
        rows=rows,
        front=steps,
        limits=[{"peak": value} for value in sorted(capacities)],
    )


def _axes() -> dict[str, Any]:
    import altair as alt

    return {
        "x": alt.X(
            "peak:Q",
            title="peak GiB of the fullest GPU",
            scale=alt.Scale(zero=False),
            axis=alt.Axis(tickCount=8),
        ),
        "y": alt.Y("drawn:Q", title="step time, s", scale=alt.Scale(zero=False)),
    }


def _marks(palette: Mapping[str, str]) -> altair.Chart:
    import altair as alt

    drawn: altair.Chart = (
        alt.Chart(named_data("rows"))
        .mark_point(filled=True, opacity=1, stroke=PAGE, strokeWidth=1)
        .encode(
            **_axes(),
            color=alt.Color("file:N", scale=colour_scale(palette), legend=None),
            size=alt.condition("datum.role == 'plan'", alt.value(220), alt.value(70)),
            shape=alt.Shape(
                "role:N",
                scale=alt.Scale(domain=list(_SHAPES), range=list(_SHAPES.values())),
                legend=None,
            ),
            tooltip=[
                alt.Tooltip("role:N"),
                alt.Tooltip("name:N"),
                alt.Tooltip("step:Q", title="step, s", format=".4g"),
                alt.Tooltip("peak:Q", title="peak GiB", format=".1f"),
                alt.Tooltip("redundant:Q", title="redundant GiB", format=",.1f"),
            ],
        )
    )
    return drawn


def _numbers() -> altair.Chart:
    """Returns the number of each plan of the front, where the line does not run."""
    import altair as alt

    drawn: altair.Chart = (
        alt.Chart(named_data("rows"))
        .mark_text(align="left", dx=4, dy=-8, fontSize=11, color=INK)
        .encode(**_axes(), text="number:N")
    )
    return drawn
