"""Prices of stages of shards [i, j), as arrays [shards, shards + 1] by first shard i and end j.

Most prices are sums over the shards. The price of a shard may depend on the first shard of its
stage: a parameter that an earlier shard of the stage holds counts there. Entries with j <= i mean
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.data_parallel import DataParallelTime
from parplan.costmodels.layers.layer_price_cache import LayerStates
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.stage_costs import link_of, time_between
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.traced.shard_classes import ShardKey
from parplan.planner.traced.shard_flow import Array
from parplan.planner.traced.shard_price_cache import ONE, ShardPriceCache


@dataclass(frozen=True, slots=True, kw_only=True)
class ByShard:
    """Prices by shard for one micro-batch size.

    time_s       seconds of both passes
    recompute_s  seconds of its recompute
    saved        bytes that it saves, without (0) and with recompute (1)
    workspace    bytes of temporaries, without (0) and with recompute (1)
    """

    time_s: Array
    recompute_s: Array
    saved: tuple[Array, Array]
    workspace: tuple[Array, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangePasses:
    """Prices by range for one micro-batch size, with `by_shard` and the sums of its entries.

    temporaries  most bytes that a backward pass adds to saved ones, without recompute
    besides      bytes that a stage saves besides its shards
    constants_s  seconds of the constants that a stage makes
    sent         bytes of the values that a stage receives and hands on, both ways
    """

    by_shard: ByShard
    time_s: Array
    recompute_s: Array
    saved: tuple[Array, Array]
    temporaries: Array
    besides: Array
    constants_s: Array
    sent: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeStates:
    """Prices of data parallelism and of states by range, at one ZeRO stage.

    per_micro_batch_s  seconds added to a micro-batch
    tail_s             seconds after the last micro-batch
    states             bytes of states
    buffers            bytes of ZeRO's buffers
    step_copies        bytes of copies for the optimizer's step
    shares             1 if another stage holds one of its parameters, else 0
    """

    per_micro_batch_s: Array
    tail_s: Array
    states: Array
    buffers: Array
    step_copies: Array
    shares: Array


class RangeTables:
    """The tables of one traced model, each computed once."""

    def __init__(self, price_cache: ShardPriceCache) -> None:
        self.price_cache = price_cache
        self.size = price_cache.num_shards
        self._passes: dict[int, RangePasses] = {}
        self._held: dict[tuple[int, Mesh, int], RangeStates] = {}
        self._received: dict[Hashable, Array] = {}

    def passes(self, micro_batch_size: int) -> RangePasses:
        """Returns the prices of passes for one micro-batch size."""
        if micro_batch_size not in self._passes:
            self._passes[micro_batch_size] = self._make_passes(micro_batch_size)
        return self._passes[micro_batch_size]

    def held(self, micro_batch_size: int, mesh: Mesh, zero: int) -> RangeStates:
        """Returns the prices of states for one micro-batch size, mesh and ZeRO stage."""
        key = micro_batch_size, mesh, zero
        if key not in self._held:
            self._held[key] = self._make_held(micro_batch_size, mesh, zero)
        return self._held[key]

    def _make_passes(self, b: int) -> RangePasses:
        price_cache, shards = self.price_cache, range(self.size)
        keys = [price_cache.key(shard, shard) for shard in shards]
        full = [price_cache.layer_time(key, b, ONE, Recompute.FULL) for key in keys]
        none = [price_cache.layer_time(key, b, ONE) for key in keys]

        def by_level(of: Callable[[int, Recompute], float]) -> tuple[Array, Array]:
            saved = np.array([float(of(shard, Recompute.NONE)) for shard in shards])
            recomputed = np.array([float(of(shard, Recompute.FULL)) for shard in shards])
            return saved, recomputed

        by_shard = ByShard(
            time_s=np.array([time.forward_s + time.backward_s for time in none]),
            recompute_s=np.array([time.recompute_s for time in full]),
            saved=by_level(
                lambda shard, level: price_cache.activations(keys[shard], b, ONE, level).saved
            ),
            workspace=by_level(
                lambda shard, level: price_cache.activations(keys[shard], b, ONE, level).workspace
            ),
        )
        cut = np.array(
            [
                float(sum(tensor.num_bytes for tensor in price_cache.crossing_tensors(cut, b)))
                for cut in range(self.size + 1)
            ]
        )
        return RangePasses(
            by_shard=by_shard,
            time_s=sum_of(by_shard.time_s),
            recompute_s=sum_of(by_shard.recompute_s),
            saved=(sum_of(by_shard.saved[0]), sum_of(by_shard.saved[1])),
            temporaries=_temporaries(by_shard),
            besides=price_cache.flow.besides(b),
            constants_s=self._constants_s(b),
            sent=cut[: self.size, None] + cut[None, :],
        )

    def _constants_s(self, b: int) -> Array:
        """Seconds by range for the constants that its shards need, each once."""
        total = np.zeros((self.size, self.size + 1))
        seconds = self.price_cache.constant_times(b)
        for place, shards in self.price_cache.flow.needed_constants.items():
            if place in seconds:
                for first, end in column_once(shards):
                    total[first, end] += seconds[place].value_s
        return total

    def _make_held(self, b: int, mesh: Mesh, zero: int) -> RangeStates:
        price_cache = self.price_cache
        shared_s, shares = self._shared(mesh)

        def data(key: ShardKey) -> DataParallelTime:
            return price_cache.data_parallel(key, b, mesh, ONE, zero)

        def states(key: ShardKey) -> LayerStates:
            return price_cache.states(key, mesh, ONE, zero)

        spare = 1 + price_cache.training.stack.allocator_share
        return RangeStates(
            per_micro_batch_s=sums(self._by_start(lambda key: data(key).per_micro_batch_s)),
            tail_s=sums(self._by_start(lambda key: data(key).per_step_s)) + shared_s,
            states=sums(self._by_start(lambda key: states(key).states.total)),
            buffers=_largest(self._by_start(lambda key: states(key).zero_buffer)),
            step_copies=sums(self._by_start(lambda key: states(key).step_copies)) / spare,
            shares=shares,
        )

    def _by_start(self, of: Callable[[ShardKey], float]) -> Array:
        """Returns an array [first, shard] of `of` for a shard in a stage that begins at `first`."""
        made, classes = np.zeros((self.size, self.size)), self.price_cache.classes
        for shard in range(self.size):
            begin = 0
            for change in classes.changes[shard]:
                made[begin : change + 1, shard] = of(self.price_cache.key(shard, change))
                begin = change + 1
        return made

    def received(self, here: int, there: int, layout: ParallelLayout) -> Array:
        """Seconds by cut of a transfer from pipeline rank `here` to `there`, 0 at both ends."""
        key = link_of(here, there, layout, self.price_cache)
        if key not in self._received:
            sent = (
                time_between(here, there, layout, self.price_cache, cut).value_s
                for cut in range(1, self.size)
            )
            self._received[key] = np.array([0.0, *sent, 0.0])
        return self._received[key]

    def _shared(self, mesh: Mesh) -> tuple[Array, Array]:
        """Seconds a step to sum gradients of parameters shared with other stages, and 1 if any."""
        total = np.zeros((self.size, self.size + 1))
        shares = np.zeros((self.size, self.size + 1))
        for shared in self.price_cache.shared_parameters:
            some = sum_of(np.isin(np.arange(self.size), shared.layers).astype(float))
            partly = (some > 0) & (some < len(shared.layers))
            seconds = (
                self.price_cache.shared_reduction(shared, mesh, ONE).value_s if mesh.pp > 1 else 0.0
            )
            total += np.where(partly, seconds, 0.0)
            shares = np.maximum(shares, partly)
        return total, shares


def sums(by_start: Array) -> Array:
    """Sums an array [first, shard] over the shards from `first` on to an array [first, end]."""
    upper = np.triu(by_start)
    return np.concatenate((np.zeros((len(upper), 1)), np.cumsum(upper, axis=1)), axis=1)


def sum_of(by_shard: Array) -> Array:
    """Sums a value by shard over each range."""
    return sums(np.broadcast_to(by_shard, (len(by_shard), len(by_shard))))


def _largest(by_start: Array) -> Array:
    upper = np.triu(by_start)
    return np.concatenate((np.zeros((len(upper), 1)), np.maximum.accumulate(upper, axis=1)), axis=1)


def column_once(shards: Sequence[int]) -> list[tuple[slice, slice]]:
    """Returns the ranges that hold any of `shards`, once each, as slices of firsts and ends."""
    ranges, before = [], -1
    for shard in sorted(shards):
        ranges.append((slice(before + 1, shard + 1), slice(shard + 1, None)))
        before = shard
    return ranges


def _temporaries(by_shard: ByShard) -> Array:
    """Most bytes by range that a backward pass adds to saved ones, without recompute."""
    size = len(by_shard.time_s)
    return _largest(np.broadcast_to(by_shard.workspace[0], (size, size)))
