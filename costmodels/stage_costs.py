"""Costs of each stage of a strategy and tails of its ranks, the input of a schedule's replay.

They include the transfers between pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from parplan.costmodels.chunks.chunk_memory import unchunked_prices
from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.hiding import contention
from parplan.costmodels.communication.mesh import Axis, Mesh, place_axis, units_crossed
from parplan.costmodels.joined_pools import (
    joined_reduction,
    joined_transfer,
    passes_join,
    prices_at,
)
from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.data_parallel import DataParallelTime, summed_inside
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.model_layers import ParameterSharing
from parplan.costmodels.memory.activation_copies import exposed_copies
from parplan.costmodels.memory.rank_memory import rank_layers
from parplan.costmodels.operators.host_launch import measured_layout_costs
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.schedules.actions import ActionKind, placement_of
from parplan.costmodels.schedules.schedule import LAST_KEEPS_ALL, Schedule, rank_of
from parplan.costmodels.schedules.simulator import StageCost
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy, in_chunks
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.provenance import ZERO, Seconds

SCALAR_BYTES = 8


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The input of a strategy's simulation: `stages[rank][chunk]`, and tails by rank.

    reduced_s      exposed reductions and gathers of the step, and copies between device and host
    tied_s         the reduction of a tied embedding's two gradients
    optimizer_s    the update of the parameters
    """

    stages: tuple[tuple[StageCost, ...], ...]
    reduced_s: tuple[float, ...]
    tied_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]

    @property
    def tail_s(self) -> tuple[float, ...]:
        """Seconds after each rank's last action."""
        return tuple(map(sum, zip(self.reduced_s, self.tied_s, self.optimizer_s, strict=True)))


@dataclass(frozen=True, slots=True)
class _LayerShare:
    """The part of one layer in the `StageCost` of its stage and in the tail of its rank."""

    forward_s: float
    backward_s: float
    recompute_s: float
    weight_s: float
    stash_bytes: float
    waiting_bytes: float
    remade_bytes: float
    reduced: Seconds
    optimizer: Seconds


def step_costs(strategy: Strategy, price_cache: LayerPriceCache) -> StepCosts:
    """Returns the costs of every stage of `strategy` and the tails of its ranks.

    Raises ConfigError if the last stage recomputes under a schedule that has no time for it.
    """
    layout = strategy.layout
    if layout.schedule in LAST_KEEPS_ALL and any(
        price_cache.recompute_operators(choice.kind, choice.recompute)
        for choice in strategy.stages[-1]
    ):
        raise ConfigError(
            f"{layout.schedule}: its last stage recomputes nothing, here it does",
            hint="use early-recompute",
        )
    rows = [_rank_costs(strategy, rank, price_cache) for rank in range(layout.mesh.pp)]
    return StepCosts(*zip(*rows, strict=True))


def with_other_ranks(
    costs: StepCosts, strategy: Strategy, ranks: Collection[int], price_cache: LayerPriceCache
) -> StepCosts:
    """Returns the costs of `strategy`, which differs on `ranks` alone from that of `costs`.

    Layouts in chunks are excluded, whose ranks share the host.
    """
    before = zip(costs.stages, costs.reduced_s, costs.tied_s, costs.optimizer_s, strict=True)
    rows = [
        _rank_costs(strategy, rank, price_cache) if rank in ranks else row
        for rank, row in enumerate(before)
    ]
    return StepCosts(*zip(*rows, strict=True))


def _rank_costs(
    strategy: Strategy, rank: int, price_cache: LayerPriceCache
) -> tuple[tuple[StageCost, ...], float, float, float]:
    """Returns the fields of `StepCosts` of one rank."""
    price_cache = prices_at(strategy.layout, rank, price_cache)
    stages = strategy.layout.stages_of(rank)
    chunks = tuple(_stage_cost(strategy, stage, price_cache) for stage in stages)
    reduced, tied, optimizer = _tail(strategy, rank, price_cache)
    return chunks, reduced.value_s, tied.value_s, optimizer.value_s


def _layer_costs(
    layers: Iterable[LayerChoice], layout: ParallelLayout, price_cache: LayerPriceCache
) -> Iterator[tuple[_LayerShare, int]]:
    """Yields the cost of each run of equal layers, and the number of its layers."""
    of_layout = price_cache.once(("layer costs", layout), KeyedCache)
    for choice, equal in groupby(layers):
        yield of_layout(choice, partial(_layer_cost, choice, layout, price_cache)), len([*equal])


def _layer_cost(
    choice: LayerChoice, layout: ParallelLayout, price_cache: LayerPriceCache
) -> _LayerShare:
    layer = (choice.kind, layout.micro_batch_size, layout.sharding_of(choice))
    time = price_cache.layer_time(*layer, choice.recompute)
    data = data_parallel(choice, layout, price_cache)
    saved = (
        price_cache.activations(*layer, choice.recompute, choice.on_host).saved
        if choice.on_host
        else price_cache.saved_bytes(*layer, choice.recompute)
    )
    weight_s = split_s = waiting_bytes = remade_bytes = 0.0
    if layout.splits_backward:
        weight_s = min(price_cache.weight_s(*layer), time.backward_s) + data.backward.value_s
        split_s = price_cache.split_s(choice.kind)
        waiting_bytes = price_cache.waiting_bytes(*layer)
    if layout.recomputes_ahead:
        remade_bytes = price_cache.remade_bytes(*layer, choice.recompute)
    return _LayerShare(
        forward_s=time.forward_s + data.forward.value_s,
        backward_s=time.backward_s + data.backward.value_s + split_s,
        recompute_s=time.recompute_s,
        weight_s=weight_s,
        stash_bytes=saved,
        waiting_bytes=waiting_bytes,
        remade_bytes=remade_bytes,
        reduced=data.step,
        optimizer=data.optimizer,
    )


def _stage_cost(strategy: Strategy, stage: int, price_cache: LayerPriceCache) -> StageCost:
    layout, chunk = strategy.layout, strategy.stages[stage]
    forward_s = backward_s = recompute_s = weight_s = 0.0
    stash_bytes = waiting_bytes = remade_bytes = 0.0
    for cost, count in _layer_costs(chunk, layout, price_cache):
        forward_s += count * cost.forward_s
        backward_s += count * cost.backward_s
        recompute_s += count * cost.recompute_s
        weight_s += count * cost.weight_s
        stash_bytes += count * cost.stash_bytes
        waiting_bytes += count * cost.waiting_bytes
        remade_bytes += count * cost.remade_bytes
    out, back = exposed_copies(chunk, layout, price_cache)
    first, end = strategy.layers_of(stage)
    made = price_cache.constants(first, end, layout.micro_batch_size)
    forward_s += out.value_s + made.value_s
    backward_s += back.value_s
    stash_bytes += price_cache.besides_bytes(first, end, layout.micro_batch_size)
    if any(choice.kind.role is LayerKind.BLOCK for choice in chunk):
        edges = price_cache.row_edges(layout.micro_batch_size, layout.sharding)
        forward_s += edges[0].value_s
        backward_s += edges[1].value_s
    if layout.chunked:
        from parplan.costmodels.chunks.chunk_time import chunk_time

        added = chunk_time(strategy, layout.rank_of(stage), price_cache)
        forward_s += added.of_pass(ActionKind.FORWARD, stage).value_s
        backward_s += added.of_pass(ActionKind.BACKWARD, stage).value_s
    receive_forward, receive_backward = receive_times(strategy, stage, price_cache)
    layouts = None
    if layout.mesh.pp > 1:
        layouts = measured_layout_costs(price_cache.machine, price_cache.training.stack)
    if layouts:
        forward_s += layouts.action_s
        backward_s += layouts.action_s
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=recompute_s,
        weight_s=weight_s,
        stash_bytes=stash_bytes,
        waiting_bytes=waiting_bytes,
        remade_bytes=remade_bytes,
        receive_forward_s=receive_forward.value_s,
        receive_backward_s=receive_backward.value_s,
    )


def data_parallel(
    choice: LayerChoice, layout: ParallelLayout, price_cache: LayerPriceCache
) -> DataParallelTime:
    """Returns the data-parallel time of one layer.

    A layer in chunks has only the sums inside the stage; `chunk_time` has the rest.
    """
    sharding = layout.sharding_of(choice)
    if not in_chunks(choice, layout):
        return unchunked_prices(layout, price_cache).data_parallel(
            choice.kind,
            layout.micro_batch_size,
            layout.mesh,
            sharding,
            choice.zero,
            choice.own_zero,
        )
    summed = summed_inside(
        price_cache.layer(choice.kind, 1),
        sharding,
        layout.mesh.dp,
        price_cache.machine,
        price_cache.training,
    )
    return DataParallelTime(forward=ZERO, backward=ZERO, step=summed, optimizer=ZERO)


def _tail(
    strategy: Strategy, rank: int, price_cache: LayerPriceCache
) -> tuple[Seconds, Seconds, Seconds]:
    """Returns the seconds after the last backward pass of a rank.

    They are exposed reductions, the reduction of a tied embedding, and the optimizer.
    """
    layout = strategy.layout
    reduced = ZERO
    updated = ZERO
    for cost, count in _layer_costs(rank_layers(strategy, rank), layout, price_cache):
        reduced += cost.reduced.scaled(count)
        updated += cost.optimizer.scaled(count)
    if layout.chunked:
        from parplan.costmodels.chunks.chunk_time import chunk_time

        added = chunk_time(strategy, rank, price_cache)
        reduced = reduced + added.step + added.host_step
        updated += added.optimizer
    return (
        reduced,
        shared_reductions(strategy, rank, price_cache),
        updated + norm_and_loss(layout, price_cache),
    )


def shared_reductions(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> Seconds:
    """Seconds of the sums of gradients of parameters that this rank and others hold.

    Copies on one rank are added without sending.
    """
    layout = strategy.layout
    total = ZERO
    for shared in price_cache.shared_parameters:
        holders = {
            layout.rank_of(stage)
            for stage in range(layout.num_virtual_stages)
            if strategy.holds(stage, shared.layers)
        }
        if len(holders) > 1 and rank in holders:
            outside = unchunked_prices(layout, price_cache)
            total += shared_reduction(shared, strategy.first_sharding, layout, outside)
    return total


def shared_reduction(
    shared: ParameterSharing,
    sharding: Sharding,
    layout: ParallelLayout,
    price_cache: LayerPriceCache,
) -> Seconds:
    """Seconds to sum the gradients of parameters that several pipeline ranks hold."""
    reduced = price_cache.shared_reduction(shared, layout.mesh, sharding)
    return joined_reduction(shared, sharding, layout, price_cache, reduced)


def norm_and_loss(layout: ParallelLayout, price_cache: LayerPriceCache) -> Seconds:
    """Seconds of the sums of the gradient norm and of the loss over all ranks.

    Zero unless the machine's own profile measured such small messages.
    """
    if measured_layout_costs(price_cache.machine, price_cache.training.stack) is None:
        return ZERO
    everyone = place_axis(
        layout.mesh.num_ranks, 1, layout.mesh.num_ranks, price_cache.machine.cluster.gpus_per_node
    )
    return collective_time(
        Collective.ALL_REDUCE, SCALAR_BYTES, everyone, price_cache.machine
    ).scaled(2)


def receive_times(
    strategy: Strategy, stage: int, price_cache: LayerPriceCache
) -> tuple[Seconds, Seconds]:
    """Returns the seconds that virtual stage `stage` waits for its inputs and output gradients.

    Each is one transfer of the tensors that cross the cut.
    """
    layout = strategy.layout
    here = layout.rank_of(stage)
    first, end = strategy.layers_of(stage)
    forward = ZERO
    backward = ZERO
    if stage > 0:
        before = layout.rank_of(stage - 1)
        forward = time_between(before, here, layout, price_cache, price_cache.cut_class(first))
    if stage < layout.num_virtual_stages - 1:
        behind = layout.rank_of(stage + 1)
        backward = time_between(behind, here, layout, price_cache, price_cache.cut_class(end))
    return forward, backward


def rank_receives(rank: int, layout: ParallelLayout, price_cache: LayerPriceCache) -> Seconds:
    """Seconds that all chunks of a rank wait for transfers in one micro-batch, if cuts are alike.

    They are the sum of `receive_times` over its virtual stages.
    """
    if layout.pools:
        return _received_on_pools(rank, layout, price_cache)
    return _received(_received_messages(layout, price_cache)[rank], layout, price_cache)


def _received_on_pools(rank: int, layout: ParallelLayout, price_cache: LayerPriceCache) -> Seconds:
    stages, total = layout.stages_of(rank), ZERO
    for stage in stages:
        for other in (stage - 1, stage + 1):
            if 0 <= other < layout.num_virtual_stages:
                total += time_between(layout.rank_of(other), rank, layout, price_cache)
    return total


def all_receives_s(layout: ParallelLayout, price_cache: LayerPriceCache) -> float:
    """Sum of `rank_receives` over all ranks."""
    messages = _received_messages(layout, price_cache).sum(axis=0)
    return _received(messages, layout, price_cache).value_s


def _received(
    messages: npt.NDArray[np.int64], layout: ParallelLayout, price_cache: LayerPriceCache
) -> Seconds:
    total = ZERO
    for level, count in enumerate(messages.tolist()):
        if count:
            total += _sent(_link(layout, price_cache, level), price_cache).scaled(count)
    return total


def _received_messages(
    layout: ParallelLayout, price_cache: LayerPriceCache
) -> npt.NDArray[np.int64]:
    """Returns by rank the messages that it receives, by the levels that they leave."""
    return _messages(
        layout.schedule,
        layout.mesh,
        layout.virtual_stages,
        layout.actions,
        price_cache.machine.cluster.unit_gpus,
    )


@lru_cache(maxsize=1024)
def _messages(
    schedule: Schedule,
    mesh: Mesh,
    virtual_stages: int,
    actions: tuple[str, ...],
    unit_gpus: tuple[int, ...],
) -> npt.NDArray[np.int64]:
    """Returns the messages of one micro-batch by receiving rank and by the levels that they leave.

    Each virtual stage receives its input from the one before, and its output gradient from the one
    after, unless the same rank runs both.
    """
    if schedule is Schedule.CUSTOM:
        placement = placement_of(actions)
        at = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
        ranks = np.array([at[stage] for stage in range(len(at))])
    else:
        stages = range(mesh.pp * virtual_stages)
        ranks = np.array([rank_of(schedule, stage, mesh.pp) for stage in stages])
    before, after = ranks[:-1], ranks[1:]
    levels = np.asarray(units_crossed(mesh, before, after, unit_gpus), np.int64)
    messages = np.zeros((mesh.pp, 1 + len(unit_gpus)), np.int64)
    for receiver in (before, after):
        np.add.at(messages, (receiver, levels), before != after)
    return messages


Link = tuple[int, Sharding, int, int, bool]


def link_of(here: int, there: int, layout: ParallelLayout, price_cache: LayerPriceCache) -> Link:
    """Returns all that a transfer between two pipeline ranks depends on, besides its tensors.

    They are the micro-batch size, the sharding, the levels that the transfer leaves (0 inside a
    node), the number of neighbouring ranks that send at once, and whether compute hides the
    transfer.
    """
    unit_gpus = price_cache.machine.cluster.unit_gpus
    if layout.pools:  # the first stage of a pool begins its nodes
        first = layout.pools.index(layout.pools[here])
        here, there = here - first, there - first
    level = units_crossed(layout.mesh, here, there, unit_gpus)
    return _link(layout, price_cache, int(level))


def _link(layout: ParallelLayout, price_cache: LayerPriceCache, level: int) -> Link:
    hidden = layout.virtual_stages > 1 and price_cache.training.stack.overlap_transfers
    sharing = min(layout.mesh.stride(Axis.PP), price_cache.machine.cluster.unit_gpus[-1])
    return layout.micro_batch_size, layout.sharding, level, sharing, hidden


def time_between(
    here: int,
    there: int,
    layout: ParallelLayout,
    price_cache: LayerPriceCache,
    cut_class: int = 0,
) -> Seconds:
    """Seconds of the tensors across a cut from a pipeline rank to another, zero for equal ranks."""
    if here == there:
        return ZERO
    if passes_join(layout, here, there):
        return joined_transfer(here, there, layout, price_cache, cut_class)
    return _sent(link_of(here, there, layout, price_cache), price_cache, cut_class)


def _sent(link: Link, price_cache: LayerPriceCache, cut_class: int = 0) -> Seconds:
    """Seconds of the tensors across a cut over one link.

    If the stack hides transfers of the interleaved schedule, only their slowdown of compute remains
    (costmodels/layers/layer_price.py). The ranks of a stage inside a node send together and share
    its NICs. `LayerPriceCache.transfer` prices the messages.
    """
    micro_batch_size, sharding, level, sharing, hidden = link
    sent = price_cache.transfer(cut_class, micro_batch_size, sharding, level=level, sharing=sharing)
    return sent.scaled(contention(price_cache.machine)) if hidden else sent


def rank_edges(layout: ParallelLayout, price_cache: LayerPriceCache) -> Seconds:
    """Seconds per micro-batch that the chunks of a rank pay at the ends of rows of halves.

    Every chunk has blocks.
    """
    forward, backward = price_cache.row_edges(layout.micro_batch_size, layout.sharding)
    return (forward + backward).scaled(layout.virtual_stages)
