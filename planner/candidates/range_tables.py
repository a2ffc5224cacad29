"""Prices of ranges of layers [i, j) of a model, as arrays [layers, layers + 1] by i and j.

They are the least of any choice for the layers of a range. Most are sums over its layers. The price
of a layer may depend on the first layer of its stage: a parameter that an earlier layer of the
stage holds counts there. Entries with j <= i mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.stage_costs import link_of, time_between
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints
from parplan.profiles.models.operator_graph import LayerKey

LEVELS = (Recompute.NONE, Recompute.FULL)
PRICES = 8  # prices of a saved byte at which the seconds of a range are bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class RangePasses:
    """Prices by range for one micro-batch size and sharding.

    time_s       seconds of both passes without recompute, and of what a stage makes of the batch
    recompute_s  seconds of the recompute of all layers
    whole        bytes that a stage saves without recompute
    kept         least bytes that a stage saves
    prices       seconds of recompute for which some layer saves a byte less, a few of them
    priced       least seconds of recompute and of the saved bytes at a price
    priced_s     those at each of `prices`
    sent         bytes of the tensors that a stage receives and hands on, both ways
    most_share   largest share of recompute in the seconds of a layer that is recomputed
    """

    time_s: Array
    recompute_s: Array
    whole: Array
    kept: Array
    prices: tuple[float, ...]
    priced: Callable[[float], Array]
    priced_s: tuple[Array, ...]
    sent: Array
    most_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeStates:
    """Prices of data parallelism and of states by range, at one ZeRO stage.

    per_micro_batch_s  seconds added to a micro-batch
    tail_s             seconds after the last micro-batch
    held               bytes of states, buffers and copies for the optimizer's step
    buffer             bytes of the largest buffer among them, which all parts of a rank use
    gradients          bytes of the gradients among them
    redundant          bytes of the states beyond their part of one copy
    """

    per_micro_batch_s: Array
    tail_s: Array
    held: Array
    buffer: Array
    gradients: Array
    redundant: Array


class RangeTables:
    """The tables of one model, each computed once."""

    def __init__(self, price_cache: LayerPriceCache, check: Callable[[], None]) -> None:
        self.price_cache = price_cache
        self.size = price_cache.num_layers
        self._once = KeyedCache(check)

    def passes(self, b: int, sharding: Sharding) -> RangePasses:
        """Returns the prices of passes for one micro-batch size."""
        return self._once(("passes", b, sharding), lambda: self._passes(b, sharding))

    def _passes(self, b: int, sharding: Sharding) -> RangePasses:
        price_cache, layers = self.price_cache, range(self.size)
        keys = [price_cache.key(layer, layer) for layer in layers]
        own = [price_cache.own_sharding(key, sharding) for key in keys]
        times = [
            price_cache.layer_time(key, b, split, Recompute.FULL)
            for key, split in zip(keys, own, strict=True)
        ]
        plain = np.array([time.forward_s + time.backward_s for time in times])
        again = np.array([time.recompute_s for time in times])
        saved = np.array(
            [
                [price_cache.activations(key, b, split, level).saved for level in LEVELS]
                for key, split in zip(keys, own, strict=True)
            ],
            np.float64,
        )
        whole, kept = saved[:, 0], saved.min(axis=1)
        prices = _prices(again, whole - kept)
        cut = np.array(
            [
                float(price_cache.sent_bytes(price_cache.cut_class(cut), b, sharding))
                for cut in range(self.size + 1)
            ]
        )
        besides, made_s = self._once(("besides", b), lambda: self._besides(b))

        def priced(price: float) -> Array:
            return sum_of(np.minimum(price * whole, again + price * kept)) + price * besides

        return RangePasses(
            time_s=sum_of(plain) + made_s,
            recompute_s=sum_of(again),
            whole=sum_of(whole) + besides,
            kept=sum_of(kept) + besides,
            prices=prices,
            priced=priced,
            priced_s=tuple(map(priced, prices)),
            sent=cut[: self.size, None] + cut[None, :],
            most_share=float((again / np.maximum(plain + again, 1e-30)).max()),
        )

    def _besides(self, b: int) -> tuple[Array, Array]:
        """Returns the bytes that a stage saves besides its layers', and the seconds of constants.

        Constants are values that each stage makes of the batch.
        """
        besides, made_s = np.zeros((2, self.size, self.size + 1))
        for i in range(self.size):
            for j in range(i + 1, self.size + 1):
                besides[i, j] = self.price_cache.besides_bytes(i, j, b)
                made_s[i, j] = self.price_cache.constants(i, j, b).value_s
        return besides, made_s

    def states(self, b: int, mesh: Mesh, sharding: Sharding, zero: int) -> RangeStates:
        """Returns the prices of states for one micro-batch size, mesh and ZeRO stage."""
        return self._once(
            ("states", b, mesh, sharding, zero), lambda: self._states(b, mesh, sharding, zero)
        )

    def _states(self, b: int, mesh: Mesh, sharding: Sharding, zero: int) -> RangeStates:
        price_cache = self.price_cache

        keys, number = self._keys

        def by_start(of: Callable[[LayerKey], float]) -> Array:
            return np.array([of(key) for key in keys], np.float64)[number]

        data = {
            key: price_cache.data_parallel(
                key, b, mesh, price_cache.own_sharding(key, sharding), zero
            )
            for key in keys
        }
        held = {
            key: price_cache.states(key, mesh, price_cache.own_sharding(key, sharding), zero)
            for key in data
        }
        spare = 1 + price_cache.training.stack.allocator_share
        states = sums(by_start(lambda key: held[key].states.total))
        buffer = largest_of(by_start(lambda key: held[key].zero_buffer))
        return RangeStates(
            per_micro_batch_s=sums(by_start(lambda key: data[key].per_micro_batch_s)),
            tail_s=sums(by_start(lambda key: data[key].per_step_s))
            + self._shared_s(mesh, sharding),
            held=states + buffer + sums(by_start(lambda key: held[key].step_copies)) / spare,
            buffer=buffer,
            gradients=sums(by_start(lambda key: held[key].states.gradients)),
            redundant=states - sums(by_start(lambda key: sum(held[key].ideal))),
        )

    @property
    def _keys(self) -> tuple[tuple[LayerKey, ...], Ints]:
        """The classes of the layers, and the number of a layer's class by [first, layer]."""
        return self._once("keys", self._classes)

    def _classes(self) -> tuple[tuple[LayerKey, ...], Ints]:
        number = np.zeros((self.size, self.size), np.int64)
        found: dict[LayerKey, int] = {}
        for layer in range(self.size):
            for first in range(layer + 1):
                key = self.price_cache.key(layer, first)
                number[first, layer] = found.setdefault(key, len(found))
        return tuple(found), number

    def received(self, here: int, there: int, layout: ParallelLayout) -> Array:
        """Seconds by cut of a transfer from pipeline rank `here` to `there`, 0 at both ends."""

        def make() -> Array:
            sent = (
                time_between(
                    here, there, layout, self.price_cache, self.price_cache.cut_class(cut)
                ).value_s
                for cut in range(1, self.size)
            )
            return np.array([0.0, *sent, 0.0])

        key: Hashable = ("received", link_of(here, there, layout, self.price_cache), here == there)
        return self._once(key, make)

    def _shared_s(self, mesh: Mesh, sharding: Sharding) -> Array:
        """Seconds a step to sum gradients of parameters that other stages hold too."""
        total = np.zeros((self.size, self.size + 1))
        for shared in self.price_cache.shared_parameters if mesh.pp > 1 else ():
            some = sum_of(np.isin(np.arange(self.size), shared.layers).astype(float))
            partly = (some > 0) & (some < len(shared.layers))
            seconds = self.price_cache.shared_reduction(shared, mesh, sharding).value_s
            total += np.where(partly, seconds, 0.0)
        return total


def _prices(recompute_s: Array, freed: Array) -> tuple[float, ...]:
    """Returns seconds of recompute per freed byte, at most `PRICES` of those of the layers."""
    frees = freed > 0
    listed = np.unique(recompute_s[frees] / freed[frees])
    chosen = np.linspace(0, len(listed) - 1, min(PRICES, len(listed))).round().astype(int)
    return tuple(float(price) for price in listed[chosen])


def sums(by_start: Array) -> Array:
    """Sums an array [first, layer] over the layers from `first` on to an array [first, end]."""
    upper = np.triu(by_start)
    return np.concatenate((np.zeros((len(upper), 1)), np.cumsum(upper, axis=1)), axis=1)


def sum_of(by_layer: Array) -> Array:
    """Sums a value by layer over each range."""
    return sums(np.broadcast_to(by_layer, (len(by_layer), len(by_layer))))


def largest_of(by_start: Array) -> Array:
    """The largest of an array [first, layer] over each range."""
    upper = np.triu(by_start)
    return np.concatenate((np.zeros((len(upper), 1)), np.maximum.accumulate(upper, axis=1)), axis=1)


def even_path(values: Sequence[Array]) -> tuple[tuple[int, int], ...] | None:
    """Returns the ranges, by stage, whose largest value is least; None where nothing is finite."""
    before, behind = from_both_ends(values, np.maximum)
    if not np.isfinite(before[-1][-1]):
        return None
    first, ranges = 0, []
    for stage, value in enumerate(values):
        end = int(np.argmin(np.maximum(value[first], behind[stage + 1])))
        ranges.append((first, end))
        first = end
    return tuple(ranges)


def from_both_ends(values: Sequence[Array], joined: np.ufunc) -> tuple[list[Array], list[Array]]:
    """Returns the least of stages before stage k that end at each cut, and of stages from k on.

    joined: how the values of two stages make one, `np.maximum` or `np.add`
    """
    size = values[0].shape[0]
    start, stop = np.full(size + 1, np.inf), np.full(size + 1, np.inf)
    start[0] = stop[size] = 0.0
    before, behind = [start], [stop]
    for value in values:
        before.append(np.min(joined(before[-1][:size, None], value), axis=0))
    for value in reversed(values):
        least = np.min(joined(value, behind[-1][None, :]), axis=1)
        behind.append(np.concatenate((least, [np.inf])))
    return before, behind[::-1]
