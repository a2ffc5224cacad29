"""The seconds of a step on a page: the waterfall from ideal to predicted, and the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parplan.planner.plan.traced_plan import AnyPlan
from parplan.report.page.chart_theme import (
    COLOURS,
    INK,
    MUTED,
    ROW_PIXELS,
    Row,
    colour_scale,
    colours,
    named_data,
    specification,
)
from parplan.report.plans.step_lines import NOTHING, STEP_CAUSES
from parplan.report.text import seconds_text

IDEAL = "ideal"
SLOWER = "below peak"
PREDICTED = "predicted"
_WHOLE, _PART = COLOURS[0], COLOURS[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """One bar of the waterfall: its seconds, and where it begins."""

    name: str
    seconds: float
    start_s: float
    whole: bool = False


def waterfall(plan: AnyPlan) -> list[Fall]:
    """Returns the bars from the ideal step to the predicted one.

    The ideal step has the model's FLOPs at the device's peak: step time x MFU. `below peak` is the
    rest of compute.
    """
    step_s, breakdown = plan.predicted.step_time_s.value, plan.predicted.breakdown
    ideal_s = step_s * plan.predicted.mfu.value
    bars = [Fall(name=IDEAL, seconds=ideal_s, start_s=0.0, whole=True)]
    at_s = ideal_s
    for name, field in STEP_CAUSES:
        seconds = getattr(breakdown, field).value - (ideal_s if name == "compute" else 0.0)
        if abs(seconds) > NOTHING * step_s:
            title = SLOWER if name == "compute" else name
            bars.append(Fall(name=title, seconds=seconds, start_s=at_s))
            at_s += seconds
    return [*bars, Fall(name=PREDICTED, seconds=step_s, start_s=0.0, whole=True)]


def waterfall_chart(bars: Sequence[Fall], longest_s: float) -> Row:
    """Returns the waterfall, one bar a row with its seconds beside it.

    longest_s: the longest step of the page, whose plans have one scale
    """
    import altair as alt

    rows = [
        {
            "cause": bar.name,
            "from": bar.start_s,
            "to": bar.start_s + bar.seconds,
            "seconds": bar.seconds,
            "text": seconds_text(bar.seconds) if bar.seconds > 0 else f"{bar.seconds:.3g} s",
            "whole": bar.whole,
        }
        for bar in bars
    ]
    base = alt.Chart(named_data("rows")).encode(
        y=alt.Y("cause:N", sort=[bar.name for bar in bars], title=None)
    )
    drawn = base.mark_bar().encode(
        x=alt.X(
            "from:Q",
            title="seconds",
            axis=alt.Axis(tickCount=8),
            scale=alt.Scale(domain=[0, 1.18 * longest_s], nice=False),
        ),
        x2="to:Q",
        color=alt.condition("datum.whole", alt.value(_WHOLE), alt.value(_PART)),
        tooltip=[alt.Tooltip("cause:N"), alt.Tooltip("seconds:Q", format=".4f")],
    )
    named = (
        base.mark_text(align="left", dx=5, color=INK)
        .encode(x=alt.X("end:Q"), text="text:N")
        .transform_calculate(end="max(datum.from, datum.to)")
    )
    return specification(alt.layer(drawn, named), len(rows) * (ROW_PIXELS + 4), rows=rows)


def difference_palette(baselines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the colour of each part of a step in which baselines differ from the plan."""
    fitting = [each for each in baselines if each["fits"]]
    return colours(list(fitting[0]["difference"]["parts_s"])) if fitting else {}


def difference_chart(baselines: Sequence[Mapping[str, Any]]) -> Row:
    """Returns the seconds that each baseline takes more or less than the plan, by part."""
    import altair as alt

    rows = [
        {"name": each["name"], "part": part, "seconds": seconds}
        for each in baselines
        if each["fits"]
        for part, seconds in each["difference"]["parts_s"].items()
    ]
    names = list(dict.fromkeys(row["name"] for row in rows))
    bars = (
        alt.Chart(named_data("rows"))
        .mark_bar()
        .encode(
            x=alt.X(
                "seconds:Q",
                title="seconds more than the plan, mean GPU",
                axis=alt.Axis(tickCount=8),
            ),
            y=alt.Y("name:N", sort=names, title=None),
            color=alt.Color(
                "part:N", scale=colour_scale(difference_palette(baselines)), legend=None
            ),
            tooltip=[
                alt.Tooltip("name:N", title="baseline"),
                alt.Tooltip("part:N"),
                alt.Tooltip("seconds:Q", title="more, s", format="+.3f"),
            ],
        )
    )
    zero = alt.Chart(named_data("zeros")).mark_rule(color=MUTED).encode(x="zero:Q")
    return specification(
        alt.layer(bars, zero),
        max(44, len(names) * (ROW_PIXELS + 6)),
        rows=rows,
        zeros=[{"zero": 0}],
    )
