"""A rule on sub-pipelined tensor parallelism, which executor/sharding/overlap.py runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from parplan.costmodels.layers.run_in_halves import whole_in_halves
from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.placed_layers import layer_operators
from parplan.executor.rules.rule import Refusal, rule
from parplan.planner.plan.plan import LayerPlan, OperatorPlacement, Plan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.transformer import build_graph

ACROSS_BLOCKS = 3


@rule(
    why="the all-reduces of a block of Megatron's tensor parallelism run under the products of "
    "the other half of its micro-batch",
    action="set tp_overlap to 0, or what it says",
)
def halves(plan: Plan) -> Iterator[Refusal]:
    level = plan.pipeline.tp_overlap
    lower, obstacle = 0, _obstacle(plan) if level else None
    if not obstacle and level >= ACROSS_BLOCKS:
        lower, obstacle = ACROSS_BLOCKS - 1, _half_kept(plan)
    if obstacle:
        yield Refusal(
            problem=f"pipeline: tp_overlap {level} with {obstacle}",
            action=f"set tp_overlap to {lower}",
            nearest=replace(plan, pipeline=replace(plan.pipeline, tp_overlap=lower)),
        )


def _obstacle(plan: Plan) -> str | None:
    """Return the reason why the plan can run at no level of overlap, or None."""
    if plan.mesh.tp == 1:
        return "tp 1, where nothing is all-reduced"
    if plan.module is not None:
        return "a module that is not the executor's own"
    if plan.model.num_experts:
        return "a mixture of experts"
    if plan.pipeline.micro_batch_size % 2:
        return f"micro-batches of {plan.pipeline.micro_batch_size}, which have no two equal halves"
    if whole := whole_in_halves(plan.model, plan.training):
        return whole
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    megatron = {
        operator.name: placements(operator, Sharding(tp=plan.mesh.tp))
        for operator in graph.block.operators
    }
    for name, layer_plan in _blocks(plan):
        differing = [
            operator
            for operator in megatron
            if layer_plan.operators[operator] != OperatorPlacement(**asdict(megatron[operator]))
        ]
        if differing:
            by_sequence = ", by sequence" if layer_plan.sequence_parallel else ""
            return f"{differing[0]} of layer plan {name} divided otherwise{by_sequence}"
    return None


def _half_kept(plan: Plan) -> str | None:
    """Return the reason why the plan cannot run at level 3, or None.

    A block of level 3 gets half of its input while it runs: no hook sees that half to draw a mask
    for it or to move it to the host.
    """
    for name, layer_plan in _blocks(plan):
        if set(layer_plan.recompute) == set(layer_operators(plan, layer_plan)):
            if plan.model.dropout:
                return (
                    f"dropout, and layer plan {name} recomputed in full, which would draw no mask "
                    "for half of its input"
                )
            if layer_plan.keep_on_host:
                return (
                    f"layer plan {name} recomputed in full and kept on the host, half of whose "
                    "input would stay"
                )
    return None


def _blocks(plan: Plan) -> Iterator[tuple[str, LayerPlan]]:
    return (
        (name, layer_plan)
        for name, layer_plan in plan.layer_plans.items()
        if layer_plan.layer is LayerKind.BLOCK
    )
