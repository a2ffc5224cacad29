"""The chunks of a plan (EQUATIONS O): what its file says of them, and the schedule that it stands for.

The file has homes, groups, budgets and predicted bytes. The schedule is made again from them: the same plan, the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from costmodels.book import PriceBook
from costmodels.chunks.held import rank_chunks
from costmodels.chunks.home import Eviction
from costmodels.chunks.schedule import RankChunks
from costmodels.mesh import Mesh
from costmodels.occupancy import usable_bytes
from costmodels.strategy import Strategy
from planner.plan import ChunkGroup, ChunkRank, Chunks, Plan
from planner.reread import book_of, layers_of, strategy_of
from profiles.errors import ConfigError
from profiles.provenance import Kind

DIGITS = 6  # of a utilisation
_AMPLE = 2**62


def budget_bytes(mesh: Mesh, book: PriceBook) -> int:
    """What tensors may fill of a device: as stated, or what the memory limit leaves beside context, communicators and allocator."""
    chunking = book.chunking
    if chunking.device_bytes is not None:
        return chunking.device_bytes
    limit = book.machine.cluster.device.memory_bytes if chunking.limit_bytes is None else chunking.limit_bytes
    return int(usable_bytes(limit, mesh, book))


def chunks_of(strategy: Strategy, book: PriceBook, *, eviction: Eviction, device_bytes: int) -> Chunks:
    """The section of the plan file for a strategy whose blocks are in chunks. Raises InfeasibleError with the smallest budget."""
    ranks = range(strategy.frame.mesh.pp)
    found = [rank_chunks(strategy, rank, book, eviction=eviction, device_bytes=device_bytes) for rank in ranks]
    return Chunks(eviction=eviction, groups=tuple(_groups(found)), ranks=tuple(_rank(stage, own) for stage, own in enumerate(found)))


def _groups(ranks: Sequence[RankChunks]) -> Iterator[ChunkGroup]:
    for stage, own in enumerate(ranks):
        for group in own.groups:
            layout = group.layout
            yield ChunkGroup(
                stage=stage, home=group.home, chunk_elements=layout.chunk_elements, num_chunks=layout.num_chunks,
                utilisation=round(layout.utilisation, DIGITS))


def _rank(stage: int, own: RankChunks) -> ChunkRank:
    return ChunkRank(
        stage=stage, device_bytes=own.device_bytes, smallest_bytes=own.smallest_bytes, in_bytes=own.in_bytes, out_bytes=own.out_bytes,
        kind=Kind.ANALYTIC)


def busiest_rank(plan: Plan) -> int:
    """The pipeline rank whose devices move most in a step; 0 where the plan has no chunks."""
    return max(plan.chunks.ranks, key=lambda rank: rank.in_bytes + rank.out_bytes).stage if plan.chunks else 0


def rechunked(plan: Plan) -> Plan:
    """A plan with chunks whose layers or sizes were changed, with the chunks of those, in the smallest budget. Raises ConfigError."""
    assert plan.chunks is not None, "it has chunks"
    book, eviction = book_of(plan), plan.chunks.eviction
    strategy = layers_of(plan, book)
    ample = chunks_of(strategy, book, eviction=eviction, device_bytes=_AMPLE)
    smallest = max(rank.smallest_bytes for rank in ample.ranks)
    return replace(plan, chunks=chunks_of(strategy, book, eviction=eviction, device_bytes=smallest))


def rank_chunks_of(plan: Plan, pipeline_rank: int) -> RankChunks:
    """The chunk schedule of one pipeline rank of a plan, made again.

    Raises ConfigError where the plan has no chunks, or others than its layers give; InfeasibleError where its budget is too small.
    """
    if plan.chunks is None:
        raise ConfigError("the plan has no chunks", hint="make one with: plan estimate --offload optimizer,parameters")
    if not 0 <= pipeline_rank < plan.mesh.pp:
        raise ConfigError(f"pipeline rank {pipeline_rank}: the plan has 0 to {plan.mesh.pp - 1}", hint="choose one of them")
    book = book_of(plan)
    found = rank_chunks(
        strategy_of(plan, book), pipeline_rank, book, eviction=plan.chunks.eviction,
        device_bytes=plan.chunks.ranks[pipeline_rank].device_bytes)
    stated = (group for group in plan.chunks.groups if group.stage == pipeline_rank)
    for group, own in zip(stated, found.groups, strict=True):
        _require_same(group, own.layout.chunk_elements, own.layout.num_chunks)
    return found


def _require_same(group: ChunkGroup, chunk_elements: int, num_chunks: int) -> None:
    """Raises ConfigError where a group of the file is not what its blocks fill: states on disk lie as it says."""
    if (group.chunk_elements, group.num_chunks) != (chunk_elements, num_chunks):
        raise ConfigError(
            f"chunks.groups: stage {group.stage}, home {group.home} has {group.num_chunks} chunks of {group.chunk_elements} elements, "
            f"its blocks fill {num_chunks} of {chunk_elements}", hint="make the plan again")
