"""The rule on a grid of tensor-parallel ranks, which the executor does not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from parplan.costmodels.operators.sharding import placements
from parplan.executor.rules.rule import Refusal, rule
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan import LayerPlan, OperatorPlacement, Plan
from parplan.profiles.models.transformer import build_graph


@rule(
    why="tensor-parallel ranks of the executor are one row, which divides products in one dim",
    action="set tp_rows to 1",
)
def grid_rule(plan: Plan) -> Iterator[Refusal]:
    if plan.mesh.tp_rows > 1:
        yield Refusal(
            problem=f"mesh: tp_rows is {plan.mesh.tp_rows}",
            action="set tp_rows to 1, and every operator to Megatron's placement over tp",
            nearest=_one_row(plan),
        )


def _one_row(plan: Plan) -> Plan:
    plan = replace(plan, mesh=replace(plan.mesh, tp_rows=1))
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    sharding = layout_of(plan).sharding

    def in_one_row(layer_plan: LayerPlan) -> LayerPlan:
        operators = graph.layer_class(layer_plan.key(graph)).operators
        usual = {
            operator.name: OperatorPlacement(**asdict(placements(operator, sharding)))
            for operator in operators
        }
        return replace(layer_plan, operators=usual)

    plans = {name: in_one_row(layer_plan) for name, layer_plan in plan.layer_plans.items()}
    return replace(plan, layer_plans=plans)
