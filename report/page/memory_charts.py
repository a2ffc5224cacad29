"""Memory and redundancy of a page: GiB by pipeline stage and class, and over the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from parplan.planner.runs.held_activations import Moment
from parplan.profiles.units import gib
from parplan.report.page.chart_theme import (
    LIMIT,
    MOST_ROWS,
    ROW_PIXELS,
    Row,
    colour_scale,
    colours,
    named_data,
    specification,
)
from parplan.report.page.timeline_chart import drawn_ranks

CLASSES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "reserve")
CLASS_COLOURS = colours(CLASSES)
MOST_LINES = 6  # curves of memory over the step
MOMENTS = 300  # points of a curve; between two the highest is drawn
_CURVE_PIXELS = 240


def alike(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last index of runs of records that are equal in `names`."""
    first = 0
    for _, run in groupby(records, key=lambda record: [record[name] for name in names]):
        last = first + len(list(run)) - 1
        yield first, last
        first = last + 1


def stage_chart(
    records: Sequence[Mapping[str, Any]], title: str, capacity_gib: float | None = None
) -> Row:
    """Returns stacked bars of each pipeline stage by class; equal neighbours share a bar.

    records: one for each pipeline rank, as the plan file has them
    capacity_gib: draws the memory of a device as a line
    """
    import altair as alt

    names = [name for name in CLASSES if name in records[0]]
    runs = list(alike(records, names))[:MOST_ROWS]
    labels = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    rows = [
        {"stage": label, "class": name, "gib": records[first][name], "order": order}
        for label, (first, _) in zip(labels, runs, strict=True)
        for order, name in enumerate(names)
    ]
    bars = (
        alt.Chart(named_data("stages"))
        .mark_bar()
        .encode(
            x=alt.X("gib:Q", title=title, axis=alt.Axis(tickCount=8)),
            y=alt.Y("stage:N", sort=labels, title="pipeline rank"),
            color=alt.Color(
                "class:N",
                scale=colour_scale({name: CLASS_COLOURS[name] for name in names}),
                legend=None,
            ),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("stage:N", title="pipeline rank"),
                alt.Tooltip("class:N"),
                alt.Tooltip("gib:Q", title="GiB", format=",.4f"),
            ],
        )
    )
    height = max(44, len(runs) * ROW_PIXELS)
    if capacity_gib is None:
        return specification(bars, height, stages=rows)
    limit = (
        alt.Chart(named_data("limits"))
        .mark_rule(color=LIMIT, strokeWidth=2, strokeDash=[6, 3])
        .encode(x="gib:Q", tooltip=[alt.Tooltip("gib:Q", title="the device has, GiB")])
    )
    return specification(
        alt.layer(bars, limit), height, stages=rows, limits=[{"gib": capacity_gib}]
    )


def curve_rows(
    held: Sequence[Sequence[Moment]], base_gib: Sequence[float], step_s: float
) -> list[Row]:
    """Returns the points of each curve: base and held activations, the highest of each interval.

    base_gib: by pipeline rank, all but activations
    """
    rows: list[Row] = []
    for rank in drawn_ranks(len(held), MOST_LINES):
        for at_s, n_bytes in _highest(held[rank], step_s):
            rows.append(
                {
                    "rank": f"rank {rank}",
                    "s": round(at_s, 5),
                    "gib": round(base_gib[rank] + gib(n_bytes), 4),
                }
            )
    return rows


def _highest(moments: Sequence[Moment], step_s: float) -> Iterator[Moment]:
    """Yields the most bytes of each of MOMENTS intervals of the step, or all moments if fewer."""
    yield 0.0, 0.0
    if len(moments) <= MOMENTS:
        yield from moments
    else:
        wide_s = step_s / MOMENTS
        for _, part in groupby(moments, key=lambda moment: int(moment[0] / wide_s)):
            yield max(part, key=lambda moment: moment[1])
    yield step_s, 0.0


def curve_palette(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the colour of each curve."""
    return colours(list(dict.fromkeys(row["rank"] for row in rows)))


def curve_chart(rows: Sequence[Row], capacity_gib: float) -> Row:
    """Returns the memory of some pipeline ranks over the step, under the memory of a device."""
    import altair as alt

    lines = (
        alt.Chart(named_data("moments"))
        .mark_line(interpolate="step-after", strokeWidth=1.6)
        .encode(
            x=alt.X("s:Q", title="seconds into the step", axis=alt.Axis(grid=False, tickCount=6)),
            y=alt.Y("gib:Q", title="GiB", scale=alt.Scale(domainMin=0)),
            color=alt.Color("rank:N", scale=colour_scale(curve_palette(rows)), legend=None),
            tooltip=[
                alt.Tooltip("rank:N", title="pipeline"),
                alt.Tooltip("s:Q", title="at, s"),
                alt.Tooltip("gib:Q", title="GiB", format=",.2f"),
            ],
        )
    )
    limit = (
        alt.Chart(named_data("limits"))
        .mark_rule(color=LIMIT, strokeWidth=2, strokeDash=[6, 3])
        .encode(y="gib:Q")
    )
    return specification(
        alt.layer(lines, limit), _CURVE_PIXELS, moments=rows, limits=[{"gib": capacity_gib}]
    )
