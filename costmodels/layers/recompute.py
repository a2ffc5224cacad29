"""Which operators of a layer run again in the backward pass, and what the layer keeps because of
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from parplan.costmodels.layers.tensor_flow import TensorFlow, keeps_output, tensor_flows_of
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.operator_graph import (
    PRODUCTS,
    LayerClass,
    Operator,
    OperatorKind,
    Tensor,
)
from parplan.profiles.stack import NEUTRAL, Stack


class Recompute(StrEnum):
    """How much of a block runs again: nothing, the operators that hold many bytes for few FLOPs, or
    everything.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


RecomputedOperators = (
    Recompute | tuple[str, ...]
)  # what runs again in the backward pass: a level, or operators by name


def recompute_operators(layer: LayerClass, level: RecomputedOperators) -> tuple[str, ...]:
    """The names of the operators that `level` recomputes in `layer`.

    Selective is the attention core where it stores its scores (Korthikanti et al. 2022, section 5);
    with flash attention, which recomputes them by itself, it is the norms and activation functions
    whose outputs a matmul keeps.
    """
    if isinstance(level, tuple):
        return level
    if level is Recompute.NONE:
        return ()
    if level is Recompute.FULL:
        return tuple(operator.name for operator in layer.operators)
    unfused = tuple(operator.name for operator in layer.operators if _stores_scores(operator))
    if unfused:
        return unfused
    kept_by_matmul = {t.name for op in layer.operators if op.kind in PRODUCTS for t in op.saved}
    cheap = (OperatorKind.NORM, OperatorKind.ELEMENTWISE)
    return tuple(
        op.name
        for op in layer.operators
        if op.kind in cheap and any(t.name in kept_by_matmul for t in op.outputs)
    )


def _stores_scores(operator: Operator) -> bool:
    return operator.kind is OperatorKind.ATTENTION and any(
        tensor.has("keys") for tensor in operator.saved
    )


def kept_tensors(layer: LayerClass, recompute: Iterable[str]) -> tuple[Tensor, ...]:
    """The activations held from the forward to the backward pass, each once.

    Everything some operator's backward needs and every input of a recomputed operator, except what
    the recomputed operators make: their own internal tensors and their outputs. The output of a
    recomputed attention core stays for an output projection that is not recomputed, as in
    Korthikanti's selective recompute (34 S b h).
    """
    kept: dict[str, Tensor] = {}
    for _, tensor in keepers(layer, recompute):
        kept.setdefault(tensor.name, tensor)
    return tuple(kept.values())


def keepers(layer: LayerClass, recompute: Iterable[str] = ()) -> Iterator[tuple[Operator, Tensor]]:
    """Each kept tensor with every operator that needs it kept, in the order of the operators."""
    again = frozenset(recompute)
    remade = {
        t.name
        for op in layer.operators
        if op.name in again
        for t in (*_remade_outputs(op, layer, again), *made_inside(op))
    }
    for operator in layer.operators:
        needed = (*operator.saved, *operator.inputs) if operator.name in again else operator.saved
        yield from (
            (operator, tensor) for tensor in dict.fromkeys(needed) if tensor.name not in remade
        )


def _remade_outputs(
    operator: Operator, layer: LayerClass, again: frozenset[str]
) -> tuple[Tensor, ...]:
    stays = operator.kind is OperatorKind.ATTENTION and not again.issuperset(
        layer.graph.successors(operator.name)
    )
    return () if stays else operator.outputs


def made_inside(operator: Operator) -> tuple[Tensor, ...]:
    """Saved tensors that the operator makes itself: scores, masks, statistics."""
    inputs = {tensor.name for tensor in operator.inputs}
    return tuple(tensor for tensor in operator.saved if tensor.name not in inputs)


def saved_bytes(
    layer: LayerClass,
    sharding: Sharding,
    recompute: Iterable[str] = (),
    stack: Stack = NEUTRAL,
    on_host: Iterable[str] = (),
) -> int:
    """Bytes one rank keeps of `layer` for one micro-batch (EQUATIONS M3), without what the
    operators `on_host` send to the host.

    A stack that keeps the gathered input of a column-parallel product holds it whole; the others
    gather it again.
    """
    return sum(saved_bytes_by_operator(layer, sharding, recompute, stack, on_host).values())


def saved_bytes_by_operator(
    layer: LayerClass,
    sharding: Sharding,
    recompute: Iterable[str] = (),
    stack: Stack = NEUTRAL,
    on_host: Iterable[str] = (),
) -> dict[str, int]:
    """The same by operator.

    A tensor that several operators read where it was made, or gather from there, is kept once and
    counts at the first of them; one that reads it divided in another way keeps a copy of its own.
    """
    total, away = dict.fromkeys((op.name for op in layer.operators), 0), frozenset(on_host)
    for copy in _copies(layer, sharding, frozenset(recompute), stack):
        if copy.holder not in away:
            total[copy.counted_at] += copy.num_bytes
    return total


def host_bytes_by_operator(
    layer: LayerClass,
    sharding: Sharding,
    recompute: Iterable[str] = (),
    stack: Stack = NEUTRAL,
) -> dict[str, int]:
    """Bytes that each operator sends to the host where it is one of those `on_host`.

    A tensor that several operators keep goes there if the first of them is named, in the order in
    which they run: fused attention keeps what it gives before the projection behind it does. They
    add up to `saved_bytes`, but for copies of the input of a layer that runs again as a whole: it
    is sent as it came, once.
    """
    total = dict.fromkeys((op.name for op in layer.operators), 0)
    for copy in _copies(layer, sharding, frozenset(recompute), stack):
        if copy.holder is not None:
            total[copy.holder] += copy.num_bytes
    return total


@dataclass(frozen=True, slots=True)
class _Copy:
    """A part of a tensor that is kept: the operator that it counts at, the first that keeps it
    (None: it stays), and its bytes.
    """

    counted_at: str
    holder: str | None
    num_bytes: int


def _copies(
    layer: LayerClass, sharding: Sharding, again: frozenset[str], stack: Stack
) -> Iterator[_Copy]:
    flow, counted = tensor_flows_of(layer, sharding), set[tuple[str, str]]()
    for operator, tensor in keepers(layer, again):
        edge = flow.get((operator.name, tensor.name))
        copy = (
            tensor.name,
            operator.name if edge is not None and edge.keeps_own_copy(sharding.degrees) else "",
        )
        if copy not in counted:
            more = bool(counted) and len(again) == len(layer.operators)
            counted.add(copy)
            for stored in _stored(
                operator, tensor, sharding, edge, whole=stack.keeps_gathered_inputs, again=again
            ):
                yield replace(stored, holder=None) if more else stored


def _stored(
    operator: Operator,
    tensor: Tensor,
    sharding: Sharding,
    edge: TensorFlow | None,
    *,
    whole: bool,
    again: frozenset[str],
) -> Iterator[_Copy]:
    """What is kept of a tensor that an operator needs: an input as `TensorFlow.kept_place` says, or
    gathered where the stack does so.

    With it counts the copy of a maker that keeps its own output elsewhere, unless it is among
    `again`.
    """
    if edge is None:
        yield _Copy(operator.name, operator.name, sharding.tensor_bytes(operator, tensor))
        return
    maker = edge.maker if edge.makers_own and edge.maker not in again else None
    place = edge.target if whole else edge.kept_place(sharding.degrees)
    yield _Copy(
        operator.name,
        maker if maker and place == edge.source else operator.name,
        sharding.local_bytes(tensor, place),
    )
    if maker and edge.keeps_own_copy(sharding.degrees):
        yield _Copy(operator.name, maker, sharding.local_bytes(tensor, edge.source))


def ideal_saved_bytes(
    layer: LayerClass, tp: int, recompute: Iterable[str] = (), on_host: Iterable[str] = ()
) -> float:
    """The same without any redundancy: every kept tensor divided over all `tp` ranks (EQUATIONS
    R2).
    """
    return sum(ideal_bytes_by_operator(layer, tp, recompute, on_host).values())


def ideal_bytes_by_operator(
    layer: LayerClass, tp: int, recompute: Iterable[str] = (), on_host: Iterable[str] = ()
) -> dict[str, float]:
    """The same by operator: a tensor that several operators need counts at the first of them."""
    counted, total = set[str](), dict.fromkeys((operator.name for operator in layer.operators), 0.0)
    again, away = frozenset(recompute), frozenset(on_host)
    makers = {
        t.name: op.name
        for op in layer.operators
        if op.name not in again and keeps_output(op)
        for t in op.outputs
    }
    for operator, tensor in keepers(layer, again):
        if tensor.name not in counted:
            counted.add(tensor.name)
            if makers.get(tensor.name, operator.name) not in away:
                total[operator.name] += tensor.num_bytes / tp
    return total


def workspace_bytes(
    layer: LayerClass, sharding: Sharding, recompute: Iterable[str] = (), stack: Stack = NEUTRAL
) -> int:
    """Temporary bytes while one micro-batch passes `layer`, beyond what the layer keeps.

    What is recomputed, and the most that the backward pass of one operator needs: gradients of its
    inputs, outputs and parameters, less what the operators after it kept, which is free by then. A
    column-parallel operator holds its whole gathered input, a row-parallel one the whole gradient
    of its output; the libraries' workspaces of the stack are there all the time. Left out:
    workspaces inside kernels.
    """
    whole, kept = (
        saved_bytes(layer, sharding, stack=stack),
        saved_bytes(layer, sharding, recompute, stack),
    )
    return workspace_of(whole, kept, max(backward_bytes(layer, sharding, stack)), stack)


def workspace_of(whole_bytes: int, kept_bytes: int, backward_bytes: int, stack: Stack) -> int:
    """The same of a layer that keeps `whole_bytes` without recompute and `kept_bytes` with it, by
    the most that an operator adds.
    """
    return max(0, whole_bytes - kept_bytes) + backward_bytes + stack.workspace_bytes


def backward_bytes(layer: LayerClass, sharding: Sharding, stack: Stack) -> Iterator[int]:
    """For each operator of the layer the bytes its backward pass adds to what the layer keeps."""
    freed, kept = 0, saved_bytes_by_operator(layer, sharding)
    for operator in reversed(layer.operators):
        yield gradient_bytes(operator, sharding, stack) - freed
        freed += kept[operator.name]


def gradient_bytes(operator: Operator, sharding: Sharding, stack: Stack) -> int:
    """Gradients of the operator's inputs, outputs and parameters; of stored scores two, after and
    before the softmax.
    """
    inputs = sum(sharding.tensor_bytes(operator, tensor) for tensor in operator.inputs)
    outputs = sum(
        sharding.local_bytes(tensor, sharding.place_inside(operator, tensor))
        for tensor in operator.outputs
    )
    parameters = sharding.parameter_elements(operator) * max(
        (t.element_bytes for t in operator.outputs), default=0
    )
    scores = next((sharding.tensor_bytes(operator, t) for t in operator.saved if t.has("keys")), 0)
    return (
        inputs + outputs + parameters + 2 * scores + _logit_copies_bytes(operator, sharding, stack)
    )


def _logit_copies_bytes(operator: Operator, sharding: Sharding, stack: Stack) -> int:
    """What the stack's loss holds beyond its input and the fp32 probabilities that it saves."""
    if operator.kind is not OperatorKind.CROSS_ENTROPY:
        return 0
    logits, probabilities = operator.inputs[0], operator.saved[0]
    beyond = stack.logit_bytes - logits.element_bytes - probabilities.element_bytes
    return max(0, beyond) * (sharding.tensor_bytes(operator, logits) // logits.element_bytes)
