"""Reads a table of measured steps, with one mapping of column to text for each row."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from parplan.planner.validation.row_cells import NEEDED, OPTIONAL, Row
from parplan.profiles.documents.bounded import Hints, read_text
from parplan.profiles.documents.tables import table_of
from parplan.profiles.errors import ConfigError

_HINT = "give a table of measured steps with --steps"
SHIPPED = "published_steps.csv"


def read_table(path: Path | None = None) -> list[Row]:
    """Returns the rows of a table of measured steps, by default the shipped one.

    Raises ConfigError when the file is no table of steps.
    """
    if path is None:
        with as_file(files("parplan.profiles") / "data" / SHIPPED) as shipped:
            return read_table(shipped)
    return [_cleaned(row) for row in read_rows(path)]


def _cleaned(row: Row) -> Row:
    """Drops cells without a column name; cells that a short line lacks become empty."""
    return {name: (value or "").strip() for name, value in row.items() if name}


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a steps table, as they are in the file.

    Raises ConfigError when the file cannot be read or lacks a needed column.
    """
    hints = Hints(_HINT, _HINT)
    _, cells = table_of(read_text(path, hints=hints), str(path), hints)
    rows: list[Row] = [dict.fromkeys(OPTIONAL, "") | dict(row) for row in cells]
    if not rows:
        raise ConfigError(f"{path}: no rows", hint=_HINT)
    missing = [name for name in (*NEEDED, "id", "framework") if name not in rows[0]]
    if missing:
        raise ConfigError(
            f"{path}: no column {missing[0]}",
            hint="the columns of a steps table are listed in docs/accuracy.md",
        )
    return rows
