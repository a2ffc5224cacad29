"""Rules on stages, micro-batches and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.schedules.actions import check_rows
from parplan.costmodels.schedules.merak_schedules import SHIFTED_FEWEST
from parplan.costmodels.schedules.schedule import AHEAD, LAST_KEEPS_ALL, V_SHAPED, Schedule
from parplan.executor.placed_layers import action_rows, layer_operators, stage_layers
from parplan.executor.rules.rule import Refusal, rule, those, with_layer_plan
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.equal_shares import (
    equal_shares_text,
    illegal_micro_batches,
    with_equal_shares,
)
from parplan.planner.plan.plan import LayerRun, Plan, StagePlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind, layer_kind
from parplan.profiles.units import spans_text


@rule(
    why="every layer is run once, in the model's order, and every stage runs at least one",
    action="cut the layers anew",
)
def layers(plan: Plan) -> Iterator[Refusal]:
    needed = list(range(plan.model.num_blocks + 2))
    held = [layer.index for stage in stage_layers(plan) for layer in stage]
    empty = [k for k, stage in enumerate(plan.stages) if not stage.layers]
    if held == needed and not empty:
        return
    nearest = _cut_anew(plan)
    action = "make the plan again"
    if nearest:
        counts = [stage.end - stage.first for stage in nearest.stages]
        action = f"give the stages {counts} layers in order"
    if held != needed:
        yield Refusal(
            problem=f"stages: they hold layers {spans_text(held) or 'none'}, "
            f"the model has {len(needed)}",
            action=action,
            nearest=nearest,
        )
    elif empty:
        yield Refusal(
            problem=f"stages: stage {empty[0]} of {len(plan.stages)} holds no layer",
            action=action,
            nearest=nearest,
        )


def _cut_anew(plan: Plan) -> Plan | None:
    """Return the plan with each layer once, as evenly as possible over the stages.

    A layer keeps its layer plan, or gets one that another layer of its kind has. Returns None if
    there are more stages than layers or a kind has no layer plan.
    """
    num_layers = plan.model.num_blocks + 2
    num_stages = plan.mesh.pp * plan.pipeline.virtual_stages
    names = {
        index: run.plan for stage in plan.stages for run in stage.layers for index in run.indices
    }
    spare = {layer_plan.layer: name for name, layer_plan in reversed(plan.layer_plans.items())}
    if num_stages > num_layers or set(spare) != set(LayerKind):
        return None
    runs = [
        LayerRun(plan=names.get(i, spare[layer_kind(i, plan.model.num_blocks)]), first=i, last=i)
        for i in range(num_layers)
    ]
    firsts = [num_layers * k // num_stages for k in range(num_stages + 1)]
    rank_of = layout_of(plan).rank_of
    stages = tuple(
        StagePlan(rank=rank_of(k), layers=tuple(runs[firsts[k] : firsts[k + 1]]))
        for k in range(num_stages)
    )
    return replace(plan, stages=stages)


@rule(
    why="the schedule says on which pipeline rank a virtual stage runs",
    action="give the stages those ranks",
)
def stage_ranks(plan: Plan) -> Iterator[Refusal]:
    pp, num_stages = plan.mesh.pp, plan.mesh.pp * plan.pipeline.virtual_stages
    expected = [layout_of(plan).rank_of(k) for k in range(num_stages)]
    ranks = [stage.rank for stage in plan.stages]
    if len(ranks) != num_stages:
        yield Refusal(
            problem=f"stages: there are {len(ranks)}, pp {pp} with {plan.pipeline.virtual_stages} "
            f"virtual stages has {num_stages}",
            action=f"cut the layers into {num_stages} stages",
            nearest=_cut_anew(plan),
        )
    elif ranks != expected:
        stages = tuple(
            replace(stage, rank=rank) for stage, rank in zip(plan.stages, expected, strict=True)
        )
        yield Refusal(
            problem=f"stages: their ranks are {ranks}",
            action=f"set the ranks to {expected}",
            nearest=replace(plan, stages=stages),
        )


@rule(
    why="the schedule has one stage per pipeline rank, in a V two, interleaved two or more",
    action="use another schedule, or its number of virtual stages",
)
def virtual_stages(plan: Plan) -> Iterator[Refusal]:
    pipeline = plan.pipeline
    known = {Schedule.GPIPE: 1, Schedule.ONE_F_ONE_B: 1, **dict.fromkeys(AHEAD, 1)}
    known |= dict.fromkeys(V_SHAPED, 2)
    known |= {Schedule.INTERLEAVED: max(2, pipeline.virtual_stages)}
    legal_stages = known.get(pipeline.schedule, pipeline.virtual_stages)
    if plan.mesh.pp == 1 or pipeline.virtual_stages == legal_stages:
        return
    several = pipeline.virtual_stages > 1
    schedule = Schedule.INTERLEAVED if several else Schedule.ONE_F_ONE_B
    yield Refusal(
        problem=f"pipeline: {pipeline.schedule} with virtual_stages {pipeline.virtual_stages}",
        action=f"set schedule to {schedule}",
        nearest=_with_pipeline(plan, schedule=schedule),
    )


def _with_pipeline(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, pipeline=replace(plan.pipeline, **changes))


@rule(
    why="the micro-batches of all data-parallel ranks are the global batch, each sequence once",
    action="change their number or size",
)
def batch(plan: Plan) -> Iterator[Refusal]:
    pipeline, dp = plan.pipeline, plan.mesh.dp
    sequences = pipeline.micro_batch_size * sum(pipeline.micro_batches(dp))
    if sequences != plan.training.global_batch_size:
        yield _micro_batch_refusal(
            plan,
            f"pipeline: {pipeline.num_micro_batches} micro-batches of {pipeline.micro_batch_size} "
            f"on {dp} data-parallel ranks are {sequences} sequences, "
            f"global_batch_size is {plan.training.global_batch_size}",
        )


@rule(
    why="the schedule goes round by round through all pipeline ranks, or needs as many to fill "
    "them",
    action="change the number of micro-batches",
)
def micro_batches(plan: Plan) -> Iterator[Refusal]:
    if plan.mesh.pp > 1 and (problem := illegal_micro_batches(plan.pipeline, plan.mesh.pp)):
        yield _micro_batch_refusal(plan, f"pipeline: {problem}")


@rule(
    why="their passes meet those of other data-parallel ranks, or are not run on micro-batches of "
    "no sequence",
    action="give all data-parallel ranks the same number of micro-batches",
)
def unequal_shares(plan: Plan) -> Iterator[Refusal]:
    obstacles = {
        "chunks": plan.chunks is not None,
        "a module": plan.module is not None,
        "a tower": plan.model.tower is not None,
        "a token table on the hosts": any(
            Offload.LOOKUP in each.offload for each in plan.layer_plans.values()
        ),
        "weights divided over dp": any(
            each.divides_over_data for each in plan.layer_plans.values()
        ),
    }
    if plan.pipeline.micro_batches_of_replicas and any(obstacles.values()):
        yield _micro_batch_refusal(
            plan, f"pipeline: micro_batches_of_replicas with {' and '.join(those(obstacles))}"
        )


def _micro_batch_refusal(plan: Plan, problem: str) -> Refusal:
    """Return the refusal with micro-batches that make up the global batch.

    If there are none, the nearest plan has another global batch.
    """
    equal = with_equal_shares(plan)
    if equal is not None:
        return Refusal(
            problem=problem,
            action=equal_shares_text(equal),
            nearest=replace(plan, pipeline=equal),
        )
    mesh = plan.mesh
    pipeline = replace(plan.pipeline, micro_batches_of_replicas=())
    least = pipeline.num_micro_batches
    numbers = (
        number
        for number in range(least, least + max(mesh.pp, SHIFTED_FEWEST) + 1)
        if not illegal_micro_batches(replace(pipeline, num_micro_batches=number), mesh.pp)
    )
    number = next(numbers, None)
    if number is None:
        return Refusal(problem=problem, action="make the plan again")
    batch = number * pipeline.micro_batch_size * mesh.dp
    return Refusal(
        problem=problem,
        action=f"set num_micro_batches to {number} and global_batch_size to {batch}",
        nearest=replace(
            _with_pipeline(plan, num_micro_batches=number, micro_batches_of_replicas=()),
            training=replace(plan.training, global_batch_size=batch),
        ),
    )


@rule(
    why="each rank's list must be whole, and none may wait for ever for another",
    action="correct the lists of the schedule",
)
def action_lists(plan: Plan) -> Iterator[Refusal]:
    pipeline = plan.pipeline
    if plan.mesh.pp == 1:
        if pipeline.actions:
            yield Refusal(
                problem="pipeline: a custom schedule on 1 pipeline rank",
                action="set schedule to 1f1b and actions to []",
                nearest=_with_pipeline(plan, schedule=Schedule.ONE_F_ONE_B, actions=()),
            )
        return
    try:
        check_rows(
            action_rows(plan), plan.mesh.pp, pipeline.virtual_stages, pipeline.num_micro_batches
        )
    except ConfigError as error:
        schedule = Schedule.ONE_F_ONE_B if pipeline.virtual_stages == 1 else Schedule.INTERLEAVED
        yield Refusal(
            problem=f"pipeline: {error.message}",
            action=f"{error.hint}, or set schedule to {schedule} and actions to []",
            nearest=_with_pipeline(plan, schedule=schedule, actions=()),
        )


@rule(
    why="what is freed between input and weight gradients loses the second",
    action="use zero 2 or less, or another schedule",
)
def split_zero(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items() if _splits(plan) else ():
        if layer_plan.highest_zero == 3 and plan.mesh.replicas > 1:
            yield Refusal(
                problem=f"layer_plans.{name}: {plan.pipeline.schedule} splits the backward pass of "
                "a layer of zero 3",
                action=f"set zero to 2 on layer plan {name}"
                + (" and leave own_zero out" if layer_plan.own_zero else ""),
                nearest=with_layer_plan(plan, name, zero=2, own_zero={}),
            )


@rule(
    why="the layer would run again for every parameter",
    action="recompute some operators, or none, or use another schedule",
)
def split_recompute(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items() if _splits(plan) else ():
        if set(layer_plan.recompute) == set(layer_operators(plan, layer_plan)):
            yield Refusal(
                problem=f"layer_plans.{name}: {plan.pipeline.schedule} splits the backward pass of "
                "a layer that is recomputed in full",
                action=f"set recompute to [] on layer plan {name}",
                nearest=with_layer_plan(plan, name, recompute=()),
            )


@rule(
    why="the schedule leaves the last stage no time to recompute",
    action="recompute nothing there, or use early-recompute",
)
def last_stage(plan: Plan) -> Iterator[Refusal]:
    schedule = plan.pipeline.schedule
    runs = plan.stages[-1].layers
    recomputed = [run.plan for run in runs if plan.layer_plans[run.plan].recompute]
    if plan.mesh.pp > 1 and schedule in LAST_KEEPS_ALL and recomputed:
        yield Refusal(
            problem=f"stages: under {schedule} the last stage has layers of "
            f"{', '.join(dict.fromkeys(recomputed))}, which are recomputed",
            action="give the layers of the last stage plans with recompute []",
            nearest=_last_keeps_all(plan),
        )


def _last_keeps_all(plan: Plan) -> Plan:
    """Return the plan without recompute in the last stage.

    Layers that were recomputed there get copies of their layer plans, without recompute.
    """
    plans = dict(plan.layer_plans)
    last = plan.stages[-1]
    runs = []
    for run in last.layers:
        name = f"{run.plan}-kept" if plan.layer_plans[run.plan].recompute else run.plan
        while name != run.plan and name in plan.layer_plans:
            name += "-"
        plans[name] = replace(plan.layer_plans[run.plan], recompute=())
        runs.append(replace(run, plan=name))
    stages = (*plan.stages[:-1], replace(last, layers=tuple(runs)))
    used = {run.plan for stage in stages for run in stage.layers}
    return replace(
        plan,
        stages=stages,
        layer_plans={name: layer_plan for name, layer_plan in plans.items() if name in used},
    )


def _splits(plan: Plan) -> bool:
    """Return True if the schedule computes input and weight gradients apart."""
    return plan.mesh.pp > 1 and layout_of(plan).splits_backward


SCHEDULE = (
    layers,
    stage_ranks,
    virtual_stages,
    batch,
    micro_batches,
    unequal_shares,
    action_lists,
    split_zero,
    split_recompute,
    last_stage,
)
