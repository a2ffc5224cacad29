"""Prices of ranges of shards: by first shard i and end j, what a stage of shards [i, j) takes and
holds, as arrays [shards, shards + 1].

Most of it is a sum over the shards. What a shard costs may depend on where its stage begins: a
parameter that an earlier shard of the stage holds counts there. Entries with j <= i mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.data_parallel import DataParallelTime
from parplan.costmodels.layers.layer_price_cache import LayerStates
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.traced.shard_classes import ShardKey
from parplan.planner.traced.shard_flow import Array
from parplan.planner.traced.shard_price_cache import ONE, ShardPriceCache


@dataclass(frozen=True, slots=True, kw_only=True)
class ByShard:
    """Of one micro-batch size, by shard: seconds of both passes, and of the forward pass that runs
    again; bytes of its own that it keeps, and temporaries, once run (0) and run again (1).
    """

    time_s: Array
    again_s: Array
    saved: tuple[Array, Array]
    workspace: tuple[Array, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangePasses:
    """The same by range, and what a stage has besides its shards: bytes that it keeps, `besides`,
    and seconds of constants.

    temporaries: when nothing runs again, the most that a backward pass adds to what is kept
    sent: bytes of the values that a stage receives and hands on, both ways
    """

    by_shard: ByShard
    time_s: Array
    again_s: Array
    saved: tuple[Array, Array]
    temporaries: Array
    besides: Array
    constants_s: Array
    sent: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeStates:
    """By range, at one ZeRO stage: seconds that data parallelism adds to a micro-batch, and after
    the last; bytes of states, of ZeRO's buffers and of copies for the optimizer's step; `shares`:
    whether another stage holds one of its parameters.
    """

    per_micro_batch_s: Array
    tail_s: Array
    states: Array
    buffers: Array
    step_copies: Array
    shares: Array


class RangeTables:
    """The tables of one traced model, each made once."""

    def __init__(self, price_cache: ShardPriceCache) -> None:
        self.price_cache = price_cache
        self.size = price_cache.num_shards
        self._passes: dict[int, RangePasses] = {}
        self._held: dict[tuple[int, Mesh, int], RangeStates] = {}
        self._received: dict[tuple[int, bool, int], Array] = {}

    def passes(self, micro_batch_size: int) -> RangePasses:
        """Of one micro-batch size."""
        if micro_batch_size not in self._passes:
            self._passes[micro_batch_size] = self._make_passes(micro_batch_size)
        return self._passes[micro_batch_size]

    def held(self, micro_batch_size: int, mesh: Mesh, zero: int) -> RangeStates:
        """Of one micro-batch size, mesh and ZeRO stage."""
        key = micro_batch_size, mesh, zero
        if key not in self._held:
            self._held[key] = self._make_held(micro_batch_size, mesh, zero)
        return self._held[key]

    def _make_passes(self, b: int) -> RangePasses:
        price_cache, shards = self.price_cache, range(self.size)
        keys = [price_cache.classes.key(shard, shard) for shard in shards]
        full = [price_cache.layer_time(key, b, ONE, Recompute.FULL) for key in keys]
        none = [price_cache.layer_time(key, b, ONE) for key in keys]

        def by_level(of: Callable[[int, Recompute], float]) -> tuple[Array, Array]:
            once, again = (
                np.array([float(of(shard, level)) for shard in shards])
                for level in (Recompute.NONE, Recompute.FULL)
            )
            return once, again

        own = ByShard(
            time_s=np.array([time.forward_s + time.backward_s for time in none]),
            again_s=np.array([time.recompute_s for time in full]),
            saved=by_level(lambda shard, level: price_cache.saved_bytes(shard, level, b)),
            workspace=by_level(
                lambda shard, level: price_cache.activations(keys[shard], b, ONE, level).workspace
            ),
        )
        cut = np.array(
            [*(float(sum(price_cache.flow.handed_on(shard, b).values())) for shard in shards), 0.0]
        )
        return RangePasses(
            by_shard=own,
            time_s=sum_of(own.time_s),
            again_s=sum_of(own.again_s),
            saved=(sum_of(own.saved[0]), sum_of(own.saved[1])),
            temporaries=_temporaries(own),
            besides=price_cache.flow.besides(b),
            constants_s=self._constants_s(b),
            sent=cut[: self.size, None] + cut[None, :],
        )

    def _constants_s(self, b: int) -> Array:
        """What a range takes for the constants that its shards need, each once."""
        total = np.zeros((self.size, self.size + 1))
        seconds = self.price_cache.constants(b)
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
        """[first, shard] -> what `of` says of the shard in a stage that begins with `first`."""
        made, classes = np.zeros((self.size, self.size)), self.price_cache.classes
        for shard in range(self.size):
            begin = 0
            for change in classes.changes[shard]:
                made[begin : change + 1, shard] = of(classes.key(shard, change))
                begin = change + 1
        return made

    def received(self, micro_batch_size: int, *, crosses_nodes: bool, sharing: int) -> Array:
        """By shard, the seconds in which a stage that begins with it gets its values; nothing at
        either end of the model.
        """
        key = micro_batch_size, crosses_nodes, sharing
        if key not in self._received:
            sent = (
                self.price_cache.sent(
                    shard, micro_batch_size, crosses_nodes=crosses_nodes, sharing=sharing
                ).value_s
                for shard in range(1, self.size)
            )
            self._received[key] = np.array([0.0, *sent, 0.0])
        return self._received[key]

    def _shared(self, mesh: Mesh) -> tuple[Array, Array]:
        """Seconds a step for the sums of gradients of parameters that other stages hold as well,
        and whether there are any.
        """
        total, shares = (np.zeros((self.size, self.size + 1)) for _ in range(2))
        for _, elements, shards in self.price_cache.sharded.shared:
            some = sum_of(np.isin(np.arange(self.size), shards).astype(float))
            partly = (some > 0) & (some < len(shards))
            seconds = (
                self.price_cache.shared_reduction(elements, len(shards), mesh).value_s
                if mesh.pp > 1
                else 0.0
            )
            total += np.where(partly, seconds, 0.0)
            shares = np.maximum(shares, partly)
        return total, shares


def sums(by_start: Array) -> Array:
    """[first, shard] -> [first, end], the sum over the shards from `first` on."""
    upper = np.triu(by_start)
    return np.concatenate((np.zeros((len(upper), 1)), np.cumsum(upper, axis=1)), axis=1)


def sum_of(by_shard: Array) -> Array:
    """Of a value by shard, the sum over each range."""
    return sums(np.broadcast_to(by_shard, (len(by_shard), len(by_shard))))


def _largest(by_start: Array) -> Array:
    upper = np.triu(by_start)
    return np.concatenate((np.zeros((len(upper), 1)), np.maximum.accumulate(upper, axis=1)), axis=1)


def column_once(shards: Sequence[int]) -> list[tuple[slice, slice]]:
    """The ranges that hold any of `shards`, each range once: slices of first shards and of ends."""
    found, before = [], -1
    for shard in sorted(shards):
        found.append((slice(before + 1, shard + 1), slice(shard + 1, None)))
        before = shard
    return found


def _temporaries(own: ByShard) -> Array:
    """By range, the most that a backward pass adds to what is kept when nothing runs again: that of
    a shard, less what the shards behind it kept, which is free by then.
    """
    size = len(own.time_s)
    saved, found = sum_of(own.saved[0]), np.full((size + 1, size + 1), -np.inf)
    for first in reversed(range(size)):
        behind = saved[first] - own.saved[0][first]
        found[first] = np.maximum(found[first + 1], own.workspace[0][first] - behind)
        found[first, : first + 1] = -np.inf
    return found[:size]
