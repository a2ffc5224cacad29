"""Collectives of 2-D tensor parallelism beside those of activations (EQUATIONS T7).

The tensor-parallel ranks are a grid of r rows and c columns. The rows divide the batch; the columns
divide hidden features, heads, the feed-forward width and the vocabulary. A rank holds one tile of
a weight W of I inputs and O outputs, I / r x O / c of it. It gathers the tiles of its column for a
product, as it gathers the input's features over its row (`layer_price.edge_time`):

    forward     all-gather of W over the rows
    backward    all-gather of W, and reduce-scatter of its gradient, over the rows
    norm        all-reduce of two fp32 sums of a token over the columns, in each pass; of one
                without a mean

Source: van de Geijn and Watts 1997, SUMMA; Xu et al. 2021, arXiv 2104.05343, whose panels are
broadcast one by one here are gathered at once, which sends the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from parplan.costmodels.operators.kernels import FP32_BYTES
from parplan.costmodels.operators.sharding import BATCH, PARTIAL, Place, Sharding
from parplan.profiles.elementwise import Number
from parplan.profiles.models.operator_graph import Operator, OperatorKind
from parplan.profiles.models.spec import TrainingSpec

Move = tuple[Number, Place, Place]  # bytes of the whole tensor, its placement before and after


def grid_moves(
    operator: Operator, sharding: Sharding, training: TrainingSpec
) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    """Returns the redistributions of weights and of sums of norms, forward and backward."""
    if operator.kind is OperatorKind.NORM:
        moments = (_moments(operator),)
        return moments, moments if operator.gradient else ()
    forward: list[Move] = []
    backward: list[Move] = []
    for num_bytes, stored, used, summed, trained in _weights(operator, sharding, training):
        forward.append((num_bytes, stored, used))
        if operator.inputs and operator.gradient:
            backward.append((num_bytes, stored, used))
        if trained:
            backward.append((num_bytes, summed, stored))
    return tuple(forward), tuple(backward)


def _moments(operator: Operator) -> Move:
    tokens = operator.size(BATCH) * operator.size("sequence")
    sums = len(operator.parameters)  # a norm with a mean has a bias as well
    return FP32_BYTES * sums * tokens, (BATCH, PARTIAL), (BATCH, None)


def _weights(
    operator: Operator, sharding: Sharding, training: TrainingSpec
) -> Iterator[tuple[int, Place, Place, Place, bool]]:
    """Yields bytes and placements of each weight that rows divide: stored, used, its gradient."""
    _, columns = sharding.splits(operator)
    for parameter in operator.parameters:
        stored = sharding.over_rows(operator, parameter)
        if stored is not None:
            num_bytes = training.precision.num_bytes * parameter.num_elements
            yield (
                num_bytes,
                (stored, columns.dim),
                (None, columns.dim),
                (PARTIAL, columns.dim),
                parameter.trained,
            )
