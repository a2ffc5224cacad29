"""Plans a torch module: traces it, cuts it into shards, searches, and assembles the best plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.request import ModuleRequest, OnProgress, TracedRequest
from parplan.planner.search.find_plan import search
from parplan.planner.traced.shards import shard
from parplan.planner.traced.stage_rules import StageRule
from parplan.planner.traced.traced_prices import traced_prices
from parplan.planner.traced.traced_shortfall import infeasible_traced_error

OnPhase = Callable[[str], None]  # takes the name of the next phase: "trace", "search"
SAMPLES = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedResult:
    """The plan, and true if Ctrl-C ended the search."""

    plan: TracedPlan
    interrupted: bool


def plan_traced_module(
    request: ModuleRequest,
    rule: StageRule | None = None,
    *,
    cross_skips: bool = False,
    on_progress: OnProgress | None = None,
    on_phase: OnPhase | None = None,
) -> TracedPlan:
    """Returns the fastest plan for the module of the request.

    rule: the way to give shards to stages (--stages)
    cross_skips: skip connections may cross stages (--cross-skips)

    The module is traced without memory for its weights. Raises ConfigError when the module cannot
    be traced or the pins leave nothing, InfeasibleError when nothing fits, SolverError, and
    KeyboardInterrupt before the first plan.
    """
    from parplan.profiles.tracing.trace import trace  # loads torch

    training = request.training
    if on_phase:
        on_phase("trace")
    model = trace(
        request.model,
        seq_length=training.seq_length,
        precision=training.precision,
        attention=training.attention,
        on_cpu=request.cluster.device.is_host,
        check=request.options.deadline.check,
    )
    if on_phase:
        on_phase("search")
    traced = request.of_model(model)
    return find_traced_plan(traced, rule, cross_skips=cross_skips, on_progress=on_progress).plan


def find_traced_plan(
    request: TracedRequest,
    rule: StageRule | None = None,
    *,
    cross_skips: bool = False,
    on_progress: OnProgress | None = None,
) -> TracedResult:
    """Returns the fastest plan for a model that is traced already.

    In a plan of samples the sequence has one token, so speeds are samples a second.
    """
    if request.model.unit == SAMPLES:
        request = replace(request, training=replace(request.training, seq_length=1))
    sharded = shard(request.model, cross_skips=cross_skips)
    prices = traced_prices(request, sharded, rule or StageRule())
    result = search(prices, request.objective, request.options, on_progress)
    if result is None:
        raise infeasible_traced_error(request, prices, rule or StageRule())
    return TracedResult(plan=cast(TracedPlan, result.plan), interrupted=result.interrupted)
