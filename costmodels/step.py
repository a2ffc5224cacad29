"""The price of a whole step: time with its breakdown, memory by class and pipeline rank, redundancy
over the cluster.

Two times are given. The *closed form* is what the integer program minimises (EQUATIONS P3, I4):

    T = (M - a) max_s t_s + a sum_s t_s + max_s tail_s

with a = 1/v, or for schedules that split the backward what their list says (`bubble_share`), t_s
the seconds of one micro-batch on rank s (compute, recompute, exposed communication) and tail_s what
follows its last backward pass (exposed gradient reduction, optimizer). Where recompute runs ahead
of the gradient, part of it is hidden (costmodels/schedules/hidden_recompute.py). The *simulated*
time replays the schedule's action list and is the one reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from parplan.costmodels.chunks.chunk_memory import device_memory, prices_of
from parplan.costmodels.chunks.chunk_time import chunk_time
from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Axis, place_axis
from parplan.costmodels.layers.data_parallel import DataParallelTime, summed_inside
from parplan.costmodels.layers.layer_price import contention
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.memory.activation_copies import exposed_copies
from parplan.costmodels.memory.rank_memory import RankMemory, rank_layers
from parplan.costmodels.operators.host_launch import layouts_of
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.hidden_recompute import (
    HiddenRecompute,
    hidden_passes,
    plain_and_ramp,
)
from parplan.costmodels.schedules.schedule import LAST_KEEPS_ALL, Schedule
from parplan.costmodels.schedules.simulator import SimulatedStep, StageCost, replay
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy, in_chunks
from parplan.costmodels.usage.redundancy import RedundantBytes, rank_redundancy
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import ZERO, Seconds

SCALAR_BYTES = 8
STEPS = 50  # of the proportions that a bubble is replayed with: 2 % of a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Seconds of one pipeline rank in one step; all but the bubble, by cause.

    host_comm: copies between device and host that nothing hides, and what the host adds up
    """

    compute: Seconds
    recompute: Seconds
    tp_comm: Seconds
    dp_comm: Seconds
    pp_comm: Seconds
    optimizer: Seconds
    host_comm: Seconds = ZERO

    @property
    def total(self) -> Seconds:
        return (
            self.compute
            + self.recompute
            + self.tp_comm
            + self.dp_comm
            + self.pp_comm
            + self.optimizer
            + self.host_comm
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """What a strategy costs. `ranks`, `memory` and `redundant` (per device) are by pipeline rank.

    bubble_share    what equal ranks wait, of the seconds of one micro-batch and by each rank but
                    one
    """

    closed_form_s: float
    bubble_share: float
    simulated: SimulatedStep
    ranks: tuple[RankTime, ...]
    memory: tuple[RankMemory, ...]
    redundant: tuple[RedundantBytes, ...]

    @property
    def step_s(self) -> float:
        return self.simulated.step_s


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a simulation of a strategy starts from: `stages[rank][chunk]`, and by rank the seconds
    after its last action, `tail_s`.

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
        return tuple(map(sum, zip(self.reduced_s, self.tied_s, self.optimizer_s, strict=True)))


def closed_form_s(
    rank_s: Sequence[float],
    tail_s: Sequence[float],
    num_micro_batches: int,
    share: float,
    ahead: HiddenRecompute | None = None,
) -> float:
    """(M - a - e) max t + e max n + a sum u + max tail, a = `share`: exact for equal ranks without
    transfers (EQUATIONS P3, P5).

    Without recompute ahead e = 0 and u = t.
    """
    hidden, plain_s, ramp_s = (
        (ahead.hidden, ahead.plain_s, ahead.ramp_s) if ahead else (0, rank_s, rank_s)
    )
    return (
        (num_micro_batches - share - hidden) * max(rank_s)
        + hidden * max(plain_s)
        + share * sum(ramp_s)
        + max(tail_s)
    )


def _ahead(
    layout: ParallelLayout, rank_s: Sequence[float], stages: Sequence[Sequence[StageCost]]
) -> HiddenRecompute:
    recompute_s = [sum(c.recompute_s for c in row) for row in stages]
    longer_s = [sum(c.backward_s - c.forward_s for c in row) for row in stages]
    found = [
        plain_and_ramp(layout.schedule, rank, len(stages), *seconds)
        for rank, seconds in enumerate(zip(rank_s, recompute_s, longer_s, strict=True))
    ]
    return HiddenRecompute(
        hidden_passes(layout.schedule),
        [plain_s for plain_s, _ in found],
        [ramp_s for _, ramp_s in found],
    )


def bubble_share(layout: ParallelLayout, price_cache: PriceCache) -> float:
    """What a rank but the first adds to the step of equal ranks, as a share of its seconds for one
    micro-batch.

        whole backwards   1/v (EQUATIONS P1)
        split ones        (T - M t) / ((P - 1) t), T the step of the lists: 1/6 where all three
                          parts are alike (EQUATIONS P6)

    replayed with equal stages in the proportions of a block of `layout` without recompute. Leaves
    out: ZeRO, transfers.
    """
    if not layout.splits_backward and layout.schedule is not Schedule.CUSTOM:
        return 1 / layout.virtual_stages
    time = price_cache.layer_time(LayerKind.BLOCK, layout.micro_batch_size, layout.sharding)
    weight_s = price_cache.weight_s(LayerKind.BLOCK, layout.micro_batch_size, layout.sharding)
    parts = (
        round(STEPS * part / time.total_s) / STEPS
        for part in (time.forward_s, min(weight_s, time.backward_s))
    )
    # the bubble of a longer step is the same: every micro-batch more takes what it takes
    enough = (
        layout.num_micro_batches
        if layout.actions
        else min(layout.num_micro_batches, 2 * layout.mesh.pp)
    )
    return _replayed_share(replace(layout, num_micro_batches=enough), *parts)


@lru_cache(maxsize=256)
def _replayed_share(layout: ParallelLayout, forward: float, weight: float) -> float:
    pp, num_micro_batches = layout.mesh.pp, layout.num_micro_batches
    share = 1 / layout.virtual_stages
    stage = StageCost(
        forward_s=forward * share,
        backward_s=(1 - forward) * share,
        recompute_s=0.0,
        receive_forward_s=0.0,
        receive_backward_s=0.0,
        stash_bytes=0.0,
        weight_s=weight * share,
    )
    step_s = replayed(layout, ((stage,) * layout.virtual_stages,) * pp, (0.0,) * pp).step_s
    return max(0.0, step_s - num_micro_batches) / max(1, pp - 1)


def replayed(
    layout: ParallelLayout,
    stages: tuple[tuple[StageCost, ...], ...],
    tail_s: tuple[float, ...],
    *,
    keep_events: bool = False,
) -> SimulatedStep:
    """The step of the layout's lists. Raises ConfigError when its schedule is not legal."""
    placement = [layout.stages_of(rank) for rank in range(layout.mesh.pp)]
    return replay(layout.orders(), layout.num_micro_batches, stages, tail_s, keep_events, placement)


def transfer_time(rank: int, layout: ParallelLayout, price_cache: PriceCache) -> Seconds:
    """One micro-batch's boundary activation (or its gradient) from pipeline rank `rank` to the next
    one, cyclically.
    """
    return time_between(rank, (rank + 1) % layout.mesh.pp, layout, price_cache)


def time_between(here: int, there: int, layout: ParallelLayout, price_cache: PriceCache) -> Seconds:
    """The same from one pipeline rank to another, nothing from a rank to itself.

    Where the stack hides transfers of the interleaved schedule, what they slow down is left
    (costmodels/layers/layer_price.py). The ranks of a stage that sits inside a node send together
    and share its NICs. What each sends: `PriceCache.transfer`.
    """
    gpus_per_node, stride = price_cache.machine.cluster.gpus_per_node, layout.mesh.stride(Axis.PP)
    if here == there:
        return ZERO
    crosses = here * stride // gpus_per_node != there * stride // gpus_per_node
    sent = price_cache.transfer(
        layout.micro_batch_size,
        layout.sharding,
        crosses_nodes=crosses,
        sharing=min(stride, gpus_per_node),
    )
    hidden = layout.virtual_stages > 1 and price_cache.training.stack.overlap_transfers
    return sent.scaled(contention(price_cache.machine)) if hidden else sent


def receive_times(
    stage: int, layout: ParallelLayout, price_cache: PriceCache
) -> tuple[Seconds, Seconds]:
    """What virtual stage `stage` waits for its forward input and for its output gradient, each as
    long as one transfer.
    """
    here = layout.rank_of(stage)
    forward = (
        time_between(layout.rank_of(stage - 1), here, layout, price_cache) if stage > 0 else ZERO
    )
    backward = (
        time_between(layout.rank_of(stage + 1), here, layout, price_cache)
        if stage < layout.num_virtual_stages - 1
        else ZERO
    )
    return forward, backward


def rank_receives(rank: int, layout: ParallelLayout, price_cache: PriceCache) -> Seconds:
    """What all chunks of a rank wait for in one micro-batch: the sum of `receive_times` over its
    virtual stages.
    """
    if layout.schedule in (Schedule.ZBV, Schedule.CUSTOM):
        total = ZERO
        for stage in layout.stages_of(rank):
            forward, backward = receive_times(stage, layout, price_cache)
            total += forward + backward
        return total
    pp, chunks = layout.mesh.pp, layout.virtual_stages
    forward = transfer_time((rank - 1) % pp, layout, price_cache).scaled(chunks - (rank == 0))
    return forward + transfer_time(rank, layout, price_cache).scaled(chunks - (rank == pp - 1))


def rank_edges(layout: ParallelLayout, price_cache: PriceCache) -> Seconds:
    """What the chunks of a rank, each of which has blocks, pay for a micro-batch where halves go
    from block to block.
    """
    forward, backward = price_cache.row_edges(layout.micro_batch_size, layout.sharding)
    return (forward + backward).scaled(layout.virtual_stages)


def step_costs(strategy: Strategy, price_cache: PriceCache) -> StepCosts:
    """The costs of every stage of `strategy` and the tails of its ranks, before any schedule is
    replayed.

    Raises ConfigError where the last stage recomputes under a schedule that has no time for it.
    """
    layout, ranks = strategy.layout, range(strategy.layout.mesh.pp)
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
    reduced_s, tied_s, optimizer_s = (
        tuple(part.value_s for part in parts) for parts in zip(*tails, strict=True)
    )
    return StepCosts(stages, reduced_s, tied_s, optimizer_s)


def simulated_step(
    strategy: Strategy, costs: StepCosts, *, keep_events: bool = False
) -> SimulatedStep:
    """The schedule of `strategy` replayed with the costs of its stages."""
    return replayed(strategy.layout, costs.stages, costs.tail_s, keep_events=keep_events)


def price_step(strategy: Strategy, price_cache: PriceCache) -> StepPrice:
    """Time, memory and redundancy of `strategy`.

    Raises AssertionError when the strategy is not legal for its schedule; legality is decided in
    planner/candidates/enumeration.py.
    """
    layout = strategy.layout
    ranks = range(layout.mesh.pp)
    memory = tuple(device_memory(strategy, rank, price_cache) for rank in ranks)
    costs = step_costs(strategy, price_cache)
    simulated = simulated_step(strategy, costs)
    times = [_rank_time(strategy, rank, price_cache) for rank in ranks]
    if layout.recomputes_ahead:
        times = [
            _less_hidden(time, line.transfer_s)
            for time, line in zip(times, simulated.ranks, strict=True)
        ]
    micro_batch_s = [
        sum(
            c.forward_s + c.backward_s + c.recompute_s + c.receive_forward_s + c.receive_backward_s
            for c in row
        )
        for row in costs.stages
    ]
    share = bubble_share(layout, price_cache)
    return StepPrice(
        closed_form_s=closed_form_s(
            micro_batch_s,
            costs.tail_s,
            layout.num_micro_batches,
            share,
            _ahead(layout, micro_batch_s, costs.stages),
        ),
        bubble_share=share,
        simulated=simulated,
        ranks=tuple(times),
        memory=memory,
        redundant=tuple(
            rank_redundancy(strategy, rank, held, price_cache) for rank, held in enumerate(memory)
        ),
    )


def _data_parallel(
    choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache
) -> DataParallelTime:
    """What data parallelism adds to one layer; of a block in chunks only the sums inside the stage,
    the rest is `chunk_time`.
    """
    sharding = layout.sharding_of(choice)
    if not in_chunks(choice, layout):
        return prices_of(layout, price_cache).data_parallel(
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


def _stage_cost(strategy: Strategy, stage: int, price_cache: PriceCache) -> StageCost:
    layout, chunk = strategy.layout, strategy.stages[stage]
    forward_s = backward_s = recompute_s = weight_s = stash_bytes = waiting_bytes = remade_bytes = (
        0.0
    )
    for choice in chunk:
        time = price_cache.layer_time(
            choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
        )
        data = _data_parallel(choice, layout, price_cache)
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
            own_s = price_cache.weight_s(
                choice.kind, layout.micro_batch_size, layout.sharding_of(choice)
            )
            weight_s += min(own_s, time.backward_s) + data.backward.value_s
            backward_s += price_cache.split_s(choice.kind)
            waiting_bytes += price_cache.waiting_bytes(
                choice.kind, layout.micro_batch_size, layout.sharding_of(choice)
            )
        if layout.recomputes_ahead:
            remade_bytes += price_cache.remade_bytes(
                choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
            )
    out, back = exposed_copies(chunk, layout, price_cache)
    forward_s, backward_s = forward_s + out.value_s, backward_s + back.value_s
    if any(choice.kind is LayerKind.BLOCK for choice in chunk):
        edges = price_cache.row_edges(layout.micro_batch_size, layout.sharding)
        forward_s, backward_s = forward_s + edges[0].value_s, backward_s + edges[1].value_s
    if layout.chunked:
        added = chunk_time(strategy, layout.rank_of(stage), price_cache)
        forward_s, backward_s = (
            own_s + added.of_pass(work, stage).value_s
            for work, own_s in ((ActionKind.FORWARD, forward_s), (ActionKind.BACKWARD, backward_s))
        )
    receive_forward, receive_backward = receive_times(stage, layout, price_cache)
    if layout.mesh.pp > 1 and (
        layouts := layouts_of(price_cache.machine, price_cache.training.stack)
    ):
        forward_s, backward_s = forward_s + layouts.action_s, backward_s + layouts.action_s
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


def _tail(
    strategy: Strategy, rank: int, price_cache: PriceCache
) -> tuple[Seconds, Seconds, Seconds]:
    """What follows the last backward pass of a rank: exposed reductions, the tied embedding's, and
    the optimizer.
    """
    layout, reduced, updated = strategy.layout, ZERO, ZERO
    for choice in rank_layers(strategy, rank):
        data = _data_parallel(choice, layout, price_cache)
        reduced += data.step
        updated += data.optimizer
    if layout.chunked:
        added = chunk_time(strategy, rank, price_cache)
        reduced, updated = reduced + added.step + added.host_step, updated + added.optimizer
    return reduced, _tied(layout, rank, price_cache), updated + norm_and_loss(layout, price_cache)


def norm_and_loss(layout: ParallelLayout, price_cache: LayerPriceCache[Any]) -> Seconds:
    """The sums over all ranks of the gradients' norm and of the loss, where the machine's own
    profile has what so small messages take.
    """
    if layouts_of(price_cache.machine, price_cache.training.stack) is None:
        return ZERO
    everyone = place_axis(
        layout.mesh.num_ranks, 1, layout.mesh.num_ranks, price_cache.machine.cluster.gpus_per_node
    )
    return collective_time(
        Collective.ALL_REDUCE, SCALAR_BYTES, everyone, price_cache.machine
    ).scaled(2)


def _tied(layout: ParallelLayout, rank: int, price_cache: PriceCache) -> Seconds:
    ends = {
        layout.rank_of(0),
        layout.rank_of(layout.num_virtual_stages - 1),
    }  # one rank that holds both adds without sending
    return (
        prices_of(layout, price_cache).tied_reduction(layout.mesh, layout.sharding)
        if price_cache.tied and len(ends) > 1 and rank in ends
        else ZERO
    )


def _rank_time(strategy: Strategy, rank: int, price_cache: PriceCache) -> RankTime:
    layout = strategy.layout
    compute = recompute = tp_comm = per_micro_batch = per_step = host = host_step = optimizer = ZERO
    for choice in rank_layers(strategy, rank):
        time = price_cache.layer_time(
            choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
        )
        data = _data_parallel(choice, layout, price_cache)
        compute += time.forward + time.backward
        recompute += time.recompute
        tp_comm += time.tp_forward + time.tp_backward + time.tp_recompute
        per_micro_batch += _without(data.forward + data.backward, data.host)
        per_step += _without(data.step, data.host_step)
        host, host_step = host + data.host, host_step + data.host_step
        optimizer += data.optimizer
    if layout.chunked:
        added = chunk_time(strategy, rank, price_cache)
        per_micro_batch, host = (
            sum(added.collectives.values(), per_micro_batch),
            sum(added.host.values(), host),
        )
        per_step, host_step, optimizer = (
            per_step + added.step,
            host_step + added.host_step,
            optimizer + added.optimizer,
        )
    for chunk in strategy.chunks(rank):
        out, back = exposed_copies(chunk, layout, price_cache)
        host += out + back
    tp_comm += rank_edges(layout, price_cache)
    transfers, m = rank_receives(rank, layout, price_cache), layout.num_micro_batches
    return RankTime(
        compute=compute.scaled(m),
        recompute=recompute.scaled(m),
        tp_comm=tp_comm.scaled(m),
        pp_comm=transfers.scaled(m),
        dp_comm=per_micro_batch.scaled(m) + per_step + _tied(layout, rank, price_cache),
        optimizer=optimizer,
        host_comm=host.scaled(m) + host_step,
    )


def _without(whole: Seconds, part: Seconds) -> Seconds:
    return whole.scaled(1 - part.value_s / whole.value_s) if part.value_s else whole


def _less_hidden(time: RankTime, transfer_s: float) -> RankTime:
    """The same with the seconds of transfers that the step has: without those under a recompute
    ahead of a gradient.
    """
    whole_s = time.pp_comm.value_s
    return replace(time, pp_comm=time.pp_comm.scaled(transfer_s / whole_s)) if whole_s else time


def model_flops_utilization(step_s: float, num_ranks: int, price_cache: PriceCache) -> float:
    """MFU: model FLOPs of the step (EQUATIONS K4, causal attention in full, no recompute) over the
    peak of all ranks.
    """
    training: TrainingSpec = price_cache.training
    flops = price_cache.graph(1).model_flops * training.global_batch_size
    return flops / (
        num_ranks * price_cache.machine.cluster.device.peak(training.precision) * step_s
    )
