"""The rule on a grid of tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from parplan.costmodels.divided_weights import illegal_grid
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.operators.plan_placements import placements
from parplan.executor.rules.rule import Refusal, rule, those
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan import LayerPlan, OperatorPlacement, Plan
from parplan.profiles.models.operator_graph import ModelGraph
from parplan.profiles.models.spec import Optimizer
from parplan.profiles.models.transformer import build_graph

ELEMENTWISE = (Optimizer.ADAM, Optimizer.SGD, Optimizer.SGD_MOMENTUM)


@rule(
    why="rows divide the batch of a dense transformer and columns its features, of the executor's "
    "own blocks alone; what updates a part of a matrix by more than its elements needs the whole",
    action="set tp_rows to 1, or do what it says",
)
def grid_rule(plan: Plan) -> Iterator[Refusal]:
    if plan.mesh.tp_rows == 1:
        return
    reason = illegal_grid(layout_of(plan), plan.model, plan.training) or _obstacle(plan)
    if reason:
        yield Refusal(
            problem=f"mesh: {reason}",
            action="set tp_rows to 1, and every operator to Megatron's placement over tp",
            nearest=_placed(replace(plan, mesh=replace(plan.mesh, tp_rows=1))),
        )
        return
    placed = _placed(plan)
    for name, layer_plan in plan.layer_plans.items():
        if layer_plan.operators != placed.layer_plans[name].operators:
            yield Refusal(
                problem=f"layer_plans.{name}: its operators are not placed over tp_rows "
                f"{plan.mesh.tp_rows}",
                action="set every operator to its placement over tp_rows and tp_columns",
                nearest=placed,
            )
            return


def _obstacle(plan: Plan) -> str | None:
    """Return parts of a plan that no grid runs with, or None."""
    layers = plan.layer_plans.values()
    found = those(
        {
            "a module": plan.module is not None,
            "states on the host": any(Offload.STATES in each.offload for each in layers),
            f"optimizer {plan.training.optimizer}": plan.training.optimizer not in ELEMENTWISE,
        }
    )
    return f"tp_rows {plan.mesh.tp_rows} with {' and '.join(found)}" if found else None


def _placed(plan: Plan) -> Plan:
    """Return the plan with the placements that the tensor-parallel ranks of its mesh have."""
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    plans = {name: _of_mesh(each, plan, graph) for name, each in plan.layer_plans.items()}
    return replace(plan, layer_plans=plans)


def _of_mesh(layer_plan: LayerPlan, plan: Plan, graph: ModelGraph) -> LayerPlan:
    sharding = layout_of(plan).sharding
    operators = {
        operator.name: OperatorPlacement(**asdict(placements(operator, sharding)))
        for operator in graph.layer_class(layer_plan.key(graph)).operators
    }
    return replace(layer_plan, operators=operators)
