"""Reads tables of a SQLite file from outside: tables alone, bounded in rows, bytes and steps.

A file of SQLite may hold views, which run for ever and are no data, and expressions in columns.
Views and virtual tables count as missing, no other file is attached or read beside it, a text has
at most 1 MiB, and a query ends after 400 million steps of SQLite's machine, some seconds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from parplan.profiles.documents.bounded import Hints, opened
from parplan.profiles.documents.numbers import whole, whole_of
from parplan.profiles.documents.ranges import Range
from parplan.profiles.errors import ConfigError
from parplan.profiles.units import GIB, MIB

MAX_FILE_BYTES = 16 * GIB  # rows that no query names are never read
MAX_ROWS = 2_000_000  # of all tables that are read
MAX_STEPS = 400_000_000
_CHECKED_STEPS = 100_000  # steps between two looks at their sum
IDENTITY = Range(-(2**63), 2**63 - 1)  # every integer of SQLite
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MIB,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
}


class SqliteReport:
    """The tables of an open report. Every query raises ConfigError once a bound is passed."""

    def __init__(self, connection: sqlite3.Connection, where: str, hint: str) -> None:
        self.where = where
        self._hint = hint
        self._connection = connection
        self._left_rows = MAX_ROWS
        self._left_steps = MAX_STEPS
        connection.text_factory = lambda body: body.decode("utf-8", errors="replace")
        for limit, number in _LIMITS.items():
            connection.setlimit(limit, number)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.set_progress_handler(self._out_of_steps, _CHECKED_STEPS)

    def columns(self, table: str) -> frozenset[str]:
        """Returns the columns of a table, none of one that is missing or is no plain table."""
        kinds = self._connection.execute(
            "SELECT type, sql FROM sqlite_master WHERE name = ?", (table,)
        ).fetchall()
        plain = [
            kind == "table" and not str(sql).lstrip().upper().startswith("CREATE VIRTUAL")
            for kind, sql in kinds
        ]
        if plain != [True]:
            return frozenset()
        named = self._connection.execute(f"PRAGMA table_info({table})")
        return frozenset(str(row[1]) for row in named)

    def require(self, table: str, columns: Sequence[str]) -> None:
        """Raises ConfigError for a table or a column that is missing."""
        present = self.columns(table)
        if not present:
            raise self.wrong(f"the table {table} is missing")
        for column in columns:
            if column not in present:
                raise self.wrong(f"the column {table}.{column} is missing")

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yields these columns of all rows of a table. Raises ConfigError for too many."""
        for row in self._connection.execute(f"SELECT {', '.join(columns)} FROM {table}"):
            self._left_rows -= 1
            if self._left_rows < 0:
                raise self.wrong(f"more than {MAX_ROWS:,} rows", "record fewer steps")
            yield row

    def whole(self, value: object, name: str, bounds: Range = IDENTITY) -> int:
        """Returns the whole number in a cell. Raises ConfigError for NULL, a text and others."""
        if type(value) is int and value in bounds:  # the usual case, of millions of cells
            return value
        return whole(value, name, self.where, bounds, self._hint)

    def wrong(self, problem: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.where}: {problem}", hint=hint or self._hint)

    def error(self, error: sqlite3.Error) -> ConfigError:
        """Returns the error of a query in the words of this program."""
        if self._left_steps < 0:
            return self.wrong(f"a query takes more than {MAX_STEPS:,} steps of SQLite")
        return self.wrong(f"not readable as SQLite: {error}")

    def _out_of_steps(self) -> bool:
        self._left_steps -= _CHECKED_STEPS
        return self._left_steps < 0


@contextmanager
def opened_report(path: Path, hint: str) -> Iterator[SqliteReport]:
    """Yields a file of SQLite, which nothing writes meanwhile. Raises ConfigError."""
    with opened(path, None, Hints(hint, hint), most_bytes=MAX_FILE_BYTES):
        pass
    report = None
    # an immutable file is read without its journal, so that nothing beside it counts
    name = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(name, uri=True)) as connection:
            report = SqliteReport(connection, str(path), hint)
            yield report
    except sqlite3.Error as error:
        if report is None:
            raise ConfigError(f"{path}: not readable as SQLite: {error}", hint=hint) from None
        raise report.error(error) from None


def optional_whole(value: object, bounds: Range = IDENTITY) -> int | None:
    """Returns the whole number in a cell, None for NULL and all else."""
    return None if isinstance(value, str) else whole_of(value, bounds)
