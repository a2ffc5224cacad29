"""Costs of each stage of a strategy and tails of its ranks, the input of a schedule's replay.

They include the transfers between pipeline ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parplan.costmodels.chunks.chunk_memory import unchunked_prices
from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Axis, place_axis
from parplan.costmodels.layers.data_parallel import DataParallelTime, summed_inside
from parplan.costmodels.layers.layer_price import contention
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.memory.activation_copies import exposed_copies
from parplan.costmodels.memory.rank_memory import rank_layers
from parplan.costmodels.operators.host_launch import measured_layout_costs
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.schedule import LAST_KEEPS_ALL, Schedule
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


def step_costs(strategy: Strategy, price_cache: PriceCache) -> StepCosts:
    """Returns the costs of every stage of `strategy` and the tails of its ranks.

    Raises ConfigError if the last stage recomputes under a schedule that has no time for it.
    """
    layout = strategy.layout
    ranks = range(layout.mesh.pp)
    if layout.schedule in LAST_KEEPS_ALL and any(
        price_cache.recompute_operators(choice.kind, choice.recompute)
        for choice in strategy.stages[-1]
    ):
        raise ConfigError(
            f"{layout.schedule}: its last stage recomputes nothing, here it does",
            hint="use early-recompute",
        )
    stages = tuple(
        tuple(_stage_cost(strategy, stage, price_cache) for stage in layout.stages_of(rank))
        for rank in ranks
    )
    tails = [_tail(strategy, rank, price_cache) for rank in ranks]
    return StepCosts(
        stages,
        reduced_s=tuple(reduced.value_s for reduced, _, _ in tails),
        tied_s=tuple(tied.value_s for _, tied, _ in tails),
        optimizer_s=tuple(optimizer.value_s for _, _, optimizer in tails),
    )


def _stage_cost(strategy: Strategy, stage: int, price_cache: PriceCache) -> StageCost:
    layout, chunk = strategy.layout, strategy.stages[stage]
    forward_s = backward_s = recompute_s = weight_s = 0.0
    stash_bytes = waiting_bytes = remade_bytes = 0.0
    for choice in chunk:
        time = price_cache.layer_time(
            choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
        )
        data = data_parallel(choice, layout, price_cache)
        forward_s += time.forward_s + data.forward.value_s
        backward_s += time.backward_s + data.backward.value_s
        recompute_s += time.recompute_s
        stash_bytes += price_cache.activations(
            choice.kind,
            layout.micro_batch_size,
            layout.sharding_of(choice),
            choice.recompute,
            choice.on_host,
        ).saved
        if layout.splits_backward:
            layer_weight_s = price_cache.weight_s(
                choice.kind, layout.micro_batch_size, layout.sharding_of(choice)
            )
            weight_s += min(layer_weight_s, time.backward_s) + data.backward.value_s
            backward_s += price_cache.split_s(choice.kind)
            waiting_bytes += price_cache.waiting_bytes(
                choice.kind, layout.micro_batch_size, layout.sharding_of(choice)
            )
        if layout.recomputes_ahead:
            remade_bytes += price_cache.remade_bytes(
                choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
            )
    out, back = exposed_copies(chunk, layout, price_cache)
    forward_s += out.value_s
    backward_s += back.value_s
    if any(choice.kind is LayerKind.BLOCK for choice in chunk):
        edges = price_cache.row_edges(layout.micro_batch_size, layout.sharding)
        forward_s += edges[0].value_s
        backward_s += edges[1].value_s
    if layout.chunked:
        from parplan.costmodels.chunks.chunk_time import chunk_time

        added = chunk_time(strategy, layout.rank_of(stage), price_cache)
        forward_s += added.of_pass(ActionKind.FORWARD, stage).value_s
        backward_s += added.of_pass(ActionKind.BACKWARD, stage).value_s
    receive_forward, receive_backward = receive_times(stage, layout, price_cache)
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
    choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache
) -> DataParallelTime:
    """Returns the data-parallel time of one layer.

    A block in chunks has only the sums inside the stage; `chunk_time` has the rest.
    """
    sharding = layout.sharding_of(choice)
    if not in_chunks(choice, layout):
        return unchunked_prices(layout, price_cache).data_parallel(
            choice.kind, layout.micro_batch_size, layout.mesh, sharding, choice.zero
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
    strategy: Strategy, rank: int, price_cache: PriceCache
) -> tuple[Seconds, Seconds, Seconds]:
    """Returns the seconds after the last backward pass of a rank.

    They are exposed reductions, the reduction of a tied embedding, and the optimizer.
    """
    layout = strategy.layout
    reduced = ZERO
    updated = ZERO
    for choice in rank_layers(strategy, rank):
        data = data_parallel(choice, layout, price_cache)
        reduced += data.step
        updated += data.optimizer
    if layout.chunked:
        from parplan.costmodels.chunks.chunk_time import chunk_time

        added = chunk_time(strategy, rank, price_cache)
        reduced = reduced + added.step + added.host_step
        updated += added.optimizer
    return (
        reduced,
        tied_reduction(layout, rank, price_cache),
        updated + norm_and_loss(layout, price_cache),
    )


def tied_reduction(layout: ParallelLayout, rank: int, price_cache: PriceCache) -> Seconds:
    """Seconds of the reduction of a tied embedding's gradients on a rank.

    Zero for a rank that holds both copies, which it adds without sending.
    """
    ends = {layout.rank_of(0), layout.rank_of(layout.num_virtual_stages - 1)}
    if not price_cache.tied or len(ends) == 1 or rank not in ends:
        return ZERO
    return unchunked_prices(layout, price_cache).tied_reduction(layout.mesh, layout.sharding)


def norm_and_loss(layout: ParallelLayout, price_cache: LayerPriceCache[Any]) -> Seconds:
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
    stage: int, layout: ParallelLayout, price_cache: PriceCache
) -> tuple[Seconds, Seconds]:
    """Returns the seconds that virtual stage `stage` waits for its input and its output gradient.

    Each is one transfer.
    """
    here = layout.rank_of(stage)
    forward = ZERO
    backward = ZERO
    if stage > 0:
        forward = time_between(layout.rank_of(stage - 1), here, layout, price_cache)
    if stage < layout.num_virtual_stages - 1:
        backward = time_between(layout.rank_of(stage + 1), here, layout, price_cache)
    return forward, backward


def rank_receives(rank: int, layout: ParallelLayout, price_cache: PriceCache) -> Seconds:
    """Seconds that all chunks of a rank wait for transfers in one micro-batch.

    They are the sum of `receive_times` over its virtual stages.
    """
    if layout.schedule in (Schedule.ZBV, Schedule.CUSTOM):
        total = ZERO
        for stage in layout.stages_of(rank):
            forward, backward = receive_times(stage, layout, price_cache)
            total += forward + backward
        return total
    pp = layout.mesh.pp
    chunks = layout.virtual_stages
    forward = transfer_time((rank - 1) % pp, layout, price_cache).scaled(chunks - (rank == 0))
    return forward + transfer_time(rank, layout, price_cache).scaled(chunks - (rank == pp - 1))


def transfer_time(rank: int, layout: ParallelLayout, price_cache: PriceCache) -> Seconds:
    """Seconds of one micro-batch's boundary activation from pipeline rank `rank` to the next.

    The last rank sends to the first. A gradient takes as long.
    """
    return time_between(rank, (rank + 1) % layout.mesh.pp, layout, price_cache)


def time_between(here: int, there: int, layout: ParallelLayout, price_cache: PriceCache) -> Seconds:
    """Seconds of one boundary activation between two pipeline ranks, zero for equal ranks.

    If the stack hides transfers of the interleaved schedule, only their slowdown of compute remains
    (costmodels/layers/layer_price.py). The ranks of a stage inside a node send together and share
    its NICs. `PriceCache.transfer` prices the messages.
    """
    if here == there:
        return ZERO
    gpus_per_node = price_cache.machine.cluster.gpus_per_node
    stride = layout.mesh.stride(Axis.PP)
    crosses = here * stride // gpus_per_node != there * stride // gpus_per_node
    sent = price_cache.transfer(
        layout.micro_batch_size,
        layout.sharding,
        crosses_nodes=crosses,
        sharing=min(stride, gpus_per_node),
    )
    hidden = layout.virtual_stages > 1 and price_cache.training.stack.overlap_transfers
    return sent.scaled(contention(price_cache.machine)) if hidden else sent


def rank_edges(layout: ParallelLayout, price_cache: PriceCache) -> Seconds:
    """Seconds per micro-batch that the chunks of a rank pay at the ends of rows of halves.

    Every chunk has blocks.
    """
    forward, backward = price_cache.row_edges(layout.micro_batch_size, layout.sharding)
    return (forward + backward).scaled(layout.virtual_stages)
