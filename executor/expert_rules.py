"""What the executor requires of a plan for a model of experts."""

from __future__ import annotations

from planner.plan import LayerPlan, Plan
from planner.space import illegal_expert_parallel
from profiles.errors import ConfigError
from profiles.model import LayerKind
from profiles.transformer import build_graph

MIXTURE = ("router", "choice", "dispatch", "fc1", "activation", "fc2", "combine")  # one module: executor/moe.py
AGAIN_ALONE = ("activation",)  # of it, what can run again by itself


def validate_experts(plan: Plan) -> None:
    """Raises ConfigError for an expert-parallel mesh, placements or a recompute list that the mixture cannot have."""
    reason = illegal_expert_parallel(plan.mesh, plan.model)
    if reason:
        raise ConfigError(f"mesh: {reason}", hint="make the plan again with another --ep")
    if not plan.model.num_experts:
        return
    names = {operator.name for operator in build_graph(plan.model, plan.training, 1).block.operators}
    for name, layer_plan in plan.layer_plans.items():
        if layer_plan.layer is LayerKind.BLOCK:
            _validate_recompute(name, layer_plan, names)
            if plan.mesh.tp > 1:
                _validate_placements(name, layer_plan)


def _validate_recompute(name: str, layer_plan: LayerPlan, names: set[str]) -> None:
    again = set(layer_plan.recompute)
    alone = [operator for operator in MIXTURE if operator in again and operator not in AGAIN_ALONE]
    if alone and again != names:
        raise ConfigError(
            f"layer_plans.{name}: recompute names {alone[0]}, of the experts only {', '.join(AGAIN_ALONE)} can run again by itself",
            hint="recompute the whole block, or not this")


def _validate_placements(name: str, layer_plan: LayerPlan) -> None:
    """The mixture is one module: what enters it stays divided as it is until it is combined."""
    first = layer_plan.operators["router"].input
    for operator in MIXTURE:
        placement = layer_plan.operators[operator]
        if any(placement.parameters.values()):
            raise ConfigError(f"layer_plans.{name}: operator {operator}: its parameters must be whole on every tp rank")
        if (placement.input, placement.output) != (first, first):
            raise ConfigError(
                f"layer_plans.{name}: operator {operator} is placed otherwise than router: a mixture of experts divides its tokens alike",
                hint="place router to combine alike")
