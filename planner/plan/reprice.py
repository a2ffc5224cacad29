"""The strategy of a plan and its price today, so that a comparison uses the same prices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.machines.off_speed import SpeedFactors, cluster_at

P = TypeVar("P", bound=AnyPlan)
C = TypeVar("C", bound=LayerPriceCache)


@dataclass(frozen=True, slots=True)
class Repriced(Generic[P, C]):
    """A plan with predictions of today, and the strategy and prices behind them."""

    plan: P
    strategy: Strategy
    price: StepPrice
    price_cache: C


def reprice(plan: Plan) -> Repriced[Plan, PriceCache]:
    """Returns the plan with all predictions computed again. Raises ConfigError."""
    price_cache = prices_of_plan(plan)
    strategy = strategy_of(plan, price_cache)
    price = price_step(strategy, price_cache)
    return Repriced(
        assemble(strategy, price, plan.search, price_cache), strategy, price, price_cache
    )


def priced_at(plan: Plan, factors: SpeedFactors) -> float:
    """Returns the seconds of a plan's step on its machine with other speeds. Raises ConfigError."""
    there = replace(plan, cluster=cluster_at(plan.cluster, factors))
    price_cache = prices_of_plan(there)
    return price_step(strategy_of(there, price_cache), price_cache).step_s
