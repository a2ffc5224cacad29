"""The front of a page: step time against peak memory of the plans and their runners-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parplan.planner.plan.traced_plan import AnyPlan
from parplan.report.names import plan_phrase
from parplan.report.page.chart_theme import (
    COLOURS,
    LIMIT,
    MUTED,
    PAGE,
    Row,
    colour_scale,
    colours,
    named_data,
    specification,
)
from parplan.report.page.reported_plan import ReportedPlan
from parplan.report.plans.memory_table import fullest
from parplan.report.plans.runner_up_lines import runner_up_name

_PIXELS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontCandidate:
    """A plan or a runner-up as a point."""

    file: str
    role: str
    name: str
    step_s: float
    peak_gib: float
    redundancy_gib: float


def candidates(reported: Iterable[ReportedPlan]) -> list[FrontCandidate]:
    """Returns every plan of the page and its runners-up."""
    points = []
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


def pareto(points: Iterable[FrontCandidate]) -> list[FrontCandidate]:
    """Returns the points that no other beats in both step time and peak memory, by rising peak."""
    front: list[FrontCandidate] = []
    for point in sorted(points, key=lambda point: (point.peak_gib, point.step_s)):
        if not front or point.step_s < front[-1].step_s:
            front.append(point)
    return front


def front_palette(reported: Sequence[ReportedPlan]) -> dict[str, str]:
    """Returns the colour of each plan's points."""
    return colours([each.name for each in reported])


def front_chart(reported: Sequence[ReportedPlan]) -> Row:
    """Returns the points, the line of the front through them, and the memory of a device."""
    import altair as alt

    points = candidates(reported)
    rows = [
        {
            "file": point.file,
            "role": point.role,
            "name": point.name,
            "step": point.step_s,
            "peak": point.peak_gib,
            "redundant": point.redundancy_gib,
        }
        for point in points
    ]
    axes = {
        "x": alt.X(
            "peak:Q",
            title="peak GiB of the fullest GPU",
            scale=alt.Scale(zero=False),
            axis=alt.Axis(tickCount=8),
        ),
        "y": alt.Y("step:Q", title="step time, s", scale=alt.Scale(zero=False)),
    }
    drawn = (
        alt.Chart(named_data("rows"))
        .mark_point(filled=True, opacity=1, stroke=PAGE, strokeWidth=1)
        .encode(
            **axes,
            color=alt.Color("file:N", scale=colour_scale(front_palette(reported)), legend=None),
            size=alt.condition("datum.role == 'plan'", alt.value(220), alt.value(70)),
            shape=alt.Shape(
                "role:N",
                scale=alt.Scale(domain=["plan", "runner-up"], range=["diamond", "circle"]),
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
    steps = [{"peak": point.peak_gib, "step": point.step_s} for point in pareto(points)]
    line = (
        alt.Chart(named_data("front"))
        .mark_line(interpolate="step-after", color=MUTED, strokeWidth=1.2)
        .encode(**axes)
    )
    capacities = {each.plan.predicted.memory_gib[0].capacity for each in reported}
    limit = (
        alt.Chart(named_data("limits"))
        .mark_rule(color=LIMIT, strokeWidth=2, strokeDash=[6, 3])
        .encode(x="peak:Q")
    )
    return specification(
        alt.layer(line, limit, drawn),
        _PIXELS,
        rows=rows,
        front=steps,
        limits=[{"peak": value} for value in sorted(capacities)],
    )


FRONT_MARKS = {"the front": MUTED, "memory of a device": LIMIT, "plan": COLOURS[0]}
