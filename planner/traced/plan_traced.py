"""Plans a torch module: traces it, cuts it into shards, searches, and assembles the best plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.step import StepPrice, model_flops_utilization
from parplan.costmodels.strategy import Strategy
from parplan.planner.candidates.branch_and_bound import BranchOutcome
from parplan.planner.candidates.solver_faults import failure_text
from parplan.planner.objective import Objective
from parplan.planner.plan.assemble import (
    breakdown,
    letters,
    memory_of_stages,
    pipeline_of,
    redundancy_of,
    rounded_figures,
    runner_up_of,
    step_kind,
)
from parplan.planner.plan.plan import PLAN_VERSION
from parplan.planner.plan.prediction import (
    Candidates,
    Prediction,
    Quantity,
    SearchRecord,
    Status,
)
from parplan.planner.plan.traced_plan import ShardPlan, ShardStage, TracedPlan, TracedSummary
from parplan.planner.request import ModuleRequest, OnProgress, TracedRequest
from parplan.planner.traced.shards import Sharded, shard
from parplan.planner.traced.stage_rules import StageRule
from parplan.planner.traced.traced_search import ShardSolved, TracedSearch
from parplan.planner.traced.traced_shortfall import infeasible_traced_error
from parplan.profiles.errors import ConfigError, SolverError

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
    if request.objective is not Objective.THROUGHPUT:
        raise ConfigError(
            f"--objective {request.objective}: a traced module is planned for throughput",
            hint="leave it out",
        )
    if request.model.unit == SAMPLES:
        request = replace(request, training=replace(request.training, seq_length=1))
    sharded = shard(request.model, cross_skips=cross_skips)
    search = TracedSearch(sharded, request, rule or StageRule())
    outcome = search.run(on_progress)
    if not outcome.solved and not outcome.finished:
        raise SolverError(
            "the solver found no plan in its time",
            hint="use the other --solver, or pin some degrees",
        )
    if not outcome.solved:
        raise infeasible_traced_error(search)
    (best, strategy, price), *slower = search.replayed(outcome)
    record = replace(
        _record(best, outcome, search),
        runners_up=tuple(runner_up_of(solved.layout, priced) for solved, _, priced in slower),
    )
    return TracedResult(
        plan=_assembled(strategy, price, record, search), interrupted=outcome.interrupted
    )


def _record(
    best: ShardSolved, outcome: BranchOutcome[ShardSolved], search: TracedSearch
) -> SearchRecord:
    """Returns the record of the search with the proof about `best`, in closed-form seconds."""
    considered, solved = len(search.space.layouts) + len(search.space.pruned), len(outcome.solved)
    return SearchRecord(
        objective=Objective.THROUGHPUT,
        status=Status.OPTIMAL if outcome.finished else Status.FEASIBLE,
        value=round(best.value, 6),
        bound=round(outcome.bound, 6),
        gap=round(max(0.0, 1 - outcome.bound / best.value), 6),
        fastest_step_time_s=round(outcome.solved[0].value, 6),
        candidates=Candidates(
            considered=considered,
            pruned=considered - solved - outcome.left,
            solved=solved,
            left=outcome.left,
        ),
        solver_failure=failure_text(outcome.failures),
    )


def _assembled(
    strategy: Strategy, price: StepPrice, record: SearchRecord, search: TracedSearch
) -> TracedPlan:
    layout = strategy.layout
    price_cache = search.price_cache
    sharded = search.sharded
    model = sharded.model
    cluster = price_cache.machine.cluster
    training = price_cache.training
    kind = step_kind(price)
    flops = price_cache.flops_per_sequence
    speed = training.tokens_per_step / price.step_s / layout.mesh.num_ranks
    used = model_flops_utilization(price.step_s, layout.mesh.num_ranks, price_cache)
    predicted = Prediction(
        step_time_s=Quantity(value=rounded_figures(price.step_s), kind=kind),
        tokens_per_s_per_gpu=Quantity(value=rounded_figures(speed), kind=kind),
        mfu=Quantity(value=rounded_figures(used), kind=kind),
        breakdown=breakdown(price),
        memory_gib=memory_of_stages(price, cluster.device.memory_bytes),
        redundancy_gib=redundancy_of(layout, price),
    )
    return TracedPlan(
        plan_version=PLAN_VERSION,
        module=model.source,
        cluster=cluster,
        training=training,
        mesh=layout.mesh,
        pipeline=pipeline_of(layout),
        traced=TracedSummary(
            name=model.name,
            num_parameters=model.num_parameters,
            num_operators=len(model.operators),
            flops_per_sequence=flops,
            unit=model.unit,
        ),
        shards=_shards(sharded, price_cache.classes.of),
        stages=tuple(
            ShardStage(
                rank=layout.rank_of(stage),
                first=strategy.layers_of(stage)[0],
                end=strategy.layers_of(stage)[1],
                zero=choices[0].zero,
                recompute=tuple(
                    shard
                    for shard, choice in enumerate(choices, strategy.layers_of(stage)[0])
                    if choice.recompute is Recompute.FULL
                ),
            )
            for stage, choices in enumerate(strategy.stages)
        ),
        predicted=predicted,
        search=record,
    )


def _shards(sharded: Sharded, classes: list[int]) -> tuple[ShardPlan, ...]:
    operators = sharded.model.operators
    return tuple(
        ShardPlan(
            name=each.name,
            layer=letters(number),
            first=each.first,
            end=each.end,
            starts=operators[each.first].operator.name,
            parameters=each.parameters,
        )
        for each, number in zip(sharded.shards, classes, strict=True)
    )
