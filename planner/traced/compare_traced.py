"""A traced plan beside simple strategies that any module can have, under the same prices and limit.

They are no systems: data parallelism with one ZeRO stage, and a pipeline of 1F1B whose cuts are at
even times. Each is the fastest of its space that fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.baselines.optimum import fastest, leanest
from parplan.planner.baselines.systems import Baseline
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.request import Constraints, PlanRequest, SearchOptions
from parplan.planner.search.comparison import (
    OURS,
    Comparison,
    ComparisonRow,
    row,
    side,
    side_by_side,
)
from parplan.planner.traced.assemble_traced import assembled
from parplan.planner.traced.estimate_traced import module_prices, uniform_strategies
from parplan.planner.traced.stage_rules import StageRule
from parplan.planner.traced.traced_prices import traced_prices
from parplan.planner.traced.traced_strategy import PricedModule, reprice_traced
from parplan.profiles.errors import ConfigError, unknown_name_error
from parplan.profiles.models.traced_model import TracedModel

_WHOLE = (Recompute.NONE, Recompute.FULL)


@dataclass(frozen=True, slots=True)
class _UniformSpace:
    """The strategies of a baseline: in words, and as the pins of their layouts."""

    what: str
    pins: Constraints
    pipelines: bool = False


def _data_parallel(zero: int) -> _UniformSpace:
    return _UniformSpace(
        f"data parallelism alone with ZeRO {zero}, all blocks recomputed or none, any micro-batch",
        Constraints(pp=(1,), tp=(1,), zero=(zero,), recompute=_WHOLE),
    )


def _pipeline(level: Recompute, recompute: str) -> _UniformSpace:
    return _UniformSpace(
        f"1F1B on stages cut at even times, {recompute}, ZeRO 0, no tensor parallelism, any pp and "
        "micro-batch",
        Constraints(
            tp=(1,),
            zero=(0,),
            recompute=(level,),
            virtual_stages=(1,),
            schedule=(Schedule.ONE_F_ONE_B,),
        ),
        pipelines=True,
    )


_SPACES = {
    **{f"zero-{zero}": _data_parallel(zero) for zero in range(4)},
    "1f1b": _pipeline(Recompute.NONE, "no recompute"),
    "1f1b-recompute": _pipeline(Recompute.FULL, "all blocks recomputed"),
}
ALL = "all"


def traced_baseline_names(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of baselines of a traced module, each once; `all` is every one.

    Raises ConfigError for an unknown name.
    """
    chosen: dict[str, None] = {}
    for name in names:
        if name != ALL and name not in _SPACES:
            raise unknown_name_error("baseline of a traced module", name, (*_SPACES, ALL))
        chosen.update(dict.fromkeys(_SPACES if name == ALL else (name,)))
    return tuple(chosen)


def compare_traced(
    plan: TracedPlan, model: TracedModel, names: Iterable[str], options: SearchOptions
) -> Comparison:
    """Compares `plan`, priced again for a trace of its module, with baselines within the limit.

    Raises ConfigError where the trace does not have the shards of the plan.
    """
    ours = reprice_traced(plan, model)

    def row_of(name: str) -> ComparisonRow:
        baseline = _priced(name, ours, options)
        return row(baseline, partial(assembled, price_cache=ours.price_cache))

    mine = side(OURS, ours.plan, ours.strategy, ours.price)
    return side_by_side(plan, mine, names, row_of, options)


def _priced(name: str, ours: PricedModule, options: SearchOptions) -> Baseline:
    space, plan = _SPACES[name], ours.plan
    sharded = ours.price_cache.sharded
    request = PlanRequest(
        model=sharded.model,
        cluster=plan.cluster,
        training=plan.training,
        constraints=space.pins,
        options=options,
    )
    try:
        prices = traced_prices(request, sharded, StageRule())
    except ConfigError:  # no layout of the space is legal on these GPUs with this batch
        return Baseline(name=name, what=space.what, candidates=0)
    strategies = [
        strategy
        for strategy in uniform_strategies(prices, space.pins)
        if not space.pipelines or strategy.layout.mesh.pp > 1
    ]
    limit = limit_bytes(plan.cluster, plan.training.stack, options)
    price_cache = module_prices(prices)
    optimum = fastest(strategies, price_cache, limit, options.deadline)
    short = bool(strategies) and optimum is None
    return Baseline(
        name=name,
        what=space.what,
        candidates=len(strategies),
        optimum=optimum,
        leanest=leanest(strategies, price_cache, options.deadline) if short else None,
    )
