"""Selects rows of a table of measured steps by source, and prices each or says why not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from parplan.planner.validation.priced_rows import PricedRow, price_row
from parplan.planner.validation.row_cells import NEEDED, Row, source_of
from parplan.profiles.documents.numbers import real_of, whole_of
from parplan.profiles.documents.ranges import Range
from parplan.profiles.errors import unknown_name_error

_COUNTS = (
    *(name for name in NEEDED if name != "dp"),
    "vocab",
    "micro_batch",
    "gpus_per_node",
    "kv_heads",
    "head_dim",
    "vocab_multiple",
)
_COUNTS_OR_NONE = ("dp", "vpp", "cp", "ep", "experts", "zero_stage")  # 0: not in use
_MEASURED = ("step_time_s", "derived_step_time_s", "tokens_per_s_per_gpu", "peak_memory_gib")
_MOST_DIGITS = 9  # digits of a count

OnRow = Callable[[int], None]  # takes the number of rows that are done


def of_sources(rows: Sequence[Row], sources: Collection[str]) -> list[Row]:
    """Returns the rows of `sources`, every row when none is named.

    Raises ConfigError for a source that the table lacks.
    """
    known = dict.fromkeys(map(source_of, rows))
    for name in sources:
        if name not in known:
            raise unknown_name_error("source", name, known, where="the table of measured steps")
    return [row for row in rows if not sources or source_of(row) in sources]


def price_table(rows: Sequence[Row], on_row: OnRow | None = None) -> list[PricedRow]:
    """Prices every row in order; a cell that is no number becomes the reason of an unpriced row."""
    priced = []
    for row in rows:
        fault = _fault(row)
        if fault:
            priced.append(PricedRow(row["id"], source_of(row), reason=fault))
        else:
            priced.append(price_row(row))
        if on_row is not None:
            on_row(len(priced))
    return priced


def _fault(row: Row) -> str | None:
    """Returns the fault of a row without an id or with a malformed number; empty cells pass."""
    if not row["id"]:
        return "id is not stated"
    for name in (*_COUNTS, *_COUNTS_OR_NONE):
        if row.get(name) and not _is_count(row[name], 1 if name in _COUNTS else 0):
            return f"{name} is no whole number"
    for name in _MEASURED:
        if row.get(name) and not 0 < _number(row[name]) < math.inf:
            return f"{name} is no number above 0"
    return None


def _is_count(text: str, least: int) -> bool:
    return whole_of(text, Range(least, 10**_MOST_DIGITS - 1)) is not None


def _number(text: str) -> float:
    number = real_of(text)
    return math.nan if number is None else number
