"""The cost of every way to place the layers of a rank whose layers are of several classes.

As for equal blocks (planner/host_options/location_costs.py), a location is two counts, of HOST and
of OPTIMIZER layers, in the order of the model. Every layer fills communication groups of one size
by itself, so that bytes and seconds of a run of layers add up over its groups. Equal layers of one
rank share groups.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from parplan.costmodels.chunks.chunk_layout import block_tensors, first_tensors, groups_after
from parplan.costmodels.chunks.chunk_schedule import UPDATE_BYTES
from parplan.costmodels.chunks.group_size import common_group_size, widest_groups
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import ChunkCommunication, StateLocation
from parplan.costmodels.layers.chunked_layer import (
    STAGED_CHUNKS,
    BlockCost,
    block_cost,
    gradient_chunks,
    writes_over_parameters,
)
from parplan.costmodels.layers.layer_price import LayerTime
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints
from parplan.planner.host_options.location_costs import LocationCosts, Tensors, once_s
from parplan.planner.host_options.state_locations import counts_of_locations, locations_allowed
from parplan.profiles.models.operator_graph import LayerKey

MOST_COUNTS = 17  # counts of HOST layers, and of OPTIMIZER layers, that a search tries


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """The communication groups that the layers of a rank fill.

    elements   of a group
    after      groups of the first layers of the rank, by their number
    apart      whether every layer begins a group; else equal layers share groups
    of_layer   groups that a pass of each layer needs
    """

    elements: int
    after: Ints
    apart: bool
    of_layer: tuple[int, ...]

    def of_runs(self, first: Ints, end: Ints) -> Ints:
        """Groups of the runs of layers [first, end), each packed from the beginning of a group."""
        return self.after[end] - self.after[first] if self.apart else self.after[end - first]


def sequence_locations(
    keys: Sequence[LayerKey],
    layout: ParallelLayout,
    offload: Collection[Offload],
    price_cache: LayerPriceCache,
    workspace_bytes: float = 0.0,
) -> LocationCosts:
    """Returns the costs of all ways to place the layers of a rank that chunks hold.

    keys               the classes of these layers in the order of the model, at least one
    workspace_bytes    least temporaries of the largest pass; they are free again before gradients
                       get memory of their own
    """
    tensors = {key: _tensors(key, layout, price_cache) for key in dict.fromkeys(keys)}
    groups = _groups([tensors[key] for key in keys], layout.mesh.dp, price_cache)
    times = [_time(key, layout, price_cache) for key in keys]
    units = {
        location: _unit(location, groups.elements, times[0], layout, price_cache)
        for location in locations_allowed(offload)
    }
    passes = list(zip(keys, groups.of_layer, strict=True))
    gathered_s = sum(
        _gathered_s(key, count * groups.elements, layout, price_cache) for key, count in passes
    )
    size, chunk = len(keys), groups.elements // layout.mesh.dp
    host, optimizer = tried_counts(size, units)
    ends = size - host
    filled = {
        StateLocation.HOST: groups.of_runs(ends, np.full_like(ends, size)),
        StateLocation.OPTIMIZER: groups.of_runs(ends - optimizer, ends),
        StateLocation.DEVICE: groups.of_runs(np.zeros_like(ends), ends - optimizer),
    }
    counts = {location: filled[location].astype(np.float64) for location in units}

    def summed(name: str) -> Array:
        values = [counts[each] * _value(cost, name) for each, cost in units.items()]
        return np.asarray(np.sum(values, axis=0))

    sizes = [(sum(tensors[key]), count * chunk) for key, count in passes]

    def largest_pass(*, on_host: bool) -> float:
        beside = partial(_pass_bytes, on_host, layout, price_cache, workspace_bytes)
        return max(beside(*each) for each in sizes)

    width = price_cache.training.precision.num_bytes
    gradient = price_cache.training.gradient_precision.num_bytes
    largest = max(groups.of_layer)
    has_host = (host > 0).astype(np.float64)
    return LocationCosts(
        host=host,
        optimizer=optimizer,
        always_bytes=summed("device"),
        working_bytes=np.where(host > 0, largest_pass(on_host=True), largest_pass(on_host=False)),
        update_bytes=UPDATE_BYTES * chunk * (filled[StateLocation.DEVICE] > 0).astype(np.float64),
        host_bytes=summed("host") + STAGED_CHUNKS * gradient * chunk * has_host,
        parts=filled[StateLocation.HOST].astype(np.float64),
        running=float(largest),
        block_bytes=float(width * chunk),
        ahead_bytes=largest * chunk * (width + gradient) * has_host,
        gathered_s=np.full(len(host), gathered_s),
        fetch_s=summed("fetch_s"),
        send_s=summed("send_s"),
        added_s=summed("added_s"),
        once_s=once_s(counts, units, sum(t.backward_s for t in times) / groups.after[-1]),
    )


def _time(key: LayerKey, layout: ParallelLayout, price_cache: LayerPriceCache) -> LayerTime:
    own = price_cache.own_sharding(key, layout.sharding)
    return price_cache.layer_time(key, layout.micro_batch_size, own)


def _unit(
    location: StateLocation,
    elements: int,
    time: LayerTime,
    layout: ParallelLayout,
    price_cache: LayerPriceCache,
) -> BlockCost:
    """Returns the cost of one communication group, whose bytes and copies do not depend on time."""
    training = price_cache.training
    return block_cost(
        location,
        elements,
        time,
        mesh=layout.mesh,
        in_parameters=writes_over_parameters(training, layout.num_micro_batches),
        machine=price_cache.machine,
        training=training,
    )


def _pass_bytes(
    on_host: bool,
    layout: ParallelLayout,
    price_cache: LayerPriceCache,
    workspace_bytes: float,
    made: int,
    own: int,
) -> float:
    """Bytes that a layer's pass needs beside states that stay, activations and workspace.

    They are its gathered parameters, its gradients in autograd, and those in chunks, which come
    after the workspace is free.

    made, own    elements of its tensors, and of the rank's chunks that hold them
    on_host      some chunks are copied to the device
    """
    training, ranks = price_cache.training, layout.mesh.dp
    width = training.precision.num_bytes
    gradient = training.gradient_precision.num_bytes
    if writes_over_parameters(training, layout.num_micro_batches):
        gradient = 0
    several = ranks > 1
    gathered = ranks * own * width if several else 0.0
    at_once = gradient_chunks(ranks, price_cache.chunking.communication)
    single = price_cache.chunking.communication is ChunkCommunication.SINGLE
    if single and several and on_host:  # the sum goes to the host
        at_once += 1
    fresh = at_once * own * gradient if several or on_host else 0.0
    fetched = own * width if on_host else 0.0
    return width * made + gathered + fetched + max(0.0, fresh - workspace_bytes)


def tried_counts(num_layers: int, allowed: Collection[StateLocation]) -> tuple[Ints, Ints]:
    """Returns the counts of HOST and of OPTIMIZER layers that a search tries.

    They are all counts of few layers. Of more, they are `MOST_COUNTS` host counts at even
    distances, each with as many counts of OPTIMIZER layers, and with all others as such.
    """
    host, optimizer = counts_of_locations(num_layers, allowed)
    if num_layers < MOST_COUNTS:
        return host, optimizer
    some = np.unique(np.linspace(0, num_layers, MOST_COUNTS).round().astype(np.int64))
    full = host + optimizer == num_layers
    tried = np.isin(host, some) & (np.isin(optimizer, some) | full)
    return host[tried], optimizer[tried]


def _tensors(key: LayerKey, layout: ParallelLayout, price_cache: LayerPriceCache) -> Tensors:
    own = price_cache.own_sharding(key, layout.sharding)
    return tuple(tensor.elements for tensor in block_tensors(price_cache.layer(key, 1), own))


def _groups(layers: Sequence[Tensors], ranks: int, price_cache: LayerPriceCache) -> _Groups:
    width = price_cache.training.precision.num_bytes
    elements = common_group_size(layers, ranks, price_cache.machine.cluster, width)
    apart = len(set(layers)) > 1
    if apart:
        of_layer = tuple(len(first_tensors(each, 1, elements)) for each in layers)
        after = np.array([0, *accumulate(of_layer)])
    else:
        widest = widest_groups(layers[0], len(layers), elements, ranks)
        of_layer = (widest,) * len(layers)
        after = np.array(groups_after(layers[0], len(layers), elements, ranks))
    return _Groups(elements=elements, after=after, apart=apart, of_layer=of_layer)


def _gathered_s(
    key: LayerKey, elements: int, layout: ParallelLayout, price_cache: LayerPriceCache
) -> float:
    """Exposed seconds of the collectives of a layer in a micro-batch."""
    cost = price_cache.chunked(
        key,
        StateLocation.DEVICE,
        layout.micro_batch_size,
        layout.mesh,
        price_cache.own_sharding(key, layout.sharding),
        in_parameters=writes_over_parameters(price_cache.training, layout.num_micro_batches),
        elements=elements,
    )
    return cost.forward_s + cost.backward_s


def _value(cost: BlockCost, name: str) -> float:
    """Returns a number of a group's cost, of states their sum."""
    value = getattr(cost, name)
    return float(getattr(value, "total", value))
