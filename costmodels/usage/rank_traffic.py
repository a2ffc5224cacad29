"""Traffic of one rank in a step by mesh axis and kind of collective, as the price counts it.

The collectives are those whose seconds `parplan.costmodels.layers.layer_price` and
`parplan.costmodels.stage_costs` add up: their calls and bytes, hidden under compute or not. Bytes
are those of `collective_time`: the tensor that is all-reduced, the output of a gather, the input of
a reduce-scatter or an exchange, the received message. Left out, as in the price: the sums of norm
and bias gradients over the tensor-parallel axis, and the sum of the loss, 4 bytes a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from parplan.costmodels.chunks.chunk_memory import chunks_of_rank, unchunked_prices
from parplan.costmodels.chunks.chunk_operations import ChunkAction, RankChunks
from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.communication.mesh import Axis, Mesh
from parplan.costmodels.communication.redistribution import RedistributionStep, moves
from parplan.costmodels.host.host_embedding import TOKEN_BYTES, HostEmbedding
from parplan.costmodels.host.state_location import ChunkCommunication
from parplan.costmodels.layers.chunked_layer import BROADCAST_GATHERS
from parplan.costmodels.layers.context_parallel import ContextCall, context_calls
from parplan.costmodels.layers.grid_products import grid_moves
from parplan.costmodels.layers.layer_price import LOSS_REDUCTIONS, loss_places
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.model_states import SUMMED, LocalParameters
from parplan.costmodels.layers.sub_pipeline import HALVES
from parplan.costmodels.layers.tensor_flow import TensorFlow, leaving_tensor, tensor_flows_of
from parplan.costmodels.operators.kernels import FP32_BYTES
from parplan.costmodels.operators.operator_kernels import gathered_bytes
from parplan.costmodels.operators.sharding import GRID, PARTIAL, Place, Sharding
from parplan.costmodels.price_cache import PriceCache, table_of
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy, in_chunks
from parplan.profiles.models.operator_graph import (
    LayerClass,
    LayerKind,
    Operator,
    OperatorKind,
    Tensor,
)
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import Stack, TowerDivision

MESSAGE = "point_to_point"  # a kind beside those of `Collective`
# axes beside those of `Axis`: the ranks that divide whole experts, and those with copies of them
EXPERT_PARALLEL = "ep"
EXPERT_COPIES = "expert copies"


@dataclass(frozen=True, slots=True, order=True)
class SentBytes:
    """Calls of one kind over one mesh axis in a step, and the sum of their bytes."""

    axis: str
    kind: str
    calls: int
    num_bytes: int


class Tally:
    """Counts calls by (axis, kind, bytes per call)."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, int]] = Counter()

    def add(self, axis: str, kind: str, num_bytes: int, calls: int = 1) -> None:
        """Adds `calls` calls of `num_bytes` each."""
        self._calls[axis, kind, num_bytes] += calls

    def total(self) -> tuple[SentBytes, ...]:
        """Returns the sums by axis and kind."""
        calls = Counter[tuple[str, str]]()
        sums = Counter[tuple[str, str]]()
        for sent in self.by_size():
            calls[sent.axis, sent.kind] += sent.calls
            sums[sent.axis, sent.kind] += sent.num_bytes
        return tuple(SentBytes(*key, count, sums[key]) for key, count in sorted(calls.items()))

    def by_size(self) -> tuple[SentBytes, ...]:
        """Returns the sums by axis, kind and bytes per call."""
        return tuple(
            SentBytes(axis, kind, calls, calls * num_bytes)
            for (axis, kind, num_bytes), calls in sorted(self._calls.items())
            if calls
        )


def rank_traffic(strategy: Strategy, rank: int, price_cache: PriceCache) -> tuple[SentBytes, ...]:
    """Returns the traffic of a device of pipeline rank `rank` in one step."""
    return rank_tally(strategy, rank, price_cache).total()


def rank_tally(strategy: Strategy, rank: int, price_cache: PriceCache) -> Tally:
    """Counts the traffic of a device of pipeline rank `rank` in one step."""
    layout, tally = strategy.layout, Tally()
    for chunk, stage in enumerate(layout.stages_of(rank)):
        ahead = _num_ahead(layout, rank, chunk)
        for choice in strategy.stages[stage]:
            _add_layer(tally, choice, layout, price_cache, ahead)
        _add_messages(tally, stage, strategy, price_cache)
    if layout.chunked:
        _add_chunks(tally, chunks_of_rank(strategy, rank, price_cache))
    ends = {layout.rank_of(0), layout.rank_of(layout.num_virtual_stages - 1)}
    if price_cache.tied and len(ends) > 1 and rank in ends:
        table = table_of(price_cache.graph(1).embedding)
        elements = strategy.first_sharding.parameter_elements(table)
        num_bytes = _gradient_bytes(elements, unchunked_prices(layout, price_cache))
        tally.add(Axis.PP, Collective.ALL_REDUCE, num_bytes)
    return tally


def _num_ahead(layout: ParallelLayout, rank: int, chunk: int) -> int:
    """The number of micro-batches whose recompute a stage runs ahead of the gradient."""
    order = layout.orders()[rank] if layout.recomputes_ahead else ()
    return sum(action.work is ActionKind.RECOMPUTE and action.chunk == chunk for action in order)


def _gradient_bytes(elements: int, price_cache: LayerPriceCache) -> int:
    return price_cache.training.gradient_precision.num_bytes * elements


def _add_layer(
    tally: Tally, choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache, ahead: int
) -> None:
    sharding = layout.sharding_of(choice)
    layer = price_cache.divided_layer(choice.kind, layout.micro_batch_size, sharding)
    recomputed = price_cache.recompute_operators(choice.kind, choice.recompute)
    if sharding.ranks > 1:
        parts = HALVES if sharding.overlap and choice.kind.role is LayerKind.BLOCK else 1
        batch = layout.micro_batch_size * sharding.data // parts
        sending = price_cache.graph(batch, sharding.part).layer_class(choice.kind)
        for move in layer_moves(sending, sharding, recomputed, price_cache.training):
            axis = _axis_of(move, sharding)
            tally.add(axis, move.collective, move.num_bytes, parts * layout.num_micro_batches)
        for num_bytes in _summed_inside(choice, layer, layout, price_cache):
            tally.add(Axis.TP, Collective.ALL_REDUCE, num_bytes)
    if sharding.cp > 1:
        gpus_per_node = price_cache.machine.cluster.gpus_per_node
        stack = price_cache.training.stack
        for call in attention_calls(layer, sharding, recomputed, gpus_per_node, stack):
            kind = MESSAGE if call.kind is None else call.kind
            tally.add(Axis.CP, kind, call.num_bytes, call.calls * layout.num_micro_batches)
    for num_bytes in _exchanges(layer, sharding, recomputed):
        tally.add(EXPERT_PARALLEL, Collective.ALL_TO_ALL, num_bytes, layout.num_micro_batches)
    if price_cache.looks_up(choice.kind) and layout.mesh.dp > 1:
        _add_lookup(
            tally, price_cache.lookup(layout.micro_batch_size, layout.mesh), layout, price_cache
        )
    if not in_chunks(choice, layout):
        _add_data_parallel(
            tally,
            choice,
            layout,
            unchunked_prices(layout, price_cache),
            ahead if recomputed else 0,
        )


def _axis_of(move: RedistributionStep, sharding: Sharding) -> str:
    """Returns the mesh axis over which ranks inside a stage communicate."""
    if sharding.rows > 1:
        return GRID[move.axis]
    return Axis.DP if sharding.data > 1 and move.axis == 0 else Axis.TP


def _add_lookup(
    tally: Tally, lookup: HostEmbedding, layout: ParallelLayout, price_cache: PriceCache
) -> None:
    """Adds the tokens of all data-parallel ranks, and both exchanges of looked-up activations."""
    m = layout.num_micro_batches
    exchanged = price_cache.training.precision.num_bytes * lookup.elements
    tally.add(Axis.DP, Collective.ALL_GATHER, TOKEN_BYTES * lookup.num_tokens * layout.mesh.dp, m)
    tally.add(Axis.DP, Collective.ALL_TO_ALL, exchanged, 2 * m)


def _add_chunks(tally: Tally, chunks: RankChunks) -> None:
    """Adds gathers and reductions of whole communication groups of chunks, or of one chunk each.

    A broadcast counts as a scatter and a gather (EQUATIONS O5). Experts with owners of their own
    are gathered from those.
    """
    messages, chunk_layout = 1, chunks.groups[0].chunk_layout
    if chunks.communication is ChunkCommunication.SINGLE:
        messages = chunk_layout.ranks
    kinds = {
        ChunkAction.GATHER: Collective.ALL_GATHER,
        ChunkAction.REDUCE: Collective.REDUCE_SCATTER,
    }
    for moment in chunks.moments:
        for op in (*moment.before, *moment.after):
            if op.does in kinds:
                twice = messages > 1 and op.does is ChunkAction.GATHER
                calls = messages * (BROADCAST_GATHERS if twice else 1)
                experts = op.num_bytes * chunk_layout.expert_elements // chunk_layout.group_elements
                tally.add(Axis.DP, kinds[op.does], (op.num_bytes - experts) // messages, calls)
                if chunk_layout.expert_ranks > 1:
                    tally.add(EXPERT_COPIES, kinds[op.does], experts)


def attention_calls(
    layer: LayerClass,
    sharding: Sharding,
    recomputed: tuple[str, ...],
    gpus_per_node: int,
    stack: Stack,
) -> Iterator[ContextCall]:
    """Yields the calls of attention on context-parallel ranks, forward and backward."""
    for operator in layer.operators:
        if operator.kind is OperatorKind.ATTENTION:
            forward, backward = context_calls(operator, sharding, gpus_per_node, stack)
            yield from forward * (1 + (operator.name in recomputed))
            yield from backward


def layer_moves(
    layer: LayerClass, sharding: Sharding, recomputed: tuple[str, ...], training: TrainingSpec
) -> Iterator[RedistributionStep]:
    """Yields the tensor-parallel collectives of one micro-batch in one layer, forward and backward.

    recomputed    operators that run forward twice
    """
    for operator in layer.operators:
        for _ in range(1 + (operator.name in recomputed)):
            yield from forward_moves(layer, operator, sharding, training)
        yield from backward_moves(layer, operator, sharding, training)
    left = leaving_tensor(layer, sharding)
    if left is not None and layer.kind.role is not LayerKind.HEAD:
        yield from _moved(left[0], left[1], sharding.boundary, sharding)
        if layer.operators[-1].gradient:
            yield from _moved(left[0], sharding.boundary, left[1], sharding)


def forward_moves(
    layer: LayerClass, operator: Operator, sharding: Sharding, training: TrainingSpec
) -> Iterator[RedistributionStep]:
    """Yields the collectives before an operator, and those that end its partial sums.

    Their seconds are `edge_time` and `ending_time` of `parplan.costmodels.layers.layer_price`.
    """
    for edge in _edges(layer, operator, sharding):
        yield from _read(edge, sharding, training)
    yield from _grid(operator, sharding, training, backward=False)
    if operator.kind is OperatorKind.CROSS_ENTROPY:
        summed, whole = loss_places(operator, sharding)
        yield from list(_moved(operator.outputs[0], summed, whole, sharding)) * LOSS_REDUCTIONS
        return
    for tensor in operator.outputs:
        summed = sharding.place_inside(operator, tensor)
        yield from _moved(tensor, summed, sharding.place(operator, tensor), sharding)


def backward_moves(
    layer: LayerClass, operator: Operator, sharding: Sharding, training: TrainingSpec
) -> Iterator[RedistributionStep]:
    """Yields the collectives of gradients, and of gathered inputs that a weight gradient needs."""
    if not operator.gradient:
        return
    for edge in _edges(layer, operator, sharding):
        is_frozen = bool(operator.parameters) and not operator.trained
        if edge.gathers(sharding.degrees) and operator.saved and not is_frozen:
            yield from _read(edge, sharding, training)
        yield from _moved(edge.tensor, edge.gradient, edge.source, sharding)
    yield from _grid(operator, sharding, training, backward=True)
    if operator.kind is OperatorKind.CROSS_ENTROPY:
        return
    for tensor in operator.outputs:
        summed = sharding.place_inside(operator, tensor)
        ended = sharding.place(operator, tensor)
        if summed != ended:
            target = tuple(None if place == PARTIAL else place for place in summed)
            num_bytes = gathered_bytes(tensor, operator, training)
            yield from moves(num_bytes, ended, target, sharding.degrees)


def _grid(
    operator: Operator, sharding: Sharding, training: TrainingSpec, *, backward: bool
) -> Iterator[RedistributionStep]:
    """Yields the gathers and sums over a grid of tensor-parallel ranks (EQUATIONS T7)."""
    if sharding.rows > 1:
        for num_bytes, source, target in grid_moves(operator, sharding, training)[backward]:
            yield from moves(num_bytes, source, target, sharding.degrees)


def _exchanges(layer: LayerClass, sharding: Sharding, recomputed: tuple[str, ...]) -> Iterator[int]:
    """Yields the bytes that this rank sends in each exchange of tokens with their experts' ranks.

    Their seconds are `own_communication` of `parplan.costmodels.layers.layer_price`.
    """
    for operator in layer.operators if sharding.ep > 1 else ():
        if operator.exchanged is not None:
            passes = 2 + (operator.name in recomputed)
            yield from [sharding.tensor_bytes(operator, operator.exchanged)] * passes


def _edges(layer: LayerClass, operator: Operator, sharding: Sharding) -> list[TensorFlow]:
    return [
        edge
        for (reader, _), edge in tensor_flows_of(layer, sharding).items()
        if reader == operator.name
    ]


def _read(
    edge: TensorFlow, sharding: Sharding, training: TrainingSpec
) -> Iterator[RedistributionStep]:
    """Yields the collectives of a tensor on its way to its reader, which may gather a cast."""
    gathers = edge.gathers(sharding.degrees)
    num_bytes = edge.tensor.num_bytes
    if gathers:
        num_bytes = gathered_bytes(edge.tensor, edge.reader, training)
    return moves(num_bytes, edge.source, edge.target, sharding.degrees)


def _moved(
    tensor: Tensor, source: Place, target: Place, sharding: Sharding
) -> Iterator[RedistributionStep]:
    return moves(tensor.num_bytes, source, target, sharding.degrees)


def _summed_inside(
    choice: LayerChoice, layer: LayerClass, layout: ParallelLayout, price_cache: LayerPriceCache
) -> Iterator[int]:
    """Yields the bytes of each weight gradient that the tensor-parallel axis sums once a step.

    (`parplan.costmodels.layers.data_parallel.summed_inside`)
    """
    sharding = layout.sharding_of(choice)
    sums = (
        bool(sharding.own)
        or sharding.tower is TowerDivision.IMAGES
        or any(operator.is_adapter for operator in layer.operators)
    )
    for operator in layer.operators if sums else ():
        shards = price_cache.shards(layout.mesh) if choice.zero_of(operator.name) else 1
        for parameter in operator.parameters if operator.kind in SUMMED else ():
            is_matrix = parameter.trained and len(parameter.dims) > 1
            if is_matrix and sharding.summed_axes(operator, parameter):
                elements = math.prod(sharding.parameter_shape(operator, parameter))
                if parameter.of_experts:
                    shards = max(1, shards * sharding.tp // math.prod(sharding.experts))
                yield -(-elements // shards) * FP32_BYTES


def _add_data_parallel(
    tally: Tally,
    choice: LayerChoice,
    layout: ParallelLayout,
    price_cache: LayerPriceCache,
    ahead: int,
) -> None:
    """Adds the reductions and gathers of one layer, and gathers of its recomputes ahead.

    (`parplan.costmodels.layers.data_parallel.data_parallel_moves`)
    """
    mesh = layout.mesh
    sharding = layout.sharding_of(choice)
    for group in price_cache.groups(choice.kind, mesh, sharding, choice.zero, choice.own_zero):
        gathers = 1
        if group.zero == 3:
            gathers = 2 * layout.num_micro_batches + ahead
        reductions = layout.num_micro_batches if group.zero >= 2 else 1
        for axis, of_experts in _by_copies(group.parameters, mesh):
            shards = price_cache.shards(mesh) if group.zero else 1
            alike = group.parameters.held_alike(of_experts=bool(of_experts))[0]
            near = alike.holders(shards) if group.zero else 1
            whole, owned = (
                group.parameters.trained.owned(parts, with_tied=mesh.pp > 1, of_experts=of_experts)
                for parts in (1, shards)
            )
            gathered = group.parameters.trained.gathered_bytes(
                price_cache.training,
                with_tied=mesh.pp > 1,
                of_experts=of_experts,
                narrow=price_cache.narrow_weights,
            )
            if group.zero == 3:
                gathered += group.parameters.frozen_bytes(
                    price_cache.training, with_tied=mesh.pp > 1, of_experts=of_experts
                )
            if gathered and near > 1:
                tally.add(axis, Collective.ALL_GATHER, gathered, gathers)
            if whole and near > 1:
                reduced = _gradient_bytes(whole, price_cache)
                tally.add(axis, Collective.REDUCE_SCATTER, reduced, reductions)
            if whole and alike.holders(mesh.replicas) > near:
                tally.add(axis, Collective.ALL_REDUCE, _gradient_bytes(owned, price_cache))


def _by_copies(parameters: LocalParameters, mesh: Mesh) -> Iterator[tuple[str, bool | None]]:
    """Yields the axes of ranks with copies of parameters: of experts, of others, or of all.

    Experts that are whole on one rank of each replica have the copies of the others.
    """
    of_experts = parameters.held_alike(of_experts=True)
    if of_experts and mesh.ep == mesh.tp == 1:
        yield Axis.DP, None
        return
    if parameters.held_alike(of_experts=False):
        yield Axis.DP, False
    if of_experts:
        yield EXPERT_COPIES, True


def _add_messages(tally: Tally, stage: int, strategy: Strategy, price_cache: PriceCache) -> None:
    """Adds the messages that a virtual stage receives (`PriceCache.transfer`).

    They are activations of the previous stage and gradients of the next one.
    """
    layout = strategy.layout
    first, end = strategy.layers_of(stage)
    for neighbour, cut in ((stage - 1, first), (stage + 1, end)):
        if neighbour not in range(layout.num_virtual_stages):
            continue
        if layout.rank_of(neighbour) == layout.rank_of(stage):
            continue
        cut_class, part = price_cache.cut_class(cut), layout.sharding.part
        for tensor in price_cache.crossing_tensors(cut_class, layout.micro_batch_size, part):
            _add_message(tally, tensor, layout, price_cache)


def _add_message(
    tally: Tally, tensor: Tensor, layout: ParallelLayout, price_cache: PriceCache
) -> None:
    """Adds the messages of one tensor, and the gathers of its parts if a stack sends parts."""
    sharding, received = layout.sharding, layout.num_micro_batches
    num_bytes = sharding.local_bytes(tensor, sharding.boundary)
    if (
        price_cache.training.stack.partitioned_transfers
        and sharding.tp > 1
        and num_bytes == tensor.num_bytes
    ):
        tally.add(Axis.TP, Collective.ALL_GATHER, num_bytes, received)
        num_bytes = -(-num_bytes // sharding.tp)
    tally.add(Axis.PP, MESSAGE, num_bytes, received)
