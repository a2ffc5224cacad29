"""Rows are added to a table of measured steps, which is written whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from parplan.planner.logs.measured_row import COLUMNS
from parplan.planner.validation.row_cells import Row
from parplan.planner.validation.step_rows import read_rows
from parplan.profiles.documents.files import only_writer, write_text

_OTHER_FILE = "choose another file with --output"


def add_rows(path: Path, rows: Iterable[Row]) -> int:
    """Adds rows to a table, and returns the number of rows that these replace.

    A row takes the place of one with its id. Commands that add to one table at the same time wait
    for each other. Raises ConfigError for a file that is no table, or cannot be written.
    """
    with only_writer(path, hint=_OTHER_FILE):
        merged, replaced = _rows_with(path, rows)
        write_text(table_text(merged), path, hint=_OTHER_FILE)
    return replaced


def _rows_with(path: Path, rows: Iterable[Row]) -> tuple[list[Row], int]:
    known = {row["id"]: row for row in read_rows(path)} if path.exists() else {}
    before = len(known)
    new = {row["id"]: row for row in rows}
    merged = known | new
    return list(merged.values()), before + len(new) - len(merged)


def table_text(rows: Iterable[Row]) -> str:
    """Returns the text of a table: the columns of a steps table, then those that rows add."""
    rows = list(rows)
    names = dict.fromkeys((*COLUMNS, *(name for row in rows for name in row if name)))
    filled = [name for name in names if name in COLUMNS or any(row.get(name) for row in rows)]
    file = io.StringIO()
    writer = csv.DictWriter(file, filled, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
