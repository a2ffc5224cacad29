"""What one rank sends in a step, by mesh axis and kind of collective, as far as the price counts
it.

The collectives are those whose seconds `parplan.costmodels.layers.layer_price` and
`parplan.costmodels.step` add up, counted instead of timed: calls and bytes, hidden under compute or
not. Bytes are those of `collective_time`: the tensor that is all-reduced, the output of a gather,
the input of a reduce-scatter or an exchange, the message that is received. Left out, as in the
price: the sums of norm and bias gradients over the tensor-parallel axis, and the sum of the loss, 4
bytes a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from parplan.costmodels.chunks.chunk_memory import chunks_of_rank, prices_of
from parplan.costmodels.chunks.chunk_operations import ChunkAction, RankChunks
from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.communication.mesh import Axis
from parplan.costmodels.communication.redistribution import RedistributionStep, moves
from parplan.costmodels.host.host_embedding import TOKEN_BYTES, HostEmbedding
from parplan.costmodels.layers.layer_price import LOSS_REDUCTIONS
from parplan.costmodels.layers.model_states import owned_parameters
from parplan.costmodels.layers.sub_pipeline import HALVES
from parplan.costmodels.layers.tensor_flow import TensorFlow, leaves, tensor_flows_of
from parplan.costmodels.operators.kernels import FP32_BYTES
from parplan.costmodels.operators.sharding import PARTIAL, Place, Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy, in_chunks
from parplan.profiles.models.operator_graph import (
    LayerClass,
    LayerKind,
    Operator,
    OperatorKind,
    Tensor,
)

MESSAGE = "point_to_point"  # a kind beside those of `Collective`


@dataclass(frozen=True, slots=True, order=True)
class SentBytes:
    """`calls` of one kind over one mesh axis in a step, and their bytes together."""

    axis: str
    kind: str
    calls: int
    num_bytes: int


class Tally:
    """Counts calls by (axis, kind, bytes of one)."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, int]] = Counter()

    def add(self, axis: str, kind: str, num_bytes: int, calls: int = 1) -> None:
        """`calls` more, each of `num_bytes`."""
        self._calls[axis, kind, num_bytes] += calls

    def total(self) -> tuple[SentBytes, ...]:
        """Everything so far, by axis and kind."""
        calls, sums = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for sent in self.by_size():
            calls[sent.axis, sent.kind] += sent.calls
            sums[sent.axis, sent.kind] += sent.num_bytes
        return tuple(SentBytes(*key, count, sums[key]) for key, count in sorted(calls.items()))

    def by_size(self) -> tuple[SentBytes, ...]:
        """The same, calls of unlike bytes apart."""
        return tuple(
            SentBytes(axis, kind, calls, calls * num_bytes)
            for (axis, kind, num_bytes), calls in sorted(self._calls.items())
            if calls
        )


def rank_traffic(strategy: Strategy, rank: int, price_cache: PriceCache) -> tuple[SentBytes, ...]:
    """Everything that a device of pipeline rank `rank` sends in one step."""
    return rank_tally(strategy, rank, price_cache).total()


def rank_tally(strategy: Strategy, rank: int, price_cache: PriceCache) -> Tally:
    """The same, call by call."""
    layout, tally = strategy.layout, Tally()
    for chunk, stage in enumerate(layout.stages_of(rank)):
        ahead = _num_ahead(layout, rank, chunk)
        for choice in strategy.stages[stage]:
            _add_layer(tally, choice, layout, price_cache, ahead)
        _add_messages(tally, stage, layout, price_cache)
    if layout.chunked:
        _add_chunks(tally, chunks_of_rank(strategy, rank, price_cache))
    ends = {layout.rank_of(0), layout.rank_of(layout.num_virtual_stages - 1)}
    if price_cache.tied and len(ends) > 1 and rank in ends:
        tables = (
            p
            for op in price_cache.graph(1).embedding.operators
            for p in op.parameters
            if op.parallel_dim == "vocab"
        )
        own = sum(p.num_elements for p in tables) // layout.mesh.tp
        tally.add(
            Axis.PP, Collective.ALL_REDUCE, _gradient_bytes(own, prices_of(layout, price_cache))
        )
    return tally


def _num_ahead(layout: ParallelLayout, rank: int, chunk: int) -> int:
    """Of how many micro-batches a stage's recompute runs ahead of the gradient."""
    order = layout.orders()[rank] if layout.recomputes_ahead else ()
    return sum(action.work is ActionKind.RECOMPUTE and action.chunk == chunk for action in order)


def _gradient_bytes(elements: int, price_cache: PriceCache) -> int:
    return price_cache.training.gradient_precision.num_bytes * elements


def _add_layer(
    tally: Tally, choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache, ahead: int
) -> None:
    layer, sharding = (
        price_cache.layer(choice.kind, layout.micro_batch_size),
        layout.sharding_of(choice),
    )
    again = price_cache.recompute_operators(choice.kind, choice.recompute)
    if sharding.tp > 1:
        parts = HALVES if sharding.overlap and choice.kind is LayerKind.BLOCK else 1
        sending = price_cache.graph(layout.micro_batch_size // parts).layer_class(choice.kind)
        for move in layer_moves(sending, sharding, again):
            tally.add(Axis.TP, move.collective, move.num_bytes, parts * layout.num_micro_batches)
        for num_bytes in _summed_inside(
            layer, sharding, price_cache.shards(layout.mesh) if choice.zero else 1
        ):
            tally.add(Axis.TP, Collective.ALL_REDUCE, num_bytes)
    if price_cache.looks_up(choice.kind) and layout.mesh.dp > 1:
        _add_lookup(
            tally, price_cache.lookup(layout.micro_batch_size, layout.mesh), layout, price_cache
        )
    if not in_chunks(choice, layout):
        _add_data_parallel(
            tally, choice, layer, layout, prices_of(layout, price_cache), ahead if again else 0
        )


def _add_lookup(
    tally: Tally, lookup: HostEmbedding, layout: ParallelLayout, price_cache: PriceCache
) -> None:
    """The tokens of all data-parallel ranks, and both exchanges of what the host looks up."""
    m = layout.num_micro_batches
    tally.add(Axis.DP, Collective.ALL_GATHER, TOKEN_BYTES * lookup.num_tokens * layout.mesh.dp, m)
    tally.add(
        Axis.DP,
        Collective.ALL_TO_ALL,
        price_cache.training.precision.num_bytes * lookup.elements,
        2 * m,
    )


def _add_chunks(tally: Tally, chunks: RankChunks) -> None:
    """Gathers and reductions of whole communication groups of chunks."""
    kinds = {
        ChunkAction.GATHER: Collective.ALL_GATHER,
        ChunkAction.REDUCE: Collective.REDUCE_SCATTER,
    }
    for moment in chunks.moments:
        for op in (*moment.before, *moment.after):
            if op.does in kinds:
                tally.add(Axis.DP, kinds[op.does], op.num_bytes)


def layer_moves(
    layer: LayerClass, sharding: Sharding, again: tuple[str, ...]
) -> Iterator[RedistributionStep]:
    """The tensor-parallel collectives of one micro-batch through one layer, forward and backward;
    `again` runs forward twice.
    """
    for operator in layer.operators:
        for _ in range(1 + (operator.name in again)):
            yield from forward_moves(layer, operator, sharding)
        yield from backward_moves(layer, operator, sharding)
    left = leaves(layer, sharding)
    if left is not None and layer.kind is not LayerKind.HEAD:
        yield from _moved(left[0], left[1], sharding.boundary, sharding)
        yield from _moved(left[0], sharding.boundary, left[1], sharding)


def forward_moves(
    layer: LayerClass, operator: Operator, sharding: Sharding
) -> Iterator[RedistributionStep]:
    """Before the operator reads, and to end the partial sums of what it computes
    (`parplan.costmodels.layers.layer_price.edge_time`, `ending_time`).
    """
    for edge in _edges(layer, operator, sharding):
        yield from _moved(edge.tensor, edge.source, edge.target, sharding)
    if operator.kind is OperatorKind.CROSS_ENTROPY:
        partial = tuple(
            PARTIAL if split.dim == operator.parallel_dim else None
            for split in sharding.splits(operator)
        )
        yield from (
            list(_moved(operator.outputs[0], partial, (None,) * len(partial), sharding))
            * LOSS_REDUCTIONS
        )
        return
    for tensor in operator.outputs:
        yield from _moved(
            tensor,
            sharding.place_inside(operator, tensor),
            sharding.place(operator, tensor),
            sharding,
        )


def backward_moves(
    layer: LayerClass, operator: Operator, sharding: Sharding
) -> Iterator[RedistributionStep]:
    """Of the gradients, and of a gathered input that the weight gradient needs again."""
    for edge in _edges(layer, operator, sharding):
        if edge.gathers(sharding.degrees) and operator.saved:
            yield from _moved(edge.tensor, edge.source, edge.target, sharding)
        yield from _moved(edge.tensor, edge.gradient, edge.source, sharding)
    if operator.kind is OperatorKind.CROSS_ENTROPY:
        return
    for tensor in operator.outputs:
        summed, ended = sharding.place_inside(operator, tensor), sharding.place(operator, tensor)
        if summed != ended:
            yield from _moved(
                tensor,
                ended,
                tuple(None if place == PARTIAL else place for place in summed),
                sharding,
            )


def _edges(layer: LayerClass, operator: Operator, sharding: Sharding) -> list[TensorFlow]:
    return [
        edge
        for (reader, _), edge in tensor_flows_of(layer, sharding).items()
        if reader == operator.name
    ]


def _moved(
    tensor: Tensor, source: Place, target: Place, sharding: Sharding
) -> Iterator[RedistributionStep]:
    return moves(tensor.num_bytes, source, target, sharding.degrees)


def _summed_inside(layer: LayerClass, sharding: Sharding, shards: int) -> Iterator[int]:
    """Bytes of each weight gradient that is summed over the tensor-parallel axis once a step
    (`parplan.costmodels.layers.data_parallel.summed_inside`).
    """
    for operator in layer.operators if sharding.own else ():
        for parameter in operator.parameters if operator.kind is OperatorKind.MATMUL else ():
            if len(parameter.dims) > 1 and sharding.summed_axes(operator, parameter):
                yield (
                    -(-math.prod(sharding.parameter_shape(operator, parameter)) // shards)
                    * FP32_BYTES
                )


def _add_data_parallel(
    tally: Tally,
    choice: LayerChoice,
    layer: LayerClass,
    layout: ParallelLayout,
    price_cache: PriceCache,
    ahead: int,
) -> None:
    """Reductions and gathers of one layer
    (`parplan.costmodels.layers.data_parallel.data_parallel_time`), and those of its recomputes ahead
    of the gradient.
    """
    mesh, sharding, with_tied = layout.mesh, layout.sharding_of(choice), layout.mesh.pp > 1
    shards = price_cache.shards(mesh) if choice.zero else 1
    whole, owned = (
        owned_parameters(layer, sharding, count, with_tied=with_tied) for count in (1, shards)
    )
    if mesh.dp == 1 or not whole:
        return
    if shards > 1:
        gathers = 2 * layout.num_micro_batches + ahead if choice.zero == 3 else 1
        reductions = layout.num_micro_batches if choice.zero >= 2 else 1
        tally.add(
            Axis.DP,
            Collective.ALL_GATHER,
            price_cache.training.precision.num_bytes * whole,
            gathers,
        )
        tally.add(
            Axis.DP, Collective.REDUCE_SCATTER, _gradient_bytes(whole, price_cache), reductions
        )
    if mesh.dp > shards:
        tally.add(Axis.DP, Collective.ALL_REDUCE, _gradient_bytes(owned, price_cache))


def _add_messages(
    tally: Tally, stage: int, layout: ParallelLayout, price_cache: PriceCache
) -> None:
    """What a virtual stage receives: activations from the one before it, gradients from the one
    after it (`PriceCache.transfer`).
    """
    boundary, sharding = price_cache.graph(layout.micro_batch_size).block.input, layout.sharding
    assert boundary is not None
    num_bytes = sharding.local_bytes(boundary, sharding.boundary)
    neighbours = [
        other for other in (stage - 1, stage + 1) if other in range(layout.num_virtual_stages)
    ]
    received = layout.num_micro_batches * sum(
        layout.rank_of(other) != layout.rank_of(stage) for other in neighbours
    )
    if (
        price_cache.training.stack.partitioned_transfers
        and sharding.tp > 1
        and num_bytes == boundary.num_bytes
    ):
        tally.add(Axis.TP, Collective.ALL_GATHER, num_bytes, received)
        num_bytes = -(-num_bytes // sharding.tp)
    tally.add(Axis.PP, MESSAGE, num_bytes, received)
