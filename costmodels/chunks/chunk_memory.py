"""What a device of a pipeline rank holds whose blocks are in chunks, and what its host holds for it (EQUATIONS O2, O3).

The device's peak is that of the chunk schedule, which knows what is there at every moment; here it is told apart by class:

    states        what is always there: chunks of DEVICE and OPTIMIZER blocks with their padding, embedding and head
    activations   the most that is kept between two actions, as without chunks
    temporaries   the rest of the fullest moment: parameters of HOST blocks, gathered groups, gradients on their way, workspace
"""

from __future__ import annotations

from functools import lru_cache

from parplan.costmodels.chunks.chunk_operations import RankChunks
from parplan.costmodels.chunks.chunk_schedule import rank_chunks
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.state_location import Home
from parplan.costmodels.layers.chunked_layer import (
    STAGED_CHUNKS,
    Chunking,
    sent_precision,
    state_widths,
    times,
)
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.memory.rank_memory import (
    RankMemory,
    communicator_bytes,
    held_bytes,
    rank_activations,
    rank_layers,
    rank_memory,
    sent_bytes,
    usable_bytes,
)
from parplan.costmodels.price_cache import PriceBook
from parplan.costmodels.strategy import Frame, Strategy
from parplan.profiles.models.operator_graph import LayerKind


def budget_bytes(rank: int, mesh: Mesh, book: PriceBook) -> int:
    """What tensors may fill of a device of pipeline rank `rank`: as stated, or what the memory limit leaves beside context,
    communicators and allocator."""
    chunking = book.chunking
    if chunking.device_bytes is not None:
        return chunking.device_bytes[rank] if isinstance(chunking.device_bytes, tuple) else chunking.device_bytes
    limit = book.machine.cluster.device.memory_bytes if chunking.limit_bytes is None else chunking.limit_bytes
    return int(usable_bytes(limit, mesh, book))


def prices_of(frame: Frame, book: PriceBook) -> PriceBook:
    """Those of layers that are in no chunks."""
    return book.outside if frame.chunked else book


def chunks_of_rank(strategy: Strategy, rank: int, book: PriceBook) -> RankChunks:
    """The chunk schedule of a device under the book's eviction and budget. Raises InfeasibleError with the smallest budget."""
    return _chunks_of_rank(strategy, rank, book, book.chunking)


@lru_cache(maxsize=64)
def _chunks_of_rank(strategy: Strategy, rank: int, book: PriceBook, chunking: Chunking) -> RankChunks:
    return rank_chunks(strategy, rank, book, eviction=chunking.eviction, device_bytes=budget_bytes(rank, strategy.frame.mesh, book))


def chunk_states(chunks: RankChunks, book: PriceBook) -> tuple[StateBytes, StateBytes]:
    """The states of all own chunks, padding included, that are always on the device, and those on the host."""
    device = host = StateBytes()
    for group in chunks.groups:
        own = group.layout.num_groups * group.layout.chunk_elements
        widths = state_widths(group.home, book.training, chunks.in_parameters)
        device, host = device + times(widths[0], own), host + times(widths[1], own)
    return device, host


def staging_bytes(chunks: RankChunks, book: PriceBook) -> int:
    """Where gradients of HOST blocks land that the host adds to those before: two chunks."""
    width = sent_precision(book.training, chunks.in_parameters).num_bytes
    return max((STAGED_CHUNKS * width * group.layout.chunk_elements for group in chunks.groups if group.home is Home.HOST), default=0)


def device_memory(strategy: Strategy, rank: int, book: PriceBook) -> RankMemory:
    """Peak bytes of one device of a pipeline rank, by class, its blocks in chunks or not."""
    return chunked_memory(strategy, rank, book) if strategy.frame.chunked else rank_memory(strategy, rank, book)


def chunked_memory(strategy: Strategy, rank: int, book: PriceBook) -> RankMemory:
    """The same of a strategy whose blocks are in chunks. Raises InfeasibleError where the budget is too small."""
    frame, layers, chunks = strategy.frame, rank_layers(strategy, rank), chunks_of_rank(strategy, rank, book)
    kept = rank_activations(strategy, rank, book)
    outside = [
        book.outside.states(choice.kind, frame.mesh, frame.sharding_of(choice), choice.zero)
        for choice in layers if choice.kind is not LayerKind.BLOCK]
    device, host = chunk_states(chunks, book)
    states = sum((layer.states for layer in outside), device)
    activations = sent_bytes(rank, frame, book) + held_bytes(strategy, rank, {choice: float(size.saved) for choice, size in kept.items()})
    beyond = chunks.most_bytes - states.total - activations
    return RankMemory(
        states=states, activations=activations, temporaries=max(0.0, beyond), apart=max(0.0, -beyond),
        allocator_reserve=book.training.stack.allocator_share * chunks.most_bytes + sum(layer.step_copies for layer in outside),
        communicators=communicator_bytes(frame.mesh, book), context=book.machine.cluster.device.context_bytes,
        host=host.total + staging_bytes(chunks, book) + sum(layer.host for layer in outside)
        + held_bytes(strategy, rank, {choice: float(size.host) for choice, size in kept.items()}))
