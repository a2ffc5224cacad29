"""Lower bounds of a layout whose stages lie on unequal pools (EQUATIONS I8).

Blocks that are alike are placed by their number. Layers of several classes have, on each stage, the
ranges of its own pool, and all else is as on equal nodes (planner/candidates/range_bounds.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from parplan.costmodels.stage_costs import rank_edges, rank_receives
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.lower_bounds import TimeBound, least_block_s, least_end_s
from parplan.planner.candidates.range_bounds import PathBounds, RangeBounds
from parplan.planner.candidates.whole_bounds import WholeBounds
from parplan.planner.dominance import Array, distinct
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_prices import end_kinds

ROUNDING = 1e-9  # relative, against another order of summation


def pooled_time_bound(
    layout: ParallelLayout, tables: Sequence[MixTable], share: float
) -> TimeBound:
    """Returns the time bound with every layer at its fastest, with unlimited memory.

    tables    the mixes of each pipeline rank

    Rank s has e_s seconds of embedding, head and transfers, and b_s for each of its n_s blocks. So
    a step takes no less than the least of

        (M - a) Z + a sum_s (e_s + b_s n_s) + tail      e_s + b_s n_s <= Z, sum_s n_s = L

    over the paces Z of all ranks and numbers of blocks. At a given pace the fastest ranks have the
    most blocks. The tail is that of the mean number of blocks on the pool with the shortest.
    """
    num_blocks = tables[0].price_cache.model.num_layers
    blocks = [least_block_s(layout, table) for table in tables]
    block_s = np.array([per_micro_batch_s for per_micro_batch_s, _ in blocks])
    fixed_s = np.array([_fixed_s(rank, layout, table) for rank, table in enumerate(tables)])
    paces_s, walks_s = _paces_and_walks_s(layout, fixed_s, block_s, num_blocks)
    repeats = max(0.0, layout.num_micro_batches - share)
    tail_s = -(-num_blocks // len(tables)) * min(per_step_s for _, per_step_s in blocks)
    step_s = float((repeats * paces_s + share * walks_s).min()) + tail_s
    return TimeBound(
        step_s * (1 - ROUNDING), float(block_s.min()), share * float(walks_s.min()) * (1 - ROUNDING)
    )


def _paces_and_walks_s(
    layout: ParallelLayout, fixed_s: Array, block_s: Array, num_blocks: int
) -> tuple[Array, Array]:
    """Returns the paces that place all blocks, and the least seconds of all ranks at each.

    fixed_s, block_s    seconds of each rank without its blocks, and of each of its blocks
    """
    counts = [list(block_counts(rank, layout, num_blocks)) for rank in range(len(fixed_s))]
    fewest = np.array([held[0] for held in counts])
    most = np.array([held[-1] for held in counts])
    ranks = zip(fixed_s, block_s, counts, strict=True)
    paces_s = distinct(np.concatenate([e + b * np.array(held) for e, b, held in ranks]))
    least_s = fixed_s + block_s * fewest
    paces_s = paces_s[paces_s >= least_s.max()]
    room = (paces_s[:, None] * (1 + ROUNDING) - fixed_s) / block_s
    more = np.clip(np.floor(room), fewest, most) - fewest  # blocks by pace and rank
    left = num_blocks - fewest.sum()
    enough = more.sum(axis=1) >= left
    fastest = np.argsort(block_s, kind="stable")
    placed = np.minimum(more[enough][:, fastest].cumsum(axis=1), left)
    walks_s = least_s.sum() + np.diff(placed, axis=1, prepend=0.0) @ block_s[fastest]
    return paces_s[enough], walks_s


def _fixed_s(rank: int, layout: ParallelLayout, table: MixTable) -> float:
    """Least seconds of a micro-batch on a rank without its blocks."""
    fixed_s = rank_receives(rank, layout, table.price_cache).value_s
    fixed_s += rank_edges(layout, table.price_cache).value_s
    return fixed_s + sum(least_end_s(kind, layout, table) for kind in end_kinds(rank, layout))


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
