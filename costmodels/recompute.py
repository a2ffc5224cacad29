"""Which operators of a layer run again in the backward pass, and what the layer keeps because of it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from costmodels.sharding import Sharding
from profiles.model import LayerClass, Operator, OperatorKind, Tensor


class Recompute(StrEnum):
    """How much of a block runs again: nothing, the operators that hold many bytes for few FLOPs, or everything."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


def recompute_operators(layer: LayerClass, level: Recompute) -> tuple[str, ...]:
    """The names of the operators that `level` recomputes in `layer`.

    Selective is the attention core where it stores its scores (Korthikanti et al. 2022, section 5); with flash
    attention, which recomputes them by itself, it is the norms and activation functions whose outputs a matmul keeps.
    """
    if level is Recompute.NONE:
        return ()
    if level is Recompute.FULL:
        return tuple(operator.name for operator in layer.operators)
    unfused = tuple(operator.name for operator in layer.operators if _stores_scores(operator))
    if unfused:
        return unfused
    kept_by_matmul = {t.name for op in layer.operators if op.kind is OperatorKind.MATMUL for t in op.saved}
    cheap = (OperatorKind.NORM, OperatorKind.ELEMENTWISE)
    return tuple(op.name for op in layer.operators if op.kind in cheap and any(t.name in kept_by_matmul for t in op.outputs))


def _stores_scores(operator: Operator) -> bool:
    return operator.kind is OperatorKind.ATTENTION and any(tensor.has("keys") for tensor in operator.saved)


def kept_tensors(layer: LayerClass, recompute: Iterable[str]) -> tuple[Tensor, ...]:
    """The activations held from the forward to the backward pass, each once.

    Everything some operator's backward needs and every input of a recomputed operator, except what the recomputed
    operators make: their own internal tensors and their outputs. The output of a recomputed attention core stays for
    an output projection that is not recomputed, as in Korthikanti's selective recompute (34 S b h).
    """
    again = frozenset(recompute)
    remade = {t.name for op in layer.operators if op.name in again for t in (*_remade_outputs(op, layer, again), *_internal(op))}
    kept: dict[str, Tensor] = {}
    for operator in layer.operators:
        needed = (*operator.saved, *operator.inputs) if operator.name in again else operator.saved
        kept.update({tensor.name: tensor for tensor in needed if tensor.name not in remade})
    return tuple(kept.values())


def _remade_outputs(operator: Operator, layer: LayerClass, again: frozenset[str]) -> tuple[Tensor, ...]:
    stays = operator.kind is OperatorKind.ATTENTION and not again.issuperset(layer.graph.successors(operator.name))
    return () if stays else operator.outputs


def _internal(operator: Operator) -> tuple[Tensor, ...]:
    """Saved tensors that the operator makes itself: scores, masks, statistics."""
    inputs = {tensor.name for tensor in operator.inputs}
    return tuple(tensor for tensor in operator.saved if tensor.name not in inputs)


def saved_bytes(layer: LayerClass, sharding: Sharding, recompute: Iterable[str] = ()) -> int:
    """Bytes one rank keeps of `layer` for one micro-batch (EQUATIONS M3)."""
    return sum(sharding.tensor_bytes(tensor) for tensor in kept_tensors(layer, recompute))


def ideal_saved_bytes(layer: LayerClass, tp: int, recompute: Iterable[str] = ()) -> float:
    """The same without any redundancy: every kept tensor divided over all `tp` ranks (EQUATIONS R)."""
    return sum(tensor.num_bytes for tensor in kept_tensors(layer, recompute)) / tp


def workspace_bytes(layer: LayerClass, sharding: Sharding, recompute: Iterable[str] = ()) -> int:
    """Temporary bytes while one micro-batch passes `layer`: what is recomputed, and the widest operator's gradients.

    A column-parallel operator holds its whole gathered input. Left out: workspaces inside kernels.
    """
    remade = saved_bytes(layer, sharding) - saved_bytes(layer, sharding, recompute)
    return max(0, remade) + max(_gradient_bytes(operator, sharding) for operator in layer.operators)


def _gradient_bytes(operator: Operator, sharding: Sharding) -> int:
    gathers = sharding.gathers_input(operator)
    inputs = sum(t.num_bytes if gathers else sharding.tensor_bytes(t) for t in operator.inputs)
    return inputs + sum(sharding.tensor_bytes(t) for t in operator.outputs)
