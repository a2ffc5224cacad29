"""Makes the plan of a traced module from a priced strategy."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.step import StepPrice
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.planner.layer_options.traced_shardings import split_plans
from parplan.planner.plan.assemble import letters, pipeline_of, prediction_of
from parplan.planner.plan.pipeline_plan import LayerRange
from parplan.planner.plan.plan import PLAN_VERSION
from parplan.planner.plan.plan_chunks import chunks_of
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.plan.traced_plan import (
    RecomputeList,
    ShardHome,
    ShardPlan,
    ShardStage,
    SplitPlan,
    TracedPlan,
    TracedSummary,
)
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import Sharded


def assembled(
    strategy: Strategy, price: StepPrice, record: SearchRecord, price_cache: ShardPriceCache
) -> TracedPlan:
    """Returns the plan of a priced strategy."""
    layout = strategy.layout
    sharded = price_cache.sharded
    model = sharded.model
    return TracedPlan(
        plan_version=PLAN_VERSION,
        module=model.source,
        cluster=price_cache.machine.cluster,
        training=price_cache.training,
        mesh=layout.mesh,
        pipeline=pipeline_of(layout),
        traced=TracedSummary(
            name=model.name,
            num_parameters=model.num_parameters,
            num_operators=len(model.operators),
            flops_per_sequence=price_cache.flops_per_sequence,
            unit=model.unit,
            counted=model.counted,
        ),
        shards=shard_plans(sharded, price_cache.classes.of),
        shardings=split_plans_of(price_cache, layout.sharding),
        stages=tuple(_stage(strategy, index, price_cache) for index in range(len(strategy.stages))),
        predicted=prediction_of(layout, price, price_cache),
        search=record,
        tp_rules=model.tp_rules,
        offload=(Offload.STATES,) if layout.states_on_host else (),
        chunks=chunks_of(strategy, price_cache),
    )


def _stage(strategy: Strategy, index: int, price_cache: ShardPriceCache) -> ShardStage:
    first, end = strategy.layers_of(index)
    choices = strategy.stages[index]
    return ShardStage(
        rank=strategy.layout.rank_of(index),
        layers=(LayerRange(first=first, last=end - 1),),
        zero=choices[0].zero,
        recompute=tuple(
            shard
            for shard, choice in enumerate(choices, first)
            if choice.recompute is Recompute.FULL
        ),
        recompute_lists=_recompute_lists(choices, first, price_cache),
        homes=_homes(choices, first) if strategy.layout.chunked else (),
    )


def _homes(choices: Sequence[LayerChoice], first: int) -> tuple[ShardHome, ...]:
    """Returns the shards in chunks of a stage that begins with shard `first`, by location."""
    shards: dict[StateLocation, list[int]] = {}
    for shard, choice in enumerate(choices, first):
        if choice.kind.in_chunks:
            shards.setdefault(choice.home, []).append(shard)
    return tuple(ShardHome(home=home, shards=tuple(each)) for home, each in shards.items())


def _recompute_lists(
    choices: Sequence[LayerChoice], first: int, price_cache: ShardPriceCache
) -> tuple[RecomputeList, ...]:
    """Returns the recompute lists of a stage that begins with shard `first`."""
    shards: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for shard, choice in enumerate(choices, first):
        if isinstance(choice.recompute, tuple) and choice.recompute:
            places = price_cache.places_of(shard, choice.recompute)
            shards.setdefault((price_cache.classes.of[shard], places), []).append(shard)
    return tuple(
        RecomputeList(shards=tuple(each), places=places) for (_, places), each in shards.items()
    )


def shard_plans(sharded: Sharded, classes: list[int]) -> tuple[ShardPlan, ...]:
    """Returns the shards as the plan file has them; `classes` has the class of each."""
    operators = sharded.model.operators
    return tuple(
        ShardPlan(
            name=each.name,
            layer=letters(number),
            first=each.first,
            end=each.end,
            starts=operators[each.first].operator.name,
            parameters=each.parameters,
        )
        for each, number in zip(sharded.shards, classes, strict=True)
    )


def split_plans_of(
    price_cache: ShardPriceCache, sharding: Sharding
) -> dict[str, tuple[SplitPlan, ...]]:
    """Returns the division of each class of shards over the tensor-parallel ranks."""
    if sharding.tp == 1:
        return {}
    sharded, plans = price_cache.sharded, dict[str, tuple[SplitPlan, ...]]()
    for number, first in enumerate(price_cache.classes.firsts):
        key = price_cache.key(first, first)
        layer = price_cache.layer(key, sharded.model.micro_batch_size)
        own = price_cache.own_sharding(key, sharding)
        plans[letters(number)] = split_plans(
            zip(price_cache.classes.places(first), layer.operators, strict=True), own
        )
    return plans
