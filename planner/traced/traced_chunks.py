"""The chunks of a traced plan: the schedule of each pipeline rank, and smaller budgets."""

from __future__ import annotations

from dataclasses import replace

from parplan.costmodels.chunks.chunk_layout import SizedTensor
from parplan.costmodels.chunks.chunk_operations import ChunkedBlocks, RankChunks
from parplan.costmodels.chunks.measured_bytes import ChunkScheduler
from parplan.planner.plan.plan_chunks import smallest_bytes
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.traced_strategy import PricedModule, planned_strategy, priced_module
from parplan.profiles.models.traced_model import TracedModel


def chunk_schedules(priced: PricedModule) -> tuple[RankChunks, ...]:
    """Returns the chunk schedule of each pipeline rank, none for a plan without chunks.

    Tensors are named by shard and by parameter of the module: `block3.encoder.0.weight` of shard 3.
    """
    return tuple(scheduler.planned() for scheduler in chunk_schedulers(priced))


def chunk_schedulers(priced: PricedModule) -> tuple[ChunkScheduler, ...]:
    """Returns what makes the schedules of `chunk_schedules`, also for measured memory."""

    def named(schedule: RankChunks) -> RankChunks:
        groups = (_named(group, priced.price_cache) for group in schedule.groups)
        return replace(schedule, groups=tuple(groups))

    if priced.plan.chunks is None:
        return ()
    return tuple(
        ChunkScheduler(
            strategy=priced.strategy, rank=rank, price_cache=priced.price_cache, named=named
        )
        for rank in range(priced.plan.mesh.pp)
    )


def _named(group: ChunkedBlocks, price_cache: ShardPriceCache) -> ChunkedBlocks:
    """Returns the group with the module's names of parameters, which prices know by number."""
    layout = group.chunk_layout
    counts = zip(group.blocks, layout.counts, strict=True)
    shards = (shard for shard, count in counts for _ in range(count))
    tensors = tuple(
        SizedTensor(f"block{shard}.{_name(tensor, shard, price_cache)}", tensor.elements)
        for shard, tensor in zip(shards, layout.tensors, strict=True)
    )
    return replace(group, chunk_layout=replace(layout, tensors=tensors))


def _name(tensor: SizedTensor, shard: int, price_cache: ShardPriceCache) -> str:
    number = int(tensor.name.rpartition(".")[2])
    return price_cache.classes.names[shard].parameters[number]


def in_smallest_budget(plan: TracedPlan, model: TracedModel) -> PricedModule:
    """Returns a changed plan with its chunks in the smallest budget, for a trace of its module.

    Raises ConfigError as `reprice_traced` does.
    """
    strategy, price_cache = planned_strategy(plan, model)
    smallest = replace(price_cache.chunking, device_bytes=smallest_bytes(strategy, price_cache))
    return priced_module(strategy, price_cache.within(smallest), plan.search)
