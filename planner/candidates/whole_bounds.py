"""Lower bounds of a layout from sums over all blocks of several classes, before any range of them.

They are looser than those of ranges (planner/candidates/range_bounds.py) and take far less to find,
so that most candidates need no ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parplan.costmodels.memory.rank_memory import gradients_come_and_go, stashes, usable_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.stage_costs import all_receives_s
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.stage_columns.sequence_table import BlockClassTable
from parplan.profiles.models.operator_graph import LayerKey, LayerKind, OperatorKind

# prices of a byte, in shares of (range of seconds) / (range of bytes) of the options of a class
_BYTE_PRICES = np.array([0.0, 0.1, 0.3, 1.0, 3.0, 10.0])


class WholeBounds:
    """The bounds of the layouts of one table of options."""

    def __init__(self, table: BlockClassTable) -> None:
        self._table, self._prices = table, table.price_cache
        layers = range(self._prices.num_layers)
        self._counts = Counter(self._prices.key(layer, layer) for layer in layers)
        self._blocks = [key for key in self._counts if key.role is LayerKind.BLOCK]
        self._mixtures = {key for key in self._blocks if self._has_experts(key)}
        self._num_blocks = sum(self._counts[key] for key in self._blocks)

    def _has_experts(self, key: LayerKey) -> bool:
        operators = self._prices.layer(key, 1).operators
        return any(operator.kind is OperatorKind.EXPERTS for operator in operators)

    def may_fit(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        """Returns False if the states exceed the memory of all devices."""
        held = sum(
            count
            * min(self._states_bytes(key, layout, zero) for zero in self._table.zero_stages(layout))
            for key, count in self._counts.items()
        )
        return held <= layout.mesh.pp * self._usable(layout, limit_bytes)

    def passes_s(self, layout: ParallelLayout) -> float:
        """Returns the least seconds of a step without data parallelism, for any memory.

        The pace is at least the mean of the ranks, and the blocks of the longest at their fastest.
        """
        walk_s = self._walk_s(layout)
        pace_s = max(walk_s / layout.mesh.pp, self._longest_s(layout))
        return self._step_s(layout, walk_s, pace_s)

    def within_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        """Returns the least seconds of a step within a memory limit.

        At any price of a byte, the layers take no less than their seconds and bytes at that price,
        less the price of all bytes of the devices (a Lagrangian bound). The tail of a step is that
        of the mean rank, over the micro-batches that the pace counts.
        """
        pp, repeats = layout.mesh.pp, layout.num_micro_batches - self._share(layout)
        if repeats <= 0:
            return self.passes_s(layout)
        fewest = min(stashes(LayerKind.BLOCK, rank, layout) for rank in range(pp))
        costs = [
            (count, *self._costs(key, layout, fewest / layout.virtual_stages, repeats))
            for key, count in self._counts.items()
        ]
        spread_s = sum(count * np.ptp(own_s) for count, own_s, _ in costs)
        spread = sum(count * np.ptp(own_bytes) for count, _, own_bytes in costs)
        prices = _BYTE_PRICES * (spread_s / max(1.0, spread))
        priced_s = -prices * pp * self._usable(layout, limit_bytes)
        for count, own_s, own_bytes in costs:
            priced_s += count * (own_s + np.multiply.outer(prices, own_bytes)).min(axis=1)
        received_s = all_receives_s(layout, self._prices)
        pace_s = max((received_s + float(priced_s.max())) / pp, self._longest_s(layout))
        return self._step_s(layout, self._walk_s(layout), pace_s)

    def _walk_s(self, layout: ParallelLayout) -> float:
        """Least seconds of all layers and transfers."""
        least_s = (count * self._least_s(key, layout) for key, count in self._counts.items())
        return all_receives_s(layout, self._prices) + sum(least_s)

    def _longest_s(self, layout: ParallelLayout) -> float:
        """Least seconds of the blocks of a rank that holds no fewer than any other."""
        block_s = min(self._least_s(key, layout) for key in self._blocks)
        return -(-self._num_blocks // layout.mesh.pp) * block_s

    def _share(self, layout: ParallelLayout) -> float:
        return 0.0 if layout.mesh.pp == 1 else bubble_share(layout, self._prices)

    def _step_s(self, layout: ParallelLayout, walk_s: float, pace_s: float) -> float:
        share = self._share(layout)
        return (layout.num_micro_batches - share) * pace_s + share * walk_s

    def _usable(self, layout: ParallelLayout, limit_bytes: float) -> float:
        return usable_bytes(limit_bytes, layout.mesh, self._prices)

    def _states_bytes(self, key: LayerKey, layout: ParallelLayout, zero: int) -> float:
        """Bytes of the states of a layer that are there with the most activations."""
        states = self._prices.states(key, layout.mesh, layout.sharding, zero).states
        frees = gradients_come_and_go(layout, self._prices)
        return float(states.total - (states.gradients if frees else 0))

    def _least_s(self, key: LayerKey, layout: ParallelLayout) -> float:
        """Least seconds of a layer's passes, on any option."""
        sharding, b = self._own(key, layout.sharding), layout.micro_batch_size
        return self._table.once(
            ("least", key, b, sharding), lambda: self._table.least_s(key, b, sharding)
        )

    def _own(self, key: LayerKey, sharding: Sharding) -> Sharding:
        """Returns the sharding, without expert parallelism where a layer has no experts."""
        return sharding if key in self._mixtures else replace(sharding, ep=1, etp=1)

    def _costs(
        self, key: LayerKey, layout: ParallelLayout, in_flight: float, repeats: float
    ) -> tuple[Array, Array]:
        """Returns by option and ZeRO stage the seconds of a micro-batch of a layer, and its bytes.

        The seconds have the share of the tail.
        """
        table, b = self._table, layout.micro_batch_size
        options = table.options(key, b, layout.sharding, table.levels)
        zeros = table.zero_stages(layout)
        data_s = [self._data_s(key, layout, zero, options, repeats) for zero in zeros]
        held = [self._states_bytes(key, layout, zero) for zero in zeros]
        hides = layout.recomputes_ahead
        times_s = [self._least_s(key, layout) if hides else each.time_s for each in options]
        saved = in_flight * np.array([each.saved_bytes for each in options])
        return np.add.outer(times_s, data_s).ravel(), np.add.outer(saved, held).ravel()

    def _data_s(
        self,
        key: LayerKey,
        layout: ParallelLayout,
        zero: int,
        options: Sequence[LayerOption],
        repeats: float,
    ) -> float:
        """Least seconds of data parallelism of a layer, with the share of the tail."""
        b, mesh = layout.micro_batch_size, layout.mesh
        ways = dict.fromkeys(option.sharding for option in options)
        data = [self._prices.data_parallel(key, b, mesh, way, zero) for way in ways]
        return min(each.per_micro_batch_s + each.per_step_s / repeats for each in data)
