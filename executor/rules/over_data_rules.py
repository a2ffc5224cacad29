"""Rules on blocks whose weights are divided over data-parallel ranks as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from parplan.costmodels.divided_weights import illegal_over_data
from parplan.costmodels.operators.plan_placements import Placements, placed_splits, placements
from parplan.executor.rules.rule import Refusal, rule, with_layer_plan
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan import LayerPlan, OperatorPlacement, Plan
from parplan.profiles.models.operator_graph import LayerKind, Operator
from parplan.profiles.models.transformer import build_graph


@rule(
    why="an operator on both axes divides its batch or its weight over data-parallel ranks",
    action="divide operators over the tensor-parallel axis only",
)
def over_data_rule(plan: Plan) -> Iterator[Refusal]:
    layout = layout_of(plan)
    batch = plan.pipeline.micro_batch_size * plan.mesh.dp
    for name, layer_plan in plan.layer_plans.items():
        if not layer_plan.divides_over_data:
            continue
        graph = build_graph(plan.model, plan.training, batch)
        operators = graph.layer_class(layer_plan.key(graph))
        reason = _unrunnable(plan, layer_plan) or next(
            (
                f"operator {operator.name} has placements that dp {plan.mesh.dp} x tp "
                f"{plan.mesh.tp} cannot give it"
                for operator in operators.operators
                if placed_splits(operator, layout.over_data, _placed(layer_plan, operator)) is None
            ),
            None,
        )
        if reason is None:
            continue
        usual = {
            operator.name: OperatorPlacement(**asdict(placements(operator, layout.sharding)))
            for operator in operators.operators
        }
        yield Refusal(
            problem=f"layer_plans.{name}: {reason}",
            action="set every operator to Megatron's placement over tp",
            nearest=with_layer_plan(plan, name, operators=usual if plan.mesh.tp > 1 else {}),
        )


def _placed(layer_plan: LayerPlan, operator: Operator) -> Placements:
    placed = layer_plan.operators.get(operator.name, OperatorPlacement())
    return Placements(parameters=dict(placed.parameters), input=placed.input, output=placed.output)


def _unrunnable(plan: Plan, layer_plan: LayerPlan) -> str | None:
    """Return why a layer of the plan cannot be divided over data-parallel ranks, or None."""
    if layer_plan.layer is not LayerKind.BLOCK:
        return f"a weight of the {layer_plan.layer} is divided over dp, only blocks can be"
    if plan.module is not None:
        return "a module of your own is divided over tp alone"
    if layer_plan.own_zero:
        return "its weights are divided over dp, and its operators differ in ZeRO"
    if layer_plan.keep_on_host or layer_plan.offload:
        return "its weights are divided over dp, and it has tensors on the host"
    layout = replace(layout_of(plan), chunked=plan.chunks is not None)
    reason = illegal_over_data(layout, plan.model)
    return f"its weights are divided over dp: {reason}" if reason else None
