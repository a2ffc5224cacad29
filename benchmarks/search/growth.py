"""Growth of a search: CPU-seconds, peak memory and candidates against layers and experts.

    python -m benchmarks.search.growth                              # a table, half an hour
    python -m benchmarks.search.growth --sweep layers --points 16,64 --repeat 1
    python -m benchmarks.search.growth --write                      # also the page

A figure is the median of whole processes, as in benchmarks/search/speed.py. `--write` replaces the
table of docs/design/growth.md. The growth with the number of GPUs is in benchmarks/scale.py.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import yaml

from benchmarks.search.speed import ROOT, timed_run
from parplan.planner.plan.plan_file import read_any_plan
from parplan.profiles.documents.schema import document
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.units import MIB
from parplan.report.text import console, print_table, say

PAGE = ROOT / "docs" / "design" / "growth.md"
END = "<!-- end of the table -->\n"
HEADING = ("sweep", "size", "CPU s", "peak MiB", "candidates", "solved")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Requests that differ in one size.

    command  the arguments of `plan` at a size; a model file goes to the folder
    """

    name: str
    sizes: tuple[int, ...]
    command: Callable[[int, Path], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The medians at one size."""

    sweep: str
    size: int
    cpu_s: float
    peak_bytes: float
    considered: int
    solved: int


def more_layers(num_layers: int, folder: Path) -> list[str]:
    """Returns the blocks of gpt-20b, more of them, on 64 GPUs."""
    entry = load_model("gpt-20b")
    spec = replace(entry.spec, name=f"gpt-{num_layers}-layers", num_layers=num_layers)
    body = {
        "model": document(spec),
        "training": {"global_batch_size": 1024, "seq_length": spec.max_seq_length},
        "source": "blocks of gpt-20b",
    }
    path = folder / f"{spec.name}.yaml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return ["--model", str(path), "--gpu", "a100-80gb", "--gpus", "64"]


UNLIKE = """
from torch import nn


class Block(nn.Module):
    def __init__(self, width, factor):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, classes, layers=24, width=4096):
        super().__init__()
        self.embedding = nn.Embedding(32768, width)
        factors = (4, 6, 3, 8, 2, 5)[:classes]
        self.blocks = nn.Sequential(
            *(Block(width, factors[k % classes]) for k in range(layers))
        )
        self.head = nn.Linear(width, 32768)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))
"""


def more_classes(num_classes: int, folder: Path) -> list[str]:
    """Returns 24 blocks of so many classes in turns, a traced module, on 32 GPUs."""
    factory = f"\n\ndef make():\n    return Net({num_classes})\n"
    (folder / f"unlike{num_classes}.py").write_text(UNLIKE + factory, encoding="utf-8")
    return [
        *("--model", f"unlike{num_classes}:make", "--gpu", "a100-80gb", "--gpus", "32"),
        *("--global-batch-size", "256", "--seq-length", "2048"),
    ]


# mixtures of experts by billions of parameters, which hardly fit 64 GPUs, or only with the hosts
EXPERTS = {109: "llama4-scout", 236: "deepseek-v2", 400: "llama4-maverick", 671: "deepseek-v3"}


def more_experts(billions: int, folder: Path) -> list[str]:
    """Returns a mixture of experts of so many billions of parameters on 64 GPUs."""
    return ["--model", EXPERTS[billions], "--gpu", "h100-80gb", "--gpus", "64"]


SWEEPS = (
    Sweep("layers", (16, 32, 64, 128, 256), more_layers),
    Sweep("classes", (1, 2, 3, 4, 5, 6), more_classes),
    Sweep("experts", tuple(EXPERTS), more_experts),
)


def measured(sweep: Sweep, size: int, folder: Path, repeat: int) -> Point:
    """Returns the medians at one size; a first run, which fills the cache, is not counted."""
    plan_file = folder / "plan.yaml"
    command = [*sweep.command(size, folder), "--output", str(plan_file)]
    runs = [timed_run(ROOT, command, folder, folder / "cache") for _ in range(1 + repeat)][1:]
    candidates = read_any_plan(plan_file).search.candidates
    return Point(
        sweep=sweep.name,
        size=size,
        cpu_s=statistics.median(run.cpu_s for run in runs),
        peak_bytes=statistics.median(run.peak_bytes for run in runs),
        considered=candidates.considered,
        solved=candidates.solved,
    )


def exponent(points: Sequence[Point], value: Callable[[Point], float]) -> float:
    """Returns k of the least-squares fit value ~ size^k; 1 is linear growth."""
    x = [math.log(point.size) for point in points]
    y = [math.log(max(value(point), 1e-9)) for point in points]
    return statistics.linear_regression(x, y).slope


def row(point: Point) -> tuple[str, ...]:
    """Returns the line of the table of one point."""
    return (
        point.sweep,
        f"{point.size:,}",
        f"{point.cpu_s:.2f}",
        f"{point.peak_bytes / MIB:.0f}",
        f"{point.considered:,}",
        f"{point.solved:,}",
    )


def growth_lines(points: Sequence[Point]) -> list[str]:
    """Returns a sentence for each sweep with the exponents of its growth."""
    lines = []
    for name in dict.fromkeys(point.sweep for point in points):
        own = [point for point in points if point.sweep == name]
        if len(own) > 1:
            cpu = exponent(own, lambda point: point.cpu_s)
            peak = exponent(own, lambda point: point.peak_bytes)
            candidates = exponent(own, lambda point: point.considered)
            lines.append(
                f"{name}: CPU-seconds grow as size^{cpu:.2f}, peak memory as size^{peak:.2f}, "
                f"candidates as size^{candidates:.2f}."
            )
    return lines


def write_page(points: Sequence[Point], page: Path, program: str) -> None:
    """Replaces the table that a program writes into the page."""
    begin = f"<!-- table of {program} -->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    after = rest.split(END, 1)[1]
    lines = [HEADING, ("---",) * len(HEADING), *map(row, points)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    growth = "\n".join(f"- {line}" for line in growth_lines(points))
    page.write_text(f"{before}{begin}{table}\n\n{growth}\n{END}{after}", encoding="utf-8")


@click.command()
@click.option(
    "--sweep",
    "name",
    type=click.Choice([sweep.name for sweep in SWEEPS]),
    help="Measure this sweep alone.",
)
@click.option("--points", help="Sizes in place of the sweep's own, for example 64,1024.")
@click.option(
    "--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs counted."
)
@click.option("--write", is_flag=True, help="Replace the table of the page.")
def main(name: str | None, points: str | None, repeat: int, write: bool) -> None:
    """Measure the growth of a search with the number of layers, layer classes and experts."""
    errors, out = console(sys.stderr), console(sys.stdout)
    table: list[Point] = []
    with tempfile.TemporaryDirectory() as text:
        for sweep in SWEEPS:
            sizes = tuple(map(int, points.split(","))) if points else sweep.sizes
            for size in sizes if name in (None, sweep.name) else ():
                table.append(measured(sweep, size, Path(text), repeat))
                say(errors, "  ".join(row(table[-1])))
    print_table(out, HEADING, map(row, table), left=("sweep",))
    for line in growth_lines(table):
        say(out, line)
    if write:
        write_page(table, PAGE, "growth.py")
        say(errors, f"wrote {PAGE}")


if __name__ == "__main__":
    main()
