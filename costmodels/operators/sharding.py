"""Sharding of a layer's operators over the mesh axes inside a stage (EQUATIONS S1).

Each axis splits one of an operator's dims, or none. The rest follows from the dims: a tensor that
has the split dim is divided along it, and a tensor that lacks it is whole on every rank. Splitting
the contracted dim leaves partial sums of the output, which an all-reduce or a reduce-scatter ends.
An input or a parameter that lacks the split dim has partial sums as its gradient. Megatron's tensor
and sequence parallelism are the default: every axis splits the operator's parallel dim.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import and_
from typing import Protocol

import numpy as np

from parplan.profiles.elementwise import Number, anywhere
from parplan.profiles.models.operator_graph import (
    EXPERTS_DIM,
    Dim,
    Operator,
    OperatorKind,
    Parameter,
    Tensor,
)

PARTIAL = "partial"  # a placement: every rank holds a summand
SCATTERED = ("batch", "sequence")  # dims that the executor can reduce-scatter partial sums over
# placement of a tensor, by axis: the divided dim, None where every rank holds it whole, or PARTIAL
Place = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """The split of one operator by one mesh axis.

    dim      the operator's dim that the axis splits; None: every rank of the axis computes the same
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
    """The division of one layer over `tp` ranks.

    sequence_parallel  activations between layers are split by token
    own                the operators that are not divided as in Megatron
    axes               the degrees of the axes that `tp` consists of; empty for one axis
    ep                 number of data-parallel ranks over which the experts are divided
    overlap            sub-pipelining level of a block, 0 to 3: it divides the micro-batch in time,
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
        """The placement of activations between layers."""
        return ("sequence" if self.sequence_parallel else None,) * len(self.degrees)

    def splits(self, operator: Operator) -> Splits:
        """The split of `operator` by each axis."""
        for name, splits in self.own:
            if name == operator.name:
                return splits
        return (megatron_split(operator, sequence_parallel=self.sequence_parallel),) * len(
            self.degrees
        )

    def parts(self, operator: Operator, dim_name: str) -> int:
        """The number of parts into which the operator's dim of that name is divided."""
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
        """The placement of one of the operator's tensors; partial sums of outputs are ended."""
        return tuple(_where(operator, tensor, split, ends=True) for split in self.splits(operator))

    def place_inside(self, operator: Operator, tensor: Tensor) -> Place:
        """Like `place`, with outputs as computed: PARTIAL where the contracted dim is split."""
        return tuple(_where(operator, tensor, split, ends=False) for split in self.splits(operator))

    def gradient_place(self, operator: Operator, tensor: Tensor) -> Place:
        """The placement of an input's gradient: PARTIAL where the input lacks the split dim."""
        return tuple(
            PARTIAL if s.dim and not tensor.has(s.dim) else s.dim for s in self.splits(operator)
        )

    def local_bytes(self, tensor: Tensor, place: Place) -> int:
        """Bytes of `tensor` on one rank when it lies at `place`."""
        return -(-tensor.num_bytes // placed_parts(place, self.degrees))

    def tensor_bytes(self, operator: Operator, tensor: Tensor) -> int:
        """Bytes on one rank of a tensor at its `place`."""
        return self.local_bytes(tensor, self.place(operator, tensor))

    def made_bytes(self, operator: Operator, tensor: Tensor) -> int:
        """Bytes on one rank of an output as it is computed, before partial sums are ended."""
        return self.local_bytes(tensor, self.place_inside(operator, tensor))

    def parameter_shape(self, operator: Operator, parameter: Parameter) -> tuple[int, ...]:
        """The shape of a parameter on one rank; matrices of several experts are stacked by rows."""
        shape = tuple(-(-dim.size // self.parts(operator, dim.name)) for dim in parameter.dims)
        return (shape[0] * shape[1], *shape[2:]) if parameter.of_experts else shape

    def parameter_elements(self, operator: Operator) -> int:
        """Elements of the operator's parameters on one rank."""
        return sum(
            math.prod(self.parameter_shape(operator, parameter))
            for parameter in operator.parameters
        )

    def summed_axes(self, operator: Operator, parameter: Parameter) -> tuple[int, ...]:
        """The axes over which a parameter's gradient is a sum: they split a dim that it lacks."""
        return tuple(
            axis
            for axis, split in enumerate(self.splits(operator))
            if self.degrees[axis] > 1
            and split.dim is not None
            and parameter.tensor_dim(split.dim) is None
        )


class LocalSizes(Protocol):
    """Sizes of an operator on one rank: numbers of one sharding, arrays of several."""

    @property
    def tp(self) -> Number: ...

    @property
    def ep(self) -> Number: ...

    def dim_size(self, operator: Operator, dim_name: str) -> Number: ...

    def tensor_bytes(self, operator: Operator, tensor: Tensor) -> Number: ...

    def made_bytes(self, operator: Operator, tensor: Tensor) -> Number: ...

    def parameter_elements(self, operator: Operator) -> Number: ...


@dataclass(frozen=True, slots=True)
class Shardings:
    """Several shardings at once: the methods are those of `Sharding`, with a number for each."""

    each: tuple[Sharding, ...]

    @property
    def tp(self) -> Number:
        return np.array([sharding.tp for sharding in self.each])

    @property
    def ep(self) -> Number:
        return np.array([sharding.ep for sharding in self.each])

    def dim_size(self, operator: Operator, dim_name: str) -> Number:
        return self._divided(operator.size(dim_name), lambda each: each.parts(operator, dim_name))

    def tensor_bytes(self, operator: Operator, tensor: Tensor) -> Number:
        return self._divided(
            tensor.num_bytes,
            lambda each: placed_parts(each.place(operator, tensor), each.degrees),
        )

    def made_bytes(self, operator: Operator, tensor: Tensor) -> Number:
        return self._divided(
            tensor.num_bytes,
            lambda each: placed_parts(each.place_inside(operator, tensor), each.degrees),
        )

    def parameter_elements(self, operator: Operator) -> Number:
        return np.array([each.parameter_elements(operator) for each in self.each])

    def _divided(self, size: Number, parts: Callable[[Sharding], int]) -> Number:
        return -(-size // np.array([parts(each) for each in self.each]))


def _where(operator: Operator, tensor: Tensor, split: Split, *, ends: bool) -> str | None:
    """The placement that `split` gives a tensor; `ends`: partial sums of outputs are ended."""
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
    """The number of parts into which a tensor at `place` is divided."""
    return math.prod([p for p, at in zip(degrees, place, strict=True) if at not in (None, PARTIAL)])


def megatron_split(operator: Operator, *, sequence_parallel: bool) -> Split:
    """Megatron's split: the parallel dim; under sequence parallelism everything else by token."""
    dim = operator.parallel_dim
    return _megatron_split(
        dim, sums=dim is not None and dim == operator.contracted, tokens=sequence_parallel
    )


@functools.lru_cache(maxsize=256)
def _megatron_split(dim: str | None, *, sums: bool, tokens: bool) -> Split:
    by_token = "sequence" if tokens else None
    if dim is None:
        return Split(by_token)
    return Split(dim, by_token if sums else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An illegal way to divide an operator, and the reason."""

    splits: Splits
    reason: str


def operator_splits(
    operator: Operator, degrees: tuple[int, ...]
) -> tuple[tuple[Splits, ...], tuple[Rejected, ...]]:
    """Returns every legal way to divide `operator` over axes of `degrees`, and the rejected.

    A way is legal for several micro-batch sizes if it is for one of them (`divides`).
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
    """Yields the splits of one axis: no dim, or any dim; partial sums end whole or divided."""
    yield Split()
    for dim in operator.dims:
        yield Split(dim.name)
        if dim.name == operator.contracted:
            yield from (Split(dim.name, d.name) for d in operator.outputs[0].dims)


def _illegal(operator: Operator, splits: Splits, degrees: tuple[int, ...]) -> str | None:
    """Returns the reason why the operator cannot be divided so, or None."""
    for split in splits:
        for name, reason in operator.undivided:
            if name == split.dim:
                return f"{split.dim} cannot be divided: {reason}"
        if split.result and split.result not in SCATTERED:
            return f"a reduce-scatter over {split.result} is not run by the executor"
    for dim in operator.dims:
        parts = _parts(dim, splits, degrees)
        if not anywhere(dim.size % (parts * dim.unit) == 0):
            groups = f", {dim.size // dim.unit} groups of {dim.unit}" if dim.unit > 1 else ""
            return f"{parts} ranks do not divide {dim.name} {dim.size}{groups}"
    return None


def _parts(dim: Dim, splits: Splits, degrees: tuple[int, ...]) -> int:
    return math.prod(
        p for p, split in zip(degrees, splits, strict=True) if dim.name in (split.dim, split.result)
    )


def divides(operator: Operator, splits: Splits, degrees: tuple[int, ...]) -> Number:
    """Returns whether `splits` divide every dim evenly, by micro-batch size where these vary."""
    return functools.reduce(
        and_,
        (dim.size % (_parts(dim, splits, degrees) * dim.unit) == 0 for dim in operator.dims),
        True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """DTensor placements over the tensor-parallel axis, as `Shard(0)@tp`.

    An empty tuple is Replicate.
    """

    parameters: dict[str, tuple[str, ...]]
    input: tuple[str, ...]
    output: tuple[str, ...]


def placements(operator: Operator, sharding: Sharding) -> Placements:
    """The placements of an operator's parameters, input and output under a sharding of one axis.

    Activations are [batch, sequence, feature]: `Shard(2)@tp` splits features, `Shard(1)@tp` tokens.
    """
    (split,) = sharding.splits(operator)

    def activation(tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
        (where,) = sharding.place(operator, tensors[0]) if tensors else (None,)
        return (f"Shard({[dim.name for dim in tensors[0].dims].index(where)})@tp",) if where else ()

    def parameter_placement(parameter: Parameter) -> tuple[str, ...]:
        dim = parameter.tensor_dim(split.dim)
        return () if dim is None else (f"Shard({dim})@tp",)

    scalar = operator.kind is OperatorKind.CROSS_ENTROPY  # the loss of the tokens is one sum
    return Placements(
        parameters={each.name: parameter_placement(each) for each in operator.parameters},
        input=activation(operator.inputs),
        output=() if scalar else activation(operator.outputs),
    )


def placed_splits(operator: Operator, tp: int, expected: Placements) -> Splits | None:
    """Returns the legal way to divide `operator` over `tp` ranks that gives `expected`, or None."""
    legal, _ = operator_splits(operator, (tp,))
    return next(
        (
            splits
            for splits in legal
            if placements(operator, Sharding(tp, own=((operator.name, splits),))) == expected
        ),
        None,
    )
