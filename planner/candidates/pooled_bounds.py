"""Lower bounds of layers of several classes whose stages lie on unequal pools (EQUATIONS I8).

Each stage has the ranges of its own pool, and all else is as on equal nodes
(planner/candidates/range_bounds.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.range_bounds import PathBounds, RangeBounds
from parplan.planner.candidates.whole_bounds import WholeBounds
from parplan.planner.dominance import Array


class PooledBounds(PathBounds):
    """The bounds of a layout over all cuts.

    by_pool    the bounds as if all stages were on one pool
    """

    def __init__(self, by_pool: Mapping[str, RangeBounds], share: float) -> None:
        first = next(iter(by_pool.values()))
        super().__init__(first.layout, share, first.cuts)
        self._by_pool = by_pool

    def _at(self, stage: int) -> RangeBounds:
        return self._by_pool[self.layout.pools[self.layout.rank_of(stage)]]

    def unlimited_s(self, stage: int) -> Array:
        return self._at(stage).unlimited_s(stage)

    def within_s(self, stage: int) -> Array:
        return self._at(stage).within_s(stage)

    def least_bytes(self, stage: int) -> Array:
        return self._at(stage).least_bytes(stage)

    def stage_bytes(self, stage: int, *, hosted: bool) -> Array:
        return self._at(stage).stage_bytes(stage, hosted=hosted)

    @cached_property
    def tail_s(self) -> Array:
        return np.asarray(np.minimum.reduce([each.tail_s for each in self._by_pool.values()]))

    def redundant_bytes(self, stage: int) -> Array:
        return self._at(stage).redundant_bytes(stage)

    @property
    def most_share(self) -> float:
        return max(bounds.most_share for bounds in self._by_pool.values())


class PooledWholeBounds:
    """The bounds of layouts from sums over all layers, before any range of them.

    by_pool    the same as if all layers were on one pool
    """

    def __init__(self, by_pool: Mapping[str, WholeBounds]) -> None:
        self._by_pool = by_pool

    def may_fit(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        """Returns False if the states exceed the memory of all devices."""
        least = min(bounds.least_states(layout) for bounds in self._by_pool.values())
        return least <= sum(self._by_pool[p].usable(layout, limit_bytes) for p in layout.pools)

    def passes_s(self, layout: ParallelLayout, share: float) -> float:
        """Returns the least seconds of a step without data parallelism, for any memory.

        The n_k layers of a class k take t_kp seconds on pool p, and u_p is the sum of n_k t_kp.
        With w_k the least t_kp / u_p of any pool, and ranks s on pools p(s),

            pace >= sum_k n_k w_k / sum_s 1 / u_p(s)

        as a rank on pool p takes no less than u_p times the w_k of its layers. One layer at its
        fastest bounds the pace too. Transfers are left out.
        """
        times_s = {
            pool: {key: bounds.least_s(key, layout) for key in bounds.counts}
            for pool, bounds in self._by_pool.items()
        }
        counts = next(iter(self._by_pool.values())).counts
        walks_s = {
            pool: sum(counts[key] * seconds for key, seconds in of_pool.items())
            for pool, of_pool in times_s.items()
        }
        parts = sum(
            number * min(of_pool[key] / walks_s[pool] for pool, of_pool in times_s.items())
            for key, number in counts.items()
        )
        fastest_s = {key: min(of_pool[key] for of_pool in times_s.values()) for key in counts}
        pace_s = max(parts / sum(1 / walks_s[pool] for pool in layout.pools), *fastest_s.values())
        walk_s = sum(number * fastest_s[key] for key, number in counts.items())
        repeats = layout.num_micro_batches - share
        return max(0.0, repeats) * pace_s + share * walk_s
