"""A plan's strategy and its price today: a comparison needs both sides under the same prices."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.price_cache import PriceBook
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import book_of, strategy_of


@dataclass(frozen=True, slots=True)
class Repriced:
    """A plan with its predictions as they are today, and what they were made of."""

    plan: Plan
    strategy: Strategy
    price: StepPrice
    book: PriceBook


def reprice(plan: Plan) -> Repriced:
    """The plan with every prediction made again; its record of the search stays. Raises ConfigError, as `strategy_of` does."""
    book = book_of(plan)
    strategy = strategy_of(plan, book)
    price = price_step(strategy, book)
    return Repriced(assemble(strategy, price, plan.search, book), strategy, price, book)
