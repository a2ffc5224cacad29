"""Lower bounds of a layout from sums over all blocks of several classes, before any range of them.

They are looser than those of ranges (planner/candidates/range_bounds.py) and take far less to find,
so that most candidates need no ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from parplan.costmodels.memory.rank_memory import gradients_come_and_go, stashes, usable_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.stage_costs import all_receives_s
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array
from parplan.planner.stage_columns.sequence_table import BlockClassTable
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

# prices of a byte, in shares of (range of seconds) / (range of bytes) of the options of a class
_BYTE_PRICES = np.array([0.0, 0.1, 0.2, 0.4, 0.7, 1.0, 2.0, 4.0, 10.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Costs of a layer by option and ZeRO stage.

    time_s    seconds of a micro-batch
    saved     bytes for each micro-batch in flight
    held      bytes of states
    """

    time_s: Array
    saved: Array
    held: Array

    def bytes_on(self, in_flight: Array) -> Array:
        """Returns the bytes by rank, each with as many micro-batches, and by option."""
        return np.asarray(self.held + np.multiply.outer(in_flight, self.saved))


def _weights(in_flight: Array, block: _Costs) -> Array:
    """Returns relative prices of a byte by rank, a few rows of them; their mean is one.

    At the price of a row, some option of a block has the same bytes on all ranks.
    """
    least = int(np.argmin(block.saved))
    most = int(np.argmax(block.saved))
    alike = block.bytes_on(in_flight)[:, [least, most]].T
    rows = 1.0 / np.stack((np.ones_like(in_flight), in_flight, *np.maximum(alike, 1.0)))
    return np.asarray(rows / rows.mean(axis=1, keepdims=True))


def _least_s(
    some: Sequence[_Costs], number: int, in_flight: float, prices: Array, usable: float
) -> float:
    """Least seconds of blocks of some classes on one rank, at any of the prices of a byte."""
    each = [
        (one.time_s + np.multiply.outer(prices, one.held + in_flight * one.saved)).min(axis=1)
        for one in some
    ]
    return float((number * np.minimum.reduce(each) - prices * usable).max())


class WholeBounds:
    """The bounds of the layouts of one table of options.

    counts    the number of layers of each class
    """

    def __init__(self, table: BlockClassTable) -> None:
        self._table, self._prices = table, table.price_cache
        layers = range(self._prices.num_layers)
        self.counts = Counter(self._prices.key(layer, layer) for layer in layers)
        self._blocks = [key for key in self.counts if key.role is LayerKind.BLOCK]
        self._num_blocks = sum(self.counts[key] for key in self._blocks)

    def may_fit(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        """Returns False if the states exceed the memory of all devices."""
        return self.least_states(layout) <= layout.mesh.pp * self.usable(layout, limit_bytes)

    def least_states(self, layout: ParallelLayout) -> float:
        """Returns the least bytes of the states of one rank of each stage together."""
        zeros, frees = self._table.zero_stages(layout), self._frees(layout)
        return self._table.once(
            ("least states", layout.mesh, layout.sharding, zeros, frees),
            lambda: sum(
                count * min(self._states_bytes(key, layout, zero) for zero in zeros)
                for key, count in self.counts.items()
            ),
        )

    def passes_s(self, layout: ParallelLayout) -> float:
        """Returns the least seconds of a step without data parallelism, for any memory.

        The pace is at least the mean of the ranks, and the blocks of the longest at their fastest.
        """
        walk_s = self._walk_s(layout)
        pace_s = max(walk_s / layout.mesh.pp, self._longest_s(layout))
        return self._step_s(layout, walk_s, pace_s)

    def within_s(
        self, layout: ParallelLayout, limit_bytes: float, *, hidden: bool = False
    ) -> float:
        """Returns the least seconds of a step within a memory limit.

        At any price of a byte of each rank, the layers take no less than their seconds and bytes at
        that price on the rank where they are cheapest, less the price of all bytes of the devices
        (a Lagrangian bound). A byte costs less on ranks that hold more micro-batches, as fewer
        layers fit there. The tail of a step is that of the mean rank, over the micro-batches that
        the pace counts.

        hidden    data parallelism counts as hidden, which takes less to find
        """
        pp, repeats = layout.mesh.pp, layout.num_micro_batches - self._share(layout)
        if repeats <= 0:
            return self.passes_s(layout)
        costs = {key: self._costs(key, layout, repeats, hidden=hidden) for key in self.counts}
        in_flight = self._in_flight(layout)
        spread_s = sum(count * np.ptp(costs[key].time_s) for key, count in self.counts.items())
        spread = sum(
            count * np.ptp(costs[key].held + in_flight.min() * costs[key].saved)
            for key, count in self.counts.items()
        )
        prices = _BYTE_PRICES * (spread_s / max(1.0, spread))
        weights = _weights(in_flight, costs[max(self._blocks, key=self.counts.__getitem__)])
        priced_s = np.multiply.outer(
            -prices * self.usable(layout, limit_bytes), weights.sum(axis=1)
        )
        for key, number in self.counts.items():
            ranks = self._ranks(key) if layout.virtual_stages == 1 else slice(None)
            held = weights[:, ranks, None] * costs[key].bytes_on(in_flight[ranks])
            least = np.multiply.outer(prices, held.min(axis=1))
            priced_s += number * (costs[key].time_s + least).min(axis=-1)
        received_s = all_receives_s(layout, self._prices)
        pace_s = max(
            (received_s + float(priced_s.max())) / pp,
            self._longest_s(layout),
            self._fullest_s(costs, in_flight, prices, self.usable(layout, limit_bytes)),
        )
        return self._step_s(layout, self._walk_s(layout), pace_s)

    def _fullest_s(
        self, costs: Mapping[LayerKey, _Costs], in_flight: Array, prices: Array, usable: float
    ) -> float:
        """Least seconds of the slowest rank, by its blocks of the slowest classes within memory.

        Let K be the least number such that ranks with at most K of n blocks, as many as fit each,
        hold all of them. If no rank has more than K, then those that have K are at least the blocks
        that ranks with at most K - 1 do not hold. One of them has no fewer micro-batches in flight
        than as many ranks with the fewest.
        """
        ascending = np.sort(in_flight)
        slowest_s, n = 0.0, 0
        some: list[_Costs] = []
        for key in sorted(self._blocks, key=lambda key: -float(costs[key].time_s.min())):
            some.append(costs[key])
            n += self.counts[key]
            least = np.minimum.reduce([each.bytes_on(ascending).min(axis=1) for each in some])
            fit = np.floor(usable / np.maximum(least, 1.0))
            if fit.sum() < n:
                return np.inf
            most = next(k for k in count(-(-n // len(fit))) if np.minimum(fit, k).sum() >= n)
            with_most = int(n - np.minimum(fit, most - 1).sum())
            at_once = float(ascending[with_most - 1])
            within_s = _least_s(some, most, at_once, prices, usable)
            beyond_s = _least_s(some, most + 1, float(ascending[0]), prices, usable)
            slowest_s = max(slowest_s, min(within_s, beyond_s))
        return slowest_s

    def _ranks(self, key: LayerKey) -> slice:
        """Returns the ranks of a pipeline that may have a layer: the ends have the end layers."""
        last = self._prices.num_layers - 1
        if self.counts[key] == 1 and key == self._prices.key(0, 0):
            return slice(0, 1)
        if self.counts[key] == 1 and key == self._prices.key(last, last):
            return slice(-1, None)
        return slice(None)

    def _in_flight(self, layout: ParallelLayout) -> Array:
        """Micro-batches that the ranks hold at least, of each of their layers.

        With several virtual stages all ranks have the fewest of any.
        """
        ranks = range(layout.mesh.pp)
        held = np.array([stashes(LayerKind.BLOCK, rank, layout) for rank in ranks], np.float64)
        if layout.virtual_stages == 1:
            return held
        return np.full_like(held, held.min() / layout.virtual_stages)

    def _walk_s(self, layout: ParallelLayout) -> float:
        """Least seconds of all layers and transfers."""
        walk_s = self._table.once(
            ("walk", layout.micro_batch_size, layout.sharding),
            lambda: sum(self.counts[key] * time_s for key, time_s in self._times_s(layout).items()),
        )
        return all_receives_s(layout, self._prices) + walk_s

    def _longest_s(self, layout: ParallelLayout) -> float:
        """Least seconds of the longest rank, which has the longest layer, or many slow blocks.

        Of the blocks that are no faster than a class, some rank holds no fewer than the mean rank.
        """

        def make() -> float:
            times_s = self._times_s(layout)
            longest_s, slower = max(times_s.values()), self._num_blocks
            for key in sorted(self._blocks, key=times_s.__getitem__):
                longest_s = max(longest_s, -(-slower // layout.mesh.pp) * times_s[key])
                slower -= self.counts[key]
            return longest_s

        way = layout.micro_batch_size, layout.sharding, layout.mesh.pp
        return self._table.once(("longest", *way), make)

    def _times_s(self, layout: ParallelLayout) -> dict[LayerKey, float]:
        return {key: self.least_s(key, layout) for key in self.counts}

    def _share(self, layout: ParallelLayout) -> float:
        return 0.0 if layout.mesh.pp == 1 else bubble_share(layout, self._prices)

    def _step_s(self, layout: ParallelLayout, walk_s: float, pace_s: float) -> float:
        share = self._share(layout)
        return (layout.num_micro_batches - share) * pace_s + share * walk_s

    def usable(self, layout: ParallelLayout, limit_bytes: float) -> float:
        """Returns the bytes of a device that tensors may fill."""
        return usable_bytes(limit_bytes, layout.mesh, self._prices)

    def _states_bytes(self, key: LayerKey, layout: ParallelLayout, zero: int) -> float:
        """Bytes of the states of a layer that are there with the most activations."""
        states = self._prices.states(key, layout.mesh, layout.sharding, zero).states
        return float(states.total - (states.gradients if self._frees(layout) else 0))

    def _frees(self, layout: ParallelLayout) -> bool:
        return gradients_come_and_go(layout, self._prices)

    def least_s(self, key: LayerKey, layout: ParallelLayout) -> float:
        """Least seconds of a layer's passes, on any option."""
        sharding = self._prices.apart(key, layout.sharding)
        b = layout.micro_batch_size
        return self._table.once(
            ("least", key, b, sharding), lambda: self._table.least_s(key, b, sharding)
        )

    def _costs(
        self, key: LayerKey, layout: ParallelLayout, repeats: float, *, hidden: bool
    ) -> _Costs:
        """Returns the costs of a layer; the seconds have the share of the tail."""
        table, b = self._table, layout.micro_batch_size
        passes = table.passes_of(key, b, layout.sharding)
        zeros = table.zero_stages(layout)
        held = [self._states_bytes(key, layout, zero) for zero in zeros]
        if hidden:
            held, data_s = [min(held)], [0.0]
        else:
            data_s = [self._data_s(key, layout, zero, passes.ways, repeats) for zero in zeros]
        times_s = passes.time_s
        if layout.recomputes_ahead:
            times_s = np.full_like(times_s, self.least_s(key, layout))
        return _Costs(
            time_s=np.add.outer(times_s, data_s).ravel(),
            saved=np.repeat(passes.saved_bytes, len(held)),
            held=np.tile(np.array(held, np.float64), len(times_s)),
        )

    def _data_s(
        self,
        key: LayerKey,
        layout: ParallelLayout,
        zero: int,
        ways: Sequence[Sharding],
        repeats: float,
    ) -> float:
        """Least seconds of data parallelism of a layer, with the share of the tail."""
        b, mesh = layout.micro_batch_size, layout.mesh
        data = [self._prices.data_parallel(key, b, mesh, way, zero) for way in ways]
        return min(each.per_micro_batch_s + each.per_step_s / repeats for each in data)
