"""The integer program of a layer certifies the layers of a plan (EQUATIONS I2).

The catalogue fills a search with the fronts of a walk over the operators. For every division of the
operators of a block, of the embedding and of the head that a plan has, the program of the same
choices says whether any other division, or recompute that is allowed, is faster without more saved
bytes and without a larger workspace. A layer whose operators have one way to run each needs no
program.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from parplan.costmodels.layers.recompute import RecomputedOperators
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.planner.layer_options.catalogue import Catalogue
from parplan.planner.layer_options.layer_problem import LayerProblem
from parplan.planner.layer_options.layer_program import LayerProgram
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import strategy_of
from parplan.planner.plan.prediction import LayerProof, Status
from parplan.planner.request import SolverName
from parplan.planner.search.search_results import SearchResult
from parplan.planner.search.search_session import DescribedPrices, SearchSession
from parplan.planner.solver import ProgramCount, Unsolved, count_programs, counted_programs
from parplan.profiles.errors import SolverError
from parplan.profiles.models.operator_graph import LayerKey

NO_FASTER = 1e-6  # relative, against another order of summation


def with_layer_proof(result: SearchResult, session: SearchSession) -> SearchResult:
    """Returns the result of a search that ran to its end with the proof of its plan's layers.

    The proof is of described models; the shards of a traced module have lists of a front alone.
    """
    prices, plan = session.prices, result.plan
    finished = plan.search.status is Status.OPTIMAL and not session.deadline.is_over
    if not isinstance(prices, DescribedPrices) or not finished:
        return result
    if result.strategy.layout.pools:  # the proof is of one device
        return result
    assert isinstance(plan, Plan), "the model is described"
    try:
        proof = layer_proof(
            strategy_of(plan, prices.price_cache),
            prices.table.catalogue,
            session.options.solver,
            session.solver_limit_s(),
        )
    except (Unsolved, SolverError):  # the plan stands without a proof of its layers
        return result
    return replace(result, plan=replace(plan, search=replace(plan.search, layers=proof)))


def layer_proof(
    strategy: Strategy, catalogue: Catalogue, solver: SolverName, time_limit_s: float
) -> LayerProof | None:
    """Returns the proof of a strategy's layers, None where no operator has a choice.

    Raises SolverError, and Unsolved where the solver's time is over.
    """
    layout = strategy.layout
    choices = dict.fromkeys(
        (choice.kind, layout.sharding_of(choice), choice.recompute)
        for stage in strategy.stages
        for choice in stage
        if _may_be_certified(choice, strategy)
    )
    b = layout.micro_batch_size
    gains: list[float] = []
    for layer in choices:
        gains_of_layer, count = catalogue.price_cache.once(
            ("layer proof", b, layer, solver),
            partial(_counted_gains, b, layer, catalogue, solver, time_limit_s),
        )
        gains += gains_of_layer
        count_programs(count)
    return LayerProof(programs=len(gains), gap=round(max(gains), 6)) if gains else None


def _counted_gains(
    micro_batch_size: int,
    layer: tuple[LayerKey, Sharding, RecomputedOperators],
    catalogue: Catalogue,
    solver: SolverName,
    time_limit_s: float,
) -> tuple[list[float], ProgramCount]:
    with counted_programs(apart=True) as count:
        return _gains(micro_batch_size, layer, catalogue, solver, time_limit_s), count


def _gains(
    micro_batch_size: int,
    layer: tuple[LayerKey, Sharding, RecomputedOperators],
    catalogue: Catalogue,
    solver: SolverName,
    time_limit_s: float,
) -> list[float]:
    """Returns by program of a layer the share by which the best alternative is faster."""
    kind, sharding, recompute = layer
    priced = kind, micro_batch_size, sharding, recompute
    time_s = catalogue.price_cache.layer_time(*priced).total_s
    size = catalogue.price_cache.activations(*priced)
    gains = []
    for alternatives in catalogue.alternatives(micro_batch_size, sharding, kind.role):
        if _has_choices(alternatives):
            faster = LayerProgram(alternatives).fastest_beside(
                size.saved, size.workspace, solver, time_limit_s
            )
            gain = 1 - faster.launched_s / time_s if faster else 0.0
            gains.append(gain if gain > NO_FASTER else 0.0)
    return gains


def _may_be_certified(choice: LayerChoice, strategy: Strategy) -> bool:
    """Returns whether a layer's price is that of its operators one by one, all on the device."""
    layout = strategy.layout
    return not choice.on_host and not layout.tp_overlap


def _has_choices(problem: LayerProblem) -> bool:
    return all(problem.options) and any(len(options) > 1 for options in problem.options)
