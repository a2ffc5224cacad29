"""What chunks add to the time of a pipeline rank: waits for copies and collectives, and the update
(EQUATIONS O6).

The waits are those of the chunk schedule on streams (costmodels/chunks/copy_streams.py); a pass of
a stage takes the mean over its micro-batches, of which the first fetches more. Where the device is
the host nothing runs beside compute: every copy is waited for. A second of a collective that is not
waited for costs the pass that it runs under what it does elsewhere
(costmodels/layers/layer_price.py, `contention`); copies cost it nothing
(costmodels/layers/chunked_layer.py). While the host adds gradients up nothing is launched.
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
from parplan.costmodels.chunks.copy_streams import StreamCosts, exposed
from parplan.costmodels.host.offload import copy_time
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.chunked_layer import (
    Chunking,
    added_time,
    group_collectives,
    host_update_time,
)
from parplan.costmodels.layers.layer_price import contention
from parplan.costmodels.memory.activation_copies import copies_s, exposed_copies
from parplan.costmodels.operators.compute import optimizer_time
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.strategy import Strategy
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.provenance import ZERO, Kind, Seconds

PassKey = tuple[ActionKind, int]  # the forward or backward passes of a virtual stage
PICOSECOND = 12  # decimals of seconds
COLLECTIVES = (ChunkAction.GATHER, ChunkAction.REDUCE)
COPIES = (ChunkAction.FETCH, ChunkAction.SEND, ChunkAction.RETURN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """Seconds that chunks add to one rank: to a pass of a stage, of the mean micro-batch, and after
    the last backward pass.

    host: waits for copies, and the host's sums; collectives: waits for gathers and reductions, and
    what they cost passes
    step: reductions that end after the last pass; host_step: copies around the update that it does
    not hide
    optimizer: the update, on device and host at once
    """

    host: Mapping[PassKey, Seconds]
    collectives: Mapping[PassKey, Seconds]
    step: Seconds
    host_step: Seconds
    optimizer: Seconds

    def of_pass(self, work: ActionKind, stage: int) -> Seconds:
        """All that is added to one pass of a stage."""
        return self.host.get((work, stage), ZERO) + self.collectives.get((work, stage), ZERO)


@dataclass(frozen=True, slots=True)
class _Waits:
    """Of a step, by pass the seconds that compute waits, and those from the last pass to the
    end.
    """

    by_pass: Mapping[PassKey, float]
    tail_s: float


def chunk_time(strategy: Strategy, rank: int, price_cache: PriceCache) -> ChunkTime:
    """What the chunks of pipeline rank `rank` add to its time. Raises InfeasibleError where the
    budget is too small.
    """
    return _chunk_time(strategy, rank, price_cache, price_cache.chunking)


@lru_cache(maxsize=64)
def _chunk_time(strategy: Strategy, rank: int, price_cache: PriceCache, _: Chunking) -> ChunkTime:
    chunks, m = chunks_of_rank(strategy, rank, price_cache), strategy.layout.num_micro_batches
    mesh, elements = strategy.layout.mesh, strategy.layout.mesh.dp * chunk_elements(chunks)
    gather, reduce = group_collectives(
        elements,
        mesh,
        price_cache.machine,
        price_cache.training,
        in_parameters=chunks.in_parameters,
    )
    costs = stream_costs(strategy, rank, chunks, price_cache)
    copies, updated = _waits(chunks, costs, price_cache), _update(chunks, costs, price_cache)
    with_sent = replace(costs, gather_s=gather.value_s, reduce_s=reduce.value_s)
    both = (
        _waits(chunks, with_sent, price_cache)
        if gather.value_s and price_cache.training.overlap_grad_reduce
        else copies
    )
    waited = {key: max(0.0, both.by_pass[key] - copies.by_pass[key]) for key in copies.by_pass}
    crowded = _crowded(strategy, rank, chunks, costs, copies.by_pass, price_cache)
    sent, added, kind, sent_kind = (
        _spent(chunks, with_sent, COLLECTIVES),
        _added(chunks, price_cache),
        _kind(price_cache),
        (gather + reduce).kind,
    )
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
    """What two sums of the same seconds in another order differ by is nothing."""
    return max(0.0, round(whole_s - part_s, PICOSECOND))


def chunk_elements(chunks: RankChunks) -> int:
    """Of every chunk of a rank."""
    return chunks.groups[0].chunk_layout.chunk_elements


def _paid_s(waited_s: float, sent_s: float, price_cache: PriceCache) -> float:
    """What collectives that take `sent_s` add to passes that wait `waited_s` for them."""
    return (
        waited_s + contention(price_cache.machine) * max(0.0, sent_s - waited_s)
        if price_cache.training.overlap_grad_reduce
        else sent_s
    )


def _kind(price_cache: PriceCache) -> Kind:
    cluster = price_cache.machine.cluster
    return (copy_time(1.0, cluster) + copy_time(1.0, cluster, to_host=True)).kind


def stream_costs(
    strategy: Strategy, rank: int, chunks: RankChunks, price_cache: PriceCache
) -> StreamCosts:
    """Seconds of passes, copies and updates of one rank, without collectives."""
    layout, cluster, elements, layers = (
        strategy.layout,
        price_cache.machine.cluster,
        chunk_elements(chunks),
        numbered_layers(strategy),
    )
    forward_s, backward_s, ends_s = (
        dict[int, float](),
        dict[int, float](),
        defaultdict[tuple[ActionKind, int, bool], float](float),
    )
    for stage in layout.stages_of(rank):
        for choice, block in layers[stage]:
            time = price_cache.layer_time(
                choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
            )
            if block is not None:
                forward_s[block], backward_s[block] = (
                    time.forward_s,
                    time.backward_s + time.recompute_s,
                )
                continue
            first = choice.kind is LayerKind.EMBEDDING
            ends_s[ActionKind.FORWARD, stage, first] += time.forward_s
            ends_s[ActionKind.BACKWARD, stage, not first] += time.backward_s
    return StreamCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        ends_s={
            (work, stage): (ends_s[work, stage, True], ends_s[work, stage, False])
            for work, stage, _ in tuple(ends_s)
        },
        in_bytes_per_s=1 / copy_time(1.0, cluster).value_s,
        out_bytes_per_s=1 / copy_time(1.0, cluster, to_host=True).value_s,
        device_adam_s=optimizer_time(elements, price_cache.machine, price_cache.training).value_s,
        host_adam_s=host_update_time(elements, price_cache.machine, price_cache.training).value_s,
    )


def _waits(chunks: RankChunks, costs: StreamCosts, price_cache: PriceCache) -> _Waits:
    if price_cache.machine.cluster.device.is_host:
        return _one_by_one(chunks, costs)
    run = exposed(chunks, costs)
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
    """All that takes time around passes, and by which."""
    for moment in chunks.moments:
        yield from (
            (moment, op)
            for op in (*moment.before, *moment.after)
            if op.does in (*COLLECTIVES, *COPIES)
        )


def _spent(
    chunks: RankChunks, costs: StreamCosts, kinds: Sequence[ChunkAction]
) -> defaultdict[PassKey, float]:
    """Seconds of a step that ops of these kinds take on their streams, by pass."""
    found = defaultdict[PassKey, float](float)
    for moment, op in _ops(chunks):
        if op.does in kinds:
            found[moment.work, moment.stage] += costs.op_s(op)
    return found


def _crowded(
    strategy: Strategy,
    rank: int,
    chunks: RankChunks,
    costs: StreamCosts,
    waited: Mapping[PassKey, float],
    price_cache: PriceCache,
) -> defaultdict[PassKey, float]:
    """Seconds of a step that backward passes wait beside `waited` because activations come to the
    device as chunks do.
    """
    layout, fetched, found = (
        strategy.layout,
        _spent(chunks, costs, (ChunkAction.FETCH,)),
        defaultdict[PassKey, float](float),
    )
    for stage in layout.stages_of(rank):
        layers, key = strategy.stages[stage], (ActionKind.BACKWARD, stage)
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
            found[key] = max(
                0.0, layout.num_micro_batches * (back_s - passes_s) + fetched[key] - waited[key]
            )
    return found


def _added(chunks: RankChunks, price_cache: PriceCache) -> defaultdict[PassKey, float]:
    """Seconds of a step in which the host adds gradients of HOST blocks to those of micro-batches
    before.
    """
    once_s = added_time(chunk_elements(chunks), price_cache.machine, price_cache.training).value_s
    found, before = defaultdict[PassKey, float](float), set[tuple[int, int]]()
    for moment, op in _ops(chunks):
        if op.does is ChunkAction.SEND and chunks.groups[op.group].home is StateLocation.HOST:
            found[moment.work, moment.stage] += once_s * ((op.group, op.number) in before)
            before.add((op.group, op.number))
    return found


def _own_chunks(chunks: RankChunks) -> tuple[int, int]:
    """How many chunks of a device the host updates, and how many the device."""
    device = sum(
        group.chunk_layout.num_groups
        for group in chunks.groups
        if group.home is StateLocation.DEVICE
    )
    return sum(group.chunk_layout.num_groups for group in chunks.groups) - device, device


def _update(chunks: RankChunks, costs: StreamCosts, price_cache: PriceCache) -> Seconds:
    """Of all chunks, on host and device at once."""
    host, device = _own_chunks(chunks)
    elements = chunk_elements(chunks)
    on_host = host_update_time(elements, price_cache.machine, price_cache.training).scaled(host)
    on_device = optimizer_time(elements, price_cache.machine, price_cache.training).scaled(device)
    if price_cache.machine.cluster.device.is_host:
        return on_host + on_device
    return max(on_host, on_device, key=lambda seconds: seconds.value_s)
