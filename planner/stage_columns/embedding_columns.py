"""Columns of a pipeline rank with embedding or head, which may run in one of several ways.

A way is a division of embedding and head over the tensor-parallel ranks, or a location of the token
table, on the device or on the host (costmodels/host/host_embedding.py). It is a choice of the rank
like their ZeRO stage: it changes the rank's costs besides its blocks, and the memory that is left
for them. So the columns of all ways are made, and dominated ones are dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import Protocol

from parplan.planner.stage_columns.columns import LeastEnds, RankColumns
from parplan.planner.stage_columns.stage_column import RankTimeLimit, StageColumn, unbeaten


class ColumnMaker(Protocol):
    """Makes the columns of one rank, as `RankColumns` and `ChunkColumns` do."""

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]: ...
    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]: ...
    def smallest(self, num_blocks: int) -> StageColumn: ...


class AnyEnds:
    """Makes columns in each of several ways to run embedding and head."""

    def __init__(self, ways: Sequence[ColumnMaker]) -> None:
        self.ways = tuple(ways)

    def fastest(
        self, num_blocks: int, limit_bytes: float, reach: RankTimeLimit | None = None
    ) -> list[StageColumn]:
        """Returns the undominated columns of all ways; those out of `reach` may be left out."""
        by_table: dict[Hashable, list[StageColumn]] = {}
        for way in self.ways:
            if reach is not None and not self._in_reach(way, num_blocks, limit_bytes, reach):
                continue
            if isinstance(way, RankColumns):
                # columns with another table replace none of these where another rank has it too
                alike = by_table.setdefault(way.tied_table if way.matches_another else (), [])
                alike += way.fastest(num_blocks, limit_bytes, reach, tuple(alike))
            else:
                by_table.setdefault((), []).extend(way.fastest(num_blocks, limit_bytes))
        return _unbeaten(by_table.values())

    @staticmethod
    def _in_reach(
        way: ColumnMaker, num_blocks: int, limit_bytes: float, reach: RankTimeLimit
    ) -> bool:
        """Returns whether a bound of the columns of a way is in reach."""
        bounds = way.relaxed(num_blocks, limit_bytes)
        return any(reach.repeats * c.plain_s + c.tail_s <= reach.room_s for c in bounds)

    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """Returns all columns of all ways.

        An average is over columns of one way, so that no column can replace one of another.
        """
        return [
            column
            for way in self.ways
            for column in way.relaxed(num_blocks, limit_bytes, plain=plain)
        ]

    @cached_property
    def bounds(self) -> RankColumns | None:
        """Bounds of the columns of all ways at once, which take less to find than those of each."""
        ways = [way for way in self.ways if isinstance(way, RankColumns)]
        return LeastEnds(ways) if len(ways) == len(self.ways) else None

    def leanest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]:
        """Returns the columns of all ways that `RankColumns.leanest` gives."""
        columns: list[StageColumn] = []
        for way in self.ways:
            assert isinstance(way, RankColumns), "the memory objective has no chunks"
            columns += way.leanest(num_blocks, limit_bytes)
        return columns

    def smallest(self, num_blocks: int) -> StageColumn:
        return min(
            (way.smallest(num_blocks) for way in self.ways), key=lambda column: column.memory_bytes
        )


def _unbeaten(columns_by_way: Iterable[list[StageColumn]]) -> list[StageColumn]:
    """Returns the undominated columns among those whose tied ends are alike."""
    alike: dict[Hashable, list[StageColumn]] = {}
    for columns in columns_by_way:
        for column in columns:
            alike.setdefault(column.table and column.tied_as, []).append(column)
    return [column for columns in alike.values() for column in unbeaten(columns)]
