"""Columns of the pipeline rank with the embedding, whose token table the device or the host may
have (costmodels/host/host_embedding.py).

Where the table lies is a choice of the rank like its ZeRO stage: it changes what the rank pays
besides its blocks, and how much memory is left for them. So the columns of both are made, and those
that no other beats are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from parplan.planner.stage_columns.stage_column import StageColumn, unbeaten


class ColumnMaker(Protocol):
    """The columns of one rank, as `RankColumns` and `ChunkColumns` make them."""

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]: ...
    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]: ...
    def smallest(self, num_blocks: int) -> StageColumn: ...


class EitherTable:
    """The same of a rank of which `here` has the table on the device and `there` on the host."""

    def __init__(self, here: ColumnMaker, there: ColumnMaker) -> None:
        self.ways = here, there

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]:
        return _both(way.fastest(num_blocks, limit_bytes) for way in self.ways)

    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """All columns of both ways: an average is of those of one way, so that none can stand in
        for another's.
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


def _both(found: Iterable[list[StageColumn]]) -> list[StageColumn]:
    return unbeaten([column for columns in found for column in columns])
