"""Makes the Plan of a priced strategy: its layer plans, placements and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import OFFLOAD_OF
from parplan.costmodels.joined_pools import capacity_bytes
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.memory.fullest_moment import at_fullest
from parplan.costmodels.memory.rank_memory import RankMemory
from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.simulator import SimulatedStep
from parplan.costmodels.step import StepPrice, model_flops_utilization
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.costmodels.usage.redundancy import (
    RedundantBytes,
    operator_redundancy,
    summed_redundancy,
)
from parplan.planner.plan.error_band import error_band, without_steps
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.plan import (
    PLAN_VERSION,
    LayerPlan,
    LayerRun,
    OperatorPlacement,
    Plan,
    StagePlan,
)
from parplan.planner.plan.plan_chunks import chunks_of
from parplan.planner.plan.prediction import (
    Breakdown,
    LayerRedundancy,
    Prediction,
    Quantity,
    Redundancy,
    RedundantGib,
    RunnerUp,
    SearchRecord,
    StageMemory,
    StageWait,
)
from parplan.planner.plan.ratio_band import Shape, plan_shape, ratio_share, shape_of
from parplan.planner.plan.traits import Run
from parplan.profiles.models.operator_graph import BlockClass, LayerKind
from parplan.profiles.provenance import Kind, Seconds, weakest_kind
from parplan.profiles.units import gib

GIB_DIGITS = 4
_CLASSES = ("parameters", "gradients", "optimizer", "activations", "temporaries")
SIGNIFICANT = 6
SHARE_DIGITS = 6


def rounded_figures(value: float) -> float:
    """Rounds to six significant digits, so that the same plan gives the same bytes."""
    return float(f"{value:.{SIGNIFICANT}g}")


def _gib(n_bytes: float) -> float:
    return round(gib(n_bytes), GIB_DIGITS)


def _layer_plan(choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache) -> LayerPlan:
    key = choice.kind
    layer = price_cache.graph(1).layer_class(key)
    sharding = layout.sharding_of(choice)
    placed = (
        {op.name: placements(op, sharding) for op in layer.operators} if sharding.ranks > 1 else {}
    )
    shards = price_cache.shards(layout.mesh)
    shares = layout.mesh.replicas > 1 or price_cache.offloads_states
    zero = choice.zero if shares else 0
    own_zero = dict(choice.own_zero) if shares else {}
    return LayerPlan(
        layer=choice.kind.role,
        sequence_parallel=layout.sequence_parallel,
        zero=zero,
        zero_ranks=shards
        if max(zero, *own_zero.values(), 0) and shards < layout.mesh.replicas
        else None,
        offload=_offload(choice, layout, price_cache),
        recompute=price_cache.recompute_operators(choice.kind, choice.recompute),
        keep_on_host=choice.on_host,
        operators={
            name: OperatorPlacement(parameters=p.parameters, input=p.input, output=p.output)
            for name, p in placed.items()
        },
        own_zero=own_zero,
        block=key.name if isinstance(key, BlockClass) else "",
        tower=sharding.runs_tower,
    )


def _offload(
    choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache
) -> tuple[Offload, ...]:
    """Returns the offload of a layer, by its state location in chunks and by the price cache."""
    chunked = layout.chunked and choice.kind.role is LayerKind.BLOCK
    table = choice.kind.role is LayerKind.EMBEDDING or price_cache.tied
    applies = {
        Offload.STATES: not chunked,
        Offload.LOOKUP: table and choice.kind.role is not LayerKind.BLOCK,
    }
    return (
        *(OFFLOAD_OF[choice.home] if chunked else ()),
        *(offload for offload in price_cache.offload if applies[offload]),
    )


def _name_choices(strategy: Strategy) -> dict[LayerChoice, str]:
    """Returns names of the layer plans: A, B, ... for blocks in order of use, else the kind."""
    names: dict[LayerChoice, str] = {}
    for stage in strategy.stages:
        for choice in stage:
            if choice in names:
                continue
            alike = sum(known.kind.role is choice.kind.role for known in names)
            if choice.kind.role is LayerKind.BLOCK:
                names[choice] = letters(alike)
            else:
                names[choice] = choice.kind.role.value + (str(alike + 1) if alike else "")
    return names


def letters(number: int) -> str:
    """Returns A, B, ... Z, AA, AB, ..."""
    before, last = divmod(number, 26)
    return (letters(before - 1) if before else "") + chr(ord("A") + last)


def _stages(strategy: Strategy, names: dict[LayerChoice, str]) -> tuple[StagePlan, ...]:
    stages = []
    for index, stage in enumerate(strategy.stages):
        runs: list[LayerRun] = []
        for layer, choice in enumerate(stage, strategy.layers_of(index)[0]):
            name, first = names[choice], layer
            if runs and runs[-1].plan == name:
                first = runs.pop().first
            runs.append(LayerRun(plan=name, first=first, last=layer))
        rank, pools = strategy.layout.rank_of(index), strategy.layout.pools
        stages.append(StagePlan(rank=rank, layers=tuple(runs), pool=pools[rank] if pools else ""))
    return tuple(stages)


def pipeline_of(layout: ParallelLayout) -> PipelinePlan:
    """Returns the pipeline fields of the plan file."""
    return PipelinePlan(
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        micro_batch_size=layout.micro_batch_size,
        num_micro_batches=layout.num_micro_batches,
        micro_batches_of_replicas=layout.micro_batches_of_replicas,
        actions=layout.actions,
        tp_overlap=layout.tp_overlap,
    )


def prediction_of(
    layout: ParallelLayout, price: StepPrice, price_cache: LayerPriceCache
) -> Prediction:
    """Returns the prediction of a priced strategy, without error band and layers' redundancy."""
    kind, num_ranks = step_kind(price), layout.mesh.num_ranks
    speed = price_cache.training.tokens_per_step / price.step_s / num_ranks
    used = model_flops_utilization(price.step_s, num_ranks, price_cache)
    return Prediction(
        step_time_s=Quantity(value=rounded_figures(price.step_s), kind=kind),
        tokens_per_s_per_gpu=Quantity(value=rounded_figures(speed), kind=kind),
        mfu=Quantity(value=rounded_figures(used), kind=kind),
        breakdown=_breakdown(price),
        memory_gib=tuple(
            _stage_memory(rank, memory, capacity_bytes(layout, rank, price_cache))
            for rank, memory in enumerate(price.memory)
        ),
        redundancy_gib=_redundancy_of_ranks(layout, price),
        waits=tuple(
            replace(each, idle_share=round(each.idle_share, SHARE_DIGITS))
            for each in stage_waits(price.simulated)
        ),
    )


def stage_waits(simulated: SimulatedStep) -> tuple[StageWait, ...]:
    """Returns the waits of every pipeline rank in a simulated step."""
    return tuple(
        StageWait(
            stage=rank,
            idle_share=(line.bubble_s + line.transfer_s) / simulated.step_s,
            in_flight=line.in_flight,
        )
        for rank, line in enumerate(simulated.ranks)
    )


def step_kind(price: StepPrice) -> Kind:
    """Returns the kind of the step time: the weakest of all ranks, which wait for each other.

    It is never better than INTERPOLATED: even where every kernel was measured, the step was not.
    """
    return weakest_kind((Kind.INTERPOLATED, *(rank.total.kind for rank in price.ranks)))


def _breakdown(price: StepPrice) -> Breakdown:
    """Returns the step time by cause on the rank that finishes last; the rest is the bubble."""
    simulated = price.simulated
    rank = max(range(len(price.ranks)), key=lambda r: price.ranks[r].total.value_s)
    time = price.ranks[rank]

    def quantity(seconds: Seconds) -> Quantity:
        return Quantity(value=rounded_figures(seconds.value_s), kind=seconds.kind)

    # without a bubble the order of additions may leave a tiny one, which is rounded to zero
    idle_s = max(0.0, round(simulated.step_s - time.total.value_s, 9))
    bubble = Quantity(value=rounded_figures(idle_s), kind=step_kind(price))
    return Breakdown(
        compute_s=quantity(time.compute),
        recompute_s=quantity(time.recompute),
        tp_comm_s=quantity(time.tp_comm),
        dp_comm_s=quantity(time.dp_comm),
        pp_comm_s=quantity(time.pp_comm),
        pp_bubble_s=bubble,
        optimizer_s=quantity(time.optimizer),
        host_comm_s=quantity(time.host_comm),
    )


def _stage_memory(rank: int, memory: RankMemory, capacity_bytes: int) -> StageMemory:
    """Returns the GiB of one device by class at the fullest moment."""
    return StageMemory(
        stage=rank,
        **{name: _gib(held) for name, held in at_fullest(memory).items()},
        total=_gib(memory.total),
        capacity=_gib(capacity_bytes),
        host=_gib(memory.host),
        kind=Kind.ANALYTIC,
    )


def _redundancy(
    strategy: Strategy, price: StepPrice, names: Mapping[LayerChoice, str], price_cache: PriceCache
) -> Redundancy:
    return replace(
        _redundancy_of_ranks(strategy.layout, price),
        layers={
            name: _layer_redundancy(choice, strategy, price_cache) for choice, name in names.items()
        },
    )


def _redundancy_of_ranks(layout: ParallelLayout, price: StepPrice) -> Redundancy:
    """Returns the redundancy of the cluster and of each pipeline rank, without single layers."""
    devices = layout.mesh.ranks_per_stage
    sums = {
        name: _gib(devices * sum(getattr(rank, name) for rank in price.redundant))
        for name in _CLASSES
    }
    stages = tuple(map(_redundant_gib, price.redundant))
    return Redundancy(
        parameters=sums["parameters"],
        gradients=sums["gradients"],
        optimizer=sums["optimizer"],
        activations=sums["activations"],
        temporaries=sums["temporaries"],
        total=_gib(devices * sum(rank.total for rank in price.redundant)),
        kind=Kind.ANALYTIC,
        stages=stages,
    )


def _layer_redundancy(
    choice: LayerChoice, strategy: Strategy, price_cache: PriceCache
) -> LayerRedundancy:
    layout = strategy.layout
    stage = layout.rank_of(
        next(index for index, layers in enumerate(strategy.stages) if choice in layers)
    )
    operators = operator_redundancy(choice, stage, layout, price_cache)
    workspace = price_cache.activations(
        choice.kind,
        layout.micro_batch_size,
        layout.sharding_of(choice),
        choice.recompute,
        choice.on_host,
    ).workspace
    layer = replace(summed_redundancy(operators.values()), temporaries=float(workspace))
    return LayerRedundancy(
        stage=stage,
        layer=_redundant_gib(layer),
        operators={name: _redundant_gib(redundant) for name, redundant in operators.items()},
    )


def _redundant_gib(redundant: RedundantBytes) -> RedundantGib:
    return RedundantGib(
        **{name: _gib(getattr(redundant, name)) for name in _CLASSES}, total=_gib(redundant.total)
    )


def assemble(
    strategy: Strategy, price: StepPrice, record: SearchRecord, price_cache: PriceCache
) -> Plan:
    """Returns the Plan of a priced strategy."""
    layout = strategy.layout
    training = price_cache.training
    names = _name_choices(strategy)
    unmeasured = (
        without_steps(price_cache.model, training)
        or price_cache.offload
        or layout.chunked
        or layout.pools
        or any(choice.on_host for choice in names)
    )
    predicted = replace(
        prediction_of(layout, price, price_cache),
        # no measured step has any of it, offload, or pools
        error_band=None
        if unmeasured
        else error_band(
            Run(
                model=price_cache.model,
                training=training,
                machine=price_cache.machine,
                mesh=layout.mesh,
                zero=max(choice.zero for choice in names),
            )
        ),
        redundancy_gib=_redundancy(strategy, price, names, price_cache),
    )
    return Plan(
        plan_version=PLAN_VERSION,
        model=price_cache.model,
        cluster=price_cache.machine.cluster,
        training=training,
        mesh=layout.mesh,
        pipeline=pipeline_of(layout),
        layer_plans={
            name: _layer_plan(choice, layout, price_cache) for choice, name in names.items()
        },
        stages=_stages(strategy, names),
        predicted=predicted,
        search=_with_ties(record, predicted, shape_of(layout.mesh, layout.micro_batch_size)),
        chunks=chunks_of(strategy, price_cache),
    )


def _with_ties(record: SearchRecord, predicted: Prediction, shape: Shape) -> SearchRecord:
    """Returns the record with the runners-up marked whose ratio to the plan is inside its band."""
    band = predicted.error_band
    if band is None:
        return record
    step_s = predicted.step_time_s.value
    runners_up = tuple(
        replace(
            runner_up,
            inside_error_band=abs(runner_up.step_time_s.value / step_s - 1)
            <= ratio_share(band, shape, plan_shape(runner_up)),
        )
        for runner_up in record.runners_up
    )
    return replace(record, runners_up=runners_up)


def runner_up(strategy: Strategy, price: StepPrice) -> RunnerUp:
    """Returns a priced strategy as a runner-up; `assemble` sets its `inside_error_band`."""
    layout = strategy.layout
    return RunnerUp(
        mesh=layout.mesh,
        pipeline=pipeline_of(layout),
        sequence_parallel=layout.sequence_parallel,
        weights_over_data=layout.weights_over_data,
        step_time_s=Quantity(value=rounded_figures(price.step_s), kind=step_kind(price)),
        peak_memory_gib=_gib(price.peak_bytes),
        redundancy_gib=_gib(
            layout.mesh.ranks_per_stage * sum(rank.total for rank in price.redundant)
        ),
    )
