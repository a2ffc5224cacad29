"""What it costs to give the blocks of a rank homes, of every way to do so at once (EQUATIONS O1,
O2, O3, O6).

Chunks of one home are packed from a beginning of their own, so that their bytes depend on a count
of blocks alone: `LocationCosts` has arrays over the homes, exact in what is always there, and never
too low in what a block needs while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from parplan.costmodels.chunks.chunk_layout import block_tensors, groups_after
from parplan.costmodels.chunks.chunk_schedule import UPDATE_BYTES
from parplan.costmodels.chunks.group_size import group_size_of, widest_groups
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.chunked_layer import (
    STAGED_CHUNKS,
    BlockCost,
    writes_over_parameters,
)
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
    """By way to give the blocks of a rank homes, `host` and `optimizer` blocks; bytes and seconds
    of one device.

    always_bytes, working_bytes   states that stay, and what the block that runs needs beside them
    update_bytes                  what the device needs to update a chunk
    host_bytes                    what the host keeps for the device
    block_bytes                   parameters of one HOST block that could stay on the device
    ahead_bytes                   with which copies of HOST blocks run beside compute: the
                                  parameters of the next, the gradients of the last
    gathered_s                    collectives of a micro-batch, what compute does not hide
    fetch_s, send_s               copies of all HOST blocks' parameters in one pass, and of their
                                  gradients
    added_s                       the host adds the gradients of a micro-batch to those before
    once_s                        after the last backward pass: what both updates and copies of
                                  OPTIMIZER blocks take
    """

    host: Ints
    optimizer: Ints
    always_bytes: Array
    working_bytes: Array
    update_bytes: Array
    host_bytes: Array
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
    """The sizes of a block's tensors, divided as `sharding` does."""
    return tuple(
        tensor.elements for tensor in block_tensors(price_cache.layer(LayerKind.BLOCK, 1), sharding)
    )


def host_share_bytes(cluster: Cluster) -> float:
    """What the host may hold for one device: the GPUs of a node have equal shares."""
    return cluster.host_memory_bytes / cluster.gpus_per_node


def block_costs(
    layout: ParallelLayout,
    sharding: Sharding,
    offload: Collection[Offload],
    price_cache: PriceCache,
) -> dict[StateLocation, BlockCost]:
    """What one block costs by home that `offload` allows, without padding."""
    in_parameters = writes_over_parameters(price_cache.training, layout.num_micro_batches)
    return {
        home: price_cache.chunked(
            home, layout.micro_batch_size, layout.mesh, sharding, in_parameters=in_parameters
        )
        for home in locations_allowed(offload)
    }


def once_s(
    counts: Mapping[StateLocation, Array],
    costs: Mapping[StateLocation, BlockCost],
    backward_s: float | None = None,
) -> Array:
    """Seconds after the last backward pass, of `counts` blocks by home: the updates of host and
    device, which run at once.

    Parameters return as the host goes on. Gradients leave under the last backward pass, of
    `backward_s` a block, and behind it: None for all under it.
    """

    def summed(name: str) -> Array:
        found: Array = np.sum(
            [counts[home] * float(getattr(cost, name)) for home, cost in costs.items()], axis=0
        )
        return found

    updated_s = np.maximum(
        np.maximum(summed("host_adam_s"), summed("device_adam_s")), summed("return_s")
    )
    if backward_s is None:
        return updated_s
    last_s = summed("leave_s") + summed("send_s")
    found: Array = updated_s + np.maximum(
        0.0, last_s - np.maximum(summed("send_s"), backward_s * sum(counts.values()))
    )
    return found


def location_costs(
    tensors: Tensors,
    num_blocks: int,
    layout: ParallelLayout,
    costs: dict[StateLocation, BlockCost],
    price_cache: PriceCache,
) -> LocationCosts:
    """The costs of all ways to give the `num_blocks` blocks of a rank homes that have `costs` for
    one block.
    """
    backward_s = price_cache.layer_time(
        LayerKind.BLOCK, layout.micro_batch_size, layout.sharding
    ).backward_s
    ranks = layout.mesh.dp
    size = group_size_of(
        tensors,
        num_blocks,
        ranks,
        price_cache.machine.cluster,
        price_cache.training.precision.num_bytes,
    )
    width, chunk = price_cache.training.precision.num_bytes, size // ranks
    padded = np.array(groups_after(tensors, num_blocks, size, ranks), dtype=np.float64) * (
        size / sum(tensors)
    )  # in blocks
    block_bytes = width * padded[-1] / num_blocks * sum(tensors) / ranks
    host, optimizer = counts_of_locations(num_blocks, costs)
    counts = {
        StateLocation.HOST: host,
        StateLocation.OPTIMIZER: optimizer,
        StateLocation.DEVICE: num_blocks - host - optimizer,
    }

    def summed(value: Callable[[BlockCost], float]) -> Array:
        found: Array = np.sum(
            [padded[counts[home]] * value(cost) for home, cost in costs.items()], axis=0
        )
        return found

    return LocationCosts(
        host=host,
        optimizer=optimizer,
        update_bytes=UPDATE_BYTES * chunk * (counts[StateLocation.DEVICE] > 0).astype(np.float64),
        working_bytes=_working_bytes(tensors, num_blocks, size, counts, layout, price_cache),
        always_bytes=summed(lambda cost: cost.device.total),
        host_bytes=summed(lambda cost: cost.host.total)
        + _staging_bytes(chunk, price_cache) * (host > 0),
        block_bytes=block_bytes,
        ahead_bytes=block_bytes
        * (1 + price_cache.training.gradient_precision.num_bytes / width)
        * (host > 0),
        gathered_s=summed(lambda cost: cost.forward_s + cost.backward_s),
        fetch_s=summed(lambda cost: cost.fetch_s),
        send_s=summed(lambda cost: cost.send_s),
        added_s=summed(lambda cost: cost.added_s),
        once_s=once_s({home: padded[count] for home, count in counts.items()}, costs, backward_s),
    )


def _staging_bytes(chunk_elements: int, price_cache: PriceCache) -> int:
    """On the host, where gradients land that are added to those before
    (costmodels/chunks/chunk_memory.py).
    """
    return STAGED_CHUNKS * price_cache.training.gradient_precision.num_bytes * chunk_elements


def _working_bytes(
    tensors: Tensors,
    num_blocks: int,
    group_elements: int,
    counts: dict[StateLocation, Ints],
    layout: ParallelLayout,
    price_cache: PriceCache,
) -> Array:
    """What the widest block needs at most beside the states that stay and its activations
    (costmodels/chunks/slots.py).

    Its gradients as autograd makes them. Of several ranks its gathered groups of parameters and of
    gradients, and of a HOST block the own chunks that are gathered; of one rank, of HOST blocks
    alone, its chunks in place.
    """
    ranks, width = layout.mesh.dp, price_cache.training.precision.num_bytes
    in_parameters = writes_over_parameters(price_cache.training, layout.num_micro_batches)
    gradient = 0 if in_parameters else price_cache.training.gradient_precision.num_bytes
    gathered = widest_groups(tensors, num_blocks, group_elements, ranks) * group_elements
    own = gathered // ranks
    away = (counts[StateLocation.HOST] > 0).astype(np.float64)
    return width * sum(tensors) + (
        gathered * (width + gradient) + own * width * away
        if ranks > 1
        else own * (width + gradient) * away
    )
