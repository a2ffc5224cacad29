"""Constraints on plans for a mixture of experts, which executor/rules/layer_rules.py checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import host_bytes_by_operator
from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.placed_layers import layer_class_of
from parplan.executor.rules.divisions import SEQUENCE, TOKENS
from parplan.planner.plan.plan import LayerPlan, OperatorPlacement, Plan
from parplan.profiles.models.operator_graph import LayerClass

RECOMPUTED_ALONE = ("activation",)  # operators of the mixture that can be recomputed by themselves

Problem = tuple[str, str, LayerPlan]  # the problem, the remedy, and the layer plan with the remedy


def mixture_problems(plan: Plan) -> Iterator[tuple[str, Problem]]:
    """Yield layer-plan names of blocks with a problem that the mixture of experts has.

    A problem is in the placements, in `recompute` or in `keep_on_host`.
    """
    for name, layer_plan in plan.layer_plans.items():
        block = layer_class_of(plan, layer_plan)
        if block.has_experts:
            for problem in (
                _recompute(layer_plan, block),
                _kept_on_host(layer_plan, block),
                _placements(layer_plan, plan.mesh, block) if plan.mesh.tp > 1 else None,
            ):
                if problem:
                    yield name, problem


def mixture_of(block: LayerClass) -> tuple[str, ...]:
    """Return the operators of a mixture, one module of executor/models/mixture_of_experts.py."""
    return tuple(operator.name for operator in block.operators if operator.in_mixture)


def _recompute(layer_plan: LayerPlan, block: LayerClass) -> Problem | None:
    recomputed = set(layer_plan.recompute)
    alone = [
        operator
        for operator in mixture_of(block)
        if operator in recomputed and operator not in RECOMPUTED_ALONE
    ]
    if not alone or recomputed == {operator.name for operator in block.operators}:
        return None
    left = tuple(operator for operator in layer_plan.recompute if operator not in alone)
    problem = (
        f"recompute names {alone[0]}, of the experts only {', '.join(RECOMPUTED_ALONE)} can run "
        "again by itself"
    )
    return problem, f"set recompute to {list(left)}", replace(layer_plan, recompute=left)


def _kept_on_host(layer_plan: LayerPlan, block: LayerClass) -> Problem | None:
    """Check that the host keeps all saved tensors of the mixture or none.

    Saved tensors of one of its operators cannot be told from those of another.
    """
    mixture = mixture_of(block)
    kept = host_bytes_by_operator(block, Sharding(), layer_plan.recompute)
    named = [operator for operator in mixture if operator in layer_plan.keep_on_host]
    missing = [operator for operator in mixture if kept[operator] and operator not in named]
    if not named or not missing:
        return None
    left = tuple(operator for operator in layer_plan.keep_on_host if operator not in mixture)
    problem = (
        f"keep_on_host names {named[0]} and not {missing[0]}: the host keeps all that the experts "
        "keep, or nothing"
    )
    return problem, f"set keep_on_host to {list(left)}", replace(layer_plan, keep_on_host=left)


def _placements(layer_plan: LayerPlan, mesh: Mesh, block: LayerClass) -> Problem | None:
    """Check that ranks divide the tokens of a mixture alike, or the width of all experts."""
    router = next(name for name in mixture_of(block) if name.endswith("router"))
    legal = _legal(layer_plan.operators[router], mesh, block)
    wrong = [name for name in legal if layer_plan.operators[name] != legal[name]]
    if not wrong:
        return None
    problem = (
        f"operator {wrong[0]} is placed otherwise than a mixture whose tp ranks divide the tokens, "
        + ("and the width of its experts" if mesh.etp > 1 else "its parameters not at all")
    )
    tokens = list(legal[router].input)
    return (
        problem,
        f"place router to combine on {tokens}"
        + (", and the parameters of experts by their width" if mesh.etp > 1 else ""),
        replace(layer_plan, operators={**layer_plan.operators, **legal}),
    )


def _legal(
    router: OperatorPlacement, mesh: Mesh, block: LayerClass
) -> dict[str, OperatorPlacement]:
    """Return the placements of a mixture that reads tokens as `router` does, if ranks divide them.

    Else the ranks divide them by sequence.
    """
    tokens = router.input if router.input in TOKENS else SEQUENCE
    sharding = Sharding(tp=mesh.tp, sequence_parallel=True, etp=mesh.etp)

    def placed(entries: tuple[str, ...]) -> tuple[str, ...]:
        return tokens if entries == SEQUENCE else entries

    legal = {}
    for name in mixture_of(block):
        each = placements(block.operator(name), sharding)
        legal[name] = OperatorPlacement(
            parameters=each.parameters, input=placed(each.input), output=placed(each.output)
        )
    return legal
