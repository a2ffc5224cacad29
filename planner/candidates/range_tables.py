"""Prices of ranges of layers [i, j) of a model, as arrays [layers, layers + 1] by i and j.

They are the least of any choice for the layers of a range. Most are sums over its layers. The price
of a layer may depend on the first layer of its stage: a parameter that an earlier layer of the
stage holds counts there. Entries with j <= i mean nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.joined_pools import passes_join
from parplan.costmodels.keyed_cache import KeyedCache, RecentCache
from parplan.costmodels.layers.chunk_owners import expert_elements, own_elements
from parplan.costmodels.layers.chunked_layer import state_widths, writes_over_parameters
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.model_states import owned_parameters
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.stage_costs import link_of, time_between
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints, hull_prices
from parplan.planner.host_options.location_costs import host_share_bytes
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.stage_columns.stage_contents import Range
from parplan.profiles.models.operator_graph import LayerKey

MOST_TABLES = 64  # prices by range that are held: each is up to 1 MiB
PRICES = 8  # prices of a saved byte at which the seconds of a range are bounded
# the ways to run a layer of a class, for a micro-batch size and a sharding
OptionsOf = Callable[[LayerKey, int, Sharding], Sequence[LayerOption]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangePasses:
    """Prices by range for one micro-batch size and sharding.

    time_s       seconds of both passes without recompute, and of what a stage makes of the batch
    recompute_s  least seconds of recompute that all choices of the layers have
    whole        least bytes that a stage saves without recompute
    kept         least bytes that a stage saves
    prices       seconds of recompute for which some layer saves a byte less, a few of them
    priced       least seconds of recompute and of the saved bytes at a price
    priced_at    those of one range, by price
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
    priced_at: Callable[[Range, Array], Array]
    priced_s: tuple[Array, ...]
    sent: Array
    most_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerPasses:
    """Prices of one layer.

    plain_s         least seconds of both passes without recompute
    least_s         least seconds of recompute
    most_s          most seconds of recompute
    whole           least bytes that it saves without recompute
    again_s, saved  by option, seconds beyond `plain_s` and saved bytes
    """

    plain_s: float
    least_s: float
    most_s: float
    whole: float
    again_s: Array
    saved: Array

    @property
    def most_share(self) -> float:
        """Largest share of recompute in its seconds."""
        return self.most_s / max(self.plain_s + self.most_s, 1e-30)

    def priced(self, prices: Array) -> Array:
        """Returns the least seconds of recompute and of the saved bytes, by price of a byte."""
        every = self.again_s + np.multiply.outer(prices, self.saved)
        return np.asarray(every.min(axis=-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeStates:
    """Prices of data parallelism and of states by range, at one ZeRO stage.

    per_micro_batch_s  seconds added to a micro-batch
    tail_s             seconds after the last micro-batch
    held               bytes of states, buffers and copies for the optimizer's step
    buffer             bytes of the largest buffer among them, which all parts of a rank use
    gradients          bytes of the gradients among them
    redundant          bytes of the states beyond their part of one copy
    host               bytes of the states on the host for this rank
    """

    per_micro_batch_s: Array
    tail_s: Array
    held: Array
    buffer: Array
    gradients: Array
    redundant: Array
    host: Array


class RangeTables:
    """The tables of one model, each computed once."""

    def __init__(
        self, price_cache: LayerPriceCache, options_of: OptionsOf, check: Callable[[], None]
    ) -> None:
        self.price_cache = price_cache
        self._options_of = options_of
        self.size = price_cache.num_layers
        self._once = KeyedCache(check)
        self._recent = RecentCache(MOST_TABLES, check)

    def passes(self, b: int, sharding: Sharding) -> RangePasses:
        """Returns the prices of passes for one micro-batch size."""
        return self._recent(("passes", b, sharding), lambda: self._passes(b, sharding))

    def _passes(self, b: int, sharding: Sharding) -> RangePasses:
        price_cache, layers = self.price_cache, range(self.size)
        keys = [price_cache.key(layer, layer) for layer in layers]
        by_class = {key: self._passes_of(key, b, sharding) for key in dict.fromkeys(keys)}
        each = [by_class[key] for key in keys]
        plain, least_s, whole, kept = np.array(
            [(one.plain_s, one.least_s, one.whole, one.saved.min()) for one in each]
        ).T
        prices = _prices(by_class.values())
        cut = np.array(
            [
                float(price_cache.sent_bytes(price_cache.cut_class(cut), b, sharding))
                for cut in range(self.size + 1)
            ]
        )
        besides, made_s = self._once(("besides", b), lambda: self._besides(b))

        def priced(price: float) -> Array:
            least = {key: float(one.priced(np.array(price))) for key, one in by_class.items()}
            return sum_of(np.array([least[key] for key in keys])) + price * besides

        def priced_at(layers: Range, at: Array) -> Array:
            total = at * besides[layers]
            for key, number in Counter(keys[slice(*layers)]).items():
                total = total + number * by_class[key].priced(at)
            return np.asarray(total)

        return RangePasses(
            time_s=sum_of(plain) + made_s,
            recompute_s=sum_of(least_s),
            whole=sum_of(whole) + besides,
            kept=sum_of(kept) + besides,
            prices=prices,
            priced=priced,
            priced_at=priced_at,
            priced_s=tuple(map(priced, prices)),
            sent=cut[: self.size, None] + cut[None, :],
            most_share=max(one.most_share for one in each),
        )

    def _passes_of(self, key: LayerKey, b: int, sharding: Sharding) -> _LayerPasses:
        price_cache, options = self.price_cache, self._options_of(key, b, sharding)
        times = [price_cache.layer_time(key, b, o.sharding, o.recompute) for o in options]
        plain_s = min(time.forward_s + time.backward_s for time in times)
        again_s = [time.recompute_s for time in times]
        divisions = dict.fromkeys(option.sharding for option in options)
        return _LayerPasses(
            plain_s=plain_s,
            least_s=min(again_s),
            most_s=max(again_s),
            whole=min(float(price_cache.activations(key, b, own).saved) for own in divisions),
            again_s=np.array([option.time_s - plain_s for option in options]),
            saved=np.array([option.saved_bytes for option in options]),
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

    def least_data(
        self, b: int, mesh: Mesh, sharding: Sharding, zeros: Sequence[int]
    ) -> tuple[Array, Array]:
        """Returns the least `per_micro_batch_s` and `tail_s` of some ZeRO stages."""

        def make() -> tuple[Array, Array]:
            states = [self.states(b, mesh, sharding, zero) for zero in zeros]
            return (
                np.minimum.reduce([held.per_micro_batch_s for held in states]),
                np.minimum.reduce([held.tail_s for held in states]),
            )

        return self._recent(("least data", b, mesh, sharding, zeros), make)

    def states(self, b: int, mesh: Mesh, sharding: Sharding, zero: int) -> RangeStates:
        """Returns the prices of states for one micro-batch size, mesh and ZeRO stage."""
        return self._recent(
            ("states", b, mesh, sharding, zero), lambda: self._states(b, mesh, sharding, zero)
        )

    def _states(self, b: int, mesh: Mesh, sharding: Sharding, zero: int) -> RangeStates:
        return self._of_layers(b, mesh, sharding, zero, lambda _: True)

    def _of_layers(
        self,
        b: int,
        mesh: Mesh,
        sharding: Sharding,
        zero: int,
        counts: Callable[[LayerKey], bool],
    ) -> RangeStates:
        """Returns the prices of the states of the layers that count."""
        price_cache = self.price_cache
        keys, number = self._keys
        own = [price_cache.own_sharding(key, sharding) for key in keys]
        data_s = [self._least_data_s(key, b, mesh, sharding, zero) for key in keys]
        held = [
            price_cache.states(key, mesh, split, zero) for key, split in zip(keys, own, strict=True)
        ]
        by_key = np.array(
            [
                *zip(*data_s, strict=True),
                [each.states.total for each in held],
                [each.step_copies for each in held],
                [each.states.gradients for each in held],
                [sum(each.ideal) for each in held],
                [each.host for each in held],
            ],
            np.float64,
        )
        counted = np.array([counts(key) for key in keys], np.float64)
        by_key *= counted
        per_micro_batch_s, per_step_s, states, step_copies, gradients, ideal, host = sums(
            by_key[:, number]
        )
        buffers = np.array([each.zero_buffer for each in held], np.float64) * counted
        buffer = largest_of(buffers[number])
        spare = 1 + price_cache.training.stack.allocator_share
        return RangeStates(
            per_micro_batch_s=per_micro_batch_s,
            tail_s=per_step_s + self.shared_s(mesh, sharding),
            held=states + buffer + step_copies / spare,
            buffer=buffer,
            gradients=gradients,
            redundant=states - ideal,
            host=host,
        )

    def _least_data_s(
        self, key: LayerKey, b: int, mesh: Mesh, sharding: Sharding, zero: int
    ) -> tuple[float, float]:
        """Returns the least seconds a micro-batch and a step of a layer, of its divisions."""
        ways = dict.fromkeys(option.sharding for option in self._options_of(key, b, sharding))
        data = [self.price_cache.data_parallel(key, b, mesh, way, zero) for way in ways]
        return min(each.per_micro_batch_s for each in data), min(each.per_step_s for each in data)

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

    def received(self, layout: ParallelLayout) -> Array:
        """Seconds [stage, 2, cut] of transfers from the stage before and from the one after."""
        ranks = tuple(layout.rank_of(stage) for stage in range(layout.num_virtual_stages))
        several = layout.virtual_stages > 1

        def make() -> Array:
            seconds = np.zeros((len(ranks), 2, self.size + 1))
            for before, after in pairwise(range(len(ranks))):
                seconds[after, 0] = self._received(ranks[before], ranks[after], layout)
                seconds[before, 1] = self._received(ranks[after], ranks[before], layout)
            return seconds

        key = ranks, layout.mesh, layout.micro_batch_size, layout.sharding, several, layout.pools
        return self._once(("received", key), make)

    def _received(self, here: int, there: int, layout: ParallelLayout) -> Array:
        """Seconds by cut of a transfer from pipeline rank `here` to `there`, 0 at both ends."""

        def make() -> Array:
            sent = (
                time_between(
                    here, there, layout, self.price_cache, self.price_cache.cut_class(cut)
                ).value_s
                for cut in range(1, self.size)
            )
            return np.array([0.0, *sent, 0.0])

        if passes_join(layout, here, there):
            return make()
        key: Hashable = ("link", link_of(here, there, layout, self.price_cache), here == there)
        return self._once(key, make)

    def shared_s(self, mesh: Mesh, sharding: Sharding) -> Array:
        """Seconds a step to sum gradients of parameters that other stages hold too."""
        total = np.zeros((self.size, self.size + 1))
        for shared in self.price_cache.shared_parameters if mesh.pp > 1 else ():
            some = sum_of(np.isin(np.arange(self.size), shared.layers).astype(float))
            partly = (some > 0) & (some < len(shared.layers))
            seconds = self.price_cache.shared_reduction(shared, mesh, sharding).value_s
            total += np.where(partly, seconds, 0.0)
        return total


class ChunkedRangeTables(RangeTables):
    """The tables of layouts in chunks, whose states may have some locations.

    Copies and updates of chunks take no time here, and chunks have no padding. The states of a
    range that cannot all be on the host are on the device.
    """

    def __init__(
        self,
        price_cache: LayerPriceCache,
        options_of: OptionsOf,
        check: Callable[[], None],
        locations: Sequence[StateLocation],
    ) -> None:
        super().__init__(price_cache, options_of, check)
        # the fewest bytes of gradients are those of one micro-batch a step
        self._over = writes_over_parameters(price_cache.training, 1)
        self._widths = [
            tuple(
                float(widths.total)
                for widths in state_widths(each, price_cache.training, self._over)
            )
            for each in locations
        ]

    def _states(self, b: int, mesh: Mesh, sharding: Sharding, zero: int) -> RangeStates:
        outside = self._of_layers(b, mesh, sharding, zero, lambda key: not key.in_chunks)
        price_cache = self.price_cache
        keys, number = self._keys
        by_key = np.zeros((2, len(keys)))
        for place, key in enumerate(keys):
            if key.in_chunks:
                own = price_cache.own_sharding(key, sharding)
                cost = price_cache.chunked(
                    key, StateLocation.DEVICE, b, mesh, own, in_parameters=self._over
                )
                layer = price_cache.layer(key, 1)
                elements, experts = owned_parameters(layer, own), expert_elements(layer, own, mesh)
                owned = own_elements(elements, experts, mesh)
                by_key[:, place] = cost.forward_s + cost.backward_s, owned
        gathered_s, elements = sums(by_key[:, number])
        return replace(
            outside,
            per_micro_batch_s=outside.per_micro_batch_s + gathered_s,
            held=outside.held + self._least_device_bytes(elements),
        )

    def _least_device_bytes(self, elements: Array) -> Array:
        """Least bytes of states on a device whose share of the host holds as much as it can.

        With d bytes a parameter on the device and h on the host by location, and a share H, n
        parameters take no less than n min(d + p h) - p H at any price p of a host byte.
        """
        share = host_share_bytes(self.price_cache.machine.cluster)
        most = max(device for device, _ in self._widths)
        prices = {0.0, *((most - device) / host for device, host in self._widths if host)}
        least = [
            elements * min(device + price * host for device, host in self._widths) - price * share
            for price in prices
        ]
        return np.asarray(np.maximum.reduce(least))


def _prices(layers: Iterable[_LayerPasses]) -> tuple[float, ...]:
    """Returns seconds of recompute per freed byte, at most `PRICES` of those of the layers."""
    listed = np.unique(
        [price for one in layers for price in hull_prices(one.again_s.tolist(), one.saved.tolist())]
    )
    chosen = np.linspace(0, len(listed) - 1, min(PRICES, len(listed))).round().astype(int)
    return tuple(float(price) for price in listed[chosen])


def sums(by_start: Array) -> Array:
    """Sums arrays [..., first, layer] over the layers from `first` on to [..., first, end]."""
    total = np.zeros((*by_start.shape[:-1], by_start.shape[-1] + 1))
    np.cumsum(np.triu(by_start), axis=-1, out=total[..., 1:])
    return total


def sum_of(by_layer: Array) -> Array:
    """Sums a value by layer over each range."""
    return sums(np.broadcast_to(by_layer, (len(by_layer), len(by_layer))))


def largest_of(by_start: Array) -> Array:
    """The largest of an array [first, layer] over each range."""
    upper = np.triu(by_start)
    return np.concatenate((np.zeros((len(upper), 1)), np.maximum.accumulate(upper, axis=1)), axis=1)


def even_path(values: Sequence[Array]) -> tuple[tuple[int, int], ...] | None:
    """Returns the ranges, by stage, whose largest value is least; None where nothing is finite."""
    behind = from_last(values, np.maximum)
    if not np.isfinite(behind[0][0]):
        return None
    first, ranges = 0, []
    for stage, value in enumerate(values):
        end = int(np.argmin(np.maximum(value[first], behind[stage + 1])))
        ranges.append((first, end))
        first = end
    return tuple(ranges)


def from_first(values: Sequence[Array], joined: np.ufunc) -> list[Array]:
    """Returns by k the least of the stages before stage k that end at each cut.

    joined: how the values of two stages make one, `np.maximum` or `np.add`
    """
    size = values[0].shape[0]
    start = np.full(size + 1, np.inf)
    start[0] = 0.0
    before = [start]
    for value in values:
        before.append(joined(before[-1][:size, None], value).min(axis=0))
    return before


def from_last(values: Sequence[Array], joined: np.ufunc) -> list[Array]:
    """Returns by k the least of the stages from stage k on that begin at each cut."""
    size = values[0].shape[0]
    stop = np.full(size + 1, np.inf)
    stop[size] = 0.0
    behind = [stop]
    for value in reversed(values):
        behind.append(np.full(size + 1, np.inf))
        joined(value, behind[-2][None, :]).min(axis=1, out=behind[-1][:size])
    return behind[::-1]
