"""Writes profiles/data/deviations.csv, the deviations of measured runs by which bands are made.

The shipped table and further tables of measured steps give the runs; those of further tables come
with their citation. Every run is priced with terms that had not seen its experiment. Runs that
leave a setting open, or ran slower kernels on purpose, say nothing about the error of a plan and
are left out. Some rows of each experiment are priced a second time as if nobody had measured their
device, for the bands of devices that nobody has measured.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from parplan.planner.validation.configuration import experiment_of
from parplan.planner.validation.priced_rows import PricedRow, price_row
from parplan.planner.validation.row_cells import Row
from parplan.planner.validation.step_rows import read_table
from parplan.planner.validation.term_fit import spaced, tells_the_error
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.deviations import FILE, Deviation, cells

SOME_ROWS = 8  # of an experiment, which are priced on computed kernels as well


def deviations_of(rows: Iterable[Row], *, computed: bool = False) -> list[Deviation]:
    """Returns the deviations of held-out predictions, of the rows that have one.

    With `computed` the devices count as unmeasured.
    """
    found = (_deviation(row, price_row(row, held_out=True, computed=computed)) for row in rows)
    return [deviation for deviation in found if deviation is not None]


def deviations_on_computed_kernels(rows: Iterable[Row]) -> list[Deviation]:
    """Returns the deviations of step times with every device taken as one that nobody measured."""
    by_experiment: dict[str, list[Row]] = {}
    for row in rows:
        by_experiment.setdefault(experiment_of(row), []).append(row)
    some = [row for group in by_experiment.values() for row in spaced(group, SOME_ROWS)]
    computed = deviations_of(some, computed=True)
    return [
        replace(each, memory=None, excess=None, grid=each.grid and f"{each.grid}|computed")
        for each in computed
        if each.time is not None
    ]


def _deviation(row: Row, priced: PricedRow) -> Deviation | None:
    if not tells_the_error(row, priced):
        return None
    time, memory = priced.time_deviation, priced.memory_deviation
    excess = excess_of(priced)
    if time is None and memory is None and excess is None:
        return None
    return Deviation(
        id=row["id"],
        experiment=experiment_of(row),
        citation=row.get("source", ""),
        traits=priced.traits,
        time=time,
        memory=memory,
        excess=excess,
        grid=priced.grid or "",
        shape=priced.shape,
        predicted_s=priced.predicted_s,
    )


def excess_of(priced: PricedRow) -> float | None:
    """Returns the memory that a run needed beyond its prediction, over the prediction, or None.

    A run out of memory needed at least the whole device.
    """
    if priced.out_of_memory and priced.predicted_total_gib and priced.capacity_gib:
        return max(0.0, priced.capacity_gib / priced.predicted_total_gib - 1)
    deviation = priced.memory_deviation
    return None if deviation is None else max(0.0, deviation)


def deviations_to_csv(deviations: Iterable[Deviation]) -> str:
    """Returns the text of profiles/data/deviations.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(Deviation))
    writer.writerows(map(cells, deviations))
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Price the shipped table and further tables, and write the deviations."""
    parser = argparse.ArgumentParser(
        prog="python -m parplan.planner.validation.deviation_table",
        description="Measured steps -> profiles/data/deviations.csv, in a minute.",
    )
    parser.add_argument(
        "--steps", type=Path, action="append", default=[], help="CSV table beside the shipped one"
    )
    parser.add_argument("--out", type=Path, default=Path("profiles/data") / FILE)
    options = parser.parse_args(arguments)
    try:
        tables = [read_table(path) for path in (None, *options.steps)]
    except ConfigError as error:
        parser.error(error.message)
    by_id: dict[str, Row] = {}
    for table in tables:
        for row in table:
            by_id.setdefault(row["id"], row)
    rows = list(by_id.values())
    deviations = [*deviations_of(rows), *deviations_on_computed_kernels(rows)]
    options.out.write_text(deviations_to_csv(deviations), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
