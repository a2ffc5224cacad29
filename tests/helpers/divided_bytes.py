"""Saved bytes of a block under any placements, by the executor's rule, from the plan file alone.

A tensor that some operator's backward pass needs is kept where it was made, once, by the operators
that read it there or read it whole, who gather it again; an operator that reads it divided in
another way keeps its own part of it. Flash attention needs its own output too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from parplan.costmodels.layers.recompute import saved_tensors
from parplan.executor.rules.divisions import Entries, shard_dim
from parplan.planner.plan.plan import OperatorPlacement
from parplan.profiles.models.operator_graph import LayerClass, Operator, OperatorKind, Tensor


def divided_saved_bytes(
    layer: LayerClass,
    placements: Mapping[str, OperatorPlacement],
    tp: int,
    recompute: Iterable[str],
    incoming: Entries = (),
) -> int:
    """Bytes that one rank saves of `layer` for one micro-batch.

    `incoming` is where the layer before leaves its output.
    """
    recomputed = frozenset(recompute)
    made = {
        tensor.name: placements[op.name].output for op in layer.operators for tensor in op.outputs
    }
    kept = {tensor.name: tensor for tensor in saved_tensors(layer, recomputed)}
    held: set[tuple[str, int | None, str]] = set()
    for operator in layer.operators:
        for tensor in _needed(operator, recomputed):
            if tensor.name in kept:
                held.add(
                    (
                        tensor.name,
                        *_where(
                            operator,
                            tensor,
                            placements[operator.name],
                            made.get(tensor.name, incoming),
                        ),
                    )
                )
    return sum(kept[name].num_bytes // (1 if dim is None else tp) for name, dim, _ in held)


def _where(
    operator: Operator, tensor: Tensor, placement: OperatorPlacement, made: Entries
) -> tuple[int | None, str]:
    """The dim along which what is kept is divided, and who keeps it if nobody else can use it."""
    if tensor in operator.outputs or (tensor in operator.inputs and placement.input in ((), made)):
        return shard_dim(made), ""
    return shard_dim(
        placement.input
    ), operator.name  # a tensor of its own, or its own part of an input


def _needed(operator: Operator, recomputed: frozenset[str]) -> tuple[Tensor, ...]:
    inputs = operator.inputs if operator.name in recomputed else ()
    flash = (
        operator.kind is OperatorKind.ATTENTION
        and operator.name not in recomputed
        and not any(t.has("keys") for t in operator.saved)
    )
    return (*operator.saved, *inputs, *(operator.outputs if flash else ()))
