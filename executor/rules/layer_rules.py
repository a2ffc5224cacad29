"""Rules on how a layer is divided, held and recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from parplan.costmodels.communication.mesh import Mesh, illegal_expert_parallel
from parplan.costmodels.host.host_embedding import illegal_host_embedding
from parplan.costmodels.host.offload import Offload
from parplan.executor.placed_layers import (
    PlacedLayer,
    effective_zero,
    layer_class_of,
    layer_operators,
    stage_layers,
)
from parplan.executor.placed_layers import zero_ranks as held_by
from parplan.executor.rules.divisions import (
    misplaced,
    nearest_placement,
    table_division,
    table_placement,
    undivided,
)
from parplan.executor.rules.expert_rules import mixture_problems
from parplan.executor.rules.external_rules import module_problems
from parplan.executor.rules.rule import Refusal, rule, with_layer_plan
from parplan.planner.plan.plan import LayerPlan, Plan
from parplan.profiles.divisors import divisors
from parplan.profiles.models.operator_graph import LayerKind

FURTHER_TABLE = "mtp1.tokens"  # the table of multi-token prediction, in the head
EIGHT_BITS = 8
GATHERED = 3  # the ZeRO stage that shards parameters


@rule(
    why="the operator's placements are not among those that give the right values and gradients",
    action="place it otherwise",
)
def placements_rule(plan: Plan) -> Iterator[Refusal]:
    for fault in misplaced(plan):
        placement = nearest_placement(plan, fault)
        operators = {**plan.layer_plans[fault.layer_plan].operators, fault.operator.name: placement}
        sides = {"input": placement.input, "output": placement.output, **placement.parameters}
        yield Refusal(
            problem=(
                f"layer_plans.{fault.layer_plan}: operator {fault.operator.name}: {fault.problem}"
            ),
            action="set "
            + ", ".join(f"{name} to {list(entries)}" for name, entries in sides.items()),
            nearest=with_layer_plan(plan, fault.layer_plan, operators=operators),
        )


@rule(why="tensor-parallel ranks hold equal parts", action="use a tp that divides it")
def divisible(plan: Plan) -> Iterator[Refusal]:
    mesh = plan.mesh
    for uneven in undivided(plan):
        smaller_tps = (n for n in range(mesh.tp - 1, 0, -1) if mesh.tp % n == 0)
        tp = next(n for n in smaller_tps if uneven.size % n == 0)
        smaller = replace(mesh, dp=mesh.dp * mesh.tp // tp, tp=tp, ep=1, etp=1)
        yield Refusal(
            problem=f"layer_plans.{uneven.layer_plan}: operator {uneven.operator}: tp {mesh.tp} "
            f"does not divide {uneven.what}",
            action=f"use tp {tp}, dp {smaller.dp}: it divides {uneven.size}",
            nearest=replace(plan, mesh=smaller),
        )


@rule(
    why="equal groups of neighbours hold one copy of the states each",
    action="use a divisor of dp x cp",
)
def zero_ranks(plan: Plan) -> Iterator[Refusal]:
    replicas = plan.mesh.replicas
    for name, layer_plan in plan.layer_plans.items():
        ranks = layer_plan.zero_ranks
        if layer_plan.highest_zero and ranks and replicas % ranks:
            nearest = min(divisors(replicas), key=lambda n: (abs(n - ranks), -n))
            divided = f"dp {plan.mesh.dp}" + (f" x cp {plan.mesh.cp}" if plan.mesh.cp > 1 else "")
            yield Refusal(
                problem=f"layer_plans.{name}: zero_ranks {ranks} does not divide {divided}",
                action=f"set zero_ranks to {nearest} on layer plan {name}",
                nearest=with_layer_plan(plan, name, zero_ranks=nearest),
            )


@rule(
    why="the two gradients of the one weight are added as they are held: whole, or in the same "
    "shards",
    action="use one zero for both",
)
def tied(plan: Plan) -> Iterator[Refusal]:
    if not plan.model.shares_table:
        return
    stages = stage_layers(plan)
    embedding = _sharded_as(stages[0][0], plan.mesh)
    head = _sharded_as(stages[-1][-1], plan.mesh)
    if plan.mesh.pp == 1:
        alike = embedding == head
    else:
        alike = (embedding[0] == 0) == (head[0] == 0) and embedding[1:] == head[1:]
    if not alike:
        to_head = embedding[0] >= head[0]
        name = _plan_name(plan, stages[-1][-1] if to_head else stages[0][0])
        zero, ranks, offload = embedding if to_head else head
        yield Refusal(
            problem=f"layer_plans: the tied embedding has zero {_zero_text(embedding)} and the "
            f"head zero {_zero_text(head)}",
            action=f"set zero to {zero}, zero_ranks to {ranks} and offload to "
            f"{list(map(str, offload))} on layer plan {name}",
            nearest=with_layer_plan(plan, name, zero=zero, zero_ranks=ranks, offload=offload),
        )


@rule(
    why="the two gradients of the one weight are added part by part",
    action="divide the table alike in embedding and head",
)
def tied_tables(plan: Plan) -> Iterator[Refusal]:
    if not plan.model.shares_table or plan.mesh.tp == 1:
        return
    stages = stage_layers(plan)
    first, last = stages[0][0], stages[-1][-1]
    in_head = "lm_head" if plan.model.tied_embeddings else FURTHER_TABLE
    division = table_division(last.plan, in_head)
    if table_division(first.plan, "tokens") != division:
        name = _plan_name(plan, first)
        table = table_placement(division)
        yield Refusal(
            problem=f"layer_plans: embedding {name} divides the tied table in another way than "
            f"head {_plan_name(plan, last)}",
            action=f"set tokens of layer plan {name} to weight "
            f"{list(table.parameters['weight'])} and output {list(table.output)}",
            nearest=with_layer_plan(
                plan, name, operators={**first.plan.operators, "tokens": table}
            ),
        )


def _plan_name(plan: Plan, layer: PlacedLayer) -> str:
    return next(name for name, each in plan.layer_plans.items() if each is layer.plan)


def _sharded_as(layer: PlacedLayer, mesh: Mesh) -> tuple[int, int, tuple[Offload, ...]]:
    on_host = tuple(sorted({Offload.STATES, Offload.LOOKUP} & set(layer.plan.offload)))
    return effective_zero(layer, mesh), held_by(layer, mesh), on_host


def _zero_text(sharded_as: tuple[int, int, tuple[Offload, ...]]) -> str:
    zero, ranks, on_host = sharded_as
    return (f"{zero} over {ranks} ranks" if zero else "0") + "".join(
        " on the host" if each is Offload.STATES else " with its table on the host"
        for each in on_host
    )


@rule(
    why="only in the executor's own blocks, without experts, are operators units of their own",
    action="give all operators one zero",
)
def zero_by_operator(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items():
        if layer_plan.own_zero and (plan.module is not None or plan.model.num_experts):
            operators = "a module" if plan.module is not None else "a mixture of experts"
            yield Refusal(
                problem=f"layer_plans.{name}: own_zero names operators of {operators}",
                action=f"leave own_zero out of layer plan {name}",
                nearest=with_layer_plan(plan, name, own_zero={}),
            )


@rule(
    why="ZeRO 3 would cast the scales of 8-bit weights to 16 bits with all that it gathers, and "
    "leave those of parts of blocks on one rank",
    action="use zero 2 or less",
)
def eight_bits(plan: Plan) -> Iterator[Refusal]:
    tuning = plan.training.fine_tuning
    if tuning is None or tuning.base_bits != EIGHT_BITS or plan.mesh.replicas == 1:
        return
    for name, layer_plan in plan.layer_plans.items():
        operators = layer_class_of(plan, layer_plan).operators
        held_so = any(each.quantised for operator in operators for each in operator.parameters)
        if held_so and layer_plan.highest_zero == GATHERED:
            own_zero = {each: min(zero, 2) for each, zero in layer_plan.own_zero.items()}
            yield Refusal(
                problem=f"layer_plans.{name}: zero is {GATHERED} with base_bits {EIGHT_BITS}",
                action=f"set zero to 2 on layer plan {name}",
                nearest=with_layer_plan(
                    plan, name, zero=min(layer_plan.zero, 2), own_zero=own_zero
                ),
            )


@rule(why="only operators of the layer can run again", action="leave out the others")
def recompute_names_rule(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items():
        known = layer_operators(plan, layer_plan)
        unknown = [operator for operator in layer_plan.recompute if operator not in known]
        if unknown:
            yield _without(
                plan, name, unknown, f"it names {unknown[0]}, the layer has {', '.join(known)}"
            )


@rule(
    why="alone it would draw another mask in the backward pass: wrong gradients",
    action="recompute the whole layer, or leave it out",
)
def recomputed_dropout(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items():
        if plan.model.dropout and set(layer_plan.recompute) != set(
            layer_operators(plan, layer_plan)
        ):
            random = [operator for operator in layer_plan.recompute if operator in DRAWS_MASK]
            if random:
                yield _without(plan, name, random, f"{random[0]} draws a dropout mask")


@rule(why="only what operators of a block keep goes to the host", action="leave out the others")
def kept_on_host(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items():
        known = layer_operators(plan, layer_plan) if layer_plan.layer is LayerKind.BLOCK else ()
        unknown = [operator for operator in layer_plan.keep_on_host if operator not in known]
        if unknown:
            left = tuple(operator for operator in layer_plan.keep_on_host if operator in known)
            has = f"the layer has {', '.join(known)}" if known else f"it is the {layer_plan.layer}"
            yield Refusal(
                problem=f"layer_plans.{name}: keep_on_host: it names {unknown[0]}, {has}",
                action=f"set keep_on_host to {list(left)}",
                nearest=with_layer_plan(plan, name, keep_on_host=left),
            )


@rule(why="the host looks whole rows up in a table of its own", action="leave lookup out")
def lookup(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items():
        if Offload.LOOKUP in layer_plan.offload:
            reason = illegal_host_embedding(
                plan.mesh, plan.model.hidden_size, plan.model.tied_embeddings
            )
            tied = plan.model.tied_embeddings and layer_plan.layer is LayerKind.HEAD
            if layer_plan.layer is not LayerKind.EMBEDDING and not tied:
                reason = f"the {layer_plan.layer} has no token table"
            elif plan.module is not None:
                reason = "the module looks tokens up itself"
            if reason:
                left = tuple(what for what in layer_plan.offload if what is not Offload.LOOKUP)
                yield Refusal(
                    problem=f"layer_plans.{name}: offload has lookup: {reason}",
                    action=f"set offload to {list(map(str, left))}",
                    nearest=with_layer_plan(plan, name, offload=left),
                )


# Attention draws a mask too, and restores the generator when it is recomputed.
DRAWS_MASK = ("positions", "residual1", "residual2")


def _without(plan: Plan, name: str, operators: list[str], problem: str) -> Refusal:
    layer_plan: LayerPlan = plan.layer_plans[name]
    left = tuple(operator for operator in layer_plan.recompute if operator not in operators)
    return Refusal(
        problem=f"layer_plans.{name}: recompute: {problem}",
        action=f"set recompute to {list(left)}",
        nearest=with_layer_plan(plan, name, recompute=left),
    )


@rule(
    why="neighbouring ranks of a stage divide the experts equally",
    action="use another ep or etp",
)
def expert_parallel(plan: Plan) -> Iterator[Refusal]:
    mesh, model = plan.mesh, plan.model
    reason = illegal_expert_parallel(mesh, model)
    if reason:
        divides = mesh.etp == mesh.tp and model.expert_ffn_hidden_size % mesh.etp == 0
        etp = mesh.etp if divides and model.num_experts else 1
        ranks = gcd(mesh.ranks_per_stage // etp, model.num_experts or 1)
        ep = max(n for n in range(1, mesh.ep + 1) if ranks % n == 0)
        yield Refusal(
            problem=f"mesh: {reason}",
            action=f"set ep to {ep}" + (f" and etp to {etp}" if etp != mesh.etp else ""),
            nearest=replace(plan, mesh=replace(mesh, ep=ep, etp=etp)),
        )


@rule(
    why="a mixture of experts is one module, whose experts are a unit of their own",
    action="treat its operators alike",
)
def mixture(plan: Plan) -> Iterator[Refusal]:
    for name, (problem, action, layer_plan) in mixture_problems(plan):
        nearest = replace(plan, layer_plans={**plan.layer_plans, name: layer_plan})
        yield Refusal(
            problem=f"layer_plans.{name}: {problem}",
            action=f"{action} on layer plan {name}",
            nearest=nearest,
        )


@rule(
    why="a module that is not the executor's own is divided, cut and recomputed by whole layers",
    action="plan with --module",
)
def modules(plan: Plan) -> Iterator[Refusal]:
    for problem, action, nearest in module_problems(plan):
        yield Refusal(problem=problem, action=action, nearest=nearest)


LAYERS = (
    placements_rule,
    divisible,
    zero_ranks,
    tied,
    tied_tables,
    zero_by_operator,
    eight_bits,
    recompute_names_rule,
    recomputed_dropout,
    kept_on_host,
    lookup,
    expert_parallel,
    mixture,
    modules,
)
