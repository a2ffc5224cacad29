"""The legal ways to divide an operator over the mesh axes inside a stage (EQUATIONS S1)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import and_

from parplan.costmodels.operators.sharding import BATCH, SCATTERED, Split, Splits
from parplan.profiles.elementwise import Number, anywhere
from parplan.profiles.models.operator_graph import (
    EXPERT_WIDTH,
    Dim,
    Operator,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An illegal way to divide an operator, and the reason."""

    splits: Splits
    reason: str


def operator_splits(
    operator: Operator, degrees: tuple[int, ...], *, over_data: bool = False, etp: int = 1
) -> tuple[tuple[Splits, ...], tuple[Rejected, ...]]:
    """Returns every legal way to divide `operator` over axes of `degrees`, and the rejected.

    A way is legal for several micro-batch sizes if it is for one of them (`divides`). With
    `over_data` the first axis are data-parallel ranks. All ranks divide each expert, where `etp` is
    more than 1.
    """
    legal, rejected = [], []
    for splits in itertools.product(
        *(tuple(_axis_splits(operator)) if p > 1 else (Split(),) for p in degrees)
    ):
        reason = _illegal_for_experts(operator, splits, degrees, etp) or _illegal(
            operator, splits, degrees
        )
        if over_data and reason is None:
            reason = _illegal_over_data(operator, splits[0])
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


def _illegal_over_data(operator: Operator, split: Split) -> str | None:
    """Returns why data-parallel ranks cannot divide the operator so, or None.

    They divide its batch or its weight, or what such a weight leaves divided. Anything else would
    do the same work on every rank, or leave partial sums of a weight's gradient on part of them.
    """
    follows = not operator.parameters and split.dim == operator.parallel_dim
    by_weight = any(p.tensor_dim(split.dim) is not None for p in operator.parameters)
    whole = split.dim == operator.contracted and split.result != BATCH
    if split.dim == BATCH or (split.dim is not None and (follows or by_weight) and not whole):
        return None
    return "data-parallel ranks divide the batch or the weight, and end partial sums by batch"


def _illegal_for_experts(
    operator: Operator, splits: Splits, degrees: tuple[int, ...], etp: int
) -> str | None:
    """Returns why the ranks cannot divide the work of experts so, or None.

    Each token goes to its experts once, so the ranks divide the tokens, or every expert.
    """
    if not operator.on_copies:
        return None
    by_width = operator.parallel_dim == EXPERT_WIDTH and etp > 1
    for degree, split in zip(degrees, splits, strict=True):
        if degree > 1 and by_width and split.dim != EXPERT_WIDTH:
            return f"etp {etp} divides the width of every expert"
        if degree > 1 and not by_width and split.dim not in SCATTERED:
            return "tensor parallel ranks hold whole experts and divide their tokens"
    return None


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
