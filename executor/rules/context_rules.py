"""Rules on context parallelism, which executor/context runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.layers.context_parallel import illegal_context
from parplan.executor.rules.rule import Refusal, rule, with_training
from parplan.planner.plan.plan import Plan
from parplan.profiles.stack import AttentionKernel, ContextForm


@rule(
    why="every rank has two pieces of each sequence, as long as those of the others",
    action="use sequences that 2 cp divides",
)
def context_pieces(plan: Plan) -> Iterator[Refusal]:
    length, cp = plan.training.seq_length, plan.mesh.cp
    if cp == 1 or length % (2 * cp) == 0:
        return
    problem = f"training: seq_length is {length}, which has no {2 * cp} equal pieces for cp {cp}"
    whole = length - length % (2 * cp)
    if not whole:
        yield _without_context(plan, problem)
        return
    yield Refusal(
        problem=problem,
        action=f"set seq_length to {whole}",
        nearest=with_training(plan, seq_length=whole, documents=None),
    )


@rule(
    why="ranks that exchange tokens for heads have as many heads each, with those keys and values "
    "that they read",
    action="use the ring",
)
def context_heads(plan: Plan) -> Iterator[Refusal]:
    text = replace(plan.model, tower=None)  # the last of these rules is about images
    reason = illegal_context(plan.mesh, text, plan.cluster)
    if reason:
        yield Refusal(
            problem=f"mesh: {plan.mesh.context_form}: {reason}",
            action="set context_form to ring",
            nearest=replace(plan, mesh=replace(plan.mesh, context_form=ContextForm.RING)),
        )


@rule(
    why="blocks of scores are merged that nobody keeps, and each rank would draw another mask",
    action="use flash attention without dropout",
)
def context_attention(plan: Plan) -> Iterator[Refusal]:
    if plan.mesh.cp == 1:
        return
    if plan.training.attention is not AttentionKernel.FLASH:
        yield Refusal(
            problem=f"training: attention is {plan.training.attention} with cp {plan.mesh.cp}",
            action="set attention to flash",
            nearest=with_training(plan, attention=AttentionKernel.FLASH),
        )
    if plan.model.dropout:
        yield Refusal(
            problem=f"model: dropout is {plan.model.dropout} with cp {plan.mesh.cp}",
            action="set dropout to 0.0",
            nearest=replace(plan, model=replace(plan.model, dropout=0.0)),
        )


@rule(
    why="only the executor's own blocks know which tokens a rank has, and only where nothing else "
    "moves under their passes",
    action="use the ranks for data parallelism",
)
def context_alone(plan: Plan) -> Iterator[Refusal]:
    obstacle = _obstacle(plan) if plan.mesh.cp > 1 else None
    if obstacle:
        yield _without_context(plan, f"mesh: cp is {plan.mesh.cp} with {obstacle}")


def _obstacle(plan: Plan) -> str | None:
    """Return the part of a plan that context parallelism cannot run beside, or None."""
    if plan.module is not None:
        return "a module that is not the executor's own"
    if plan.chunks is not None:
        return "blocks in chunks"
    if plan.model.tower is not None:
        return f"a {plan.model.tower.name} tower, whose images no rank divides"
    if plan.model.scans:
        return "blocks that scan a sequence"
    if plan.pipeline.tp_overlap:
        return f"tp_overlap {plan.pipeline.tp_overlap}"
    for name, layer_plan in plan.layer_plans.items():
        if layer_plan.divides_over_data:
            return f"weights that layer plan {name} divides over dp"
        if layer_plan.keep_on_host:
            return f"activations that layer plan {name} keeps on the host"
    return None


def _without_context(plan: Plan, problem: str) -> Refusal:
    replicas = plan.mesh.replicas
    mesh = replace(plan.mesh, cp=1, context_form=None, dp=replicas)
    return Refusal(
        problem=problem,
        action=f"set cp to 1, context_form to null and dp to {replicas}",
        nearest=replace(plan, mesh=mesh),
    )


CONTEXT = (context_pieces, context_heads, context_attention, context_alone)
