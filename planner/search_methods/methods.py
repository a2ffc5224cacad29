"""The search methods by name, and a run of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from parplan.costmodels.strategy import Strategy
from parplan.planner.deadline import cpu_deadline, cpu_s
from parplan.planner.plan.prediction import Status
from parplan.planner.request import Request
from parplan.planner.search.find_plan import find_best
from parplan.planner.search.price_factory import described_factory
from parplan.planner.search_methods.climbing import alleviation, greedy
from parplan.planner.search_methods.depth_first import depth_first
from parplan.planner.search_methods.dynamic_program import dynamic_program
from parplan.planner.search_methods.exhaustive import exhaustive
from parplan.planner.search_methods.flat_program import flat_program
from parplan.planner.search_methods.halving import recursive_halving
from parplan.planner.search_methods.ledger import BudgetSpent, Improvement, Ledger
from parplan.planner.search_methods.method_space import MethodSpace
from parplan.planner.search_methods.policy import policy_gradient
from parplan.planner.search_methods.sampling import genetic, mcmc, random_search, tree_search
from parplan.profiles.errors import ConfigError, OutOfTimeError

Method = Callable[[Ledger, Random], None]


def ours(ledger: Ledger, draw: Random) -> None:
    """Runs the search of `plan`, pinned to the space of the methods."""
    request = ledger.space.request.until(cpu_deadline(ledger.ends_s))
    with suppress(OutOfTimeError):
        result = find_best(described_factory(request))
        ledger.enter(result.strategy)
        ledger.bound_s = result.plan.search.bound
        if result.plan.search.status is Status.OPTIMAL:
            return
    raise BudgetSpent


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "ours": ours,
        "flat-program": flat_program,
        "dynamic-program": dynamic_program,
        "recursive-halving": recursive_halving,
        "depth-first": depth_first,
        "alleviation": alleviation,
        "mcmc": mcmc,
        "tree-search": tree_search,
        "genetic": genetic,
        "policy-gradient": policy_gradient,
        "random": random_search,
        "greedy": greedy,
        "exhaustive": exhaustive,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRun:
    """The outcome of one run of a method.

    strategy      the best, None where the method found none that fits
    step_s        seconds of its simulated step, infinite without a strategy
    bound_s       a step that no strategy is below, where the method proves one
    cpu_s         CPU-seconds of the whole run, the space and all prices included
    ended         the method ended by itself, inside its budget
    trace         every improvement
    priced        number of points that were priced
    """

    strategy: Strategy | None
    step_s: float
    bound_s: float | None
    cpu_s: float
    ended: bool
    trace: tuple[Improvement, ...]
    priced: int


def run_method(name: str, request: Request, budget_s: float, seed: int = 0) -> MethodRun:
    """Returns the outcome of a method within `budget_s` CPU-seconds, from an empty price cache.

    Raises ConfigError for an unknown method, and where the space is empty.
    """
    if name not in METHODS:
        raise ConfigError(
            f"the search method {name!r} is unknown", hint=f"choose one of {', '.join(METHODS)}"
        )
    started_s = cpu_s()
    ledger = Ledger(MethodSpace(request), started_s, budget_s)
    ended = True
    try:
        METHODS[name](ledger, Random(seed))
    except BudgetSpent:
        ended = False
    except KeyboardInterrupt:
        if ledger.best is None:
            raise
        ended = False
    return MethodRun(
        strategy=ledger.best,
        step_s=ledger.step_s,
        bound_s=ledger.bound_s,
        cpu_s=cpu_s() - started_s,
        ended=ended,
        trace=tuple(ledger.trace),
        priced=ledger.priced,
    )
