"""The strategy of a plan and its price today, so that a comparison uses the same prices."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of


@dataclass(frozen=True, slots=True)
class Repriced:
    """A plan with predictions of today, and the strategy and prices behind them."""

    plan: Plan
    strategy: Strategy
    price: StepPrice
    price_cache: PriceCache


def reprice(plan: Plan) -> Repriced:
    """Returns the plan with all predictions computed again. Raises ConfigError."""
    price_cache = prices_of_plan(plan)
    strategy = strategy_of(plan, price_cache)
    price = price_step(strategy, price_cache)
    return Repriced(
        assemble(strategy, price, plan.search, price_cache), strategy, price, price_cache
    )
