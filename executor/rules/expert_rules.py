"""What the executor requires of a plan for a model of experts: executor/rules/layer_rules.py asks
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from parplan.costmodels.layers.recompute import host_bytes_by_operator
from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.plan.plan import LayerPlan, Plan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.transformer import build_graph

MIXTURE = (
    "router",
    "choice",
    "dispatch",
    "fc1",
    "activation",
    "fc2",
    "combine",
)  # one module: executor/models/mixture_of_experts.py
AGAIN_ALONE = ("activation",)  # of it, what can run again by itself

Problem = tuple[str, str, LayerPlan]  # what was found, what to set, and the layer plan with that


def mixture_problems(plan: Plan) -> Iterator[tuple[str, Problem]]:
    """By name of a layer plan of blocks, placements or a list of operators that a mixture of
    experts cannot have.
    """
    if not plan.model.num_experts:
        return
    block = build_graph(plan.model, plan.training, 1).block
    names = {operator.name for operator in block.operators}
    for name, layer_plan in plan.layer_plans.items():
        if layer_plan.layer is LayerKind.BLOCK:
            kept = host_bytes_by_operator(block, Sharding(), layer_plan.recompute)
            for problem in (
                _recompute(layer_plan, names),
                _kept_on_host(layer_plan, kept),
                _placements(layer_plan) if plan.mesh.tp > 1 else None,
            ):
                if problem:
                    yield name, problem


def _recompute(layer_plan: LayerPlan, names: set[str]) -> Problem | None:
    again = set(layer_plan.recompute)
    alone = [operator for operator in MIXTURE if operator in again and operator not in AGAIN_ALONE]
    if not alone or again == names:
        return None
    left = tuple(operator for operator in layer_plan.recompute if operator not in alone)
    found = f"recompute names {alone[0]}, of the experts only {', '.join(AGAIN_ALONE)} can run again by itself"
    return found, f"set recompute to {list(left)}", replace(layer_plan, recompute=left)


def _kept_on_host(layer_plan: LayerPlan, kept: Mapping[str, int]) -> Problem | None:
    """What one of its operators keeps nothing tells from what another does."""
    named = [operator for operator in MIXTURE if operator in layer_plan.keep_on_host]
    missing = [operator for operator in MIXTURE if kept[operator] and operator not in named]
    if not named or not missing:
        return None
    left = tuple(operator for operator in layer_plan.keep_on_host if operator not in MIXTURE)
    found = f"keep_on_host names {named[0]} and not {missing[0]}: the host keeps all that the experts keep, or nothing"
    return found, f"set keep_on_host to {list(left)}", replace(layer_plan, keep_on_host=left)


def _placements(layer_plan: LayerPlan) -> Problem | None:
    """The mixture is one module: what enters it stays divided as it is until it is combined."""
    wanted = replace(
        layer_plan.operators["router"], parameters={}, output=layer_plan.operators["router"].input
    )
    wrong = [
        name for name in MIXTURE if _sides(layer_plan, name) != (wanted.input, wanted.output, False)
    ]
    if not wrong:
        return None
    operators = {**layer_plan.operators, **dict.fromkeys(MIXTURE, wanted)}
    found = f"operator {wrong[0]} is placed otherwise than router's input: a mixture divides its tokens alike, its parameters not at all"
    return (
        found,
        f"place router to combine on {list(wanted.input)}, parameters whole",
        replace(layer_plan, operators=operators),
    )


def _sides(layer_plan: LayerPlan, name: str) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    placement = layer_plan.operators[name]
    return placement.input, placement.output, any(placement.parameters.values())
