"""Predicted against measured step time and memory for a table of measured training steps, by source.

    python benchmarks/prices.py --steps steps.csv                 # rows of Megatron-LM, Megatron-DeepSpeed and vTrain
    python benchmarks/prices.py --steps steps.csv --all --rows    # every source, and every row
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from planner.validate import Priced, errors_of, price_row, read_rows


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f}"


def _table(priced: list[Priced]) -> Table:
    table = Table(title="predicted against measured, percent", box=None)
    for name in ("source", "rows", "priced", "time: mean |error|", "median |error|", "bias", "memory: mean |error|", "memory: bias"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for source in dict.fromkeys(row.source for row in priced):
        found = errors_of(source, priced)
        table.add_row(
            source, str(found.rows), str(found.priced), _percent(found.mean_absolute), _percent(found.median_absolute),
            _percent(found.bias), _percent(found.memory_mean_absolute), _percent(found.memory_bias))
    return table


@click.command()
@click.option("--steps", type=click.Path(path_type=Path), required=True, help="CSV table of measured steps.")
@click.option("--all", "every", is_flag=True, help="Every source, not only Megatron and vTrain.")
@click.option("--rows", "show_rows", is_flag=True, help="Also print every priced row.")
def main(steps: Path, every: bool, show_rows: bool) -> None:
    """Price every row of a steps table as the configuration it states."""
    console = Console(width=120)
    rows = [row for row in read_rows(steps) if every or "egatron" in row["framework"] or row["id"].startswith("vtrain")]
    priced = [price_row(row) for row in rows]
    if show_rows:
        for row in priced:
            if row.error is not None:
                console.print(f"{row.id:60} {row.measured_s:10.3f} s  predicted {row.predicted_s:10.3f} s  {_percent(row.error):>7} %"
                              f"   memory {_percent(row.memory_error)}")
    console.print(_table(priced))
    for reason, count in Counter(row.reason for row in priced if row.reason).most_common():
        console.print(f"not priced: {count:4} {reason}")


if __name__ == "__main__":
    main()
