"""Calls of the planner with the parts of a request, as most tests have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parplan.planner.candidates import enumeration
from parplan.planner.candidates.enumeration import CandidateSpace
from parplan.planner.deadline import NEVER, Deadline
from parplan.planner.infeasible import shortfall as shortfalls
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints, PlanRequest, SearchOptions
from parplan.planner.search import described_shortfall, estimate, pareto
from parplan.planner.search import find_plan as searches
from parplan.planner.search.estimate import UniformChoices
from parplan.planner.search.pareto import ParetoFront
from parplan.planner.search.price_factory import described_factory
from parplan.planner.traced import plan_traced, traced_prices
from parplan.planner.traced.plan_traced import TracedFactory
from parplan.planner.traced.shards import Cutting
from parplan.profiles.errors import InfeasibleError


def request(
    model: Any,
    cluster: Any,
    training: Any,
    objective: Objective | str = Objective.THROUGHPUT,
    constraints: Constraints | None = None,
    options: SearchOptions | None = None,
) -> PlanRequest[Any]:
    return PlanRequest(
        model=model,
        cluster=cluster,
        training=training,
        objective=Objective(objective),
        constraints=constraints or Constraints(),
        options=options or SearchOptions(),
    )


def timed(
    model: Any, cluster: Any, training: Any, pins: Any, deadline: Deadline
) -> PlanRequest[Any]:
    options = SearchOptions(deadline=deadline)
    return request(model, cluster, training, constraints=pins, options=options)


def find_plan(
    *parts: Any,
    on_progress: Any = None,
    explain: Callable[..., InfeasibleError] = described_shortfall.infeasible_error,
    **choices: Any,
) -> Plan:
    return searches.find_plan(request(*parts, **choices), on_progress, explain)


def find_front(
    *parts: Any,
    num_points: int = pareto.DEFAULT_POINTS,
    on_progress: Any = None,
    on_search: Any = None,
    **choices: Any,
) -> ParetoFront:
    factory = described_factory(request(*parts, **choices))
    return pareto.find_front(factory, num_points, on_progress, on_search)


def enumerate_candidates(
    model: Any, cluster: Any, training: Any, pins: Any, deadline: Deadline = NEVER
) -> CandidateSpace:
    return enumeration.enumerate_candidates(timed(model, cluster, training, pins, deadline))


def least_peak_bytes(
    model: Any, cluster: Any, training: Any, pins: Any, deadline: Deadline = NEVER
) -> float | None:
    return shortfalls.least_peak_bytes(timed(model, cluster, training, pins, deadline))


def smallest_cluster(
    model: Any, cluster: Any, training: Any, pins: Any, limit: float, deadline: Deadline = NEVER
) -> int | None:
    return shortfalls.smallest_cluster(timed(model, cluster, training, pins, deadline), limit)


def shortfall(model: Any, cluster: Any, training: Any, pins: Any, options: Any) -> Any:
    return shortfalls.shortfall(
        request(model, cluster, training, constraints=pins, options=options)
    )


def infeasible_error(
    model: Any, cluster: Any, training: Any, pins: Any, options: Any
) -> InfeasibleError:
    return described_shortfall.infeasible_error(
        request(model, cluster, training, constraints=pins, options=options)
    )


def estimate_plan(
    model: Any,
    cluster: Any,
    training: Any,
    layout: Any,
    *,
    options: SearchOptions | None = None,
    **choices: Any,
) -> Plan:
    return estimate.estimate_plan(
        request(model, cluster, training, options=options), layout, UniformChoices(**choices)
    )


def plan_traced_module(
    *parts: Any, how: Any = None, cross_skips: bool = False, **choices: Any
) -> Any:
    traced = plan_traced.traced_request(request(*parts, **choices))
    return searches.find_best(TracedFactory(traced, how, Cutting(cross_skips=cross_skips))).plan


def find_traced_plan(
    *parts: Any, how: Any = None, cross_skips: bool = False, on_progress: Any = None, **choices: Any
) -> Any:
    factory = TracedFactory(request(*parts, **choices), how, Cutting(cross_skips=cross_skips))
    return searches.find_best(factory, on_progress)


def traced_prices_of(
    sharded: Any, cluster: Any, training: Any, pins: Any, options: Any, how: Any
) -> traced_prices.SequencePrices:
    made = request(sharded.model, cluster, training, constraints=pins, options=options)
    return traced_prices.traced_prices(made, sharded, how)
