"""The divisions of a traced layer that are worth searching, and the operators that stay whole.

The tracer names one dim of an operator that tensor parallelism may divide, the same for the matrix
that makes it and the one that sums over it (profiles/tracing/divisible.py): heads of attention, the
width of an MLP, the vocabulary. A sharding divides some of these dims in all operators of the layer
that have them, and leaves all others whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from parplan.costmodels.operators.legal_splits import operator_splits
from parplan.costmodels.operators.sharding import Sharding, Split
from parplan.planner.plan.traced_plan import SplitPlan
from parplan.profiles.models.operator_graph import LayerClass, Operator, OperatorKind
from parplan.profiles.models.tp_rules import OPTION, TpRules
from parplan.profiles.models.traced_model import BATCH, TracedOperator

_WHOLE = (Split(),)


def traced_shardings(layer: LayerClass, tp: int) -> tuple[Sharding, ...]:
    """Returns shardings of `layer` over `tp` ranks, the one that divides most first.

    After it come those that leave one of its dims whole, and last the one that divides nothing.
    Every sharding keeps activations between layers whole.
    """
    if tp == 1:
        return (Sharding(),)
    divided = divisible_dims(layer, tp)
    chosen = [divided, *(divided - {name} for name in sorted(divided)), frozenset[str]()]
    return tuple(dict.fromkeys(_sharding(layer, tp, dims) for dims in chosen))


def divisible_dims(layer: LayerClass, tp: int) -> frozenset[str]:
    """The parallel dims of `layer` that `tp` ranks divide in every operator that has them."""
    parallel = [operator for operator in layer.operators if operator.parallel_dim is not None]
    illegal = {each.parallel_dim for each in parallel if not _divides(each, tp)}
    return frozenset(str(each.parallel_dim) for each in parallel) - illegal


def ruled_but_whole(operators: Iterable[TracedOperator], rules: TpRules, tp: int) -> str | None:
    """The reason why `tp` ranks cannot divide an operator that a rule divides, or None."""
    for traced in operators:
        operator = traced.operator
        role = rules.role(traced.path, (each.name for each in operator.parameters))
        split = (Split(operator.parallel_dim),)
        rejected = operator_splits(operator, (tp,))[1] if role and operator.parallel_dim else ()
        for each in rejected:
            if each.splits == split:
                return f"{OPTION} divides {operator.name}: {each.reason}"
    return None


def replicated_operators(layer: LayerClass, sharding: Sharding) -> tuple[tuple[str, str], ...]:
    """The operators of which every rank computes all, each with the reason.

    Operators are named if they multiply or look up; of all others every rank has the input.
    """
    return tuple(
        (operator.name, _reason(operator, layer, sharding))
        for operator in layer.operators
        if (operator.flops_forward or operator.kind is OperatorKind.EMBEDDING)
        and all(split.dim is None for split in sharding.splits(operator))
    )


def split_plans(
    placed: Iterable[tuple[int, Operator]], sharding: Sharding
) -> tuple[SplitPlan, ...]:
    """A sharding as the plan file has it, of operators with their places in a shard."""
    splits = ((place, sharding.splits(operator)[0]) for place, operator in placed)
    return tuple(SplitPlan(place=place, dim=each.dim) for place, each in splits if each.dim)


def _divides(operator: Operator, tp: int) -> bool:
    return (Split(operator.parallel_dim),) in operator_splits(operator, (tp,))[0]


def _sharding(layer: LayerClass, tp: int, dims: frozenset[str]) -> Sharding:
    """The sharding that divides `dims` and names the operators of all others as whole."""
    whole = tuple(
        (operator.name, _WHOLE)
        for operator in layer.operators
        if operator.parallel_dim is not None and operator.parallel_dim not in dims
    )
    return Sharding(tp, own=whole)


def _reason(operator: Operator, layer: LayerClass, sharding: Sharding) -> str:
    name = operator.parallel_dim
    if name is None:
        return _without_parallel_dim(operator, layer)
    for other in (each for each in layer.operators if each.parallel_dim == name):
        for rejected in operator_splits(other, sharding.degrees)[1]:
            if rejected.splits == (Split(name),):
                return rejected.reason
    return f"this sharding leaves {name} whole"


def _without_parallel_dim(operator: Operator, layer: LayerClass) -> str:
    """Names an operator of the layer that needs one of the operator's dims whole."""
    reasons = dict(operator.undivided)
    for dim in operator.dims[::-1]:
        if dim.name in reasons and dim.name != BATCH:
            return f"{dim.name}: {reasons[dim.name]}"
    for dim in operator.dims[::-1]:
        for other in layer.operators:
            whole = dict(other.undivided)
            if dim.name in whole and dim.name != BATCH:
                return f"{dim.name} is whole in {other.name}: {whole[dim.name]}"
    return "no other matrix of the layer shares a dim with it"
