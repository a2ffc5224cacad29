"""Peak memory of a device whose blocks are in chunks, and its host's bytes (EQUATIONS O2, O3).

The peak is that of the chunk schedule, which counts every moment. It is reported by class:

    states        bytes that stay: chunks of DEVICE and OPTIMIZER blocks with their padding,
                  embedding and head
    activations   most saved bytes between two actions, as without chunks
    temporaries   the rest of the peak: parameters of HOST blocks, gathered groups, gradients in
                  transit, workspace
"""

from __future__ import annotations

from functools import lru_cache

from parplan.costmodels.chunks.chunk_operations import RankChunks
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.chunked_layer import (
    STAGED_CHUNKS,
    Chunking,
    sent_precision,
    state_widths,
    states_of_elements,
)
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.memory.rank_memory import (
    RankMemory,
    besides_bytes,
    communicator_bytes,
    held_bytes,
    rank_activations,
    rank_layers,
    rank_memory,
    sent_bytes,
    usable_bytes,
)
from parplan.costmodels.strategy import ParallelLayout, Strategy, in_chunks


def budget_bytes(rank: int, mesh: Mesh, price_cache: LayerPriceCache) -> int:
    """Bytes that tensors may fill on a device of pipeline rank `rank`.

    The budget is the stated one, or the memory limit less context, communicators and allocator.
    """
    chunking = price_cache.chunking
    if chunking.device_bytes is not None:
        return (
            chunking.device_bytes[rank]
            if isinstance(chunking.device_bytes, tuple)
            else chunking.device_bytes
        )
    limit = (
        price_cache.machine.cluster.device.memory_bytes
        if chunking.limit_bytes is None
        else chunking.limit_bytes
    )
    return int(usable_bytes(limit, mesh, price_cache))


def unchunked_prices(layout: ParallelLayout, price_cache: LayerPriceCache) -> LayerPriceCache:
    """Returns the prices of layers that are in no chunks."""
    return price_cache.outside if layout.chunked else price_cache


def chunks_of_rank(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> RankChunks:
    """Returns the chunk schedule of a device under the price cache's eviction and budget.

    Raises InfeasibleError with the smallest budget.
    """
    return _chunks_of_rank(strategy, rank, price_cache, price_cache.chunking)


@lru_cache(maxsize=64)
def _chunks_of_rank(
    strategy: Strategy, rank: int, price_cache: LayerPriceCache, chunking: Chunking
) -> RankChunks:
    from parplan.costmodels.chunks.chunk_schedule import rank_chunks

    return rank_chunks(
        strategy,
        rank,
        price_cache,
        eviction=chunking.eviction,
        device_bytes=budget_bytes(rank, strategy.layout.mesh, price_cache),
    )


def chunk_states(chunks: RankChunks, price_cache: LayerPriceCache) -> tuple[StateBytes, StateBytes]:
    """Returns the states of all own chunks on the device and on the host, with padding.

    The states on the device are those that stay there all step.
    """
    device = StateBytes()
    host = StateBytes()
    for group in chunks.groups:
        elements = group.chunk_layout.num_groups * group.chunk_layout.chunk_elements
        widths = state_widths(group.home, price_cache.training, chunks.in_parameters)
        device += states_of_elements(widths[0], elements)
        host += states_of_elements(widths[1], elements)
    return device, host


def staging_bytes(chunks: RankChunks, price_cache: LayerPriceCache) -> int:
    """Bytes of two chunks, in which the host receives gradients of HOST blocks.

    The host adds them to the gradients of earlier micro-batches.
    """
    width = sent_precision(price_cache.training, chunks.in_parameters).num_bytes
    return max(
        (
            STAGED_CHUNKS * width * group.chunk_layout.chunk_elements
            for group in chunks.groups
            if group.home is StateLocation.HOST
        ),
        default=0,
    )


def device_memory(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> RankMemory:
    """Returns the peak bytes of one device of a pipeline rank by class, with chunks or without."""
    return (
        chunked_memory(strategy, rank, price_cache)
        if strategy.layout.chunked
        else rank_memory(strategy, rank, price_cache)
    )


def chunked_memory(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> RankMemory:
    """Returns the peak bytes of one device by class, for blocks in chunks.

    Raises InfeasibleError if the budget is too small.
    """
    layout = strategy.layout
    chunks = chunks_of_rank(strategy, rank, price_cache)
    saved = rank_activations(strategy, rank, price_cache)
    outside = [
        price_cache.outside.states(
            choice.kind, layout.mesh, layout.sharding_of(choice), choice.zero
        )
        for choice in rank_layers(strategy, rank)
        if not in_chunks(choice, layout)
    ]
    device, host = chunk_states(chunks, price_cache)
    states = sum((layer.states for layer in outside), device)
    activations = sent_bytes(rank, layout, price_cache, strategy.layers_of) + held_bytes(
        strategy,
        rank,
        {choice: float(size.saved) for choice, size in saved.items()},
        besides_bytes(strategy, rank, price_cache),
    )
    beyond = chunks.most_bytes - states.total - activations
    return RankMemory(
        states=states,
        activations=activations,
        temporaries=max(0.0, beyond),
        apart=max(0.0, -beyond),
        allocator_reserve=price_cache.training.stack.allocator_share * chunks.most_bytes
        + sum(layer.step_copies for layer in outside),
        communicators=communicator_bytes(layout.mesh, price_cache),
        context=price_cache.machine.cluster.device.context_bytes,
        host=host.total
        + staging_bytes(chunks, price_cache)
        + sum(layer.host for layer in outside)
        + held_bytes(strategy, rank, {choice: float(size.host) for choice, size in saved.items()}),
    )
