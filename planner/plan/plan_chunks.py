"""The chunks of a plan (EQUATIONS O1, O3, O4): their section of the file, and their schedule.

The file has state locations, groups, budgets and predicted bytes. The schedule is computed again
from them; the same plan always gives the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.chunks.chunk_memory import chunks_of_rank
from parplan.costmodels.chunks.chunk_operations import RankChunks
from parplan.costmodels.chunks.measured_bytes import ChunkScheduler
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.strategy import Strategy
from parplan.planner.plan.plan import ChunkGroup, ChunkPlan, ChunkRank, Plan
from parplan.planner.plan.plan_strategy import layers_of, prices_of_plan, strategy_of
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.provenance import Kind

DIGITS = 6  # of a utilisation
_AMPLE = 2**62


def chunks_of(strategy: Strategy, price_cache: LayerPriceCache) -> ChunkPlan | None:
    """Returns the section of the plan file, or None without chunks. Raises InfeasibleError."""
    if not strategy.layout.chunked:
        return None
    ranks = [chunks_of_rank(strategy, rank, price_cache) for rank in range(strategy.layout.mesh.pp)]
    return ChunkPlan(
        eviction=price_cache.chunking.eviction,
        groups=tuple(_groups(ranks)),
        ranks=tuple(_rank(stage, rank_chunks) for stage, rank_chunks in enumerate(ranks)),
        communication=price_cache.chunking.communication,
        access=strategy.layout.access,
    )


def _groups(ranks: Sequence[RankChunks]) -> Iterator[ChunkGroup]:
    for stage, rank_chunks in enumerate(ranks):
        for group in rank_chunks.groups:
            chunk_layout = group.chunk_layout
            yield ChunkGroup(
                stage=stage,
                home=group.home,
                chunk_elements=chunk_layout.chunk_elements,
                num_chunks=chunk_layout.num_chunks,
                utilisation=round(chunk_layout.utilisation, DIGITS),
            )


def _rank(stage: int, rank_chunks: RankChunks) -> ChunkRank:
    return ChunkRank(
        stage=stage,
        device_bytes=rank_chunks.device_bytes,
        smallest_bytes=rank_chunks.smallest_bytes,
        in_bytes=rank_chunks.in_bytes,
        out_bytes=rank_chunks.out_bytes,
        kind=Kind.ANALYTIC,
    )


def busiest_rank(plan: AnyPlan) -> int:
    """Returns the pipeline rank whose devices move the most bytes, 0 without chunks."""
    if plan.chunks is None:
        return 0
    return max(plan.chunks.ranks, key=lambda rank: rank.in_bytes + rank.out_bytes).stage


def rechunked(plan: Plan) -> Plan:
    """Returns a changed plan with its chunks in the smallest budget. Raises ConfigError."""
    assert plan.chunks is not None, "it has chunks"
    price_cache = prices_of_plan(plan)
    strategy = layers_of(plan, price_cache)
    smallest = replace(price_cache.chunking, device_bytes=smallest_bytes(strategy, price_cache))
    return replace(plan, chunks=chunks_of(strategy, price_cache.within(smallest)))


def smallest_bytes(strategy: Strategy, price_cache: LayerPriceCache) -> int:
    """The least bytes of a device with which the chunks of every rank can run."""
    ample = price_cache.within(replace(price_cache.chunking, device_bytes=_AMPLE))
    ranks = range(strategy.layout.mesh.pp)
    return max(chunks_of_rank(strategy, rank, ample).smallest_bytes for rank in ranks)


def require_matching_chunks(plan: Plan) -> None:
    """Raises ConfigError where the groups of chunks are not those that the plan's blocks fill."""
    strategy_of(plan, prices_of_plan(plan))


def rank_chunks_of(plan: Plan, pipeline_rank: int) -> RankChunks:
    """Returns the chunk schedule of one pipeline rank of a plan, computed again.

    Raises ConfigError where the plan has no chunks, or others than its blocks fill; InfeasibleError
    where its budget is too small.
    """
    require_chunks(plan, pipeline_rank)
    price_cache = prices_of_plan(plan)
    return chunks_of_rank(strategy_of(plan, price_cache), pipeline_rank, price_cache)


def chunk_schedulers_of(plan: Plan) -> tuple[ChunkScheduler, ...]:
    """Returns what makes the chunk schedule of every pipeline rank again.

    Raises ConfigError as `rank_chunks_of` does.
    """
    require_chunks(plan)
    price_cache = prices_of_plan(plan)
    strategy = strategy_of(plan, price_cache)
    return tuple(
        ChunkScheduler(strategy=strategy, rank=rank, price_cache=price_cache)
        for rank in range(plan.mesh.pp)
    )


def require_chunks(plan: AnyPlan, pipeline_rank: int = 0) -> None:
    """Raises ConfigError where a plan has no chunks or no such pipeline rank."""
    if plan.chunks is None:
        raise ConfigError(
            "the plan has no chunks",
            hint="make one with: plan estimate --offload optimizer,parameters",
        )
    if not 0 <= pipeline_rank < plan.mesh.pp:
        raise ConfigError(
            f"pipeline rank {pipeline_rank}: the plan has 0 to {plan.mesh.pp - 1}",
            hint="choose one of them",
        )
