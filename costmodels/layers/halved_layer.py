"""Price of a block whose micro-batch runs in two halves (EQUATIONS P8).

All-reduces of one half run under the compute of the other. The cost of dividing is in the
operators, priced for half a micro-batch twice: smaller products are less efficient. Whole
collectives enter the recursion (costmodels/layers/sub_pipeline.py) in place of the overlap of the
stack: nothing is hidden twice. Hidden communication slows compute down as everywhere
(costmodels/layers/layer_price.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.communication.hiding import contention
from parplan.costmodels.layers.layer_price import (
    LayerOperators,
    LayerTime,
    launched,
    price_operators,
)
from parplan.costmodels.layers.recompute import backward_bytes, saved_bytes, workspace_bytes
from parplan.costmodels.layers.sub_pipeline import HALVES, HalfTime, block_s, linear_s, pace_s
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import PRODUCTS, LayerClass
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import ZERO, Seconds
from parplan.profiles.stack import Stack


@dataclass(frozen=True, slots=True)
class _HalfOperator:
    """One operator in one pass of half a micro-batch.

    compute    its compute; `whole` for a whole micro-batch
    sent       the all-reduce after it
    launches   operators that the host launches
    """

    compute: Seconds
    whole: Seconds
    sent: Seconds
    launches: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """Compute, seconds that communication adds, and launches of operators and collectives."""

    compute: Seconds
    added: Seconds
    launches: int

    def launched(self, host_s: float) -> Seconds:
        return launched(self.compute, self.added, self.launches * host_s)


Row = Callable[[Sequence[HalfTime]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvedOperators:
    """Operators of a block priced for half and whole micro-batches, without overlap of the stack.

    level         level of sub-pipelining, 1 to 3
    contention    cost of a second of hidden communication
    """

    level: int
    half: LayerOperators
    whole: LayerOperators
    contention: float

    def time(self, recompute: Iterable[str] = ()) -> LayerTime:
        """Prices one micro-batch through the block, at level 3 through one inside a row of blocks.

        Recompute runs block by block, both halves of it, at level 2 at most.
        """
        row_s = pace_s if self.level == 3 else block_s
        forward = self._through(self._forward(self.half.compute), row_s)
        repeated = self._through(self._forward(recompute), block_s)
        backward = self._through(self._backward(), row_s)
        return LayerTime(
            forward=forward.launched(self.half.host_forward_s),
            tp_forward=forward.added,
            recompute=repeated.launched(self.half.host_forward_s),
            tp_recompute=repeated.added,
            backward=backward.launched(self.half.host_backward_s),
            tp_backward=backward.added,
        )

    @property
    def weight_time(self) -> Seconds:
        """Seconds of the backward pass for the gradients of weights."""
        return self.half.weight_time.scaled(HALVES)

    def edges(self) -> tuple[Seconds, Seconds]:
        """Seconds that the ends of a row of blocks add, forward and backward, at level 3."""
        return self._edge(self._forward(self.half.compute)), self._edge(self._backward())

    def _edge(self, pieces: Sequence[_HalfOperator]) -> Seconds:
        parts, sent = _parts(pieces), _total(piece.sent for piece in pieces)
        if self.level < 3 or not sent.value_s:
            return ZERO
        return sent.scaled((1 - self.contention) * (block_s(parts) - pace_s(parts)) / sent.value_s)

    def _forward(self, names: Iterable[str]) -> list[_HalfOperator]:
        half, whole = self.half, self.whole
        selected = frozenset(names)
        return [
            _HalfOperator(
                once.forward, whole.compute[name].forward, half.tensor_parallel[name].forward, 1
            )
            for name, once in half.compute.items()
            if name in selected
        ]

    def _backward(self) -> list[_HalfOperator]:
        half, whole = self.half, self.whole
        kinds = {op.name: op.kind for op in reversed(half.layer.operators)}
        return [
            _HalfOperator(
                half.compute[name].backward,
                whole.compute[name].backward,
                half.tensor_parallel[name].backward,
                2 if kind in PRODUCTS else 1,
            )
            for name, kind in kinds.items()
        ]

    def _through(self, pieces: Sequence[_HalfOperator], row_s: Row) -> _Pass:
        """One pass through `pieces`, whose halves take `row_s` from level 2 on."""
        if self.level == 1:
            return self._linears(pieces)
        compute = _total(piece.compute for piece in pieces).scaled(HALVES)
        sent = _total(piece.sent for piece in pieces)
        added = self._added(sent, row_s(_parts(pieces)) - compute.value_s)
        launches = sum(piece.launches + (piece.sent.value_s > 0) for piece in pieces)
        return _Pass(compute, added, HALVES * launches)

    def _linears(self, pieces: Sequence[_HalfOperator]) -> _Pass:
        """Level 1: products followed by all-reduces are divided, all else is whole."""
        compute = added = ZERO
        launches = 0
        for piece in pieces:
            parts = HALVES if piece.sent.value_s else 1
            launches += parts * (piece.launches + (piece.sent.value_s > 0))
            compute += piece.compute.scaled(HALVES) if piece.sent.value_s else piece.whole
            once_s = piece.compute.value_s
            added += self._added(piece.sent, linear_s(once_s, piece.sent.value_s) - HALVES * once_s)
        return _Pass(compute, added, launches)

    def _added(self, sent: Seconds, exposed_s: float) -> Seconds:
        """Seconds that the all-reduces of two halves add when `exposed_s` of them are exposed.

        sent: the all-reduces of one half
        """
        both_s = HALVES * sent.value_s
        exposed_s = max(0.0, exposed_s)
        if not both_s:
            return ZERO
        return sent.scaled((exposed_s + self.contention * (both_s - exposed_s)) / sent.value_s)


def _total(parts: Iterable[Seconds]) -> Seconds:
    return sum(parts, ZERO)


def _parts(pieces: Iterable[_HalfOperator]) -> list[HalfTime]:
    """Joins the operators between all-reduces to one part each."""
    parts, compute_s = [], 0.0
    for piece in pieces:
        compute_s += piece.compute.value_s
        if piece.sent.value_s:
            parts.append(HalfTime(compute_s, piece.sent.value_s))
            compute_s = 0.0
    return [*parts, HalfTime(compute_s)]


def price_halves(
    half: LayerClass,
    whole: LayerClass,
    sharding: Sharding,
    machine: Machine,
    training: TrainingSpec,
) -> HalvedOperators:
    """Prices a block at `sharding.overlap`.

    half, whole: its operators for half a micro-batch and for a whole one
    """
    bare = replace(
        training,
        stack=replace(training.stack, async_tensor_parallel=False, overlap_tensor_parallel=False),
    )
    return HalvedOperators(
        level=sharding.overlap,
        half=price_operators(half, sharding, machine, bare),
        whole=price_operators(whole, sharding, machine, bare),
        contention=contention(machine),
    )


def halved_workspace_bytes(
    half: LayerClass,
    whole: LayerClass,
    sharding: Sharding,
    recompute: Iterable[str],
    stack: Stack,
) -> int:
    """Temporary bytes of such a block, as `recompute.workspace_bytes`.

    Recomputed activations are there for both halves. At level 1 all operators but the divided
    products are whole, and one half of a result is beside it; at higher levels only one half is
    computed at a time. The gradient of the other half waits, and an all-reduce is under way:
    together one boundary tensor. Measured on two CPU ranks, the peaks of full recompute are 0.6,
    1.5 and -0.2 % below this.
    """
    assert whole.input is not None
    boundary = sharding.local_bytes(whole.input, sharding.boundary)
    if sharding.overlap == 1:
        return workspace_bytes(whole, sharding, recompute, stack) + boundary // HALVES
    remade = saved_bytes(whole, sharding, stack=stack) - saved_bytes(
        whole, sharding, recompute, stack
    )
    return (
        max(0, remade)
        + max(backward_bytes(half, sharding, stack))
        + boundary
        + stack.workspace_bytes
    )
