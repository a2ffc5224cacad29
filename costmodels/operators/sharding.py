"""Sharding of a layer's operators over the mesh axes inside a stage (EQUATIONS S1).

Each axis splits one of an operator's dims, or none. The rest follows from the dims: a tensor that
has the split dim is divided along it, and a tensor that lacks it is whole on every rank. Splitting
the contracted dim leaves partial sums of the output, which an all-reduce or a reduce-scatter ends.
An input or a parameter that lacks the split dim has partial sums as its gradient. Megatron's tensor
and sequence parallelism are the default: every axis splits the operator's parallel dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from parplan.costmodels.keyed_cache import HashedOnce
from parplan.profiles.elementwise import Number, anywhere
from parplan.profiles.models.operator_graph import (
    EXPERT_WIDTH,
    EXPERTS_DIM,
    ModelPart,
    Operator,
    OperatorKind,
    Parameter,
    Tensor,
)
from parplan.profiles.stack import ContextForm, TowerDivision

PARTIAL = "partial"  # a placement: every rank holds a summand
BATCH = "batch"
HIDDEN = "hidden"
BLOCK_INPUT = "block_input"  # what a layer of a tower reads of the one before it
GRID = ("tp_rows", "tp_columns")  # the axes of a grid of tensor-parallel ranks
SCATTERED = (BATCH, "sequence")  # dims that the executor can reduce-scatter partial sums over
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
class TokenPart:
    """The part of the tokens of a micro-batch that the operators of a layer have.

    cp         parts of every sequence, of which it is one
    exchanged  the experts lie over several ranks, which may get different numbers of tokens
    """

    cp: int = 1
    exchanged: bool = False


ALL_TOKENS = TokenPart()
_token_part = functools.lru_cache(maxsize=256)(TokenPart)


@dataclass(frozen=True, slots=True)
class Sharding(HashedOnce):
    """The division of one layer over `tp` ranks, and over `data` ranks besides.

    sequence_parallel  activations between layers are split by token
    own                the operators that are not divided as in Megatron
    axes               the degrees of the axes that `tp` consists of; empty for one axis
    ep, etp            number of ranks over which whole experts are divided, and over which each
                       expert is: 1, `tp`, or the last of two `axes`
    cp, context_form   number of ranks that divide every sequence, and the form of their attention.
                       A layer with this sharding has the tokens of one of them
    overlap            sub-pipelining level of a block, 0 to 3: it divides the micro-batch in time,
                       not over ranks (costmodels/layers/halved_layer.py)
    data               number of data-parallel ranks that operators may divide their weights over.
                       They are the first axis, where every other operator divides the batch, which
                       is then that of all these ranks; 1 where data parallelism is no axis
    tower              of a layer of a tower: the way in which the tensor-parallel ranks run it
    reads_tower        that way, of the layer behind the tower, which the ranks divide as a block
    rows               the ranks of the first of two `axes`, which divide the batch; all weights of
                       products and tables are divided over them besides, and gathered when they are
                       used (EQUATIONS T7). 1 where the ranks are no grid
    """

    __hash__ = HashedOnce.__hash__

    tp: int = 1
    sequence_parallel: bool = False
    own: tuple[tuple[str, Splits], ...] = ()
    axes: tuple[int, ...] = ()
    ep: int = 1
    overlap: int = 0
    data: int = 1
    etp: int = 1
    cp: int = 1
    context_form: ContextForm | None = None
    tower: TowerDivision = TowerDivision.TENSOR
    reads_tower: TowerDivision = TowerDivision.TENSOR
    rows: int = 1

    @property
    def degrees(self) -> tuple[int, ...]:
        inside = self.axes or (self.tp,)
        return (self.data, *inside) if self.data > 1 else inside

    @property
    def ranks(self) -> int:
        """The number of ranks on all axes."""
        return self.tp * self.data

    @property
    def experts(self) -> tuple[int, int]:
        """The ranks that divide the experts, and each expert."""
        return self.ep, self.etp

    @property
    def part(self) -> TokenPart:
        """The part of the tokens that a layer with this sharding has."""
        return _token_part(self.cp, self.ep > 1)

    @property
    def context(self) -> tuple[int, ContextForm | None]:
        """The ranks that divide every sequence, and the form of their attention."""
        return self.cp, self.context_form

    @property
    def base(self) -> Sharding:
        """The sharding with which all operators but those of `LayerClass.of_form` cost the same.

        All shardings with that base place every tensor alike.
        """
        return self if self.ep <= 2 and self.context_form is None else _base_of(self)

    @property
    def one_way(self) -> bool:
        """True where every operator has one division: on a grid, and where ranks run a tower."""
        return self.rows > 1 or self.tower is not TowerDivision.TENSOR

    @property
    def boundary(self) -> Place:
        """The placement of activations between layers."""
        if self.tower is not TowerDivision.TENSOR:
            return self._of_tower(self.tower)
        if self.rows > 1:
            return (BATCH, HIDDEN)
        inside = ("sequence" if self.sequence_parallel else None,) * len(self.axes or (self.tp,))
        return (BATCH, *inside) if self.data > 1 else inside

    def _of_tower(self, way: TowerDivision) -> Place:
        """The placement of activations between two layers of a tower that runs in such a way."""
        dim = BATCH if way is TowerDivision.IMAGES else None
        return (dim,) * len(self.axes or (self.tp,))

    @property
    def runs_tower(self) -> TowerDivision | None:
        """The way in which the ranks run the tower that the layer is of, None for as a block."""
        ways = (self.tower, self.reads_tower)
        return next((way for way in ways if way is not TowerDivision.TENSOR), None)

    def arrives(self, tensor: Tensor) -> Place:
        """The placement of a tensor that another layer made."""
        reads = self.reads_tower is not TowerDivision.TENSOR and tensor.name == BLOCK_INPUT
        return self._of_tower(self.reads_tower) if reads else self.boundary

    def splits(self, operator: Operator) -> Splits:
        """The split of `operator` by each axis."""
        for name, splits in self.own:
            if name == operator.name:
                return splits
        if self.tower is not TowerDivision.TENSOR:
            return tuple(map(Split, self._of_tower(self.tower)))
        if self.rows > 1:
            return Split(BATCH), grid_split(operator)
        dim = operator.parallel_dim
        whole = dim == EXPERT_WIDTH and self.etp == 1
        if whole or (operator.whole_where_uneven and self._is_uneven(operator)):
            dim = None
        by_token = self.sequence_parallel and not self._has_uneven_tokens(operator)
        inside = megatron_split(operator, dim, sequence_parallel=by_token)
        each = (inside,) * len(self.axes or (self.tp,))
        if dim == EXPERT_WIDTH and self.etp < self.tp:
            outer = megatron_split(operator, None, sequence_parallel=self.sequence_parallel)
            each = (outer, inside)
        return (Split(BATCH), *each) if self.data > 1 else each

    def _is_uneven(self, operator: Operator) -> bool:
        """Returns whether tensor-parallel ranks do not divide the operator's parallel dim."""
        dim = operator.parallel_dim
        return dim is not None and operator.size(dim) % (self.tp * operator.unit(dim)) > 0

    def _has_uneven_tokens(self, operator: Operator) -> bool:
        """Returns whether tensor-parallel ranks do not divide the tokens, as of some images."""
        tokens = next((dim.size for dim in operator.dims if dim.name == "sequence"), 0)
        return anywhere(tokens % self.tp > 0)

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

    def scattered_parts(self, operator: Operator) -> tuple[int, int]:
        """The parts in which a product's input, and its output's gradient, lie beside its own.

        Under sequence parallelism a rank has its tokens of both, before they are gathered.
        """
        before = behind = 1
        for p, split in zip(self.degrees, self.splits(operator), strict=True):
            if split.dim is None or split.dim in SCATTERED:
                continue
            if split.dim == operator.contracted:
                behind *= p if split.result in SCATTERED else 1
            elif self.sequence_parallel:
                before *= p
        return before, behind

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
        """The shape of a parameter on one rank.

        The matrices of several experts lie one under the other, of hidden features by width in both
        products, and their biases side by side.
        """
        stored = self.over_rows(operator, parameter)
        shape = tuple(
            -(
                -dim.size
                // (self.parts(operator, dim.name) * (self.rows if dim.name == stored else 1))
            )
            for dim in parameter.dims
        )
        if not parameter.of_experts:
            return shape
        experts, *matrix = shape
        if len(matrix) == 1:
            return (*matrix, experts)
        width = shape[parameter.tensor_dim(EXPERT_WIDTH) or -1]
        return (experts * math.prod(matrix) // width, width)

    def parameter_elements(self, operator: Operator) -> int:
        """Elements of the operator's parameters on one rank."""
        return sum(
            math.prod(self.parameter_shape(operator, parameter))
            for parameter in operator.parameters
        )

    def over_rows(self, operator: Operator, parameter: Parameter) -> str | None:
        """The dim by which the rows of a grid divide a parameter, None where each has the same."""
        if self.rows == 1 or len(parameter.dims) == 1:
            return None
        dim = operator.contracted if operator.kind is OperatorKind.MATMUL else HIDDEN
        stored = operator.kind in (OperatorKind.MATMUL, OperatorKind.EMBEDDING)
        return dim if stored else None

    def used_elements(self, operator: Operator) -> int:
        """Elements of the operator's parameters on one rank when it uses them."""
        stored = any(self.over_rows(operator, each) for each in operator.parameters)
        return self.parameter_elements(operator) * (self.rows if stored else 1)

    def summed_axes(self, operator: Operator, parameter: Parameter) -> tuple[int, ...]:
        """The axes over which a parameter's gradient is a sum: they split a dim that it lacks.

        The sum over an axis of data-parallel ranks belongs to data parallelism.
        """
        if parameter.of_experts and (self.etp == 1 or self.tp == 1):
            return ()  # data parallelism of the experts reduces over all ranks with the same part
        return tuple(
            axis
            for axis, split in enumerate(self.splits(operator))
            if self.degrees[axis] > 1
            # ranks with parts of an expert have the same rows, but for an adapter's whole matrix
            and (not parameter.of_experts or split.dim in SCATTERED)
            and not (axis == 0 and self.data > 1)
            and not (axis == 0 and self.over_rows(operator, parameter))
            and split.dim is not None
            and parameter.tensor_dim(split.dim) is None
        )

    def over_data(self, operator: Operator, parameter: Parameter) -> int:
        """The data-parallel ranks that a parameter is divided over, 1 where each has a copy."""
        divided = self.data > 1 and parameter.tensor_dim(self.splits(operator)[0].dim) is not None
        return self.data if divided else 1


@functools.lru_cache(maxsize=4096)
def _base_of(sharding: Sharding) -> Sharding:
    return replace(sharding, ep=min(sharding.ep, 2), context_form=None)


@functools.lru_cache(maxsize=4096)
def without_experts(sharding: Sharding) -> Sharding:
    """Returns the sharding of layers that have no experts."""
    return replace(sharding, ep=1, etp=1)


@functools.lru_cache(maxsize=4096)
def of_tower(sharding: Sharding, part: ModelPart, way: TowerDivision) -> Sharding:
    """Returns the sharding of a layer of a part of a model whose tower runs in such a way.

    The projector is divided as a block, which makes tokens of the text from what the tower leaves.
    """
    if part in (ModelPart.PATCHES, ModelPart.TOWER):
        return replace(sharding, tower=way, sequence_parallel=False)
    return replace(sharding, reads_tower=way) if part is ModelPart.PROJECTOR else sharding


class LocalSizes(Protocol):
    """Sizes of an operator on one rank: numbers of one sharding, arrays of several."""

    @property
    def ranks(self) -> Number: ...

    @property
    def ep(self) -> Number: ...

    def dim_size(self, operator: Operator, dim_name: str) -> Number: ...

    def scattered_parts(self, operator: Operator) -> tuple[Number, Number]: ...

    def tensor_bytes(self, operator: Operator, tensor: Tensor) -> Number: ...

    def made_bytes(self, operator: Operator, tensor: Tensor) -> Number: ...

    def parameter_elements(self, operator: Operator) -> Number: ...

    def used_elements(self, operator: Operator) -> Number: ...


@dataclass(frozen=True, slots=True)
class Shardings:
    """Several shardings at once: the methods are those of `Sharding`, with a number for each."""

    each: tuple[Sharding, ...]

    @property
    def ranks(self) -> Number:
        return np.array([sharding.ranks for sharding in self.each])

    @property
    def ep(self) -> Number:
        return np.array([sharding.ep for sharding in self.each])

    def dim_size(self, operator: Operator, dim_name: str) -> Number:
        return self._divided(operator.size(dim_name), lambda each: each.parts(operator, dim_name))

    def scattered_parts(self, operator: Operator) -> tuple[Number, Number]:
        before, behind = zip(*(each.scattered_parts(operator) for each in self.each), strict=True)
        return np.array(before), np.array(behind)

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

    def used_elements(self, operator: Operator) -> Number:
        return np.array([each.used_elements(operator) for each in self.each])

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


def grid_split(operator: Operator) -> Split:
    """The split by the columns of a grid: of a product its output, of other operators the same.

    A table has the columns' part of the vocabulary, and its sums end by hidden features.
    """
    made = operator.outputs[0].dims[-1].name
    if operator.kind is OperatorKind.EMBEDDING:
        return Split(operator.contracted, made)
    return Split(operator.parallel_dim if operator.kind is OperatorKind.CROSS_ENTROPY else made)


def megatron_split(operator: Operator, dim: str | None, *, sequence_parallel: bool) -> Split:
    """Megatron's split: the parallel dim; under sequence parallelism everything else by token."""
    return _megatron_split(
        dim, sums=dim is not None and dim == operator.contracted, tokens=sequence_parallel
    )


@functools.lru_cache(maxsize=256)
def _megatron_split(dim: str | None, *, sums: bool, tokens: bool) -> Split:
    by_token = "sequence" if tokens else None
    if dim is None:
        return Split(by_token)
    return Split(dim, by_token if sums else None)
