"""Planning times: whole commands in fresh processes, and CBC against HiGHS.

    python benchmarks/search/speed.py                     # the requests of the README
    python benchmarks/search/speed.py --repeat 5

The time to import the libraries alone is listed for comparison.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from parplan.planner.plan.plan_file import read_plan

REQUESTS = (
    ("gpt-20b", "a100-80gb", 64),
    ("llama3-70b", "h100-80gb", 512),
    ("gpt-1t", "a100-80gb", 3072),
    ("llama3-405b", "h100-80gb", 16384),
)
LIBRARIES = "import click, networkx, numpy, pulp, pydantic, rich, yaml"
START = "import sys; sys.argv[0] = 'plan'; from cli import main; main()"


def _wall_s(arguments: list[str], repeat: int) -> float:
    """Median wall seconds of a fresh Python process."""
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@click.command()
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Runs of each command; the median counts.",
)
def main(repeat: int) -> None:
    """Time whole `plan` commands as processes."""
    console = Console(width=120)
    libraries_s = _wall_s(["-c", LIBRARIES], repeat)
    help_s = _wall_s(["-c", START, "--help"], repeat)
    console.print(
        f"importing the libraries {libraries_s:.2f} s; plan --help {help_s:.2f} s, "
        f"{help_s / libraries_s:.2f} of that"
    )
    table = Table(box=None)
    for name in (
        "request",
        "solver",
        "wall s",
        "over imports",
        "considered",
        "solved",
        "gap",
        "status",
    ):
        table.add_column(
            name, justify="left" if name in ("request", "solver", "status") else "right"
        )
    with tempfile.TemporaryDirectory() as folder:
        for model, gpu, gpus in REQUESTS:
            for solver in ("cbc", "highs"):
                output = Path(folder) / "plan.yaml"
                arguments = [
                    "--model",
                    model,
                    "--gpu",
                    gpu,
                    "--gpus",
                    str(gpus),
                    "--solver",
                    solver,
                    "--output",
                    str(output),
                ]
                wall_s = _wall_s(["-c", START, *arguments], repeat)
                record = read_plan(output).search
                table.add_row(
                    f"{model} on {gpus} {gpu}",
                    solver,
                    f"{wall_s:.2f}",
                    f"{wall_s / libraries_s:.1f} x",
                    str(record.candidates.considered),
                    str(record.candidates.solved),
                    f"{100 * record.gap:.2f} %",
                    record.status,
                )
    console.print(table)


if __name__ == "__main__":
    main()
