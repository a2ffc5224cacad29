"""Regret of each preference among ties, on the grids of published steps.

    python benchmarks/prices/prefer.py
    python benchmarks/prices/prefer.py --all         # grids without a choice too
    python benchmarks/prices/prefer.py --band 0.05   # of every ratio, in place of measured pairs
    python benchmarks/prices/prefer.py --steps FILE  # another table, as `plan validate` reads it

In each grid of measured configurations of one model on one machine, a preference chooses among
those that are predicted to fit and are ties of the one predicted fastest. The
regret is the measured step of its choice over the best of the grid
(benchmarks/prices/preference_regret.py). The default of `plan --prefer` is the preference with the
least mean regret.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
from rich.console import Console
from rich.table import Table

from benchmarks.prices.preference_regret import (
    GridPreferences,
    grid_preferences,
    least_regret,
    mean_regrets,
)
from parplan.planner.objective import Prefer
from parplan.planner.validation.step_rows import read_table

WIDTH = 170


def regret_table(grids: Sequence[GridPreferences]) -> Table:
    """Returns a row for each grid: its sizes, and regret and predicted GiB of each choice."""
    table = Table(box=None)
    for name in ("rows", "fit", "ties", *Prefer, *(f"GiB {prefer}" for prefer in Prefer)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("grid", no_wrap=True)
    for grid in grids:
        chosen = [grid.chosen[prefer] for prefer in Prefer]
        table.add_row(
            *map(str, (grid.configurations, grid.fitting, grid.ties)),
            *(f"{100 * choice.regret:.1f}" for choice in chosen),
            *(f"{choice.peak_gib:.1f}" for choice in chosen),
            grid.key.replace("|", ", "),
        )
    return table


def mean_line(title: str, grids: Sequence[GridPreferences]) -> str:
    """Returns the mean regrets over some grids, and the choices that were out of memory."""
    means = mean_regrets(grids)
    failed = {prefer: sum(grid.chosen[prefer].out_of_memory for grid in grids) for prefer in Prefer}
    figures = ", ".join(
        f"{prefer} {100 * means[prefer]:.1f} % ({failed[prefer]} out of memory)"
        for prefer in Prefer
    )
    return f"mean regret over {len(grids)} {title}: {figures}"


@click.command()
@click.option(
    "--steps", type=click.Path(path_type=Path), help="Table of steps; the shipped one by default."
)
@click.option("--all", "every", is_flag=True, help="Print grids with a single tie too.")
@click.option("--band", type=float, help="Error band as a share; by default the stack's.")
def main(steps: Path | None, every: bool, band: float | None) -> None:
    """Print the regret of each preference in the grids of measured steps."""
    grids = grid_preferences(read_table(steps), band)
    open_grids = [grid for grid in grids if grid.ties > 1]
    console = Console(width=WIDTH, highlight=False)
    console.print("regret in %, of the configuration that each preference chooses")
    console.print(regret_table(grids if every else open_grids))
    console.print(mean_line("grids", grids))
    console.print(mean_line("grids with a choice", open_grids))
    console.print(f"least mean regret: {least_regret(grids)}")


if __name__ == "__main__":
    main()
