"""Predicted against measured as a picture; with front_plot.py, profile_plot.py and chunk_plot.py
what alone names matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.planner.validation.priced_rows import PricedRow
from parplan.profiles.documents.files import replacing, require_writable
from parplan.profiles.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
BAND = 0.1  # share above and below the diagonal
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C564B",
)  # told apart by most eyes
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # with 8 colours, 56 sources differ
_DPI = 150
_EXACT_NAME, _BAND_NAME = "exact", f"within {100 * BAND:.0f} %"
_FEW_DECADES = 200  # a scale shorter than this factor has ticks at 2 and 5 as well
_OTHER_FILE = "choose another file with --plot"
_SMALLEST_HALF = 3.0  # factor from the middle of a scale to its ends, so that it has ticks
_ROOM = 1.25  # factor that the axes leave around the points

_Points = dict[str, list[tuple[float, float]]]  # by source: measured, predicted
_Styles = dict[str, tuple[str, str]]  # by source: colour, marker


def require_plot(path: Path) -> None:
    """Raises ConfigError when the picture could not be drawn or written: found before the pricing,
    not after it.
    """
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


def draw(priced: Sequence[PricedRow], path: Path) -> None:
    """The step times of the rows, and their memory where some have it, one marker a source, written
    to `path`.
    """
    from matplotlib.figure import Figure

    found = {
        "step time, s": _points((row.source, row.measured_s, row.predicted_s) for row in priced),
        "memory of one GPU, GiB": _points(
            (row.source, row.measured_gib, row.predicted_gib) for row in priced
        ),
    }
    panels = [(name, points) for name, points in found.items() if points]
    if not panels:
        raise ConfigError(
            "nothing to draw: no row is both measured and priced",
            hint="plan validate without --plot says why",
        )
    figure = Figure(figsize=(1.8 + 4.7 * len(panels), 5.0), layout="constrained")
    styles = dict(
        zip(sorted({source for _, points in panels for source in points}), _looks(), strict=False)
    )
    for axes, (name, points) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        _draw_panel(axes, name, points, styles)
    _draw_legend(figure)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a picture whole, in the format that the file's suffix names. Raises ConfigError."""
    with replacing(path, hint=_OTHER_FILE) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=_DPI)


def _draw_legend(figure: Figure) -> None:
    """One for all panels, beside them: the sources by name, then the lines."""
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
    """Colours and markers, both changing from each to the next."""
    return zip(cycle(_COLOURS), cycle(_MARKERS), strict=False)


def _draw_panel(axes: Axes, name: str, points: _Points, styles: _Styles) -> None:
    """Log-log with the same limits both ways; sources with many rows lie below those with few."""
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
            label=source,
        )
    values = [value for of_source in points.values() for pair in of_source for value in pair]
    middle, room = (
        math.sqrt(min(values) * max(values)),
        max(_ROOM * math.sqrt(max(values) / min(values)), _SMALLEST_HALF),
    )
    _draw_scale(axes, middle / room, middle * room)
    axes.set_title(name.split(",")[0])
    axes.set_xlabel(f"measured {name}")
    axes.set_ylabel(f"predicted {name}")


def _draw_scale(axes: Axes, low: float, high: float) -> None:
    """The diagonal, the band around it, and axes from `low` to `high` whose ticks are plain
    numbers.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ends = (low, high)
    below, above = ([end * share for end in ends] for share in (1 - BAND, 1 + BAND))
    axes.fill_between(ends, below, above, color="0.86", linewidth=0, zorder=0, label=_BAND_NAME)
    axes.plot(ends, ends, color="0.3", linewidth=1, zorder=1, label=_EXACT_NAME)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    subs = (1.0, 2.0, 5.0) if high / low < _FEW_DECADES else (1.0,)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, color="0.92", zorder=-1)
    axes.set_axisbelow(True)
