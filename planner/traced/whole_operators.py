"""The operators of a traced module that every tensor-parallel rank computes whole, with reasons."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.planner.layer_options.traced_shardings import replicated_operators
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.traced.shard_price_cache import ShardPriceCache


@dataclass(frozen=True, slots=True)
class WholeOperator:
    """An operator that multiplies or looks up and is not divided.

    shard       name of the first shard of its class
    num_shards  number of the shards that are alike
    """

    shard: str
    num_shards: int
    operator: str
    reason: str


def whole_operators(plan: TracedPlan, price_cache: ShardPriceCache) -> tuple[WholeOperator, ...]:
    """Returns the operators that stay whole in a plan with tensor parallelism, none at tp 1."""
    if plan.mesh.tp == 1:
        return ()
    sharding, model = layout_of(plan).sharding, price_cache.sharded.model
    whole: list[WholeOperator] = []
    for number, first in enumerate(price_cache.classes.firsts):
        key = price_cache.key(first, first)
        layer = price_cache.layer(key, model.micro_batch_size)
        alike = price_cache.classes.of.count(number)
        whole += (
            WholeOperator(plan.shards[first].name, alike, name, reason)
            for name, reason in replicated_operators(layer, price_cache.own_sharding(key, sharding))
        )
    return tuple(whole)
