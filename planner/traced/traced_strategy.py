"""A traced plan priced again, and one configuration of a traced module priced by hand.

The strategy of a plan is its stages as the layers of its module. So a module is traced again, its
shards are compared with those of the plan, and the price is that of the search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute, RecomputedOperators
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan_strategy import chunking_of, require_groups
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.plan.reprice import Repriced
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.stage_columns.stage_contents import Range
from parplan.planner.traced.assemble_traced import assembled, shard_plans, split_plans_of
from parplan.planner.traced.shard_classes import ShardClasses
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import Sharded, cut_at
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.traced_model import TracedModel

_AGAIN = "make the plan again: plan --model {}"


PricedModule = Repriced[TracedPlan, ShardPriceCache]


def priced_module(
    strategy: Strategy, price_cache: ShardPriceCache, record: SearchRecord
) -> PricedModule:
    """Returns a strategy with its price and its plan."""
    price_cache = price_cache.with_states(on_host=strategy.layout.states_on_host)
    price = price_step(strategy, price_cache)
    plan = assembled(strategy, price, record, price_cache)
    return Repriced(plan, strategy, price, price_cache)


def reprice_traced(plan: TracedPlan, model: TracedModel) -> PricedModule:
    """Returns a plan with all predictions computed again for a new trace of its module.

    Raises ConfigError where the shards of the trace, the divisions of their operators over the
    tensor-parallel ranks, or the chunks that they fill are not those of the plan.
    """
    strategy, price_cache = planned_strategy(plan, model)
    if plan.chunks is not None:
        require_groups(plan.chunks, strategy, price_cache)
    return priced_module(strategy, price_cache, plan.search)


def planned_strategy(plan: TracedPlan, model: TracedModel) -> tuple[Strategy, ShardPriceCache]:
    """Returns the strategy of a plan for a new trace of its module, and its prices.

    Raises ConfigError as `reprice_traced` does, but for its chunks.
    """
    price_cache = ShardPriceCache(
        _sharded_alike(plan, model), plan.training, machine_for(plan.cluster)
    )
    layout = layout_of(plan)
    if split_plans_of(price_cache, layout.sharding) != dict(plan.shardings):
        raise ConfigError(
            f"shardings: a new trace of {plan.module.text} is divided over tp {plan.mesh.tp} in "
            "another way",
            hint=_AGAIN.format(plan.module.text),
        )
    strategy = strategy_on(
        layout,
        [(stage.first, stage.end) for stage in plan.stages],
        [stage.zero for stage in plan.stages],
        _recompute_of(plan, price_cache),
        price_cache,
    )
    chunking = chunking_of(plan.chunks)
    if chunking is None:
        return strategy, price_cache
    return _with_homes(plan, strategy), price_cache.within(chunking)


def _with_homes(plan: TracedPlan, strategy: Strategy) -> Strategy:
    """Returns the strategy with the state locations of a plan.

    Raises ConfigError where other shards lie in chunks, or the ZeRO stage is not that of chunks.
    """
    zero = 3 if plan.mesh.dp > 1 else 0
    stages = []
    for planned, choices in zip(plan.stages, strategy.stages, strict=True):
        homes = planned.home_of
        in_chunks = [
            shard for shard, choice in enumerate(choices, planned.first) if choice.kind.in_chunks
        ]
        if sorted(homes) != in_chunks or planned.zero != zero:
            raise ConfigError(
                f"stages: with chunks a stage has zero {zero}, and homes for the shards "
                f"{', '.join(map(str, in_chunks))}; this one has zero {planned.zero}, and homes "
                f"for {', '.join(map(str, sorted(homes))) or 'none'}",
                hint=_AGAIN.format(plan.module.text),
            )
        stages.append(
            tuple(
                replace(choice, home=homes[shard]) if shard in homes else choice
                for shard, choice in enumerate(choices, planned.first)
            )
        )
    return replace(strategy, stages=tuple(stages))


def _recompute_of(plan: TracedPlan, price_cache: ShardPriceCache) -> dict[int, RecomputedOperators]:
    """Returns the recompute of each shard that has any."""
    found: dict[int, RecomputedOperators] = {}
    for stage in plan.stages:
        found |= dict.fromkeys(stage.recompute, Recompute.FULL)
        for each in stage.recompute_lists:
            for number in each.shards:
                found[number] = price_cache.operators_at(number, each.places)
    return found


def _sharded_alike(plan: TracedPlan, model: TracedModel) -> Sharded:
    """Returns the model cut where the plan cuts it, in whatever way the plan was cut."""
    sharded = cut_at(model, [each.first for each in plan.shards])
    if sharded is not None and shard_plans(sharded, ShardClasses(sharded).of) == plan.shards:
        return sharded
    raise ConfigError(
        f"shards: a new trace of {plan.module.text} has other shards than the {len(plan.shards)} "
        "of the plan",
        hint=_AGAIN.format(plan.module.text),
    )


def strategy_on(
    layout: ParallelLayout,
    cuts: Sequence[Range],
    zeros: Sequence[int],
    recomputed: Mapping[int, RecomputedOperators],
    price_cache: ShardPriceCache,
) -> Strategy:
    """Returns the strategy with given shards and a ZeRO stage for each virtual stage.

    recomputed: the level or the operators of the shards that run again in the backward pass
    """

    def choice(shard: int, first: int, zero: int) -> LayerChoice:
        key = price_cache.key(shard, first)
        own = price_cache.own_sharding(key, layout.sharding)
        level = recomputed.get(shard, Recompute.NONE)
        return LayerChoice(key, level, zero, own if own != layout.sharding else None)

    return Strategy(
        layout=layout,
        stages=tuple(
            tuple(choice(shard, first, zero) for shard in range(first, end))
            for (first, end), zero in zip(cuts, zeros, strict=True)
        ),
    )


def every_block(price_cache: ShardPriceCache) -> frozenset[int]:
    """The shards that may run again: all but embeddings and the head."""
    return frozenset(
        shard
        for shard in range(price_cache.num_layers)
        if price_cache.key(shard, shard).role is LayerKind.BLOCK
    )
