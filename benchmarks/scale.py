"""Growth of a search with the number of GPUs, from 64 to 100,000.

    python -m benchmarks.scale                         # a table, twenty minutes
    python -m benchmarks.scale --sweep deepseek-v3 --gpus 16384,100000 --repeat 1
    python -m benchmarks.scale --write                 # also the page and the picture

The requests are what a user would type: `plan --model M --gpu h100-80gb --gpus N`; the same on a
cluster file with racks and pods; and with sequences of 131,072 tokens, so that a mixture of experts
may take all five axes. A figure is the median of whole processes, as in
benchmarks/search/growth.py. `--write` replaces the table of GPUs in docs/design/growth.md and draws
docs/images/growth.png.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.search.speed import ROOT, timed_run
from benchmarks.search.sweeps import PAGE, Point, Sweep, run_sweeps, write_page
from parplan.profiles.divisors import divisors
from parplan.profiles.units import MIB
from parplan.report.plots.log_ticks import set_plain_ticks
from parplan.report.plots.scatter_plot import encoded
from parplan.report.text import console, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = ROOT / "docs" / "images" / "growth.png"
SMALL = (64, 256, 1024, 4096, 16384, 100_000)
LARGE = (1024, 4096, 16384, 100_000)  # fewer GPUs do not hold these models
MOST = (16384, 100_000)
GPUS_PER_NODE = 8
RACK_NODES, POD_NODES = 32, 512  # the most
OVERSUBSCRIPTION = 7  # of the uplinks of a pod (Llama 3, arXiv 2407.21783, section 3.3.1)
LONG_SEQUENCE = 131072
MOST_CPU_S, MOST_MIB = 10.0, 1024.0  # bounds of the design


def on_gpus(model: str, num_gpus: int, folder: Path) -> list[str]:
    """Returns the arguments of `plan` for a model on a number of GPUs."""
    return ["--model", model, "--gpu", "h100-80gb", "--gpus", str(num_gpus)]


def on_racks(model: str, num_gpus: int, folder: Path) -> list[str]:
    """Returns the same on racks and pods of equal numbers of nodes, whose switches are by rail."""
    nodes = num_gpus // GPUS_PER_NODE
    rack = max(number for number in divisors(nodes) if number <= RACK_NODES)
    pod = rack * max(number for number in divisors(nodes // rack) if rack * number <= POD_NODES)
    cluster = folder / f"racks{num_gpus}.yaml"
    levels = ("--level", f"rack:{rack}", "--level", f"pod:{pod}:{OVERSUBSCRIPTION}", "--rails")
    made = ("init", str(cluster), "--gpu", "h100-80gb", "--nodes", str(nodes), *levels)
    if not cluster.exists():
        timed_run(ROOT, (*made, "--no-look", "--no-ask"), folder, folder / "cache")
    return ["--model", model, "--cluster", str(cluster)]


def on_five_axes(model: str, num_gpus: int, folder: Path) -> list[str]:
    """Returns the same with sequences so long that context parallelism divides them too."""
    return [*on_gpus(model, num_gpus, folder), "--seq-length", str(LONG_SEQUENCE)]


SWEEPS = (
    Sweep("llama3-70b", SMALL, partial(on_gpus, "llama3-70b")),
    Sweep("llama3-405b", LARGE, partial(on_gpus, "llama3-405b")),
    Sweep("deepseek-v3", LARGE, partial(on_gpus, "deepseek-v3")),
    Sweep("llama3-405b on racks", MOST, partial(on_racks, "llama3-405b")),
    Sweep("deepseek-v3 on racks", MOST, partial(on_racks, "deepseek-v3")),
    Sweep("deepseek-v3, five axes", MOST, partial(on_five_axes, "deepseek-v3")),
)


def draw(points: Sequence[Point], path: Path) -> None:
    """Draws CPU-seconds, peak memory and candidates against GPUs, on logarithmic scales."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for name in dict.fromkeys(point.sweep for point in points):
        own = [point for point in points if point.sweep == name]
        _draw_line(panels[0], own, [point.cpu_s for point in own])
        _draw_line(panels[1], own, [point.peak_bytes / MIB for point in own])
        _draw_line(panels[2], own, [point.considered for point in own])
    for axes, label in zip(panels, ("CPU-seconds", "peak memory, MiB", "candidates"), strict=True):
        axes.set(xlabel="GPUs", ylabel=label)
        axes.grid(visible=True, color="0.92")
    panels[0].axhline(MOST_CPU_S, color="0.5", linestyle="dotted")
    panels[1].axhline(MOST_MIB, color="0.5", linestyle="dotted")
    for axes in panels:
        set_plain_ticks(axes.xaxis)
        set_plain_ticks(axes.yaxis)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(SWEEPS), fontsize=8)
    path.write_bytes(encoded(figure, path.suffix))


def _draw_line(axes: Axes, points: Sequence[Point], values: Sequence[float]) -> None:
    axes.loglog([point.size for point in points], values, marker="o", label=points[0].sweep)


@click.command()
@click.option(
    "--sweep", type=click.Choice([each.name for each in SWEEPS]), help="Measure this sweep alone."
)
@click.option("--gpus", help="Numbers of GPUs in place of the sweep's own, for example 64,1024.")
@click.option(
    "--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs counted."
)
@click.option("--write", is_flag=True, help="Replace the table of the page and draw the picture.")
def main(sweep: str | None, gpus: str | None, repeat: int, write: bool) -> None:
    """Measure the growth of a search with the number of GPUs."""
    table = run_sweeps(SWEEPS, sweep, gpus, repeat)
    if write:
        write_page(table, "scale.py")
        draw(table, PICTURE)
        say(console(sys.stderr), f"wrote {PAGE} and {PICTURE}")


if __name__ == "__main__":
    main()
