"""The price of a step: time with its breakdown, memory by class, redundancy over the cluster.

There are two times. The integer program minimises the *closed form* (EQUATIONS P3, I4):

    T = (M - a) max_s t_s + a sum_s t_s + max_s tail_s

a is 1/v, or the share of the action list for schedules that split the backward pass
(`bubble_share`). t_s are the seconds of one micro-batch on rank s (compute, recompute, exposed
communication), tail_s those after its last backward pass (exposed gradient reduction, optimizer).
Recompute ahead of the gradient is partly hidden (costmodels/schedules/hidden_recompute.py). The
*simulated* time replays the schedule's action list and is the one reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from parplan.costmodels.chunks.chunk_memory import device_memory
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.joined_pools import prices_at
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.memory.activation_copies import exposed_copies
from parplan.costmodels.memory.rank_memory import RankMemory, rank_layers
from parplan.costmodels.schedules.action_lists import ActionLists, lists_of
from parplan.costmodels.schedules.hidden_recompute import (
    HiddenRecompute,
    hidden_passes,
    plain_and_ramp,
)
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.schedules.simulator import (
    SimulatedStep,
    StageCost,
    run_lists,
    step_of_lists_s,
)
from parplan.costmodels.stage_costs import (
    StepCosts,
    data_parallel,
    rank_edges,
    receive_times,
    shared_reductions,
    step_costs,
)
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.costmodels.usage.redundancy import RedundantBytes, rank_redundancy
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import ZERO, Seconds

STEPS = 50  # a bubble is replayed with proportions in steps of 2 % of a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Seconds of one pipeline rank in one step by cause, without the bubble.

    forward, backward   compute of the passes; recompute is apart
    host_comm           exposed copies between device and host, and sums on the host
    """

    forward: Seconds
    backward: Seconds
    recompute: Seconds
    tp_comm: Seconds
    dp_comm: Seconds
    pp_comm: Seconds
    optimizer: Seconds
    host_comm: Seconds = ZERO

    @property
    def compute(self) -> Seconds:
        return self.forward + self.backward

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
    """The price of a strategy; `ranks`, `memory` and `redundant` (per device) are by pipeline rank.

    bubble_share    wait of equal ranks, as a share of a micro-batch's seconds for each rank but one
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

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest device."""
        return max(memory.total for memory in self.memory)


def closed_form_s(
    rank_s: Sequence[float],
    tail_s: Sequence[float],
    num_micro_batches: int,
    share: float,
    ahead: HiddenRecompute | None = None,
) -> float:
    """Seconds of a step, exact for equal ranks without transfers (EQUATIONS P3, P5).

        (M - a - e) max t + e max n + a sum u + max tail        a = `share`

    Without recompute ahead e = 0 and u = t.
    """
    hidden = ahead.hidden if ahead else 0
    plain_s = ahead.plain_s if ahead else rank_s
    ramp_s = ahead.ramp_s if ahead else rank_s
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
    seconds_by_rank = [
        plain_and_ramp(layout.schedule, rank, len(stages), *seconds)
        for rank, seconds in enumerate(zip(rank_s, recompute_s, longer_s, strict=True))
    ]
    return HiddenRecompute(
        hidden_passes(layout.schedule),
        [plain_s for plain_s, _ in seconds_by_rank],
        [ramp_s for _, ramp_s in seconds_by_rank],
    )


def bubble_share(layout: ParallelLayout, price_cache: LayerPriceCache) -> float:
    """Share of a micro-batch's seconds that each rank but the first adds to a step of equal ranks.

        whole backward passes   1/v (EQUATIONS P1)
        split backward passes   (T - M t) / ((P - 1) t), T the step of the action lists: 1/6 if all
                                three parts are equal (EQUATIONS P6)

    T is replayed with equal stages in the proportions of the mean block of `layout` without
    recompute. Leaves out: ZeRO, transfers.
    """
    if not layout.splits_backward and layout.schedule is not Schedule.CUSTOM:
        return 1 / layout.virtual_stages
    forward_s, weight_s, total_s = price_cache.once(
        ("mean block", layout.micro_batch_size, layout.sharding),
        lambda: _blocks_s(layout, price_cache),
    )
    forward = round(STEPS * forward_s / total_s) / STEPS
    weight = round(STEPS * weight_s / total_s) / STEPS
    enough = layout.num_micro_batches
    if not layout.actions:  # more micro-batches do not change the bubble
        enough = min(enough, 2 * layout.mesh.pp)
    alone = ParallelLayout(
        mesh=Mesh(pp=layout.mesh.pp, dp=1, tp=1),
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        micro_batch_size=1,
        num_micro_batches=enough,
        sequence_parallel=False,
        actions=layout.actions,
    )
    return _replayed_share(alone, forward, weight)


def _blocks_s(layout: ParallelLayout, price_cache: LayerPriceCache) -> tuple[float, float, float]:
    """Returns the seconds of forward passes, weight gradients and both passes of all blocks.

    Where all blocks are alike, they are those of one.
    """
    keys = Counter(
        key for key in price_cache.keys(0, price_cache.num_layers) if key.role is LayerKind.BLOCK
    )
    forward_s = weight_s = total_s = 0.0
    for key, count in keys.items():
        how = key, layout.micro_batch_size, layout.sharding
        time, share = price_cache.layer_time(*how), count if len(keys) > 1 else 1
        forward_s += share * time.forward_s
        weight_s += share * min(price_cache.weight_s(*how), time.backward_s)
        total_s += share * time.total_s
    return forward_s, weight_s, total_s


@lru_cache(maxsize=256)
def _replayed_share(layout: ParallelLayout, forward: float, weight: float) -> float:
    pp = layout.mesh.pp
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
    return max(0.0, step_s - layout.num_micro_batches) / max(1, pp - 1)


def replayed(
    layout: ParallelLayout,
    stages: tuple[tuple[StageCost, ...], ...],
    tail_s: tuple[float, ...],
    *,
    keep_events: bool = False,
) -> SimulatedStep:
    """Replays the layout's action lists.

    Raises ConfigError if its schedule is not legal.
    """
    return run_lists(_lists(layout), stages, tail_s, keep_events=keep_events)


def simulated_step_s(strategy: Strategy, costs: StepCosts) -> float:
    """Seconds of the step of `simulated_step`."""
    return step_of_lists_s(_lists(strategy.layout), costs.stages, costs.tail_s)


def _lists(layout: ParallelLayout) -> ActionLists:
    return lists_of(
        layout.schedule,
        layout.mesh.pp,
        layout.num_micro_batches,
        layout.virtual_stages,
        layout.actions,
    )


def simulated_step(
    strategy: Strategy, costs: StepCosts, *, keep_events: bool = False
) -> SimulatedStep:
    """Replays the schedule of `strategy` with the costs of its stages."""
    return replayed(strategy.layout, costs.stages, costs.tail_s, keep_events=keep_events)


def price_step(strategy: Strategy, price_cache: LayerPriceCache) -> StepPrice:
    """Returns time, memory and redundancy of `strategy`.

    Raises AssertionError if the strategy is not legal for its schedule;
    planner/candidates/enumeration.py decides legality.
    """
    layout = strategy.layout
    ranks = range(layout.mesh.pp)
    memory = tuple(device_memory(strategy, rank, price_cache) for rank in ranks)
    costs = step_costs(strategy, price_cache)
    simulated = simulated_step(strategy, costs)
    times = [rank_time(strategy, rank, price_cache) for rank in ranks]
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


def rank_time(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> RankTime:
    """Returns the seconds of pipeline rank `rank` by cause, with all transfers exposed."""
    layout = strategy.layout
    price_cache = prices_at(layout, rank, price_cache)
    forward = backward = recompute = tp_comm = optimizer = ZERO
    per_micro_batch = per_step = host = host_step = ZERO
    for choice in rank_layers(strategy, rank):
        time = price_cache.layer_time(
            choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
        )
        data = data_parallel(choice, layout, price_cache)
        forward += time.forward
        backward += time.backward
        recompute += time.recompute
        tp_comm += time.tp_forward + time.tp_backward + time.tp_recompute
        per_micro_batch += _without(data.forward + data.backward, data.host)
        per_step += _without(data.step, data.host_step)
        host += data.host
        host_step += data.host_step
        optimizer += data.optimizer
    if layout.chunked:
        from parplan.costmodels.chunks.chunk_time import chunk_time

        added = chunk_time(strategy, rank, price_cache)
        per_micro_batch = sum(added.collectives.values(), per_micro_batch)
        host = sum(added.host.values(), host)
        per_step += added.step
        host_step += added.host_step
        optimizer += added.optimizer
    transfers = ZERO
    for stage in layout.stages_of(rank):
        out, back = exposed_copies(strategy.stages[stage], layout, price_cache)
        host += out + back
        received, returned = receive_times(strategy, stage, price_cache)
        transfers += received + returned
        forward += price_cache.constants(*strategy.layers_of(stage), layout.micro_batch_size)
    tp_comm += rank_edges(layout, price_cache)
    m = layout.num_micro_batches
    return RankTime(
        forward=forward.scaled(m),
        backward=backward.scaled(m),
        recompute=recompute.scaled(m),
        tp_comm=tp_comm.scaled(m),
        pp_comm=transfers.scaled(m),
        dp_comm=per_micro_batch.scaled(m)
        + per_step
        + shared_reductions(strategy, rank, price_cache),
        optimizer=optimizer,
        host_comm=host.scaled(m) + host_step,
    )


def _without(whole: Seconds, part: Seconds) -> Seconds:
    return whole.scaled(1 - part.value_s / whole.value_s) if part.value_s else whole


def _less_hidden(time: RankTime, transfer_s: float) -> RankTime:
    """Returns `time` with the transfers that the simulated step exposes.

    Transfers under a recompute ahead of a gradient are hidden.
    """
    whole_s = time.pp_comm.value_s
    return replace(time, pp_comm=time.pp_comm.scaled(transfer_s / whole_s)) if whole_s else time


def model_flops_utilization(step_s: float, num_ranks: int, price_cache: LayerPriceCache) -> float:
    """MFU: model FLOPs of the step over the peak of all ranks (EQUATIONS K4).

    Attention counts as causal in full, recompute does not count.
    """
    training: TrainingSpec = price_cache.training
    flops = price_cache.flops_per_sequence * training.global_batch_size
    cluster = price_cache.machine.cluster
    return flops / (num_ranks * cluster.mean_peak(training.precision) * step_s)
