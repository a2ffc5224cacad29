"""The price of a block whose micro-batch runs in two halves, all-reduces of one under the compute
of the other (EQUATIONS P8).

What dividing costs is in the operators themselves, priced for half a micro-batch twice: smaller
products are less efficient. Whole collectives enter the recursion
(costmodels/layers/sub_pipeline.py), in place of what the stack hides by itself: nothing is hidden
twice. Hidden communication slows compute down as everywhere (costmodels/layers/layer_price.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.layers.layer_price import (
    LayerOperators,
    LayerTime,
    contention,
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
    """One operator in one pass of half a micro-batch: its compute, that of a whole one, the
    all-reduce after it, its launches.
    """

    compute: Seconds
    whole: Seconds
    sent: Seconds
    launches: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """Compute, what communication adds to it, and how many operators and collectives the host
    launches.
    """

    compute: Seconds
    added: Seconds
    launches: int

    def launched(self, host_s: float) -> Seconds:
        return launched(self.compute, self.added, self.launches * host_s)


Row = Callable[[Sequence[HalfTime]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvedOperators:
    """Every operator of a block priced for half a micro-batch and for a whole one, without what the
    stack hides.

    level         of sub-pipelining, 1 to 3
    contention    what a second of hidden communication costs
    """

    level: int
    half: LayerOperators
    whole: LayerOperators
    contention: float

    def time(self, recompute: Iterable[str] = ()) -> LayerTime:
        """One micro-batch through the block, as `LayerOperators.time`; at level 3 through one that
        others surround.

        What runs again does so block by block, both halves of it, at level 2 at most.
        """
        ahead, again, back = (
            self._forward(self.half.compute),
            self._forward(recompute),
            self._backward(),
        )
        row_s = pace_s if self.level == 3 else block_s
        forward, repeated, backward = (
            self._through(ahead, row_s),
            self._through(again, block_s),
            self._through(back, row_s),
        )
        return LayerTime(
            forward=forward.launched(self.half.host_forward_s),
            tp_forward=forward.added,
            recompute=repeated.launched(self.half.host_forward_s),
            tp_recompute=repeated.added,
            backward=backward.launched(self.half.host_backward_s),
            tp_backward=backward.added,
        )

    @property
    def weight_s(self) -> float:
        """Of the backward pass, the seconds of the gradients of weights."""
        return HALVES * self.half.weight_s

    def edges(self) -> tuple[Seconds, Seconds]:
        """What the first and the last block of a row pay together beyond `time`, forward and
        backward: at level 3 alone.
        """
        return self._edge(self._forward(self.half.compute)), self._edge(self._backward())

    def _edge(self, pieces: Sequence[_HalfOperator]) -> Seconds:
        parts, sent = _parts(pieces), _total(piece.sent for piece in pieces)
        if self.level < 3 or not sent.value_s:
            return ZERO
        return sent.scaled((1 - self.contention) * (block_s(parts) - pace_s(parts)) / sent.value_s)

    def _forward(self, names: Iterable[str]) -> list[_HalfOperator]:
        half, whole, some = self.half, self.whole, frozenset(names)
        return [
            _HalfOperator(
                once.forward, whole.compute[name].forward, half.tensor_parallel[name].forward, 1
            )
            for name, once in half.compute.items()
            if name in some
        ]

    def _backward(self) -> list[_HalfOperator]:
        half, whole, kinds = (
            self.half,
            self.whole,
            {op.name: op.kind for op in reversed(self.half.layer.operators)},
        )
        return [
            _HalfOperator(
                half.compute[n].backward,
                whole.compute[n].backward,
                half.tensor_parallel[n].backward,
                2 if kind in PRODUCTS else 1,
            )
            for n, kind in kinds.items()
        ]

    def _through(self, pieces: Sequence[_HalfOperator], row_s: Row) -> _Pass:
        """One pass through `pieces`, whose halves take `row_s` from level 2 on."""
        if self.level == 1:
            return self._linears(pieces)
        compute, sent = (
            _total(piece.compute for piece in pieces).scaled(HALVES),
            _total(piece.sent for piece in pieces),
        )
        added = self._added(sent, row_s(_parts(pieces)) - compute.value_s)
        return _Pass(
            compute,
            added,
            HALVES * sum(piece.launches + (piece.sent.value_s > 0) for piece in pieces),
        )

    def _linears(self, pieces: Sequence[_HalfOperator]) -> _Pass:
        """Level 1: the products whose results are all-reduced are divided, all else is whole."""
        compute, added, launches = ZERO, ZERO, 0
        for piece in pieces:
            parts = HALVES if piece.sent.value_s else 1
            launches += parts * (piece.launches + (piece.sent.value_s > 0))
            compute += piece.compute.scaled(HALVES) if piece.sent.value_s else piece.whole
            once_s = piece.compute.value_s
            added += self._added(piece.sent, linear_s(once_s, piece.sent.value_s) - HALVES * once_s)
        return _Pass(compute, added, launches)

    def _added(self, sent: Seconds, exposed_s: float) -> Seconds:
        """What the all-reduces of two halves add, `sent` those of one, when so much of them is not
        hidden.
        """
        both_s = HALVES * sent.value_s
        exposed_s = max(0.0, exposed_s)
        return (
            sent.scaled((exposed_s + self.contention * (both_s - exposed_s)) / sent.value_s)
            if both_s
            else ZERO
        )


def _total(parts: Iterable[Seconds]) -> Seconds:
    return sum(parts, ZERO)


def _parts(pieces: Iterable[_HalfOperator]) -> list[HalfTime]:
    """Operators between all-reduces as one part each."""
    found, compute_s = [], 0.0
    for piece in pieces:
        compute_s += piece.compute.value_s
        if piece.sent.value_s:
            found.append(HalfTime(compute_s, piece.sent.value_s))
            compute_s = 0.0
    return [*found, HalfTime(compute_s)]


def price_halves(
    half: LayerClass,
    whole: LayerClass,
    sharding: Sharding,
    machine: Machine,
    training: TrainingSpec,
) -> HalvedOperators:
    """A block at `sharding.overlap`, of whose operators `half` has those of half a micro-batch and
    `whole` those of a whole one.
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

    What is recomputed is there for both halves. At level 1 all operators but the divided products
    are whole, and one half of a result is beside it; above, only one half is computed at a time.
    The other's gradient waits, and an all-reduce is under way: together one boundary tensor.
    Measured on two CPU ranks, the peaks of full recompute are 0.6, 1.5 and -0.2 % below this.
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
