"""Recomputed operators of a layer, and the saved and temporary bytes that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from parplan.costmodels.layers.tensor_flow import TensorFlow, saves_own_output, tensor_flows_of
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.elementwise import addable
from parplan.profiles.models.operator_graph import (
    PRODUCTS,
    LayerClass,
    Operator,
    OperatorKind,
    Tensor,
)
from parplan.profiles.stack import NEUTRAL, Stack


class Recompute(StrEnum):
    """The recompute level of a block.

    Selective recompute repeats the operators that hold many bytes for few FLOPs.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


RecomputedOperators = Recompute | tuple[str, ...]  # a level, or the operators by name


def recompute_operators(layer: LayerClass, level: RecomputedOperators) -> tuple[str, ...]:
    """The names of the operators that `level` recomputes in `layer`.

    Selective is the attention core where it stores its scores (Korthikanti et al. 2022, section 5);
    with flash attention, which recomputes them by itself, it is the norms and activation functions
    whose outputs a matmul saves.
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


def saved_tensors(layer: LayerClass, recompute: Iterable[str]) -> tuple[Tensor, ...]:
    """The activations held from the forward to the backward pass, each once.

    These are the tensors that some operator's backward needs and every input of a recomputed
    operator, except tensors made by recomputed operators: their own internal tensors and their
    outputs. The output of a recomputed attention core stays for an output projection that is not
    recomputed, as in Korthikanti's selective recompute (34 S b h).
    """
    kept: dict[str, Tensor] = {}
    for _, tensor in saved_tensor_readers(layer, recompute):
        kept.setdefault(tensor.name, tensor)
    return tuple(kept.values())


def saved_tensor_readers(
    layer: LayerClass, recompute: Iterable[str] = ()
) -> Iterator[tuple[Operator, Tensor]]:
    """Yields each saved tensor with every operator that needs it, in the order of the operators.

    An operator that needs a tensor twice may come twice with it.
    """
    recomputed = frozenset(recompute)
    remade = {
        t.name
        for op in layer.operators
        if op.name in recomputed
        for t in (*_remade_outputs(op, layer, recomputed), *made_inside(op))
    }
    for operator in layer.operators:
        needed = (
            (*operator.saved, *operator.inputs) if operator.name in recomputed else operator.saved
        )
        yield from (
            (operator, tensor)
            for tensor in needed
            if tensor.name not in remade and tensor.name not in layer.outside
        )


def _remade_outputs(
    operator: Operator, layer: LayerClass, recomputed: frozenset[str]
) -> tuple[Tensor, ...]:
    stays = operator.kind is OperatorKind.ATTENTION and not recomputed.issuperset(
        layer.readers(operator.name)
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
    """Bytes that one rank saves of `layer` for one micro-batch (EQUATIONS M3).

    Bytes that the operators `on_host` send to the host are left out. A stack that saves the
    gathered input of a column-parallel product holds it whole; the others gather it a second time.
    """
    return sum(saved_bytes_by_operator(layer, sharding, recompute, stack, on_host).values())


def saved_bytes_by_operator(
    layer: LayerClass,
    sharding: Sharding,
    recompute: Iterable[str] = (),
    stack: Stack = NEUTRAL,
    on_host: Iterable[str] = (),
) -> dict[str, int]:
    """The terms of `saved_bytes` by operator.

    A tensor that several operators read where it was made, or gather from there, is saved once and
    counts at the first of them; an operator that reads it divided in another way saves its own
    copy.
    """
    total = dict.fromkeys((op.name for op in layer.operators), 0)
    away = frozenset(on_host)
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
    """Bytes that each operator sends to the host if it is among `on_host`.

    A tensor that several operators save goes there if the first of them is named, in the order in
    which they run: fused attention saves its output before the projection behind it does. They add
    up to `saved_bytes`, but for copies of the input of a layer that is recomputed as a whole: it is
    sent as it came, once.
    """
    total = dict.fromkeys((op.name for op in layer.operators), 0)
    for copy in _copies(layer, sharding, frozenset(recompute), stack):
        if copy.holder is not None:
            total[copy.holder] += copy.num_bytes
    return total


@dataclass(frozen=True, slots=True)
class _Copy:
    """A saved part of a tensor.

    counted_at   the operator that it counts at
    holder       the first operator that saves it; None: it stays on the device
    """

    counted_at: str
    holder: str | None
    num_bytes: int


def _copies(
    layer: LayerClass, sharding: Sharding, recomputed: frozenset[str], stack: Stack
) -> Iterator[_Copy]:
    flow = tensor_flows_of(layer, sharding)
    counted = set[tuple[str, str]]()
    for operator, tensor in saved_tensor_readers(layer, recomputed):
        edge = flow.get((operator.name, tensor.name))
        copy = (
            tensor.name,
            operator.name if edge is not None and edge.keeps_own_copy(sharding.degrees) else "",
        )
        if copy not in counted:
            more = bool(counted) and len(recomputed) == len(layer.operators)
            counted.add(copy)
            for stored in _stored(
                operator,
                tensor,
                sharding,
                edge,
                whole=stack.keeps_gathered_inputs,
                recomputed=recomputed,
            ):
                yield replace(stored, holder=None) if more else stored


def _stored(
    operator: Operator,
    tensor: Tensor,
    sharding: Sharding,
    edge: TensorFlow | None,
    *,
    whole: bool,
    recomputed: frozenset[str],
) -> Iterator[_Copy]:
    """Yields the saved copies of a tensor that an operator needs.

    An input is saved at `TensorFlow.kept_place`, or gathered where the stack saves it so. With it
    counts the copy of a maker that saves its own output at another placement, unless the maker is
    recomputed.
    """
    if edge is None:
        yield _Copy(operator.name, operator.name, sharding.tensor_bytes(operator, tensor))
        return
    maker = edge.maker if edge.makers_own and edge.maker not in recomputed else None
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
    """Saved bytes without redundancy: each tensor divided over all `tp` ranks (EQUATIONS R2)."""
    return sum(ideal_bytes_by_operator(layer, tp, recompute, on_host).values())


def ideal_bytes_by_operator(
    layer: LayerClass, tp: int, recompute: Iterable[str] = (), on_host: Iterable[str] = ()
) -> dict[str, float]:
    """The terms of `ideal_saved_bytes` by operator.

    A tensor that several operators need counts at the first of them.
    """
    counted = set[str]()
    total = dict.fromkeys((operator.name for operator in layer.operators), 0.0)
    recomputed, away = frozenset(recompute), frozenset(on_host)
    makers = {
        t.name: op.name
        for op in layer.operators
        if op.name not in recomputed and saves_own_output(op)
        for t in op.outputs
    }
    for operator, tensor in saved_tensor_readers(layer, recomputed):
        if tensor.name not in counted:
            counted.add(tensor.name)
            if makers.get(tensor.name, operator.name) not in away:
                total[operator.name] += tensor.num_bytes / tp
    return total


def workspace_bytes(
    layer: LayerClass, sharding: Sharding, recompute: Iterable[str] = (), stack: Stack = NEUTRAL
) -> int:
    """Temporary bytes while one micro-batch passes `layer`, beyond its saved tensors.

    They are the recomputed tensors and the most that the backward pass of one operator needs:
    gradients of its inputs, outputs and parameters, less the saved tensors of the operators after
    it, which are free by then. A column-parallel operator holds its whole gathered input, a
    row-parallel one the whole gradient of its output; the libraries' workspaces of the stack are
    there all the time. Left out: workspaces inside kernels.
    """
    whole = saved_bytes(layer, sharding, stack=stack)
    kept = saved_bytes(layer, sharding, recompute, stack)
    return workspace_of(whole, kept, max(backward_bytes(layer, sharding, stack)), stack)


def workspace_of(whole_bytes: int, kept_bytes: int, backward_bytes: int, stack: Stack) -> int:
    """Workspace bytes of a layer by its saved bytes without recompute and with it.

    backward_bytes: the most that the backward pass of one operator adds
    """
    return max(0, whole_bytes - kept_bytes) + backward_bytes + stack.workspace_bytes


def backward_bytes(layer: LayerClass, sharding: Sharding, stack: Stack) -> Iterator[int]:
    """Yields for each operator the bytes that its backward pass adds to the saved bytes."""
    freed, kept = 0, saved_bytes_by_operator(layer, sharding)
    for operator in reversed(layer.operators):
        yield gradient_bytes(operator, sharding, stack) - freed
        freed += kept[operator.name]


def gradient_bytes(operator: Operator, sharding: Sharding, stack: Stack) -> int:
    """Gradients of the operator's inputs, outputs and parameters.

    Stored scores have two, after and before the softmax. A frozen parameter has none, and one in 8
    bits is there in 16 bits instead. Without a backward pass the bytes are those of the forward
    pass: inputs and outputs. A weight that the rows of a grid hold in parts is gathered beside.
    """
    inputs = sum(sharding.tensor_bytes(operator, tensor) for tensor in operator.inputs)
    outputs = sum(
        sharding.local_bytes(tensor, sharding.place_inside(operator, tensor))
        for tensor in operator.outputs
    )
    has_weights = operator.trained or any(p.quantised for p in operator.parameters)
    used = sharding.used_elements(operator)
    gathered = used if used > sharding.parameter_elements(operator) else 0
    parameters: int = addable(
        ((used if has_weights else 0) + gathered)
        * max((t.element_bytes for t in operator.outputs), default=0)
    )
    scores = next((sharding.tensor_bytes(operator, t) for t in operator.saved if t.has("keys")), 0)
    return (
        inputs + outputs + parameters + 2 * scores + _logit_copies_bytes(operator, sharding, stack)
    )


def _logit_copies_bytes(operator: Operator, sharding: Sharding, stack: Stack) -> int:
    """Bytes of the stack's loss beyond its input and the fp32 probabilities that it saves."""
    if operator.kind is not OperatorKind.CROSS_ENTROPY:
        return 0
    logits, probabilities = operator.inputs[0], operator.saved[0]
    beyond = stack.logit_bytes - logits.element_bytes - probabilities.element_bytes
    return max(0, beyond) * (sharding.tensor_bytes(operator, logits) // logits.element_bytes)
