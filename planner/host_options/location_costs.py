"""The cost of every way to place the blocks of a rank (EQUATIONS O1, O2, O3, O6).

Chunks of one location are packed from the beginning of a group, so that their bytes depend on a
count of blocks alone. `LocationCosts` has arrays over the ways, exact in the bytes that stay, and
never too low in the bytes that a block needs while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access, ChunkCommunication, StateLocation
from parplan.costmodels.layers.chunk_owners import (
    expert_elements,
    expert_owners,
    own_elements,
)
from parplan.costmodels.layers.chunked_layer import (
    STAGED_CHUNKS,
    BlockCost,
    writes_over_parameters,
)
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints
from parplan.planner.host_options.state_locations import (
    BlockLocations,
    counts_of_locations,
    locations_allowed,
)
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.operator_graph import LayerKind

Tensors = tuple[int, ...]  # elements of a block's tensors on one tensor-parallel rank, in use order


@dataclass(frozen=True, slots=True, kw_only=True)
class LocationCosts:
    """Bytes and seconds of one device by way to place `host` and `optimizer` blocks of a rank.

    always_bytes       states that stay
    working_bytes      bytes beside them that the running block needs
    update_bytes       bytes that the device needs to update a chunk
    host_bytes         host bytes for the device
    parts              HOST blocks; where layers are of several sizes, the chunks that they fill
    running            such parts that the running block needs at once
    block_bytes        parameters of one such part, which could stay on the device
    ahead_bytes        room that lets copies of HOST blocks run beside compute: parameters of the
                       next block, gradients of the last
    gathered_s         exposed collectives of a micro-batch
    fetch_s, send_s    copies of all HOST blocks' parameters in one pass, and of their gradients
    added_s            the host's sum of a micro-batch's gradients with earlier ones
    once_s             seconds after the last backward pass: both updates and copies of OPTIMIZER
                       blocks
    """

    host: Ints
    optimizer: Ints
    always_bytes: Array
    working_bytes: Array
    update_bytes: Array
    host_bytes: Array
    parts: Array
    running: float
    block_bytes: float
    ahead_bytes: Array
    gathered_s: Array
    fetch_s: Array
    send_s: Array
    added_s: Array
    once_s: Array

    def homes(self, index: int) -> BlockLocations:
        return BlockLocations(int(self.host[index]), int(self.optimizer[index]))


def tensors_of(sharding: Sharding, price_cache: PriceCache) -> Tensors:
    """Returns the sizes of a block's tensors, divided by `sharding`."""
    from parplan.costmodels.chunks.chunk_layout import block_tensors

    return tuple(
        tensor.elements for tensor in block_tensors(price_cache.layer(LayerKind.BLOCK, 1), sharding)
    )


def host_share_bytes(cluster: Cluster) -> float:
    """Host bytes for one device: the GPUs of a node have equal shares."""
    return cluster.host_memory_bytes / cluster.gpus_per_node


def block_costs(
    layout: ParallelLayout,
    sharding: Sharding,
    offload: Collection[Offload],
    price_cache: PriceCache,
) -> dict[StateLocation, BlockCost]:
    """Returns the cost of one block without padding, by location that `offload` allows."""
    in_parameters = writes_over_parameters(price_cache.training, layout.num_micro_batches)
    return {
        location: price_cache.chunked(
            LayerKind.BLOCK,
            location,
            layout.micro_batch_size,
            layout.mesh,
            sharding,
            in_parameters=in_parameters,
        )
        for location in locations_allowed(offload)
    }


def once_s(
    counts: Mapping[StateLocation, Array],
    costs: Mapping[StateLocation, BlockCost],
    backward_s: float | None = None,
) -> Array:
    """Seconds after the last backward pass, for `counts` blocks by location.

    They are the updates of host and device, which run at once; parameters return during the host's
    update. Gradients leave under and after the last backward pass.

    backward_s    the backward pass of a block; None hides all gradients under the last backward
                  pass
    """

    def summed(name: str) -> Array:
        total: Array = np.sum(
            [counts[location] * float(getattr(cost, name)) for location, cost in costs.items()],
            axis=0,
        )
        return total

    adam_s = np.maximum(summed("host_adam_s"), summed("device_adam_s"))
    updated_s: Array = np.maximum(adam_s, summed("return_s"))
    if backward_s is None:
        return updated_s
    send_s = summed("send_s")
    hidden_s = np.maximum(send_s, backward_s * sum(counts.values()))
    exposed_s: Array = np.maximum(0.0, summed("leave_s") + send_s - hidden_s)
    return updated_s + exposed_s


def location_costs(
    tensors: Tensors,
    num_blocks: int,
    layout: ParallelLayout,
    costs: dict[StateLocation, BlockCost],
    price_cache: PriceCache,
) -> LocationCosts:
    """Returns the costs of all ways to place the `num_blocks` blocks of a rank.

    costs    the cost of one block by location
    """
    from parplan.costmodels.chunks.chunk_schedule import UPDATE_BYTES

    backward_s = price_cache.layer_time(
        LayerKind.BLOCK, layout.micro_batch_size, layout.sharding
    ).backward_s
    width = price_cache.training.precision.num_bytes
    packed = _packed(tensors, num_blocks, layout, price_cache)
    chunk, by_part = packed.chunk, layout.access is Access.OPERATOR
    # blocks with their padding, by number of blocks
    padded = packed.groups * (chunk / packed.own)
    block_bytes = width * chunk * packed.groups[-1] / num_blocks
    per_block = packed.groups[-1] / num_blocks if by_part else 1.0
    block_bytes /= per_block  # of one group
    host, optimizer = counts_of_locations(num_blocks, costs)
    has_host_blocks = (host > 0).astype(np.float64)
    counts = {
        StateLocation.HOST: host,
        StateLocation.OPTIMIZER: optimizer,
        StateLocation.DEVICE: num_blocks - host - optimizer,
    }

    def summed(value: Callable[[BlockCost], float]) -> Array:
        total: Array = np.sum(
            [padded[counts[location]] * value(cost) for location, cost in costs.items()], axis=0
        )
        return total

    return LocationCosts(
        host=host,
        optimizer=optimizer,
        update_bytes=UPDATE_BYTES * chunk * (counts[StateLocation.DEVICE] > 0).astype(np.float64),
        working_bytes=_working_bytes(packed, counts, layout, price_cache),
        always_bytes=summed(lambda cost: cost.device.total),
        host_bytes=summed(lambda cost: cost.host.total)
        + _staging_bytes(chunk, price_cache) * has_host_blocks,
        parts=per_block * host.astype(np.float64),
        running=1.0,
        block_bytes=block_bytes,
        ahead_bytes=block_bytes
        * (1 + price_cache.training.gradient_precision.num_bytes / width)
        * has_host_blocks,
        gathered_s=summed(lambda cost: cost.forward_s + cost.backward_s),
        fetch_s=summed(lambda cost: cost.fetch_s),
        send_s=summed(lambda cost: cost.send_s),
        added_s=summed(lambda cost: cost.added_s),
        once_s=once_s(
            {location: padded[count] for location, count in counts.items()}, costs, backward_s
        ),
    )


def _staging_bytes(chunk_elements: int, price_cache: LayerPriceCache) -> int:
    """Host bytes that receive gradients to be added to earlier ones.

    (costmodels/chunks/chunk_memory.py)
    """
    return STAGED_CHUNKS * price_cache.training.gradient_precision.num_bytes * chunk_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """The groups of a rank's blocks.

    elements    of a group
    chunk       elements of the own chunk of a group
    own         the own part of a block without padding
    groups      of x blocks, by x
    needed      groups that the widest pass needs
    made        elements of the tensors whose gradients it makes
    """

    elements: int
    chunk: int
    own: float
    groups: Array
    needed: int
    made: int


def _packed(
    tensors: Tensors, num_blocks: int, layout: ParallelLayout, price_cache: PriceCache
) -> _Packed:
    from parplan.costmodels.chunks.chunk_layout import first_tensors, groups_after
    from parplan.costmodels.chunks.group_size import (
        common_group_size,
        group_size_of,
        summed_by_part,
        widest_groups,
    )

    ranks, cluster = layout.mesh.dp, price_cache.machine.cluster
    width = price_cache.training.precision.num_bytes
    own = sum(tensors) / ranks
    if expert_owners(layout.mesh):
        return _packed_with_experts(sum(tensors), num_blocks, layout, price_cache)
    if layout.access is Access.BLOCK:
        size = group_size_of(tensors, num_blocks, ranks, cluster, width)
        groups = np.array(groups_after(tensors, num_blocks, size, ranks), dtype=np.float64)
        needed = widest_groups(tensors, num_blocks, size, ranks)
        return _Packed(
            elements=size,
            chunk=size // ranks,
            own=own,
            groups=groups,
            needed=needed,
            made=sum(tensors),
        )
    counts = price_cache.tensors_by_part(LayerKind.BLOCK, layout.access)
    parts = summed_by_part(tensors, counts)
    size = common_group_size([parts] * num_blocks, ranks, cluster, width, by_part=True)
    groups = len(first_tensors(parts, 1, size)) * np.arange(num_blocks + 1, dtype=np.float64)
    return _Packed(
        elements=size, chunk=size // ranks, own=own, groups=groups, needed=1, made=max(parts)
    )


def _packed_with_experts(
    made: int, num_blocks: int, layout: ParallelLayout, price_cache: PriceCache
) -> _Packed:
    """Returns groups of a block each, whose experts have owners of their own."""
    from parplan.costmodels.chunks.chunk_layout import ExpertGroup
    from parplan.costmodels.chunks.group_size import expert_group_size

    mesh = layout.mesh
    experts = expert_elements(price_cache.layer(LayerKind.BLOCK, 1), layout.sharding, mesh)
    size = expert_group_size([ExpertGroup(made, experts)], mesh.dp, expert_owners(mesh))
    return _Packed(
        elements=size.elements,
        chunk=own_elements(size.elements, size.experts, mesh),
        own=own_elements(made, experts, mesh),
        groups=np.arange(num_blocks + 1, dtype=np.float64),
        needed=1,
        made=made,
    )


def _working_bytes(
    packed: _Packed,
    counts: dict[StateLocation, Ints],
    layout: ParallelLayout,
    price_cache: PriceCache,
) -> Array:
    """Upper bound of the widest pass's bytes beside the states that stay and its activations.

    They include its gradients in autograd (costmodels/chunks/slots.py). With several ranks: its
    gathered groups of parameters and of gradients, and the own chunks of a HOST block that are
    gathered. With one rank: the chunks of HOST blocks, in place.
    """
    ranks = layout.mesh.dp
    width = price_cache.training.precision.num_bytes
    in_parameters = writes_over_parameters(price_cache.training, layout.num_micro_batches)
    gradient = 0 if in_parameters else price_cache.training.gradient_precision.num_bytes
    gathered, chunks = packed.needed * packed.elements, packed.needed * packed.chunk
    communication = price_cache.chunking.communication
    single = communication is ChunkCommunication.SINGLE
    fresh = gradient * (chunks if single else gathered)
    has_host_blocks = (counts[StateLocation.HOST] > 0).astype(np.float64)
    kept = gradient if single else 0  # the sum, for the host
    if ranks > 1:
        working = gathered * width + fresh + chunks * (width + kept) * has_host_blocks
    else:
        working = chunks * (width + gradient) * has_host_blocks
    return width * packed.made + working
