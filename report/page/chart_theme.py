"""The look of all charts of a page: colours are CSS variables, so that a theme repaints them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from parplan.report.shared_colours import SERIES

if TYPE_CHECKING:
    import altair

COLOURS = tuple(f"var(--c{number})" for number in range(1, 1 + len(SERIES)))
INK = "var(--ink)"
MUTED = "var(--muted)"
GRID = "var(--line)"
PAGE = "var(--page)"
LIMIT = "var(--limit)"
ROW_PIXELS = 22
MOST_ROWS = 32  # rows of a chart; more would not be read

Row = dict[str, Any]


def colours(names: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each name, in their order."""
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def colour_scale(palette: Mapping[str, str]) -> altair.Scale:
    """Returns the scale of a palette; the page draws its legend."""
    import altair as alt

    return alt.Scale(domain=list(palette), range=list(palette.values()))


@contextmanager
def unchecked_charts() -> Iterator[None]:
    """Leaves out altair's check of every part of a chart, which takes longer than to make them.

    tests/report/page/test_html_page.py checks the charts of a page against the same schema.
    """
    from altair.utils.schemapi import debug_mode

    with debug_mode(False):
        yield


def named_data(name: str) -> altair.NamedData:
    """Returns the data that `specification` adds under a name.

    altair checks every row of data that a chart holds itself, which takes longer than all else.
    """
    import altair as alt

    return alt.NamedData(name=name)


def specification(
    chart: altair.LayerChart | altair.FacetChart | altair.Chart,
    height: int,
    **datasets: Sequence[Row],
) -> Row:
    """Returns a chart as a Vega-Lite document of the width of its place on the page.

    height: pixels
    datasets: the rows of `named_data`
    """
    text = {"labelColor": MUTED, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12}
    lines = {"gridColor": GRID, "domainColor": MUTED, "tickColor": MUTED}
    styled = chart.properties(width="container", height=height).configure(
        background="transparent",
        font="system-ui, sans-serif",
        axis={**text, **lines, "titleFontWeight": "normal", "labelLimit": 150},
        view={"stroke": None},
    )
    drawn = styled.to_dict(validate=False)
    return {**drawn, "datasets": {name: list(rows) for name, rows in datasets.items()}}
