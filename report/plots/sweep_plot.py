"""A sweep as a picture: tokens/s of all GPUs against their number, beside perfect scaling."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from parplan.planner.plan.derived import tokens_per_s
from parplan.planner.plan.plan import Plan
from parplan.report.plots.log_ticks import set_plain_ticks
from parplan.report.plots.scatter_plot import MARKERS, literal, save
from parplan.report.shared_colours import SERIES


def draw_sweep(plans: Sequence[Plan], path: Path) -> Path | None:
    """Draw a line for each kind of GPU, batch size and sequence length, and write it to `path`.

    Raises ConfigError when the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    styles = zip(cycle(SERIES), cycle(MARKERS), strict=False)
    for (name, line), (colour, marker) in zip(_lines(plans).items(), styles, strict=False):
        gpus = [plan.cluster.num_gpus for plan in line]
        speeds = [tokens_per_s(plan) for plan in line]
        axes.plot(gpus, speeds, marker=marker, color=colour, label=literal(name))
        best = max(speed / number for speed, number in zip(speeds, gpus, strict=True))
        ideal = [best * number for number in gpus]
        axes.plot(gpus, ideal, linestyle=":", linewidth=1, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        set_plain_ticks(axis)
    axes.set_xticks(sorted({plan.cluster.num_gpus for plan in plans}))
    axes.set_xlabel("GPUs")
    axes.set_ylabel(f"tokens/s (predicted, {plans[0].predicted.step_time_s.kind})")
    axes.set_title(f"{literal(plans[0].model.name)}: best plans; dotted, perfect scaling", pad=12)
    axes.legend(frameon=False, fontsize=8)
    return save(figure, path)


def _lines(plans: Sequence[Plan]) -> dict[str, list[Plan]]:
    """Returns the plans of each line by its name, in the order of their GPUs."""
    lines: dict[str, list[Plan]] = {}
    for plan in sorted(plans, key=lambda each: each.cluster.num_gpus):
        training = plan.training
        name = (
            f"{plan.cluster.device.name}, {training.global_batch_size:,} x "
            f"{training.seq_length:,} tokens"
        )
        lines.setdefault(name, []).append(plan)
    return lines
