"""How the mesh axes inside a stage divide the operators of a layer (EQUATIONS S1), derived from the
operators' dims.

Each axis splits one of an operator's dims, or none. What follows is mechanical: a tensor that has
the dim is divided along it, one that lacks it is whole on every rank; splitting the contracted dim
leaves partial sums of the output, which an all-reduce or a reduce-scatter ends; an input that lacks
the split dim has partial sums as its gradient, and so has a parameter. Megatron's tensor and
sequence parallelism are the default: every axis splits the operator's parallel dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from parplan.profiles.models.operator_graph import (
    EXPERTS_DIM,
    Operator,
    OperatorKind,
    Parameter,
    Tensor,
)

PARTIAL = "partial"  # a placement: every rank holds a summand
SCATTERED = (
    "batch",
    "sequence",
)  # what the reduce-scatter of partial sums may divide: the executor runs these
Place = tuple[
    str | None, ...
]  # of a tensor, by axis: the dim that is divided, None where every rank holds it whole, or PARTIAL


@dataclass(frozen=True, slots=True)
class Split:
    """What one mesh axis does with one operator.

    dim      the operator's dim that it splits; None: every rank of the axis computes the same
    result   where `dim` is contracted: the dim of the output that a reduce-scatter splits, None for
             an all-reduce
    """

    dim: str | None = None
    result: str | None = None

    def __str__(self) -> str:
        return (self.dim or "replicated") + (f" -> {self.result}" if self.result else "")


Splits = tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one layer is divided over `tp` ranks; `sequence_parallel`: between layers activations are
    split by token.

    own    the operators that are divided otherwise than in Megatron's way
    axes   the degrees of the axes that `tp` is made of; empty for one axis
    ep     over how many data-parallel ranks the experts are divided
    overlap    of a block, the level of sub-pipelining, 0 to 3: it divides the micro-batch in time,
               not over ranks (costmodels/layers/halved_layer.py)
    """

    tp: int = 1
    sequence_parallel: bool = False
    own: tuple[tuple[str, Splits], ...] = ()
    axes: tuple[int, ...] = ()
    ep: int = 1
    overlap: int = 0

    @property
    def degrees(self) -> tuple[int, ...]:
        return self.axes or (self.tp,)

    @property
    def boundary(self) -> Place:
        """Where the activations between layers are."""
        return ("sequence" if self.sequence_parallel else None,) * len(self.degrees)

    def splits(self, operator: Operator) -> Splits:
        """What each axis does with `operator`."""
        for name, splits in self.own:
            if name == operator.name:
                return splits
        return (megatron_split(operator, sequence_parallel=self.sequence_parallel),) * len(
            self.degrees
        )

    def parts(self, operator: Operator, dim_name: str) -> int:
        """Into how many parts the operator's dim of that name is divided."""
        if dim_name == EXPERTS_DIM:
            return self.ep
        return math.prod(
            p
            for p, split in zip(self.degrees, self.splits(operator), strict=True)
            if split.dim == dim_name
        )

    def dim_size(self, operator: Operator, dim_name: str) -> int:
        """The extent of one of the operator's dims on one rank."""
        return -(-operator.size(dim_name) // self.parts(operator, dim_name))

    def place(self, operator: Operator, tensor: Tensor) -> Place:
        """Where the operator reads, keeps or leaves one of its tensors; its output after the
        partial sums are ended.
        """
        return tuple(_where(operator, tensor, split, ends=True) for split in self.splits(operator))

    def place_inside(self, operator: Operator, tensor: Tensor) -> Place:
        """As `place`, with outputs as the operator computes them: PARTIAL where it sums over the
        dim that is split.
        """
        return tuple(_where(operator, tensor, split, ends=False) for split in self.splits(operator))

    def gradient_place(self, operator: Operator, tensor: Tensor) -> Place:
        """Where the operator leaves the gradient of one of its inputs: PARTIAL where the input
        lacks the split dim.
        """
        return tuple(
            PARTIAL if s.dim and not tensor.has(s.dim) else s.dim for s in self.splits(operator)
        )

    def local_bytes(self, tensor: Tensor, place: Place) -> int:
        """Bytes of `tensor` on one rank when it lies at `place`."""
        return -(-tensor.num_bytes // placed_parts(place, self.degrees))

    def tensor_bytes(self, operator: Operator, tensor: Tensor) -> int:
        """Bytes on one rank of a tensor where the operator reads, keeps or leaves it."""
        return self.local_bytes(tensor, self.place(operator, tensor))

    def parameter_shape(self, operator: Operator, parameter: Parameter) -> tuple[int, ...]:
        """The shape of a parameter on one rank; the matrices of its experts lie one under the
        other.
        """
        shape = tuple(-(-dim.size // self.parts(operator, dim.name)) for dim in parameter.dims)
        return (shape[0] * shape[1], *shape[2:]) if parameter.of_experts else shape

    def parameter_elements(self, operator: Operator) -> int:
        """Elements of the operator's parameters on one rank."""
        return sum(
            math.prod(self.parameter_shape(operator, parameter))
            for parameter in operator.parameters
        )

    def summed_axes(self, operator: Operator, parameter: Parameter) -> tuple[int, ...]:
        """The axes over which the gradient of a parameter is a sum: those that split a dim which
        the parameter lacks.
        """
        return tuple(
            axis
            for axis, split in enumerate(self.splits(operator))
            if self.degrees[axis] > 1
            and split.dim is not None
            and parameter.tensor_dim(split.dim) is None
        )


def _where(operator: Operator, tensor: Tensor, split: Split, *, ends: bool) -> str | None:
    """Where `split` puts a tensor of the operator; `ends`: an output once its partial sums are
    added up.
    """
    if tensor.has(split.dim):
        return split.dim
    if (
        split.dim is None
        or split.dim != operator.contracted
        or all(tensor.name != output.name for output in operator.outputs)
    ):
        return None
    return split.result if ends else PARTIAL


def placed_parts(place: Place, degrees: tuple[int, ...]) -> int:
    """Into how many parts a tensor at `place` is divided."""
    return math.prod(p for p, dim in zip(degrees, place, strict=True) if dim not in (None, PARTIAL))


def megatron_split(operator: Operator, *, sequence_parallel: bool) -> Split:
    """Megatron's tensor parallelism: the parallel dim is split, under sequence parallelism all else
    by token.
    """
    tokens = "sequence" if sequence_parallel else None
    if operator.parallel_dim is None:
        return Split(tokens)
    return Split(
        operator.parallel_dim, tokens if operator.contracted == operator.parallel_dim else None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A way to divide an operator that is not legal, and why."""

    splits: Splits
    reason: str


def operator_splits(
    operator: Operator, degrees: tuple[int, ...]
) -> tuple[tuple[Splits, ...], tuple[Rejected, ...]]:
    """Every way to divide `operator` over axes of `degrees`: the legal ones, and the others with
    their reason.
    """
    legal, rejected = [], []
    for splits in itertools.product(
        *(tuple(_axis_splits(operator)) if p > 1 else (Split(),) for p in degrees)
    ):
        reason = _illegal(operator, splits, degrees)
        if reason is None:
            legal.append(splits)
        else:
            rejected.append(Rejected(splits=splits, reason=reason))
    return tuple(legal), tuple(rejected)


def _axis_splits(operator: Operator) -> Iterator[Split]:
    """What one axis can do: split nothing, or any dim; partial sums end whole or divided."""
    yield Split()
    for dim in operator.dims:
        yield Split(dim.name)
        if dim.name == operator.contracted:
            yield from (Split(dim.name, d.name) for d in operator.outputs[0].dims)


def _illegal(operator: Operator, splits: Splits, degrees: tuple[int, ...]) -> str | None:
    """Why the operator cannot be divided so, or None."""
    for split in splits:
        for name, reason in operator.undivided:
            if name == split.dim:
                return f"{split.dim} cannot be divided: {reason}"
        if split.result and split.result not in SCATTERED:
            return f"a reduce-scatter over {split.result} is not run by the executor"
    for dim in operator.dims:
        parts = math.prod(
            p
            for p, split in zip(degrees, splits, strict=True)
            if dim.name in (split.dim, split.result)
        )
        if dim.size % (parts * dim.unit):
            of = f", {dim.size // dim.unit} groups of {dim.unit}" if dim.unit > 1 else ""
            return f"{parts} ranks do not divide {dim.name} {dim.size}{of}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """DTensor placements over the tensor-parallel axis, as `Shard(0)@tp`; an empty tuple is
    Replicate.
    """

    parameters: dict[str, tuple[str, ...]]
    input: tuple[str, ...]
    output: tuple[str, ...]


def placements(operator: Operator, sharding: Sharding) -> Placements:
    """The placements that `sharding`, of one axis, gives an operator's parameters, input and
    output.

    Activations are [batch, sequence, feature]: `Shard(2)@tp` splits features, `Shard(1)@tp` tokens.
    """
    (split,) = sharding.splits(operator)

    def activation(tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
        (where,) = sharding.place(operator, tensors[0]) if tensors else (None,)
        return (f"Shard({[dim.name for dim in tensors[0].dims].index(where)})@tp",) if where else ()

    def parameter(found: Parameter) -> tuple[str, ...]:
        dim = found.tensor_dim(split.dim)
        return () if dim is None else (f"Shard({dim})@tp",)

    scalar = operator.kind is OperatorKind.CROSS_ENTROPY  # the loss of the tokens is one sum
    return Placements(
        parameters={found.name: parameter(found) for found in operator.parameters},
        input=activation(operator.inputs),
        output=() if scalar else activation(operator.outputs),
    )


def placed_splits(operator: Operator, tp: int, found: Placements) -> Splits | None:
    """The legal way to divide `operator` over `tp` ranks that gives the placements `found`, or
    None.
    """
    legal, _ = operator_splits(operator, (tp,))
    return next(
        (
            splits
            for splits in legal
            if placements(operator, Sharding(tp, own=((operator.name, splits),))) == found
        ),
        None,
    )
