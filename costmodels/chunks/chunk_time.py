"""Seconds that chunks add to a pipeline rank: waits and the update (EQUATIONS O6).

The waits for copies and collectives are those of the chunk schedule on streams
(costmodels/chunks/copy_streams.py). A pass of a stage takes the mean over its micro-batches, of
which the first fetches more. If the device is the host, no copy overlaps with compute and every
copy is exposed. A hidden second of a collective slows its pass down like any other collective
(costmodels/layers/layer_price.py, `contention`); copies slow nothing down
(costmodels/layers/chunked_layer.py). The host launches nothing while it adds gradients up.
Activations that come back from the host (costmodels/memory/activation_copies.py) share a direction
of PCIe with chunks: a backward pass takes no less than both copies together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from parplan.costmodels.chunks.accesses import numbered_layers
from parplan.costmodels.chunks.chunk_memory import chunks_of_rank
from parplan.costmodels.chunks.chunk_operations import BlockPass, ChunkAction, ChunkOp, RankChunks
from parplan.costmodels.chunks.copy_streams import PartKey, StreamCosts, run_streams
from parplan.costmodels.communication.hiding import contention
from parplan.costmodels.host.offload import copy_time
from parplan.costmodels.host.state_location import Access, StateLocation
from parplan.costmodels.layers.chunked_layer import (
    Chunking,
    added_time,
    group_collectives,
    host_update_time,
)
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.memory.activation_copies import copies_s, exposed_copies
from parplan.costmodels.operators.compute import optimizer_time
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.provenance import ZERO, Kind, Seconds

PassKey = tuple[ActionKind, int]  # the forward or backward passes of a virtual stage
PICOSECOND = 12  # decimals of seconds
COLLECTIVES = (ChunkAction.GATHER, ChunkAction.REDUCE)
COPIES = (ChunkAction.FETCH, ChunkAction.SEND, ChunkAction.RETURN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """Seconds that chunks add to the passes of one rank, and after its last backward pass.

    host           per pass of a stage, mean over micro-batches: waits for copies, and the host's
                   sums
    collectives    per pass of a stage: waits for gathers and reductions, and their slowdown of
                   passes
    step           reductions that end after the last pass
    host_step      copies around the update that the update does not hide
    optimizer      the update, on device and host at once
    """

    host: Mapping[PassKey, Seconds]
    collectives: Mapping[PassKey, Seconds]
    step: Seconds
    host_step: Seconds
    optimizer: Seconds

    def of_pass(self, work: ActionKind, stage: int) -> Seconds:
        """Seconds added to one pass of a stage."""
        return self.host.get((work, stage), ZERO) + self.collectives.get((work, stage), ZERO)


@dataclass(frozen=True, slots=True)
class _Waits:
    """Exposed seconds of a step by pass, and seconds from the last pass to the end."""

    by_pass: Mapping[PassKey, float]
    tail_s: float


def chunk_time(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> ChunkTime:
    """Returns the seconds that the chunks of pipeline rank `rank` add.

    Raises InfeasibleError if the budget is too small.
    """
    return _chunk_time(strategy, rank, price_cache, price_cache.chunking)


@lru_cache(maxsize=64)
def _chunk_time(
    strategy: Strategy, rank: int, price_cache: LayerPriceCache, _: Chunking
) -> ChunkTime:
    layout = strategy.layout
    chunks = chunks_of_rank(strategy, rank, price_cache)
    gather, reduce = group_collectives(
        chunks.groups[0].chunk_layout.group_elements,
        layout.mesh,
        price_cache.machine,
        price_cache.training,
        in_parameters=chunks.in_parameters,
        communication=chunks.communication,
        experts=chunks.groups[0].chunk_layout.expert_elements,
    )
    costs = stream_costs(strategy, rank, chunks, price_cache)
    copies = _waits(chunks, costs, price_cache)
    updated = _update(chunks, costs, price_cache)
    with_sent = replace(costs, gather_s=gather.value_s, reduce_s=reduce.value_s)
    both = (
        _waits(chunks, with_sent, price_cache)
        if gather.value_s and price_cache.training.overlap_grad_reduce
        else copies
    )
    waited = {key: max(0.0, both.by_pass[key] - copies.by_pass[key]) for key in copies.by_pass}
    crowded = _crowded(strategy, rank, chunks, costs, copies.by_pass, price_cache)
    sent = _spent(chunks, with_sent, COLLECTIVES)
    added = _added(chunks, price_cache)
    kind = _kind(price_cache)
    sent_kind = (gather + reduce).kind
    m = layout.num_micro_batches
    return ChunkTime(
        host={
            key: Seconds((copies.by_pass[key] + added[key] + crowded[key]) / m, kind)
            for key in copies.by_pass
        },
        collectives={
            key: Seconds(_paid_s(waited[key], sent[key], price_cache) / m, sent_kind)
            for key in copies.by_pass
        },
        step=Seconds(_longer_s(both.tail_s, copies.tail_s), sent_kind),
        host_step=Seconds(_longer_s(copies.tail_s, updated.value_s), kind),
        optimizer=updated,
    )


def _longer_s(whole_s: float, part_s: float) -> float:
    """Seconds by which a whole exceeds its part, zero for differences of rounding.

    Two sums of the same seconds in another order count as equal.
    """
    return max(0.0, round(whole_s - part_s, PICOSECOND))


def chunk_elements(chunks: RankChunks) -> int:
    """Elements of every chunk of a rank."""
    return chunks.groups[0].chunk_layout.chunk_elements


def _paid_s(waited_s: float, sent_s: float, price_cache: LayerPriceCache) -> float:
    """Seconds that collectives of `sent_s` add to passes that wait `waited_s` for them."""
    return (
        waited_s + contention(price_cache.machine) * max(0.0, sent_s - waited_s)
        if price_cache.training.overlap_grad_reduce
        else sent_s
    )


def _kind(price_cache: LayerPriceCache) -> Kind:
    cluster = price_cache.machine.cluster
    return (copy_time(1.0, cluster) + copy_time(1.0, cluster, to_host=True)).kind


def stream_costs(
    strategy: Strategy, rank: int, chunks: RankChunks, price_cache: LayerPriceCache
) -> StreamCosts:
    """Seconds of passes, copies and updates of one rank, without collectives."""
    layout = strategy.layout
    cluster = price_cache.machine.cluster
    elements = chunk_elements(chunks)
    layers = numbered_layers(strategy)
    forward_s = dict[int, float]()
    backward_s = dict[int, float]()
    parts_s = dict[int, dict[PartKey, float]]()
    ends_s = defaultdict[tuple[ActionKind, int, bool], float](float)
    for stage in layout.stages_of(rank):
        first = True  # until the first layer in chunks
        for choice, block in layers[stage]:
            time = price_cache.layer_time(
                choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
            )
            if block is not None:
                first = False
                forward_s[block] = time.forward_s
                backward_s[block] = time.backward_s + time.recompute_s
                if layout.access is Access.OPERATOR:
                    parts_s[block] = _parts_s(choice, layout, price_cache)
                continue
            ends_s[ActionKind.FORWARD, stage, first] += time.forward_s
            ends_s[ActionKind.BACKWARD, stage, not first] += time.backward_s + time.recompute_s
    return StreamCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        parts_s=parts_s,
        ends_s={
            (work, stage): (ends_s[work, stage, True], ends_s[work, stage, False])
            for work, stage, _ in tuple(ends_s)
        },
        in_bytes_per_s=1 / copy_time(1.0, cluster).value_s,
        out_bytes_per_s=1 / copy_time(1.0, cluster, to_host=True).value_s,
        device_adam_s=optimizer_time(elements, price_cache.machine, price_cache.training).value_s,
        host_adam_s=host_update_time(elements, price_cache.machine, price_cache.training).value_s,
    )


def _parts_s(
    choice: LayerChoice, layout: ParallelLayout, price_cache: LayerPriceCache
) -> dict[PartKey, float]:
    """Seconds of each access of a block's passes."""
    times = price_cache.part_time(
        choice.kind,
        layout.micro_batch_size,
        layout.sharding_of(choice),
        choice.recompute,
        layout.access,
    )
    backward = price_cache.part_passes(choice.kind, layout.access, choice.recompute, backward=True)
    again = {access.part for access in backward if access.rerun}
    seconds: dict[PartKey, float] = {}
    for part, time in enumerate(times):
        rerun_s = time.recompute_s if part in again else 0.0
        seconds[ActionKind.FORWARD, part, False] = time.forward_s
        seconds[ActionKind.BACKWARD, part, True] = rerun_s
        seconds[ActionKind.BACKWARD, part, False] = time.backward_s + time.recompute_s - rerun_s
    return seconds


def _waits(chunks: RankChunks, costs: StreamCosts, price_cache: LayerPriceCache) -> _Waits:
    if price_cache.machine.cluster.device.is_host:
        return _one_by_one(chunks, costs)
    run = run_streams(chunks, costs)
    by_pass = defaultdict[PassKey, float](float)
    for (work, stage, _), waited_s in run.actions_s.items():
        by_pass[work, stage] += waited_s
    return _Waits(by_pass, run.tail_s)


def _one_by_one(chunks: RankChunks, costs: StreamCosts) -> _Waits:
    by_pass = dict.fromkeys(((moment.work, moment.stage) for moment in chunks.moments), 0.0)
    for moment, op in _ops(chunks):
        by_pass[moment.work, moment.stage] += costs.op_s(op)
    returned_s = sum(costs.op_s(op) for op in chunks.closing if op.does is ChunkAction.RETURN)
    host, device = _own_chunks(chunks)
    return _Waits(by_pass, returned_s + host * costs.host_adam_s + device * costs.device_adam_s)


def _ops(chunks: RankChunks) -> Iterator[tuple[BlockPass, ChunkOp]]:
    """Yields every copy and collective around the passes, with its pass."""
    for moment in chunks.moments:
        yield from (
            (moment, op)
            for op in (*moment.before, *moment.after)
            if op.does in (*COLLECTIVES, *COPIES)
        )


def _spent(
    chunks: RankChunks, costs: StreamCosts, kinds: Sequence[ChunkAction]
) -> defaultdict[PassKey, float]:
    """Seconds of a step that operations of these kinds take on their streams, by pass."""
    spent_s = defaultdict[PassKey, float](float)
    for moment, op in _ops(chunks):
        if op.does in kinds:
            spent_s[moment.work, moment.stage] += costs.op_s(op)
    return spent_s


def _crowded(
    strategy: Strategy,
    rank: int,
    chunks: RankChunks,
    costs: StreamCosts,
    waited: Mapping[PassKey, float],
    price_cache: LayerPriceCache,
) -> defaultdict[PassKey, float]:
    """Seconds of a step that backward passes wait beyond `waited`, by pass.

    The cause is activations that come to the device at the same time as chunks.
    """
    layout = strategy.layout
    fetched = _spent(chunks, costs, (ChunkAction.FETCH,))
    crowded_s = defaultdict[PassKey, float](float)
    for stage in layout.stages_of(rank):
        layers = strategy.stages[stage]
        key = ActionKind.BACKWARD, stage
        back_s = sum(copies_s(choice, layout, price_cache)[1] for choice in layers)
        if back_s and key in waited:
            times = [
                price_cache.layer_time(
                    choice.kind,
                    layout.micro_batch_size,
                    layout.sharding_of(choice),
                    choice.recompute,
                )
                for choice in layers
            ]
            passes_s = (
                sum(time.backward_s + time.recompute_s for time in times)
                + exposed_copies(layers, layout, price_cache)[1].value_s
            )
            crowded_s[key] = max(
                0.0, layout.num_micro_batches * (back_s - passes_s) + fetched[key] - waited[key]
            )
    return crowded_s


def _added(chunks: RankChunks, price_cache: LayerPriceCache) -> defaultdict[PassKey, float]:
    """Seconds of a step in which the host adds gradients of HOST blocks up, by pass."""
    once_s = added_time(chunk_elements(chunks), price_cache.machine, price_cache.training).value_s
    added_s = defaultdict[PassKey, float](float)
    before = set[tuple[int, int]]()
    for moment, op in _ops(chunks):
        if op.does is ChunkAction.SEND and chunks.groups[op.group].home is StateLocation.HOST:
            if (op.group, op.number) in before:
                added_s[moment.work, moment.stage] += once_s
            before.add((op.group, op.number))
    return added_s


def _own_chunks(chunks: RankChunks) -> tuple[int, int]:
    """Returns the numbers of chunks that the host and the device update."""
    device = sum(
        group.chunk_layout.num_groups
        for group in chunks.groups
        if group.home is StateLocation.DEVICE
    )
    return sum(group.chunk_layout.num_groups for group in chunks.groups) - device, device


def _update(chunks: RankChunks, costs: StreamCosts, price_cache: LayerPriceCache) -> Seconds:
    """Seconds of the update of all chunks, on host and device at once."""
    host, device = _own_chunks(chunks)
    elements = chunk_elements(chunks)
    on_host = host_update_time(elements, price_cache.machine, price_cache.training).scaled(host)
    on_device = optimizer_time(elements, price_cache.machine, price_cache.training).scaled(device)
    if price_cache.machine.cluster.device.is_host:
        return on_host + on_device
    return max(on_host, on_device, key=lambda seconds: seconds.value_s)
