"""The placements of a sharding, as plan files state them, and the way back (EQUATIONS S1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from parplan.costmodels.operators.legal_splits import operator_splits
from parplan.costmodels.operators.sharding import GRID, Sharding, Splits
from parplan.profiles.models.operator_graph import (
    Operator,
    OperatorKind,
    Parameter,
    Tensor,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """DTensor placements, as `Shard(0)@tp`: over the data-parallel axis, and the tensor-parallel.

    Those of a grid are over `GRID`. An axis without an entry is Replicate.
    """

    parameters: dict[str, tuple[str, ...]]
    input: tuple[str, ...]
    output: tuple[str, ...]


def placements(operator: Operator, sharding: Sharding) -> Placements:
    """The placements of an operator's parameters, input and output.

    The sharding has one tensor-parallel axis, and the data-parallel axis where it divides that, or
    the rows and columns of a grid of tensor-parallel ranks.
    Activations are [batch, sequence, feature]: `Shard(2)@tp` splits features, `Shard(1)@tp` tokens.
    """
    axes: tuple[str, ...] = ("dp", "tp") if sharding.data > 1 else ("tp",)
    if sharding.rows > 1:
        axes = GRID

    def entries(dims: Iterable[int | None]) -> tuple[str, ...]:
        return tuple(
            f"Shard({dim})@{axis}" for axis, dim in zip(axes, dims, strict=True) if dim is not None
        )

    def activation(tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
        if not tensors:
            return ()
        names = [dim.name for dim in tensors[0].dims]
        places = sharding.place(operator, tensors[0])
        return entries(None if place is None else names.index(place) for place in places)

    splits = sharding.splits(operator)
    scalar = operator.kind is OperatorKind.CROSS_ENTROPY  # the loss of the tokens is one sum

    def held(parameter: Parameter) -> tuple[str, ...]:
        dims = [split.dim for split in splits]
        if sharding.rows > 1:
            dims[0] = sharding.over_rows(operator, parameter)
        return entries(map(parameter.tensor_dim, dims))

    return Placements(
        parameters={parameter.name: held(parameter) for parameter in operator.parameters},
        input=activation(operator.inputs),
        output=() if scalar else activation(operator.outputs),
    )


def placed_splits(operator: Operator, over: Sharding, expected: Placements) -> Splits | None:
    """Returns the legal way to divide `operator` over the ranks of `over` for `expected`, or None.

    An operator that is divided over data-parallel ranks has the batch of all of them.
    """
    legal, _ = operator_splits(operator, over.degrees, over_data=over.data > 1, etp=over.etp)
    return next(
        (
            splits
            for splits in legal
            if placements(operator, replace(over, own=((operator.name, splits),))) == expected
        ),
        None,
    )
