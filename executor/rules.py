"""What the executor cannot run, or would run to wrong results: one function a rule, and the nearest plan that can run.

A rule looks at a plan, without torch and without ranks, and says what it found. Why the executor cannot have it is the
rule's own text, which docs/executor.md lists. The nearest plan differs in the fields that the hint names; it may break
another rule, so `nearest_legal` goes on until there is none to break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from costmodels.actions import check
from costmodels.mesh import Mesh, illegal_expert_parallel
from costmodels.offload import Offload
from costmodels.schedules import Schedule, legal
from executor.divisions import misplaced, nearest_placement, undivided
from executor.expert_rules import mixture_problems
from executor.foreign.rules import module_problems
from executor.layout import PlacedLayer, action_rows, effective_zero, layer_operators, stage_layers, zero_ranks
from planner.plan import LayerPlan, LayerRun, Pipeline, Plan, StagePlan, frame_of
from profiles.errors import ConfigError
from profiles.model import LayerKind
from profiles.spec import Positions, Precision

MAX_REPAIRS = 1000  # each changes a field for good, so no plan of a few hundred layers needs as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`found` says where and what; `action` is the change, in field values, that gives the `nearest` plan, if there is one."""

    found: str
    action: str
    nearest: Plan | None = None


Check = Callable[[Plan], Iterator[Refusal]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`why`: what happens without it; `action`: what to do, in general."""

    name: str
    why: str
    action: str
    check: Check


RULES: list[Rule] = []


def _rule(*, why: str, action: str) -> Callable[[Check], Check]:
    """Add a check to the rules, which are asked in the order of this file."""

    def add(check: Check) -> Check:
        RULES.append(Rule(name=check.__name__.strip("_").replace("_", " "), why=why, action=action, check=check))
        return check

    return add


def refusals(plan: Plan) -> Iterator[tuple[Rule, Refusal]]:
    """Every rule that `plan` breaks; one that has no stages to speak of breaks the first alone."""
    for rule in RULES:
        found = [(rule, refusal) for refusal in rule.check(plan)]
        yield from found
        if found and rule.name == "layers":
            return


def validate(plan: Plan) -> None:
    """Raises ConfigError for a plan that is well-formed but that the executor cannot run as it stands."""
    for rule, refusal in refusals(plan):
        raise ConfigError(f"{refusal.found}: {rule.why}", hint=refusal.action)


def nearest_legal(plan: Plan) -> Plan | None:
    """`plan` with the changes of all hints, or None where a rule has none to give."""
    for _ in range(MAX_REPAIRS):
        refusal = next((found for _, found in refusals(plan)), None)
        if refusal is None:
            return plan
        if refusal.nearest is None:
            return None
        plan = refusal.nearest
    return None


def _with_layer_plan(plan: Plan, name: str, **changes: Any) -> Plan:
    return replace(plan, layer_plans={**plan.layer_plans, name: replace(plan.layer_plans[name], **changes)})


def _plan_name(plan: Plan, layer: PlacedLayer) -> str:
    return next(name for name, found in plan.layer_plans.items() if found is layer.plan)


@_rule(why="every layer is run once, in the model's order, and every stage runs at least one", action="cut the layers anew")
def _layers(plan: Plan) -> Iterator[Refusal]:
    needed = list(range(plan.model.num_layers + 2))
    found = [layer.index for stage in stage_layers(plan) for layer in stage]
    empty = [k for k, stage in enumerate(plan.stages) if not stage.layers]
    if found == needed and not empty:
        return
    nearest = _cut_anew(plan)
    counts = [sum(len(_indices(plan, run)) for run in stage.layers) for stage in nearest.stages] if nearest else []
    action = f"give the stages {counts} layers in order" if nearest else "make the plan again"
    if found != needed:
        yield Refusal(found=f"stages: they hold layers {_text(found)}, the model has {len(needed)}", action=action, nearest=nearest)
    elif empty:
        yield Refusal(found=f"stages: stage {empty[0]} of {len(plan.stages)} holds no layer", action=action, nearest=nearest)


def _text(indices: list[int]) -> str:
    """Layer numbers, runs of them as first-last."""
    runs = [[index for _, index in group] for _, group in groupby(enumerate(indices), lambda item: item[1] - item[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"


def _indices(plan: Plan, run: LayerRun) -> range:
    if run.blocks is not None:
        return range(run.blocks[0] + 1, run.blocks[1] + 2)
    first = 0 if plan.layer_plans[run.plan].layer is LayerKind.EMBEDDING else plan.model.num_layers + 1
    return range(first, first + 1)


def _cut_anew(plan: Plan) -> Plan | None:
    """Each layer once, as evenly as can be, on the layer plan that it had, or on one that another layer of its kind has."""
    num_layers, num_stages = plan.model.num_layers + 2, plan.mesh.pp * plan.pipeline.virtual_stages
    names = {index: run.plan for stage in plan.stages for run in stage.layers for index in _indices(plan, run)}
    spare = {layer_plan.layer: name for name, layer_plan in reversed(plan.layer_plans.items())}
    if num_stages > num_layers or set(spare) != set(LayerKind):
        return None
    kinds = [LayerKind.EMBEDDING, *[LayerKind.BLOCK] * plan.model.num_layers, LayerKind.HEAD]
    runs = [LayerRun(plan=names.get(i, spare[kind]), blocks=(i - 1, i - 1) if kind is LayerKind.BLOCK else None)
            for i, kind in enumerate(kinds)]
    firsts = [num_layers * k // num_stages for k in range(num_stages + 1)]
    rank_of = frame_of(plan).rank_of
    stages = tuple(StagePlan(rank=rank_of(k), layers=tuple(runs[firsts[k] : firsts[k + 1]])) for k in range(num_stages))
    return replace(plan, stages=stages)


@_rule(why="the schedule says on which pipeline rank a virtual stage runs", action="give the stages those ranks")
def _stage_ranks(plan: Plan) -> Iterator[Refusal]:
    pp, num_stages = plan.mesh.pp, plan.mesh.pp * plan.pipeline.virtual_stages
    expected, found = [frame_of(plan).rank_of(k) for k in range(num_stages)], [stage.rank for stage in plan.stages]
    if len(found) != num_stages:
        yield Refusal(
            found=f"stages: there are {len(found)}, pp {pp} with {plan.pipeline.virtual_stages} virtual stages has {num_stages}",
            action=f"cut the layers into {num_stages} stages", nearest=_cut_anew(plan))
    elif found != expected:
        stages = tuple(replace(stage, rank=rank) for stage, rank in zip(plan.stages, expected, strict=True))
        yield Refusal(
            found=f"stages: their ranks are {found}", action=f"set the ranks to {expected}", nearest=replace(plan, stages=stages))


@_rule(why="the schedule has one stage per pipeline rank, zbv two", action="use another schedule, or its number of virtual stages")
def _virtual_stages(plan: Plan) -> Iterator[Refusal]:
    pipeline = plan.pipeline
    wanted = {Schedule.GPIPE: 1, Schedule.ONE_F_ONE_B: 1, Schedule.ZBV: 2}.get(pipeline.schedule, pipeline.virtual_stages)
    if plan.mesh.pp == 1 or pipeline.virtual_stages == wanted:
        return
    found = f"pipeline: {pipeline.schedule} with virtual_stages {pipeline.virtual_stages}"
    if pipeline.virtual_stages > 1:
        yield Refusal(found=found, action="set schedule to interleaved", nearest=_with_pipeline(plan, schedule=Schedule.INTERLEAVED))
    else:
        yield Refusal(found=found, action="set schedule to 1f1b", nearest=_with_pipeline(plan, schedule=Schedule.ONE_F_ONE_B))


def _with_pipeline(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, pipeline=replace(plan.pipeline, **changes))


@_rule(why="the micro-batches of all data-parallel ranks are the global batch, each sequence once", action="change their number or size")
def _batch(plan: Plan) -> Iterator[Refusal]:
    pipeline, dp = plan.pipeline, plan.mesh.dp
    sequences = pipeline.micro_batch_size * pipeline.num_micro_batches * dp
    if sequences != plan.training.global_batch_size:
        yield _micro_batch_refusal(plan, (
            f"pipeline: {pipeline.num_micro_batches} micro-batches of {pipeline.micro_batch_size} on {dp} data-parallel ranks are "
            f"{sequences} sequences, global_batch_size is {plan.training.global_batch_size}"))


@_rule(why="torch's schedule does not take that many", action="change the number of micro-batches")
def _micro_batches(plan: Plan) -> Iterator[Refusal]:
    if plan.mesh.pp > 1 and (problem := _schedule_problem(plan.pipeline, plan.mesh.pp)):
        yield _micro_batch_refusal(plan, f"pipeline: {problem}")


def _schedule_problem(pipeline: Pipeline, pp: int) -> str | None:
    if pipeline.schedule is Schedule.CUSTOM:
        return None
    return legal(pipeline.schedule, pp, pipeline.num_micro_batches, pipeline.virtual_stages)


def _micro_batch_refusal(plan: Plan, found: str) -> Refusal:
    """The refusal with micro-batches that make up the global batch; where none do, the global batch changes."""
    pipeline, mesh, batch = plan.pipeline, plan.mesh, plan.training.global_batch_size
    sizes = [size for size in range(1, batch + 1) if batch % (size * mesh.dp) == 0]
    shapes = [replace(pipeline, micro_batch_size=size, num_micro_batches=batch // size // mesh.dp) for size in sizes]
    legal = [shape for shape in shapes if not _schedule_problem(shape, mesh.pp)]
    if legal:
        best = min(legal, key=lambda shape: abs(shape.micro_batch_size - pipeline.micro_batch_size))
        action = f"set micro_batch_size to {best.micro_batch_size} and num_micro_batches to {best.num_micro_batches}"
        return Refusal(found=found, action=action, nearest=replace(plan, pipeline=best))
    number = next(n for n in range(pipeline.num_micro_batches, pipeline.num_micro_batches + mesh.pp + 1)
                  if not _schedule_problem(replace(pipeline, num_micro_batches=n), mesh.pp))
    batch = number * pipeline.micro_batch_size * mesh.dp
    return Refusal(
        found=found, action=f"set num_micro_batches to {number} and global_batch_size to {batch}",
        nearest=replace(_with_pipeline(plan, num_micro_batches=number), training=replace(plan.training, global_batch_size=batch)))


@_rule(why="each rank's list must be whole, and none may wait for ever for another", action="correct the lists of the schedule")
def _action_lists(plan: Plan) -> Iterator[Refusal]:
    pipeline = plan.pipeline
    if plan.mesh.pp == 1:
        if pipeline.actions:
            yield Refusal(
                found="pipeline: a custom schedule on 1 pipeline rank", action="set schedule to 1f1b and actions to []",
                nearest=_with_pipeline(plan, schedule=Schedule.ONE_F_ONE_B, actions=()))
        return
    try:
        check(action_rows(plan), plan.mesh.pp, pipeline.virtual_stages, pipeline.num_micro_batches)
    except ConfigError as error:
        schedule = Schedule.ONE_F_ONE_B if pipeline.virtual_stages == 1 else Schedule.INTERLEAVED
        yield Refusal(
            found=f"pipeline: {error.message}", action=f"{error.hint}, or set schedule to {schedule} and actions to []",
            nearest=_with_pipeline(plan, schedule=schedule, actions=()))


@_rule(why="what is freed between input and weight gradients loses the second", action="use zero 2 or less, or another schedule")
def _split_zero(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items() if _splits(plan) else ():
        if layer_plan.zero == 3 and plan.mesh.dp > 1:
            yield Refusal(
                found=f"layer_plans.{name}: {plan.pipeline.schedule} splits the backward pass of a layer of zero 3",
                action=f"set zero to 2 on layer plan {name}", nearest=_with_layer_plan(plan, name, zero=2))


@_rule(why="the layer would run again for every parameter", action="recompute some operators, or none, or use another schedule")
def _split_recompute(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items() if _splits(plan) else ():
        if set(layer_plan.recompute) == set(layer_operators(plan, layer_plan)):
            yield Refusal(
                found=f"layer_plans.{name}: {plan.pipeline.schedule} splits the backward pass of a layer that is recomputed in full",
                action=f"set recompute to [] on layer plan {name}", nearest=_with_layer_plan(plan, name, recompute=()))


def _splits(plan: Plan) -> bool:
    """Whether input and weight gradients are computed apart."""
    return plan.mesh.pp > 1 and frame_of(plan).splits_backward


@_rule(why="the executor has no loss scaling, and would run fp32 in its place", action="use bf16 or fp32")
def _fp16(plan: Plan) -> Iterator[Refusal]:
    if plan.training.precision is Precision.FP16:
        training = replace(plan.training, precision=Precision.BF16, gradient_precision=Precision.FP32)
        yield Refusal(
            found="training: precision is fp16", action="set precision to bf16", nearest=replace(plan, training=training))


@_rule(why="the executor has no fp8 products and would run 16-bit ones", action="make a plan without --fp8")
def _fp8(plan: Plan) -> Iterator[Refusal]:
    if plan.training.fp8_matmuls:
        yield Refusal(
            found="training: fp8_matmuls is set", action="set fp8_matmuls to false",
            nearest=replace(plan, training=replace(plan.training, fp8_matmuls=False)))


@_rule(why="gradients accumulate and are reduced in fp32, which takes twice the planned bytes", action="use fp32 gradients")
def _gradient_precision(plan: Plan) -> Iterator[Refusal]:
    found = plan.training.gradient_precision
    if found is not Precision.FP32:
        yield Refusal(
            found=f"training: gradient_precision is {found}", action="set gradient_precision to fp32",
            nearest=replace(plan, training=replace(plan.training, gradient_precision=Precision.FP32)))


@_rule(why="the table of learned positions ends there", action="use shorter sequences")
def _positions(plan: Plan) -> Iterator[Refusal]:
    length, most = plan.training.seq_length, plan.model.max_seq_length
    if plan.model.positions is Positions.LEARNED and length > most:
        yield Refusal(
            found=f"training: seq_length is {length}, the model's max_seq_length {most}", action=f"set seq_length to {most}",
            nearest=replace(plan, training=replace(plan.training, seq_length=most)))


@_rule(why="rotary embedding turns pairs of features", action="turn an even share of a head")
def _rotary_pairs(plan: Plan) -> Iterator[Refusal]:
    model = plan.model
    turned = int(model.head_dim * model.rotary_fraction)
    if model.positions is Positions.ROTARY and turned % 2:
        share = (turned + 1) / model.head_dim if turned < model.head_dim else (turned - 1) / model.head_dim
        yield Refusal(
            found=f"model: rotary_fraction {model.rotary_fraction} of head_dim {model.head_dim} is {turned} features",
            action=f"set rotary_fraction to {share}", nearest=replace(plan, model=replace(model, rotary_fraction=share)))


@_rule(why="the operator's placements are not among those that give the right values and gradients", action="place it otherwise")
def _placements(plan: Plan) -> Iterator[Refusal]:
    for found in misplaced(plan):
        placement = nearest_placement(plan, found)
        operators = {**plan.layer_plans[found.layer_plan].operators, found.operator.name: placement}
        sides = {"input": placement.input, "output": placement.output, **placement.parameters}
        yield Refusal(
            found=f"layer_plans.{found.layer_plan}: operator {found.operator.name}: {found.problem}",
            action="set " + ", ".join(f"{name} to {list(entries)}" for name, entries in sides.items()),
            nearest=_with_layer_plan(plan, found.layer_plan, operators=operators))


@_rule(why="tensor-parallel ranks hold equal parts", action="use a tp that divides it")
def _divisible(plan: Plan) -> Iterator[Refusal]:
    mesh = plan.mesh
    for found in undivided(plan):
        tp = next(n for n in range(mesh.tp - 1, 0, -1) if mesh.tp % n == 0 and found.size % n == 0)
        smaller = Mesh(pp=mesh.pp, dp=mesh.dp * mesh.tp // tp, tp=tp)
        yield Refusal(
            found=f"layer_plans.{found.layer_plan}: operator {found.operator}: tp {mesh.tp} does not divide {found.what}",
            action=f"use tp {tp}, dp {smaller.dp}: it divides {found.size}", nearest=replace(plan, mesh=smaller))


@_rule(why="equal groups of neighbours hold one copy of the states each", action="use a divisor of dp")
def _zero_ranks(plan: Plan) -> Iterator[Refusal]:
    dp = plan.mesh.dp
    for name, layer_plan in plan.layer_plans.items():
        found = layer_plan.zero_ranks
        if layer_plan.zero and found and dp % found:
            nearest = min((n for n in range(1, dp + 1) if dp % n == 0), key=lambda n: (abs(n - found), -n))
            yield Refusal(
                found=f"layer_plans.{name}: zero_ranks {found} does not divide dp {dp}",
                action=f"set zero_ranks to {nearest} on layer plan {name}", nearest=_with_layer_plan(plan, name, zero_ranks=nearest))


@_rule(why="the two gradients of the one weight are added as they are held: whole, or in the same shards", action="use one zero for both")
def _tied(plan: Plan) -> Iterator[Refusal]:
    if not plan.model.tied_embeddings:
        return
    stages = stage_layers(plan)
    embedding, head = (_held(layer, plan.mesh) for layer in (stages[0][0], stages[-1][-1]))
    alike = embedding == head if plan.mesh.pp == 1 else (embedding[0] == 0) == (head[0] == 0) and embedding[1] == head[1]
    if not alike:
        to_head = embedding[0] >= head[0]
        name = _plan_name(plan, stages[-1][-1] if to_head else stages[0][0])
        zero, ranks, on_host = embedding if to_head else head
        offload = (Offload.STATES,) if on_host else ()
        yield Refusal(
            found=f"layer_plans: the tied embedding has zero {_said(embedding)} and the head zero {_said(head)}",
            action=f"set zero to {zero}, zero_ranks to {ranks} and offload to {list(map(str, offload))} on layer plan {name}",
            nearest=_with_layer_plan(plan, name, zero=zero, zero_ranks=ranks, offload=offload))


def _held(layer: PlacedLayer, mesh: Mesh) -> tuple[int, int, bool]:
    return effective_zero(layer, mesh), zero_ranks(layer, mesh), Offload.STATES in layer.plan.offload


def _said(held: tuple[int, int, bool]) -> str:
    return (f"{held[0]} over {held[1]} ranks" if held[0] else "0") + (" on the host" if held[2] else "")


@_rule(why="only operators of the layer can run again", action="leave out the others")
def _recompute_names(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items():
        known = layer_operators(plan, layer_plan)
        unknown = [operator for operator in layer_plan.recompute if operator not in known]
        if unknown:
            yield _without(plan, name, unknown, f"it names {unknown[0]}, the layer has {', '.join(known)}")


@_rule(why="alone it would draw another mask in the backward pass: wrong gradients", action="recompute the whole layer, or leave it out")
def _recomputed_dropout(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items():
        if plan.model.dropout and set(layer_plan.recompute) != set(layer_operators(plan, layer_plan)):
            random = [operator for operator in layer_plan.recompute if operator in DRAWS_MASK]
            if random:
                yield _without(plan, name, random, f"{random[0]} draws a dropout mask")


DRAWS_MASK = ("positions", "residual1", "residual2")  # attention does too, and restores the generator when it runs again


def _without(plan: Plan, name: str, operators: list[str], problem: str) -> Refusal:
    layer_plan: LayerPlan = plan.layer_plans[name]
    left = tuple(operator for operator in layer_plan.recompute if operator not in operators)
    return Refusal(
        found=f"layer_plans.{name}: recompute: {problem}", action=f"set recompute to {list(left)}",
        nearest=_with_layer_plan(plan, name, recompute=left))


@_rule(why="equal groups of neighbouring data-parallel ranks divide the experts", action="use another ep")
def _expert_parallel(plan: Plan) -> Iterator[Refusal]:
    reason = illegal_expert_parallel(plan.mesh, plan.model)
    if reason:
        fits = max(n for n in range(1, plan.mesh.ep + 1) if plan.mesh.dp % n == 0 and (plan.model.num_experts or 1) % n == 0)
        yield Refusal(found=f"mesh: {reason}", action=f"set ep to {fits}", nearest=replace(plan, mesh=replace(plan.mesh, ep=fits)))


@_rule(why="a mixture of experts is one module, whose experts are a unit of their own", action="treat its operators alike")
def _mixture(plan: Plan) -> Iterator[Refusal]:
    for name, (found, action, layer_plan) in mixture_problems(plan):
        nearest = replace(plan, layer_plans={**plan.layer_plans, name: layer_plan})
        yield Refusal(found=f"layer_plans.{name}: {found}", action=f"{action} on layer plan {name}", nearest=nearest)


@_rule(why="a module that is not the executor's own is divided, cut and recomputed by whole layers", action="plan with --module")
def _modules(plan: Plan) -> Iterator[Refusal]:
    for found, action, nearest in module_problems(plan):
        yield Refusal(found=found, action=action, nearest=nearest)
