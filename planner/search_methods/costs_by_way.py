"""The costs of one block of a layout in each way, for methods that add up blocks.

Seconds of blocks and ends add up exactly. Bytes do nearly: a device holds the states and the saved
tensors of each block, and beside them the largest workspace and ZeRO buffers of its ways. A method
that adds up bytes therefore prices its answer in the ledger, which counts every byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parplan.costmodels.joined_pools import prices_at
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.stage_costs import data_parallel
from parplan.costmodels.strategy import LayerChoice, ParallelLayout
from parplan.planner.baselines.optimum import fits, pass_s, rank_bytes
from parplan.planner.baselines.uniform_strategies import layer_choice
from parplan.planner.dominance import Array
from parplan.planner.search_methods.ledger import Ledger
from parplan.planner.search_methods.method_space import MethodSpace, Point, one_way
from parplan.profiles.models.operator_graph import LayerKind


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes on a device of one rank, by way: of one block, and of all that is not a block's."""

    block: Array
    beside: Array


class LayoutCosts:
    """The costs of the blocks and ends of one layout.

    A cost is the seconds of all micro-batches of a layer and of its share of the tail.
    """

    def __init__(self, space: MethodSpace, layout: ParallelLayout) -> None:
        self.space, self.layout = space, layout
        self.ways = space.ways(layout)
        self._block_s: dict[str, Array] = {}

    def _cost_s(self, choice: LayerChoice, rank: int) -> float:
        layout = self.layout
        price_cache = prices_at(layout, rank, self.space.price_cache)
        data = data_parallel(choice, layout, price_cache)
        tail_s = data.step.value_s + data.optimizer.value_s
        return layout.num_micro_batches * pass_s(choice, layout, price_cache) + tail_s

    def block_s(self, rank: int) -> Array:
        """Cost of one block on a rank, by way; ranks of a pool have the same."""
        pool = self.layout.pools[rank] if self.layout.pools else ""
        if pool not in self._block_s:
            choices = (layer_choice(LayerKind.BLOCK, zero, level) for level, zero in self.ways)
            self._block_s[pool] = np.array([self._cost_s(choice, rank) for choice in choices])
        return self._block_s[pool]

    def ends_s(self, rank: int, ends: tuple[int, int]) -> float:
        """Cost of the embedding and the head on a rank."""
        cost_s = 0.0
        if rank == 0:
            cost_s += self._cost_s(layer_choice(LayerKind.EMBEDDING, ends[0], Recompute.NONE), rank)
        if rank == self.layout.mesh.pp - 1:
            cost_s += self._cost_s(layer_choice(LayerKind.HEAD, ends[1], Recompute.NONE), rank)
        return cost_s

    def rank_bytes(self, rank: int, ends: tuple[int, int]) -> RankBytes:
        """Bytes on a device of a rank, from one and from two blocks of each way on each chunk."""
        few, ways = self.layout.virtual_stages, range(len(self.ways))
        once = np.array([self._bytes_of(rank, few, way, ends) for way in ways])
        twice = np.array([self._bytes_of(rank, 2 * few, way, ends) for way in ways])
        block = (twice - once) / few
        return RankBytes(block, once - few * block)

    def limit_bytes(self, rank: int) -> float:
        """Memory limit of a device of a rank, on pools that of its own."""
        prices = prices_at(self.layout, rank, self.space.price_cache)
        return min(self.space.limit_bytes, prices.most_bytes)

    def _bytes_of(self, rank: int, count: int, way: int, ends: tuple[int, int]) -> float:
        none = one_way(0, 0, len(self.ways))
        counts = one_way(count, way, len(self.ways))
        ranks = tuple(counts if each == rank else none for each in range(self.layout.mesh.pp))
        strategy = self.space.strategy(Point(self.layout, ends, ranks))
        return rank_bytes(strategy, rank, self.space.price_cache)

    @cached_property
    def least_s(self) -> float:
        """A lower bound T of the step, with every block in the fastest way b_r of its rank.

        A rank with ends of e_r holds at most (T - e_r) / b_r blocks, and all ranks hold L:

            T >= (L + sum_r e_r / b_r) / sum_r 1 / b_r
        """
        rates = [1 / float(self.block_s(rank).min()) for rank in range(self.layout.mesh.pp)]
        beside = min(
            sum(rate * self.ends_s(rank, ends) for rank, rate in enumerate(rates))
            for ends in self.space.ends(self.layout)
        )
        return (self.space.num_blocks + beside) / sum(rates)

    def least_block_s(self, first: int = 0) -> float:
        """Cost of the fastest block of all ranks from `first` on."""
        ranks = range(first, self.layout.mesh.pp)
        return min((float(self.block_s(rank).min()) for rank in ranks), default=0.0)

    @cached_property
    def fastest_alike(self) -> Point | None:
        """The point of the fastest way that fits if all blocks run in it, None where none fits.

        The last way is the leanest: where it does not fit, no other is tried.
        """
        leanest = len(self.ways) - 1
        if not self._alike_fits(leanest):
            return None
        mean_s = sum(self.block_s(rank) for rank in range(self.layout.mesh.pp))
        way = next(int(way) for way in np.argsort(mean_s) if self._alike_fits(int(way)))
        return self._alike(way)

    def _alike(self, way: int) -> Point:
        zero = self.ways[way][1]
        return self.space.alike(self.layout, way, (zero, zero))

    def _alike_fits(self, way: int) -> bool:
        strategy = self.space.strategy(self._alike(way))
        return fits(strategy, self.space.price_cache, self.space.limit_bytes)


def promising(ledger: Ledger) -> Iterator[LayoutCosts]:
    """Yields the layouts by the bound of the planner's search, while it is below the best step.

    Layouts whose blocks fit in no way are left out (planner/candidates/lower_bounds.py).
    """
    space, bounds_s = ledger.space, []
    for number, layout in enumerate(space.layouts):
        ledger.check()
        bounds_s.append((space.time_bound(layout).step_s, number))
    for bound_s, number in sorted(bounds_s):
        ledger.check()
        if bound_s >= ledger.step_s:
            return
        costs = LayoutCosts(space, space.layouts[number])
        if costs.least_s < ledger.step_s and costs.fastest_alike is not None:
            yield costs
