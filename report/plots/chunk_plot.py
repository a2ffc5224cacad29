"""A chunk schedule as a picture: bytes of one device at every moment of a step, and its fetches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.planner.plan.chunk_levels import CLASSES, ChunkLevel
from parplan.planner.plan.traced_plan import AnyPlan, model_name
from parplan.profiles.units import format_number, gib
from parplan.report.plots.scatter_plot import literal, save
from parplan.report.shared_colours import LIMIT, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOM = 1.08  # factor that the axis of memory leaves above the budget
_LABELS = {
    "always": "states at home on the device",
    "other": "activations and all else",
    "gathered": "gathered groups",
    "pool": "parameter chunks of blocks on the host",
}
_COLOURS = {"always": SERIES[0], "other": "#BBBBBB", "gathered": SERIES[1], "pool": SERIES[2]}


def draw_levels(
    levels: Sequence[ChunkLevel], plan: AnyPlan, rank: int, budget_bytes: int, path: Path
) -> Path | None:
    """Draw the moments and write them to `path`; raises ConfigError if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 5.0), layout="constrained")
    axes, marks = figure.subplots(2, 1, sharex=True, height_ratios=(12, 1))
    _draw_bytes(axes, levels, budget_bytes)
    _draw_marks(marks, levels)
    axes.set_title(
        f"{literal(model_name(plan))}, stage {rank}: {plan.mesh}, "
        f"{plan.pipeline.num_micro_batches} micro-batches"
    )
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return save(figure, path)


def _draw_bytes(axes: Axes, levels: Sequence[ChunkLevel], budget_bytes: int) -> None:
    """Draw stacked areas with one step a moment; the class that changes least is lowest."""
    edges = [level.moment for level in levels] + [len(levels)]
    floor = [0.0] * len(edges)
    for name in sorted(CLASSES, key=list(_LABELS).index):
        sizes = [gib(getattr(level, name)) for level in levels]
        top = [low + size for low, size in zip(floor, (*sizes, sizes[-1]), strict=True)]
        axes.fill_between(
            edges, floor, top, step="post", color=_COLOURS[name], linewidth=0, label=_LABELS[name]
        )
        floor = top
    axes.axhline(
        gib(budget_bytes),
        color=LIMIT,
        linewidth=1.2,
        label=f"budget, {format_number(gib(budget_bytes), 4)} GiB",
    )
    axes.set_ylim(0, _ROOM * max(gib(budget_bytes), *floor))
    axes.set_xlim(0, len(levels))
    axes.set_ylabel("GiB of one GPU (predicted, analytic)")
    axes.grid(visible=True, axis="y", color="0.92", zorder=-1)
    axes.set_axisbelow(True)


def _draw_marks(axes: Axes, levels: Sequence[ChunkLevel]) -> None:
    """Mark moments that wait for a chunk from the host, and below them moments that send one."""
    for height, (field, name) in enumerate((("out_bytes", "sent"), ("in_bytes", "fetched"))):
        moved = [level.moment + 0.5 for level in levels if getattr(level, field)]
        axes.scatter(moved, [height] * len(moved), marker="|", s=30, color="black", linewidths=0.8)
        axes.text(
            -0.005,
            height,
            name,
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            fontsize=8,
        )
    axes.set_ylim(-0.6, 1.6)
    axes.set_yticks([])
    axes.set_xlabel(
        "moments of a step: passes of blocks, forward and backward, in the order of the schedule"
    )
