"""Makes the plan of a traced module from a priced strategy."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.step import StepPrice, model_flops_utilization
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.planner.layer_options.traced_shardings import split_plans
from parplan.planner.plan.assemble import (
    breakdown,
    letters,
    memory_of_stages,
    pipeline_of,
    redundancy_of,
    rounded_figures,
    step_kind,
)
from parplan.planner.plan.plan import PLAN_VERSION
from parplan.planner.plan.prediction import Prediction, Quantity, SearchRecord
from parplan.planner.plan.traced_plan import (
    RecomputeList,
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
    cluster = price_cache.machine.cluster
    training = price_cache.training
    kind = step_kind(price)
    flops = price_cache.flops_per_sequence
    speed = training.tokens_per_step / price.step_s / layout.mesh.num_ranks
    used = model_flops_utilization(price.step_s, layout.mesh.num_ranks, price_cache)
    predicted = Prediction(
        step_time_s=Quantity(value=rounded_figures(price.step_s), kind=kind),
        tokens_per_s_per_gpu=Quantity(value=rounded_figures(speed), kind=kind),
        mfu=Quantity(value=rounded_figures(used), kind=kind),
        breakdown=breakdown(price),
        memory_gib=memory_of_stages(price, cluster.device.memory_bytes),
        redundancy_gib=redundancy_of(layout, price),
    )
    return TracedPlan(
        plan_version=PLAN_VERSION,
        module=model.source,
        cluster=cluster,
        training=training,
        mesh=layout.mesh,
        pipeline=pipeline_of(layout),
        traced=TracedSummary(
            name=model.name,
            num_parameters=model.num_parameters,
            num_operators=len(model.operators),
            flops_per_sequence=flops,
            unit=model.unit,
        ),
        shards=shard_plans(sharded, price_cache.classes.of),
        shardings=split_plans_of(price_cache, layout.sharding),
        stages=tuple(
            ShardStage(
                rank=layout.rank_of(stage),
                first=strategy.layers_of(stage)[0],
                end=strategy.layers_of(stage)[1],
                zero=choices[0].zero,
                recompute=tuple(
                    shard
                    for shard, choice in enumerate(choices, strategy.layers_of(stage)[0])
                    if choice.recompute is Recompute.FULL
                ),
                recompute_lists=_recompute_lists(
                    choices, strategy.layers_of(stage)[0], price_cache
                ),
            )
            for stage, choices in enumerate(strategy.stages)
        ),
        predicted=predicted,
        search=record,
    )


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
