"""Predicted against measured steps as a picture, and the files that pictures are written to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.planner.validation.priced_rows import PricedRow
from parplan.profiles.documents.files import require_writable, write_result
from parplan.profiles.errors import ConfigError
from parplan.report.plots.log_ticks import set_plain_ticks
from parplan.report.shared_colours import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
BAND = 0.1  # share above and below the diagonal
# most eyes can tell these apart
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # with 8 colours, 56 sources differ
_DPI = 150
_UNDATED: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_EXACT_NAME, _BAND_NAME = "exact", f"within {100 * BAND:.0f} %"
_OTHER_FILE = "choose another file with --plot"
_SMALLEST_HALF = 3.0  # factor from the middle of a scale to its ends, so that it has ticks
_ROOM = 1.25  # factor that the axes leave around the points

_Points = dict[str, list[tuple[float, float]]]  # by source: measured, predicted
_Styles = dict[str, tuple[str, str]]  # by source: colour, marker


def require_plot(path: Path) -> None:
    """Raise ConfigError if the picture could not be drawn or written, before anything is priced."""
    if path.suffix.lower() not in FORMATS:
        formats = ", ".join(FORMATS)
        raise ConfigError(
            f"cannot draw {path}: {path.suffix or 'no suffix'} is not {formats}",
            hint="for example --plot errors.png",
        )
    require_writable(path, hint=_OTHER_FILE)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed", hint="pip install 'parplan[plot]'"
        ) from None


def draw(priced: Sequence[PricedRow], path: Path) -> Path | None:
    """Draw step times and, if rows have it, memory to `path`, with one marker a source."""
    from matplotlib.figure import Figure

    points_by_name = {
        "step time, s": _points((row.source, row.measured_s, row.predicted_s) for row in priced),
        "memory of one GPU, GiB": _points(
            (row.source, row.measured_gib, row.predicted_gib) for row in priced
        ),
    }
    panels = [(name, points) for name, points in points_by_name.items() if points]
    if not panels:
        raise ConfigError(
            "nothing to draw: no row is both measured and priced",
            hint="plan validate without --plot says why",
        )
    figure = Figure(figsize=(1.8 + 4.7 * len(panels), 5.0), layout="constrained")
    sources = sorted({source for _, points in panels for source in points})
    styles = dict(zip(sources, _looks(), strict=False))
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, points) in zip(all_axes, panels, strict=True):
        _draw_panel(axes, name, points, styles)
    _draw_legend(figure)
    return save(figure, path)


def encoded(figure: Figure, suffix: str) -> bytes:
    """Return a picture as the bytes of a file with a suffix such as ".png".

    The same picture has the same bytes: no date, and names in SVG that follow from what is drawn.
    Text in PDF stays text in embedded TrueType, which journals ask for.
    """
    from matplotlib import rc_context

    file = BytesIO()
    with rc_context({"svg.hashsalt": "parplan", "pdf.fonttype": 42}):
        figure.savefig(file, format=suffix[1:], dpi=_DPI, metadata=_UNDATED.get(suffix))
    return file.getvalue()


def literal(text: str) -> str:
    """Returns a text as matplotlib draws it as it is: two dollar signs begin no formula."""
    return text.replace("$", r"\$")


def save(figure: Figure, path: Path) -> Path | None:
    """Write a picture in the format of the file's suffix; raises ConfigError.

    Returns the name under which another file that was there is kept, as `write_result` does.
    """
    return write_result(encoded(figure, path.suffix.lower()), path, hint=_OTHER_FILE)


def _draw_legend(figure: Figure) -> None:
    """Draw one legend for all panels: the sources by name, then the lines."""
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    lines = (_EXACT_NAME, _BAND_NAME)
    names = [*sorted(name for name in handles if name not in lines), *lines]
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside right upper",
        frameon=False,
        title="rows of",
    )


def _points(rows: Iterable[tuple[str, float | None, float | None]]) -> _Points:
    points: _Points = {}
    for source, measured, predicted in rows:
        if measured is not None and predicted is not None:
            points.setdefault(source, []).append((measured, predicted))
    return points


def _looks() -> Iterator[tuple[str, str]]:
    """Yields colours with markers; both change from each pair to the next."""
    return zip(cycle(SERIES), cycle(MARKERS), strict=False)


def _draw_panel(axes: Axes, name: str, points: _Points, styles: _Styles) -> None:
    """Draw log-log axes with equal limits; sources with many rows lie below those with few."""
    for source in sorted(points, key=lambda source: -len(points[source])):
        colour, marker = styles[source]
        measured, predicted = zip(*points[source], strict=True)
        axes.scatter(
            measured,
            predicted,
            s=30,
            color=colour,
            marker=marker,
            alpha=0.8,
            linewidths=0.4,
            edgecolors="white",
            label=literal(source),
        )
    values = [value for of_source in points.values() for pair in of_source for value in pair]
    middle = math.sqrt(min(values) * max(values))
    room = max(_ROOM * math.sqrt(max(values) / min(values)), _SMALLEST_HALF)
    _draw_scale(axes, middle / room, middle * room)
    axes.set_title(name.split(",")[0])
    axes.set_xlabel(f"measured {name}")
    axes.set_ylabel(f"predicted {name}")


def _draw_scale(axes: Axes, low: float, high: float) -> None:
    """Draw the diagonal and its band; the axes run from `low` to `high` with plain numbers."""
    ends = (low, high)
    below = [end * (1 - BAND) for end in ends]
    above = [end * (1 + BAND) for end in ends]
    axes.fill_between(ends, below, above, color="0.86", linewidth=0, zorder=0, label=_BAND_NAME)
    axes.plot(ends, ends, color="0.3", linewidth=1, zorder=1, label=_EXACT_NAME)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        set_plain_ticks(axis)
    axes.grid(visible=True, color="0.92", zorder=-1)
    axes.set_axisbelow(True)
