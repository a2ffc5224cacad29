"""A lower bound of a layout in chunks before any column is made (EQUATIONS I5).

It is the least time of a rank with many blocks that must offload states. Every block saves the
least bytes, its chunks have no padding, and its workspace is zero. For each count of HOST blocks,
so many others must have their optimizer states on the host that the rest fits the device. More of
them leave room for parameters of HOST blocks, which need no second fetch, until copies take no
longer than compute or all parameters stay. The cost of both is linear in between, so that the least
is at one of these counts, taken as real numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parplan.costmodels.chunks.group_size import summed_by_part
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.chunked_layer import (
    BlockCost,
    gradient_chunks,
    writes_over_parameters,
)
from parplan.costmodels.memory.rank_memory import stashes, usable_bytes
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.lower_bounds import TimeBound, ends_bytes, least_kept_bytes
from parplan.planner.dominance import Array
from parplan.planner.host_options.location_costs import once_s
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.models.operator_graph import LayerKind

INFINITY = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Least:
    """The least cost of any block of a layout, by state location.

    `room` is the bytes of the device beside the saved tensors of `num_blocks` blocks.
    """

    num_blocks: int
    costs: dict[StateLocation, BlockCost]
    compute_s: float
    passes: int
    room: float
    host_room: float

    def _value(self, home: StateLocation, name: str) -> float:
        return float(getattr(self.costs[home], name).total) if home in self.costs else 0.0

    def counts(self) -> tuple[Array, Array, Array]:
        """Returns HOST blocks, and the least and most OPTIMIZER blocks beside them that fit."""
        most_host = self.num_blocks if StateLocation.HOST in self.costs else 0
        host = np.arange(most_host + 1, dtype=np.float64)
        least = np.maximum(0.0, self._optimizer(host, np.zeros(len(host))))
        most = np.zeros(len(host))
        left = self.host_room - host * self._value(StateLocation.HOST, "host")
        if StateLocation.OPTIMIZER in self.costs:
            optimizer_bytes = self._value(StateLocation.OPTIMIZER, "host")
            most = np.minimum(self.num_blocks - host, left / optimizer_bytes)
        fits = (least <= most + 1e-9) & (left >= 0)
        return host[fits], least[fits], np.maximum(least[fits], most[fits])

    def _optimizer(self, host: Array, spare: Array) -> Array:
        """Returns the OPTIMIZER blocks that leave `spare` bytes, beside `host` HOST blocks."""
        device = self._value(StateLocation.DEVICE, "device")
        optimizer: Array = (spare - self.room + (self.num_blocks - host) * device) / (
            device - self._value(StateLocation.OPTIMIZER, "device")
        )
        return optimizer

    def _spare(self, host: Array, optimizer: Array) -> Array:
        device = self.num_blocks - host - optimizer
        spare: Array = (
            self.room
            - device * self._value(StateLocation.DEVICE, "device")
            - optimizer * self._value(StateLocation.OPTIMIZER, "device")
        )
        return spare

    def ways(self) -> tuple[Array, list[Array]]:
        """Returns HOST blocks, and counts of OPTIMIZER blocks one of which is best beside them."""
        host, least, most = self.counts()
        if StateLocation.OPTIMIZER not in self.costs:
            return host, [least]
        ways = [least, *(np.clip(even, least, most) for even in self._even_updates(host))]
        if StateLocation.HOST not in self.costs:
            return host, ways
        cost = self.costs[StateLocation.HOST]
        hidden_s = np.maximum(self.num_blocks * self.compute_s, host * cost.send_s)
        missed = (hidden_s * self.passes / cost.fetch_s - host) / (2 * self.passes - 1)
        enough = [np.maximum(0.0, host - 1 - missed), np.maximum(0.0, host - 1)]
        return host, [
            *ways,
            *(
                np.clip(self._optimizer(host, held * cost.fetched_bytes), least, most)
                for held in enough
            ),
        ]

    def _even_updates(self, host: Array) -> Iterator[Array]:
        """Yields OPTIMIZER blocks for which two parts of the update take equally long.

        The parts are the update on the host, the update on the device, and the way back.
        """
        on_host = self.costs[StateLocation.OPTIMIZER].host_adam_s
        on_device = self.costs[StateLocation.DEVICE].device_adam_s
        back = self.costs[StateLocation.OPTIMIZER].return_s
        yield ((self.num_blocks - host) * on_device - host * on_host) / (on_host + on_device)
        yield (self.num_blocks - host) * on_device / (back + on_device)
        if back > on_host:
            yield host * on_host / (back - on_host)

    def seconds(self, host: Array, optimizer: Array, repeats: float) -> Array:
        """Seconds of `repeats` micro-batches and the tail."""
        micro_batch_s: Array = np.full(len(host), self.num_blocks * self.compute_s)
        cost = self.costs.get(StateLocation.HOST)
        if cost:
            held = np.maximum(0.0, self._spare(host, optimizer)) / cost.fetched_bytes
            swept = host + (2 * self.passes - 1) * np.maximum(0.0, host - 1 - held)
            copied_s = np.maximum(swept / self.passes * cost.fetch_s, host * cost.send_s)
            micro_batch_s = (
                np.maximum(micro_batch_s, copied_s) + (1 - 1 / self.passes) * host * cost.added_s
            )
        counts = {
            StateLocation.HOST: host,
            StateLocation.OPTIMIZER: optimizer,
            StateLocation.DEVICE: self.num_blocks - host - optimizer,
        }
        total_s: Array = repeats * micro_batch_s + once_s(counts, self.costs)
        return total_s


class ChunkBound:
    """The bound of one layout within a memory limit, by the blocks of its fullest rank."""

    def __init__(
        self,
        layout: ParallelLayout,
        table: MixTable,
        time: TimeBound,
        limit_bytes: float,
        share: float,
    ) -> None:
        price_cache = table.price_cache
        self.layout = layout
        self.time = time
        self.repeats = layout.num_micro_batches - share
        self.costs = table.block_costs(layout, layout.sharding)
        held = [stashes(LayerKind.BLOCK, rank, layout) for rank in range(layout.mesh.pp)]
        in_flight = max(held) if layout.equal_ranks else min(held)
        self.kept_bytes = least_kept_bytes(layout, table) / layout.virtual_stages * in_flight
        self.host_room = table.host_share_bytes
        zero = 3 if layout.mesh.dp > 1 else 0
        ends = ends_bytes(0, layout, zero, table) if layout.mesh.pp == 1 else 0.0
        self.usable = usable_bytes(limit_bytes, layout.mesh, price_cache) - max(
            ends, self._inside_bytes(table)
        )
        self.num_layers = price_cache.model.num_layers

    def _inside_bytes(self, table: MixTable) -> float:
        """Least bytes of gradients and gathered groups in a backward pass of a block."""
        training, mesh = table.price_cache.training, self.layout.mesh
        in_parameters = writes_over_parameters(training, self.layout.num_micro_batches)
        gradient = 0 if in_parameters else training.gradient_precision.num_bytes
        at_once = gradient_chunks(mesh.dp, table.price_cache.chunking.communication) / mesh.dp
        gathered = training.precision.num_bytes + gradient * at_once if mesh.dp > 1 else 0
        counts = table.price_cache.tensors_by_part(LayerKind.BLOCK, self.layout.access)
        widest = max(summed_by_part(table.tensors(self.layout.sharding), counts))
        return float((training.precision.num_bytes + gathered) * widest)

    def step_s(self, num_blocks: int | None = None) -> float:
        """Seconds of a step in which some rank has `num_blocks` blocks, by default the fewest."""
        count = -(-self.num_layers // self.layout.mesh.pp) if num_blocks is None else num_blocks
        least = _Least(
            num_blocks=count,
            costs=self.costs,
            compute_s=self.time.block_s,
            passes=self.layout.num_micro_batches,
            room=self.usable - count * self.kept_bytes,
            host_room=self.host_room,
        )
        host, ways = least.ways()
        if not len(host):
            return INFINITY
        return self.time.total_s + min(
            float(least.seconds(host, optimizer, self.repeats).min()) for optimizer in ways
        )

    def longest_rank(self, cut_s: float) -> int | None:
        """Returns the most blocks of a rank for a step below `cut_s`, or None without a limit."""
        if self.layout.equal_ranks or self.layout.mesh.pp == 1:
            return None  # their number of blocks is given
        if self.step_s(self.num_layers) < cut_s:
            return None
        counts = range(1, self.num_layers + 1)
        return max(1, bisect_left(counts, True, key=lambda count: self.step_s(count) >= cut_s))
