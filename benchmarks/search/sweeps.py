"""Sweeps: requests that differ in one size, each measured as whole processes."""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.search.speed import ROOT, timed_run
from parplan.planner.plan.plan_file import read_any_plan
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


def run_sweeps(
    sweeps: Sequence[Sweep], only: str | None, sizes: str | None, repeat: int
) -> list[Point]:
    """Returns the points of the sweeps, each said when it is measured, and prints their table.

    only   the name of the one sweep to measure, None for all of them
    sizes  sizes in place of a sweep's own, with commas between
    """
    errors, out = console(sys.stderr), console(sys.stdout)
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as folder:
        for sweep in sweeps:
            chosen = tuple(map(int, sizes.split(","))) if sizes else sweep.sizes
            for size in chosen if only in (None, sweep.name) else ():
                points.append(measured(sweep, size, Path(folder), repeat))
                say(errors, "  ".join(row(points[-1])))
    print_table(out, HEADING, map(row, points), left=("sweep",))
    for line in growth_lines(points):
        say(out, line)
    return points


def write_page(points: Sequence[Point], program: str) -> None:
    """Replaces the table that a program writes into the page."""
    begin = f"<!-- table of {program} -->\n"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    after = rest.split(END, 1)[1]
    lines = [HEADING, ("---",) * len(HEADING), *map(row, points)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    growth = "\n".join(f"- {line}" for line in growth_lines(points))
    PAGE.write_text(f"{before}{begin}{table}\n\n{growth}\n{END}{after}", encoding="utf-8")
