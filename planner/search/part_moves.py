"""Cuts of the parts of all pipeline ranks, improved by moving one layer at a time.

They are a first choice, so that the search looks only for faster ones, and they are replayed
beside the choice of the master program (planner/search/sequence_prices.py): the closed form knows
the sums of the parts of the ranks, but not their order. A column is made only for the ranks of the
best cuts so far; the others keep their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from parplan.planner.candidates.part_bounds import PartBounds
from parplan.planner.candidates.range_tables import even_path
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.planner.stage_columns.stage_contents import Range

MOST_TIMES = 4  # that cuts are improved, each time with the columns of the last ones
Cuts = tuple[int, ...]
Place = tuple[Range, ...]


class PartMoves:
    """The descent of one layout.

    column    the fastest column of a rank whose chunks are given, None where nothing fits
    """

    def __init__(
        self, bounds: PartBounds, column: Callable[[int, Place], StageColumn | None]
    ) -> None:
        self.bounds, self.layout = bounds, bounds.layout
        self._column = column
        self._known: dict[tuple[int, Place], StageColumn | None] = {}
        self._seconds: dict[tuple[int, Place], float] = {}

    def descended(self) -> list[StageColumn] | None:
        """Returns the columns of cuts that no move shortens, None where none of them fits.

        The first cuts are even in time, and then those whose fullest part holds least.
        """
        for start in (even_path(self.bounds.time_s), self.bounds.leanest_cuts):
            if start is not None:
                columns = self._descended(tuple(end for _, end in start[:-1]))
                if columns is not None:
                    return columns
        return None

    def _descended(self, cuts: Cuts) -> list[StageColumn] | None:
        best, best_s = None, math.inf
        for _ in range(MOST_TIMES):
            cuts = self._moved(cuts)
            before = len(self._known)
            columns, (step_s, _) = self._columns(cuts), self._step(cuts)
            if columns is not None and step_s < best_s:
                best, best_s = columns, step_s
            if len(self._known) == before:
                break
        return best

    def _columns(self, cuts: Cuts) -> list[StageColumn] | None:
        places = list(enumerate(self._places(cuts)))
        for rank, place in places:
            if (rank, place) not in self._known:
                column = self._column(rank, place)
                self._known[rank, place] = column
                self._seconds[rank, place] = self._column_s(column) if column else math.inf
        columns = [column for each in places if (column := self._known[each]) is not None]
        return columns if len(columns) == len(places) else None

    def _column_s(self, column: StageColumn) -> float:
        """Seconds of a micro-batch with its share of the tail, as in the bounds."""
        return column.time_s + column.tail_s / self.bounds.repeats

    def _moved(self, cuts: Cuts) -> Cuts:
        """Returns the cuts after all moves that shorten the step, as far as it is known."""
        best = self._step(cuts)
        moving = True
        while moving:
            moving = False
            for other in self._moves(cuts):
                step = self._step(other)
                if step < best:
                    cuts, best = other, step
                    moving = True
        return cuts

    def _moves(self, cuts: Cuts) -> Iterator[Cuts]:
        """Yields the cuts with one layer moved to another part, and the parts between shifted."""
        ends = (0, *cuts, self.bounds.tables.size)
        for first in range(len(cuts)):
            for last in range(first + 1, len(cuts) + 1):
                for by in (-1, 1):
                    gives = (last, last + 1) if by > 0 else (first, first + 1)
                    if ends[gives[1]] - ends[gives[0]] > 1:
                        moved = (cut + by for cut in cuts[first:last])
                        yield (*cuts[:first], *moved, *cuts[last:])

    def _step(self, cuts: Cuts) -> tuple[float, float]:
        """Returns the seconds of a step, and how uneven its ranks are; known columns count."""
        places = self._places(cuts)
        seconds = [self._rank_s(rank, place) for rank, place in enumerate(places)]
        pace_s = self._pace_s(places, seconds)
        step_s = self.bounds.repeats * pace_s + sum(seconds) / self.layout.virtual_stages
        if pace_s == math.inf:
            missing = sum(each == math.inf for each in seconds)
            return math.inf, float(missing)
        return float(f"{step_s:.12g}"), float(f"{sum(each * each for each in seconds):.12g}")

    def _pace_s(self, places: list[Place], seconds: list[float]) -> float:
        """Returns the sum over the chunks of the longest part of any rank.

        All ranks run the same chunk at about the same time, so that ranks wait for the longest.
        """
        longest = [0.0] * self.layout.virtual_stages
        for rank, (place, rank_s) in enumerate(zip(places, seconds, strict=True)):
            stages = self.layout.stages_of(rank)
            parts = [self.bounds.time_s[k][layers] for k, layers in zip(stages, place, strict=True)]
            whole_s = sum(parts)
            if math.inf in (whole_s, rank_s):
                return math.inf
            longest = [
                max(most_s, float(part_s / whole_s * rank_s))
                for most_s, part_s in zip(longest, parts, strict=True)
            ]
        return sum(longest)

    def _rank_s(self, rank: int, place: Place) -> float:
        if (rank, place) not in self._seconds:
            stages = self.layout.stages_of(rank)
            values = [
                self.bounds.values(stage)[:, first, end]
                for stage, (first, end) in zip(stages, place, strict=True)
            ]
            own = np.sum(values, axis=0)
            self._seconds[rank, place] = float(self.bounds.own_s(rank, own))
        return self._seconds[rank, place]

    def _places(self, cuts: Cuts) -> list[Place]:
        """Returns the ranges of the chunks of each rank."""
        ends = (0, *cuts, self.bounds.tables.size)
        ranks = range(self.layout.mesh.pp)
        return [
            tuple((ends[stage], ends[stage + 1]) for stage in self.layout.stages_of(rank))
            for rank in ranks
        ]
