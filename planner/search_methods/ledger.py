"""The ledger of a search method: it prices points, and keeps the best with its CPU time.

Every method pays for its prices here, so that all have one price: the memory of each device and the
simulated step that `costmodels/step.py` gives for every plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from parplan.costmodels.stage_costs import step_costs
from parplan.costmodels.step import simulated_step_s
from parplan.costmodels.strategy import Strategy
from parplan.planner.baselines.optimum import fits
from parplan.planner.deadline import cpu_s
from parplan.planner.search_methods.method_space import MethodSpace, Point


class BudgetSpent(Exception):  # noqa: N818 - not an error: the method ends with its best so far
    """The CPU-seconds of a method are over."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """A new best step of a method, and the CPU-seconds until it was found."""

    cpu_s: float
    step_s: float


class Ledger:
    """Prices of one run of a method, and its best strategy within `budget_s` CPU-seconds.

    priced    the number of points that the method asked for
    """

    def __init__(self, space: MethodSpace, started_s: float, budget_s: float) -> None:
        self.space = space
        self.started_s, self.ends_s = started_s, started_s + budget_s
        self.best: Strategy | None = None
        self.step_s = inf
        self.priced = 0
        self.bound_s: float | None = None
        self.trace: list[Improvement] = []

    def check(self) -> None:
        """Raises BudgetSpent at the end of the budget."""
        if cpu_s() >= self.ends_s:
            raise BudgetSpent

    def point_s(self, point: Point) -> float:
        """Seconds of the step of a point, infinite where it does not fit. Raises BudgetSpent."""
        self.check()
        self.priced += 1
        strategy = self.space.strategy(point)
        if not fits(strategy, self.space.price_cache, self.space.limit_bytes):
            return inf
        return self.enter(strategy)

    def enter(self, strategy: Strategy) -> float:
        """Enters a strategy that fits, and returns the seconds of its step."""
        price_cache = self.space.price_cache
        step_s = simulated_step_s(strategy, step_costs(strategy, price_cache))
        if step_s < self.step_s:
            self.best, self.step_s = strategy, step_s
            self.trace.append(Improvement(cpu_s() - self.started_s, step_s))
        return step_s
