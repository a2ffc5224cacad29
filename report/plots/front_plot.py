"""The front as a picture: step time against peak memory, coloured by redundant memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.planner.plan.traced_plan import model_name
from parplan.planner.search.pareto import ParetoFront, ParetoPoint
from parplan.profiles.units import counted, format_number
from parplan.report.names import FASTEST, search_text
from parplan.report.plots.scatter_plot import literal, save
from parplan.report.shared_colours import LIMIT
from parplan.report.text import gib_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

_LAST_COLOUR = 0.92  # share of the colour map in use: its palest end is lost on paper
# Factor on the fastest step. Slower points stand at the upper edge with their time, so that the
# scale separates the rest.
FAR = 2.5
_ROOM = 1.04  # factor that the axis of memory leaves beyond the device
_REDUNDANT = "redundant memory over all GPUs, GiB"
_TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)


def edge_s(steps_s: Sequence[float]) -> float:
    """Returns the seconds at which steps that are far slower than the first are drawn."""
    near_s = max(step_s for step_s in steps_s if step_s <= FAR * steps_s[0])
    return near_s + 0.2 * max(near_s - steps_s[0], 0.1 * near_s)


def draw_front(front: ParetoFront, path: Path) -> Path | None:
    """Draw the front and write it to `path`; raises ConfigError if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 5.6), layout="constrained")
    axes = figure.subplots()
    top_s = _draw_scales(axes, front)
    _draw_steps(axes, front, top_s)
    _draw_points(figure, axes, front, top_s)
    _draw_limits(axes, front)
    _name_points(axes, front, top_s)
    _name_axes(figure, axes, front)
    return save(figure, path)


def _capacity_gib(front: ParetoFront) -> float:
    return front.points[0].plan.predicted.memory_gib[0].capacity


def _draw_scales(axes: Axes, front: ParetoFront) -> float:
    """Set axes around the points near the fastest; returns the step time of the upper edge."""
    fastest_s = front.points[0].step_time_s
    near_s = max(
        point.step_time_s for point in front.points if point.step_time_s <= FAR * fastest_s
    )
    room_s = max(0.12 * (near_s - fastest_s), 0.02 * fastest_s)
    far = any(point.step_time_s > near_s for point in front.points)
    top_s = near_s + room_s * (2 if far else 1)
    axes.set_ylim(fastest_s - room_s, top_s)
    axes.set_xlim(
        0, _ROOM * max(_capacity_gib(front), *(point.peak_memory_gib for point in front.points))
    )
    axes.ticklabel_format(useOffset=False)
    axes.grid(visible=True, color="0.92", zorder=-1)
    axes.set_axisbelow(True)
    return top_s


def front_steps(front: ParetoFront) -> list[ParetoPoint]:
    """Returns the points that are fastest within their peak memory, by rising peak.

    Points that are on the front for their redundant memory alone are left out.
    """
    steps: list[ParetoPoint] = []
    for point in sorted(front.points, key=lambda point: (point.peak_memory_gib, point.step_time_s)):
        if not steps or point.step_time_s < steps[-1].step_time_s:
            steps.append(point)
    return steps


def _draw_steps(axes: Axes, front: ParetoFront, top_s: float) -> None:
    """Draw the fastest known step within each peak, as a descending staircase."""
    steps = front_steps(front)
    peaks = [
        *(point.peak_memory_gib for point in steps),
        max(front.usable_gib, steps[-1].peak_memory_gib),
    ]
    times_s = [*(min(point.step_time_s, top_s) for point in steps), steps[-1].step_time_s]
    axes.step(
        peaks,
        times_s,
        where="post",
        color="0.45",
        linewidth=1.2,
        zorder=2,
        label="fastest found within a peak",
    )


def _draw_points(figure: Figure, axes: Axes, front: ParetoFront, top_s: float) -> None:
    """Draw the points, with a colour bar of redundant memory.

    Triangles at the edge are far slower, squares use the host. The colour scale is logarithmic
    unless devices hold less than one copy.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm, Normalize

    below = min(point.redundancy_gib for point in front.points) < 0
    redundant = [
        point.redundancy_gib if below else max(point.redundancy_gib, 1e-3) for point in front.points
    ]
    colours = ListedColormap(
        colormaps["viridis"]([_LAST_COLOUR * step / 255 for step in range(256)])
    )
    norm = (
        Normalize(min(redundant), max(redundant))
        if below
        else LogNorm(min(redundant) / 1.01, max(redundant) * 1.01)
    )
    named = set()
    for point, value in zip(front.points, redundant, strict=True):
        if point.step_time_s > top_s:
            marker, label = "^", "plan, beyond the scale"
        elif point.host_gib:
            marker, label = "s", "uses the host, GiB a node"
        else:
            marker, label = "o", "plan, numbered as in the table"
        axes.scatter(
            point.peak_memory_gib,
            min(point.step_time_s, top_s),
            color=colours(norm(value)),
            marker=marker,
            s=70,
            edgecolors="black",
            linewidths=0.6,
            zorder=3,
            clip_on=False,
            label=None if label in named else label,
        )
        named.add(label)
    if below:
        figure.colorbar(ScalarMappable(norm, colours), ax=axes, label=_REDUNDANT, pad=0.02)
    else:
        _draw_bar(figure, axes, ScalarMappable(norm, colours), min(redundant), max(redundant))


def _draw_bar(figure: Figure, axes: Axes, colours: ScalarMappable, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    bar = figure.colorbar(colours, ax=axes, label=_REDUNDANT, pad=0.02)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [
        part * 10.0**decade
        for decade in decades
        for part in _TICKS
        if low <= part * 10.0**decade <= high
    ]
    bar.set_ticks(ticks if len(ticks) > 1 else sorted({low, high}))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value, 4)))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())


def _draw_limits(axes: Axes, front: ParetoFront) -> None:
    capacity = _capacity_gib(front)
    axes.axvline(
        front.usable_gib,
        color=LIMIT,
        linewidth=1,
        linestyle="--",
        zorder=1,
        label=f"usable, {front.usable_gib:.1f} GiB",
    )
    axes.axvline(
        capacity,
        color=LIMIT,
        linewidth=1.4,
        zorder=1,
        label=f"the GPU has {capacity:.1f} GiB",
    )


def end_names(front: ParetoFront) -> dict[int, str]:
    """Returns names of the points at the ends of the front, by number."""
    names: dict[int, str] = {}
    default = search_text(front.points[0].plan.search) == FASTEST
    ends = (
        (
            "fastest, the default plan" if default else "fastest",
            [point.step_time_s for point in front.points],
        ),
        ("least peak memory", [point.peak_memory_gib for point in front.points]),
        ("least redundant", [point.redundancy_gib for point in front.points]),
    )
    for name, values in ends:
        number = values.index(min(values)) + 1
        names[number] = f"{names[number]}, {name}" if number in names else name
    return names


def _name_points(axes: Axes, front: ParetoFront, top_s: float) -> None:
    """Write number and name of every point, away from the staircase."""
    from matplotlib.patheffects import withStroke

    ends = end_names(front)
    middle = sum(axes.get_xlim()) / 2
    steps = front_steps(front)
    for number, point in enumerate(front.points, 1):
        far = point.step_time_s > top_s
        words = [str(number)]
        if far:
            words.append(seconds_text(point.step_time_s))
        if number in ends:
            words.append(ends[number])
        if point.host_gib:
            words.append(f"host {gib_text(point.host_gib)}")
        left = point.peak_memory_gib > middle
        below = far or point in steps
        axes.annotate(
            ", ".join(words),
            (point.peak_memory_gib, min(point.step_time_s, top_s)),
            xytext=(-5 if left else 5, -5 if below else 4),
            textcoords="offset points",
            ha="right" if left else "left",
            va="top" if below else "bottom",
            fontsize=8,
            zorder=4,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )


def _name_axes(figure: Figure, axes: Axes, front: ParetoFront) -> None:
    plan = front.points[0].plan
    partial = ", incomplete" if front.stopped else ""
    plans = counted(len(front.points), "plan")
    axes.set_title(
        literal(f"{model_name(plan)} on {plan.cluster.num_gpus} x {plan.cluster.device.name}: ")
        + f"{plans}{partial}",
        pad=12,
    )
    axes.set_xlabel("peak memory of the fullest GPU, GiB (predicted, analytic)")
    axes.set_ylabel(f"step time, s (predicted, {plan.predicted.step_time_s.kind})")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
