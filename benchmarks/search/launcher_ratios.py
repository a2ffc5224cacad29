"""CPU-seconds of the searches of launchers, as ratios to one request measured beside them.

    python -m benchmarks.search.launcher_ratios                      # three minutes
    python -m benchmarks.search.launcher_ratios --baseline ../before --repeat 3
    python -m benchmarks.search.launcher_ratios --only "llama4-scout, parplan" --json

The unit is `plan --model gpt-20b --gpus 64` of another checkout, the tree before a change, or with
`--for none` of this tree, the search of one stack, where no other is named. It runs before and
after each request, and a ratio is of neighbours in time: a machine whose speed varies slows both. A
figure is the user and system time of a fresh process, whose bytecode is there. The exit code is 1
where a request misses what it is to reach.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.search.speed import ROOT, Run, timed_run
from parplan.profiles.units import MIB
from parplan.report.text import console, print_table, say

UNIT = "--model gpt-20b --gpus 64"
UNIT_OF_THIS_TREE = f"{UNIT} --for none"
HEADING = ("request", "ratio", "to reach", "CPU s", "unit s", "peak MiB", "at most")


@dataclass(frozen=True, slots=True)
class Target:
    """A request, with the ratio and the memory that it is to reach.

    most_mib    None where no memory is asked for
    """

    name: str
    command: str
    most_ratio: float
    most_mib: int | None = None


TARGETS = (
    Target("gpt-20b, all", "--model gpt-20b --gpus 64", 1.5),
    Target("gpt-20b, parplan", "--model gpt-20b --gpus 64 --for parplan", 1.2, 500),
    Target(
        "llama3-70b, parplan",
        "--model llama3-70b --gpus 128 --gpu h100-80gb --for parplan",
        3.0,
        1024,
    ),
    Target(
        "llama4-scout, parplan",
        "--model llama4-scout --gpus 64 --gpu h100-80gb --for parplan",
        10.0,
        1024,
    ),
    Target("llama3-70b, all", "--model llama3-70b --gpus 128 --gpu h100-80gb", 6.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A request beside the unit: medians of its runs, and the most memory of any."""

    request: str
    ratio: float
    most_ratio: float
    cpu_s: float
    unit_s: float
    peak_bytes: int
    most_bytes: int | None

    @property
    def is_reached(self) -> bool:
        enough = self.most_bytes is None or self.peak_bytes <= self.most_bytes
        return enough and self.ratio <= self.most_ratio


def measured(target: Target, unit: tuple[Path, str], folder: Path, repeat: int) -> Figures:
    """Returns the figures of a request; each of its runs is between two runs of the unit.

    unit    the checkout that runs it, and its command
    """
    command = shlex.split(target.command)
    runs: list[Run] = []
    units_s = [_unit_s(unit, folder)]
    for _ in range(repeat):
        runs.append(timed_run(ROOT, command, folder, folder / "cache"))
        units_s.append(_unit_s(unit, folder))
    ratios = [
        2 * run.cpu_s / (before_s + after_s)
        for run, before_s, after_s in zip(runs, units_s, units_s[1:], strict=False)
    ]
    return Figures(
        request=target.name,
        ratio=statistics.median(ratios),
        most_ratio=target.most_ratio,
        cpu_s=statistics.median(run.cpu_s for run in runs),
        unit_s=statistics.median(units_s),
        peak_bytes=max(run.peak_bytes for run in runs),
        most_bytes=None if target.most_mib is None else target.most_mib * MIB,
    )


def _unit_s(unit: tuple[Path, str], folder: Path) -> float:
    tree, command = unit
    return timed_run(tree, shlex.split(command), folder, folder / "cache").cpu_s


def row(figures: Figures) -> tuple[str, ...]:
    """Returns the line of the table of one request."""
    most = figures.most_bytes
    return (
        figures.request,
        f"x {figures.ratio:.2f}",
        f"x {figures.most_ratio:g}",
        f"{figures.cpu_s:.2f}",
        f"{figures.unit_s:.2f}",
        f"{figures.peak_bytes / MIB:.0f}",
        "" if most is None else f"{most / MIB:.0f}",
    )


@click.command()
@click.option(
    "--baseline",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="PATH",
    help="Checkout whose plain request is the unit. [default: --for none of this tree]",
)
@click.option(
    "--repeat", type=click.IntRange(1), default=1, show_default=True, help="Runs counted."
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([target.name for target in TARGETS]),
    help="Measure this request; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else on stdout.")
def main(baseline: Path | None, repeat: int, only: Sequence[str], as_json: bool) -> None:
    """Measure the searches of launchers in units of one request."""
    errors = console(sys.stderr)
    unit = (ROOT, UNIT_OF_THIS_TREE) if baseline is None else (baseline.resolve(), UNIT)
    table: list[Figures] = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for tree, command in {unit, (ROOT, UNIT_OF_THIS_TREE)}:  # these fill the cache of bytecode
            timed_run(tree, shlex.split(command), folder, folder / "cache")
        for target in TARGETS:
            if not only or target.name in only:
                table.append(measured(target, unit, folder, repeat))
                say(errors, "  ".join(row(table[-1])))
    if as_json:
        click.echo(json.dumps([asdict(figures) for figures in table], indent=2))
    else:
        print_table(console(sys.stdout), HEADING, map(row, table), left=("request",))
    sys.exit(0 if all(figures.is_reached for figures in table) else 1)


if __name__ == "__main__":
    main()
