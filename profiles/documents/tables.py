"""The one reader of CSV from outside: bounded rows and columns, every cell a text."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence

from parplan.profiles.documents.bounded import MAX_LINES, Hints, lines_of
from parplan.profiles.errors import ConfigError

Cells = Mapping[str, str]
MAX_COLUMNS = 1000
MAX_CELLS = 10_000_000


def table_of(
    text: str, where: str, hints: Hints = Hints(), *, first_line: int = 0
) -> tuple[Sequence[str], list[Cells]]:
    """Returns the names of the columns of a CSV text, and its rows.

    first_line: the number of lines before the names of the columns
    A cell that a short row lacks is "", and cells beyond the columns are dropped.
    Raises ConfigError for text that is no CSV, and for more columns or cells than a table may have.
    """
    rows = rows_of(lines_of(text, where, hints)[first_line:], where, hints)
    names = [name.strip() for name in rows[0]] if rows else []
    if len(names) > MAX_COLUMNS or len(names) * len(rows) > MAX_CELLS:
        raise ConfigError(
            f"{where}: {len(names):,} columns of {len(rows):,} rows, at most {MAX_COLUMNS:,} "
            f"columns and {MAX_CELLS:,} cells are read",
            hint=hints.broken,
        )
    empty = [""] * len(names)
    return names, [
        dict(zip(names, [*row, *empty][: len(names)], strict=True)) for row in rows[1:] if row
    ]


def rows_of(
    lines: Iterable[str], where: str, hints: Hints = Hints(), *, skips_spaces: bool = False
) -> list[list[str]]:
    """Returns the cells of each row of a CSV text without a header. Raises ConfigError."""
    reader = csv.reader(lines, skipinitialspace=skips_spaces)
    try:
        return list(reader)
    except csv.Error as error:
        raise ConfigError(
            f"{where}:{min(reader.line_num, MAX_LINES)}: not a CSV table: {error}",
            hint=hints.broken,
        ) from None
