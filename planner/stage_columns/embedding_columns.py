"""Columns of the pipeline rank with the embedding, with the token table on device or host.

The table's location (costmodels/host/host_embedding.py) is a choice of the rank like its ZeRO
stage: it changes the rank's costs besides its blocks, and the memory that is left for them. So the
columns of both locations are made, and dominated ones are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from parplan.planner.stage_columns.stage_column import StageColumn, unbeaten


class ColumnMaker(Protocol):
    """Makes the columns of one rank, as `RankColumns` and `ChunkColumns` do."""

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]: ...
    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]: ...
    def smallest(self, num_blocks: int) -> StageColumn: ...


class EitherTable:
    """Makes columns with the table on the device (`here`) and on the host (`there`)."""

    def __init__(self, here: ColumnMaker, there: ColumnMaker) -> None:
        self.ways = here, there

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]:
        return _both(way.fastest(num_blocks, limit_bytes) for way in self.ways)

    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """Returns all columns of both locations.

        An average is over columns of one location, so that no column can replace one of the other.
        """
        return [
            column
            for way in self.ways
            for column in way.relaxed(num_blocks, limit_bytes, plain=plain)
        ]

    def smallest(self, num_blocks: int) -> StageColumn:
        return min(
            (way.smallest(num_blocks) for way in self.ways), key=lambda column: column.memory_bytes
        )


def _both(columns_by_way: Iterable[list[StageColumn]]) -> list[StageColumn]:
    return unbeaten([column for columns in columns_by_way for column in columns])
