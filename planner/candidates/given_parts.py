"""Lower bounds of a layout whose pipeline ranks run several given parts of the model each.

They are those of planner/candidates/part_bounds.py for one path of parts. Only the prices of its
ranges are read, so that values are arrays by stage, and not by range of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import AHEAD
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.part_bounds import (
    PartBounds,
    RankParts,
    part_values,
)
from parplan.planner.candidates.range_bounds import may_recompute
from parplan.planner.candidates.range_tables import RangeStates, RangeTables
from parplan.planner.dominance import Array
from parplan.planner.stage_columns.stage_contents import Range


class GivenParts(PartBounds):
    """The bounds of one layout with several virtual stages a rank, whose ranges are given."""

    def __init__(
        self,
        layout: ParallelLayout,
        tables: RangeTables,
        levels: Sequence[Recompute],
        zeros: Sequence[int],
        limit_bytes: float,
        given: tuple[Range, ...],
    ) -> None:
        super().__init__(layout, tables, levels, zeros, limit_bytes, given)
        self._given = given
        self._first, self._end = np.array(given, np.int64).T
        self._ranks = [layout.rank_of(stage) for stage in range(layout.num_virtual_stages)]

    def _picked(self, by_range: Array) -> Array:
        """Returns values by range at the given ranges, by stage."""
        return np.asarray(by_range[self._first, self._end])

    @cached_property
    def _passes_s(self) -> Array:
        """Seconds of passes and transfers of a micro-batch by stage, without data parallelism."""
        hidden = [
            self.layout.schedule in AHEAD or Recompute.NONE in self._allowed(rank)
            for rank in self._ranks
        ]
        again_s = np.where(hidden, 0.0, self._picked(self._passes.recompute_s))
        stages = np.arange(len(self._ranks))
        before_s = self._received[stages, 0, self._first]
        after_s = self._received[stages, 1, self._end]
        return np.asarray(self._picked(self._passes.time_s) + again_s + before_s + after_s)

    @cached_property
    def _given_values(self) -> Array:
        """The values of the parts (`PartBounds.values`), by stage."""
        stashes = np.array([self._stashes(stage) for stage in range(len(self._ranks))])
        data_s = [self._picked(each) for each in self._tailed_s]
        held = [self._given_bytes(states) for states in self._states]
        kept = self._passes.kept if may_recompute(self._levels) else self._passes.whole
        least = np.minimum.reduce(held) + stashes * self._picked(kept)
        time_s = np.where(least <= self._usable, self._passes_s + np.minimum.reduce(data_s), np.inf)
        prices = self._prices[self._ranks].T
        again_s = [
            self._passes.priced_at(layers, own * held_at_once)
            for layers, own, held_at_once in zip(self._given, prices.T, stashes, strict=True)
        ]
        priced_s = list(zip(prices, np.array(again_s).T, strict=True))
        return part_values(time_s, data_s, held, least, priced_s)

    def _given_bytes(self, states: RangeStates) -> Array:
        """Bytes of the parts besides activations by stage, as in `PartBounds._part_bytes`."""
        sent = np.array([self._moments[rank].sent for rank in self._ranks])
        made = [self._moments[rank].made for rank in self._ranks]
        held = self._picked(states.held - states.buffer)
        held += sent * self.layout.num_micro_batches * self._picked(self._passes.sent)
        held -= np.where(made, 0.0, self._picked(states.gradients))
        held[-1] -= self._head_bytes
        return held

    @cached_property
    def _ramps_s(self) -> float:
        data_s = self._picked(self._data_s)
        return float((self._passes_s + data_s).sum()) * self._share

    @cached_property
    def least_pace_s(self) -> float:
        """Least seconds of the slowest rank, infinite where a rank does not fit."""
        values, ranks = self._given_values, range(self.layout.mesh.pp)
        own = [values[:, list(self.layout.stages_of(rank))].sum(axis=1) for rank in ranks]
        return max(float(values[0].max()), *(float(self.own_s(r, own[r])) for r in ranks))

    @cached_property
    def least_walk_s(self) -> float:
        return self.walk_of(self._given_values.sum(axis=1))

    @cached_property
    def least_tail_s(self) -> float:
        """None besides the share of each part."""
        return 0.0

    def parts(self, rank: int, cut_s: float, class_of: Callable[[Range], int]) -> RankParts:
        """Returns the given contents of a rank, none if the layout takes longer than `cut_s`."""
        if self.least_s >= cut_s:
            return RankParts((), complete=True)
        contents = tuple((self._given[stage],) for stage in self.layout.stages_of(rank))
        return RankParts((contents,), complete=True)
