"""A profile as a picture: FLOP/s of products and attention, bytes/s of memory and collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.curves import (
    Chip,
    CollectiveCurve,
    FlashCurve,
    MatmulCurve,
    MemoryCurve,
    matmul_s,
    memory_bound_s,
)
from parplan.profiles.machines.user_profile import UserProfile
from parplan.profiles.models.spec import Precision
from parplan.profiles.units import GB, TERA, US_PER_S, format_bytes, format_number
from parplan.report.machines.profile_series import CurveSeries, chip_of, product_of, series_of
from parplan.report.machines.profile_tables import collectives_of, placement_text
from parplan.report.plots.log_ticks import set_plain_ticks
from parplan.report.plots.scatter_plot import MARKERS, literal, save
from parplan.report.shared_colours import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2
_PANEL_INCHES = (6.6, 4.4)
_STEPS = 60  # segments of a drawn curve


@dataclass(frozen=True, slots=True)
class _Panel:
    """One pair of axes: title, names of both scales, a limit to mark (name, height), its drawer."""

    title: str
    across: str
    up: str
    limit: tuple[str, float] | None
    draw: Callable[[Axes], None]
    bytes_across: bool = True


def draw_profile(profile: UserProfile, path: Path) -> Path | None:
    """Draw a profile and write it to `path`.

    Raises ConfigError when nothing was measured, or when the file cannot be written.
    """
    from matplotlib.figure import Figure

    panels = [*_speeds(profile), *_collectives(collectives_of(profile))]
    if not panels:
        raise ConfigError(
            "nothing to draw: the profile has no measured points",
            hint="measure them with: plan profile -o FILE",
        )
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows + 0.4), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(places, panels, strict=False):
        _draw(axes, panel)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(literal(_title(profile)))
    return save(figure, path)


def _title(profile: UserProfile) -> str:
    here = profile.environment
    parts = (
        profile.device,
        profile.precision,
        *((f"torch {here.torch}", here.date) if here else ()),
    )
    return ", ".join(part for part in parts if part)


def _speeds(profile: UserProfile) -> Iterable[_Panel]:
    """Yields the panels of operations on one device."""
    chip = chip_of(profile)
    if chip is None:
        return
    all_series = series_of(profile)
    for title, kind in (("matrix products", MatmulCurve), ("fused attention", FlashCurve)):
        series = [each for each in all_series if isinstance(each.curve, kind)]
        if series:
            limit = (
                f"peak, {format_number(chip.peak_flops_per_s / TERA, 3)} TFLOP/s",
                chip.peak_flops_per_s / TERA,
            )
            cube = next((each for each in series if each.name == "forward"), None)
            line = (
                _cubes(cube, chip, Precision(profile.precision).num_bytes)
                if cube and profile.precision
                else None
            )
            yield _Panel(
                f"{title} by FLOPs",
                "FLOPs",
                "TFLOP/s",
                limit,
                _fitted_points(series, line),
                bytes_across=False,
            )
    streams = [each for each in all_series if isinstance(each.curve, MemoryCurve)]
    if streams:
        limit = (f"memory, {format_number(chip.bytes_per_s / GB, 4)} GB/s", chip.bytes_per_s / GB)
        yield _Panel(
            "operations bound by memory, by size",
            "bytes moved at least",
            "GB/s",
            limit,
            _streams(streams, chip),
        )


def _fitted_points(
    series: Sequence[CurveSeries], line: tuple[list[float], list[float]] | None
) -> Callable[[Axes], None]:
    """Returns a drawer of measured points (filled), fitted points (rings) and `line`."""

    def draw(axes: Axes) -> None:
        for each, colour, marker in zip(series, SERIES, MARKERS, strict=False):
            work = [point.work for point in each.points]
            measured = [point.rate / each.scale for point in each.points]
            fitted = [point.fitted_rate / each.scale for point in each.points]
            axes.vlines(work, measured, fitted, color=colour, linewidth=0.8, alpha=0.6, zorder=1)
            axes.scatter(
                work,
                fitted,
                s=34,
                marker=marker,
                facecolors="none",
                edgecolors=colour,
                linewidths=0.8,
                zorder=2,
            )
            axes.scatter(
                work,
                measured,
                s=16,
                marker=marker,
                color=colour,
                zorder=3,
                label=each.name,
            )
        if line:
            axes.plot(
                *line,
                color=SERIES[0],
                linewidth=0.9,
                alpha=0.7,
                zorder=0,
                label="forward fitted, m = n = k",
            )
        axes.scatter(
            [],
            [],
            s=34,
            marker="o",
            facecolors="none",
            edgecolors="0.3",
            linewidths=0.8,
            label="fitted, same shape",
        )

    return draw


def _streams(series: Sequence[CurveSeries], chip: Chip) -> Callable[[Axes], None]:
    """Returns a drawer of measured points and their curve; backward is hollow and dashed."""

    def draw(axes: Axes) -> None:
        operations = list(dict.fromkeys(each.name.partition(".")[0] for each in series))
        for each in series:
            place = operations.index(each.name.partition(".")[0])
            colour = SERIES[place % len(SERIES)]
            marker = MARKERS[place % len(MARKERS)]
            backward = each.name.endswith("backward")
            axes.plot(
                *_stream_line(each, chip),
                color=colour,
                linewidth=0.9,
                linestyle="--" if backward else "-",
                alpha=0.7,
                zorder=1,
            )
            axes.scatter(
                [point.work for point in each.points],
                [point.rate / GB for point in each.points],
                s=18,
                marker=marker,
                facecolors="white" if backward else colour,
                edgecolors=colour,
                linewidths=0.9,
                zorder=3,
                label=each.name,
            )

    return draw


def _stream_line(series: CurveSeries, chip: Chip) -> tuple[list[float], list[float]]:
    """Returns bytes from the smallest to the largest point, and the curve's GB/s at each."""
    sizes = _between(series)
    curve = series.curve
    assert isinstance(curve, MemoryCurve)
    return sizes, [
        n_bytes / memory_bound_s(n_bytes, curve, chip.bytes_per_s) / GB for n_bytes in sizes
    ]


def _between(series: CurveSeries) -> list[float]:
    low, high = series.points[0].work, series.points[-1].work
    return [low * (high / low) ** (step / _STEPS) for step in range(_STEPS + 1)]


def _cubes(series: CurveSeries, chip: Chip, element_bytes: int) -> tuple[list[float], list[float]]:
    """Returns FLOPs and fitted TFLOP/s of products with m = n = k."""
    curve = series.curve
    assert isinstance(curve, MatmulCurve)
    products = [
        product_of((round((flops / 2) ** (1 / 3)),) * 3, element_bytes)
        for flops in _between(series)
    ]
    return [product.flops for product in products], [
        product.flops / matmul_s(product, curve, chip) / TERA for product in products
    ]


def _collectives(curves: Sequence[CollectiveCurve]) -> Iterable[_Panel]:
    """Yields one panel a collective, with one line for each placement of its group."""
    for name in dict.fromkeys(curve.collective for curve in curves):
        same = [curve for curve in curves if curve.collective == name]
        yield _Panel(
            f"{name.replace('_', ' ')} by size",
            "bytes, as nccl-tests counts them",
            "GB/s",
            None,
            _placements(same),
        )


def _placements(curves: Sequence[CollectiveCurve]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for index, curve in enumerate(curves):
            rates = [
                n_bytes / time_us * US_PER_S / GB
                for n_bytes, time_us in zip(curve.bytes, curve.time_us, strict=True)
            ]
            axes.plot(
                curve.bytes,
                rates,
                color=SERIES[index % len(SERIES)],
                marker=MARKERS[index % len(MARKERS)],
                markersize=4,
                linewidth=1.1,
                label=placement_text(curve),
            )

    return draw


def _draw(axes: Axes, panel: _Panel) -> None:
    """Draw a panel with its scales, its limit and its legend beside it."""
    panel.draw(axes)
    axes.set(xscale="log", yscale="log", title=panel.title, xlabel=panel.across, ylabel=panel.up)
    if panel.limit:
        name, height = panel.limit
        axes.axhline(height, color="0.3", linewidth=1, linestyle=":", zorder=0, label=name)
    _set_ticks(axes, panel)
    axes.grid(visible=True, color="0.92", zorder=-1)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _set_ticks(axes: Axes, panel: _Panel) -> None:
    """Set plain numbers upwards; across are powers of two with units, or powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    set_plain_ticks(axes.yaxis)
    if panel.bytes_across:
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: format_bytes(value).replace(".0 ", " "))
        )
