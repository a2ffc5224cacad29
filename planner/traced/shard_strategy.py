"""The price of a step of a traced module, whose shards are priced like layers.

The prices are those of costmodels/step.py and costmodels/memory/rank_memory.py. Stages of shards
differ in three ways: more than one tensor may cross a cut, any stages may share parameters, and
every stage makes the constants that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from parplan.costmodels.layers.model_states import StateBytes, ideal_states
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import RankMemory, communicator_bytes
from parplan.costmodels.operators.host_launch import measured_layout_costs
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.schedule import AHEAD, actions, in_flight
from parplan.costmodels.schedules.simulator import StageCost
from parplan.costmodels.stage_costs import norm_and_loss
from parplan.costmodels.step import RankTime, StepPrice, closed_form_s, replayed
from parplan.costmodels.strategy import ParallelLayout
from parplan.costmodels.usage.redundancy import RedundantBytes
from parplan.planner.traced.range_tables import RangeTables
from parplan.planner.traced.shard_price_cache import ONE, ShardPriceCache, transfer_between
from parplan.profiles.provenance import ZERO, Kind, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRun:
    """One virtual stage: shards [first, end), its ZeRO stage, and the shards it recomputes."""

    first: int
    end: int
    zero: int
    recomputed: tuple[int, ...] = ()

    def level(self, shard: int) -> Recompute:
        return Recompute.FULL if shard in self.recomputed else Recompute.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStrategy:
    """A layout and its virtual stages in model order; stage k runs on rank `layout.rank_of(k)`."""

    layout: ParallelLayout
    stages: tuple[ShardRun, ...]


def price_shards(strategy: ShardStrategy, tables: RangeTables) -> StepPrice:
    """Prices time, memory and redundancy of `strategy`, which must be legal for its schedule."""
    layout, price_cache = strategy.layout, tables.price_cache
    ranks = range(layout.mesh.pp)
    costs = tuple(
        tuple(_stage_cost(strategy, stage, tables) for stage in layout.stages_of(rank))
        for rank in ranks
    )
    tails = [
        (tail(strategy, rank, tables) + norm_and_loss(layout, price_cache)).value_s
        for rank in ranks
    ]
    walk_s = [sum(_micro_batch_s(cost) for cost in row) for row in costs]
    share = 1 / layout.virtual_stages
    memory = tuple(shard_rank_memory(strategy, rank, tables) for rank in ranks)
    simulated = replayed(layout, costs, tuple(tails))
    return StepPrice(
        closed_form_s=closed_form_s(walk_s, tails, layout.num_micro_batches, share),
        bubble_share=share,
        simulated=simulated,
        ranks=tuple(_rank_time(strategy, rank, tables) for rank in ranks),
        memory=memory,
        redundant=tuple(
            _redundant(strategy, rank, held, price_cache) for rank, held in enumerate(memory)
        ),
    )


def _micro_batch_s(cost: StageCost) -> float:
    return (
        cost.forward_s
        + cost.backward_s
        + cost.recompute_s
        + cost.receive_forward_s
        + cost.receive_backward_s
    )


def receives(
    stage: int, strategy: ShardStrategy, price_cache: ShardPriceCache
) -> tuple[Seconds, Seconds]:
    """Waits of virtual stage `stage` for its inputs, and for the gradients of its outputs."""
    layout, run = strategy.layout, strategy.stages[stage]
    here, last = layout.rank_of(stage), layout.num_virtual_stages - 1
    forward = (
        transfer_between(layout.rank_of(stage - 1), here, run.first, layout, price_cache)
        if stage > 0
        else ZERO
    )
    backward = (
        transfer_between(layout.rank_of(stage + 1), here, run.end, layout, price_cache)
        if stage < last
        else ZERO
    )
    return forward, backward


def _stage_cost(strategy: ShardStrategy, stage: int, tables: RangeTables) -> StageCost:
    layout = strategy.layout
    run = strategy.stages[stage]
    price_cache = tables.price_cache
    forward_s = float(tables.passes(layout.micro_batch_size).constants_s[run.first, run.end])
    backward_s = recompute_s = 0.0
    for shard in range(run.first, run.end):
        key = price_cache.classes.key(shard, run.first)
        time = price_cache.layer_time(key, layout.micro_batch_size, ONE, run.level(shard))
        data = price_cache.data_parallel(key, layout.micro_batch_size, layout.mesh, ONE, run.zero)
        forward_s += time.forward_s + data.forward.value_s
        backward_s += time.backward_s + data.backward.value_s
        recompute_s += time.recompute_s
    received, returned = receives(stage, strategy, price_cache)
    added = (
        measured_layout_costs(price_cache.machine, price_cache.training.stack)
        if layout.mesh.pp > 1
        else None
    )
    each_s = added.action_s if added else 0.0
    kept = kept_bytes(strategy, stage, tables)
    return StageCost(
        forward_s=forward_s + each_s,
        backward_s=backward_s + each_s,
        recompute_s=recompute_s,
        receive_forward_s=received.value_s,
        receive_backward_s=returned.value_s,
        stash_bytes=kept,
        remade_bytes=_whole_bytes(strategy, stage, tables) - kept,
    )


def tail(strategy: ShardStrategy, rank: int, tables: RangeTables) -> Seconds:
    """Time after a rank's last backward pass: exposed and shared reductions, and the optimizer."""
    reduced, updated = _steps(strategy, rank, tables)
    return reduced + updated


def _steps(strategy: ShardStrategy, rank: int, tables: RangeTables) -> tuple[Seconds, Seconds]:
    layout = strategy.layout
    price_cache = tables.price_cache
    reduced = updated = ZERO
    for run in (strategy.stages[stage] for stage in layout.stages_of(rank)):
        for shard in range(run.first, run.end):
            data = price_cache.data_parallel(
                price_cache.classes.key(shard, run.first),
                layout.micro_batch_size,
                layout.mesh,
                ONE,
                run.zero,
            )
            reduced, updated = reduced + data.step, updated + data.optimizer
        for _, elements, shards in price_cache.sharded.shared:
            some = sum(run.first <= shard < run.end for shard in shards)
            if 0 < some < len(shards) and layout.mesh.pp > 1:
                reduced += price_cache.shared_reduction(elements, len(shards), layout.mesh)
    return reduced, updated


def _rank_time(strategy: ShardStrategy, rank: int, tables: RangeTables) -> RankTime:
    layout = strategy.layout
    price_cache = tables.price_cache
    compute = recompute = data = received = ZERO
    for stage in layout.stages_of(rank):
        run = strategy.stages[stage]
        compute += Seconds(
            float(tables.passes(layout.micro_batch_size).constants_s[run.first, run.end]),
            Kind.ANALYTIC,
        )
        for shard in range(run.first, run.end):
            key = price_cache.classes.key(shard, run.first)
            time = price_cache.layer_time(key, layout.micro_batch_size, ONE, run.level(shard))
            of_data = price_cache.data_parallel(
                key, layout.micro_batch_size, layout.mesh, ONE, run.zero
            )
            compute = compute + time.forward + time.backward
            recompute = recompute + time.recompute
            data = data + of_data.forward + of_data.backward
        received += sum(receives(stage, strategy, price_cache), ZERO)
    reduced, updated = _steps(strategy, rank, tables)
    m = layout.num_micro_batches
    return RankTime(
        compute=compute.scaled(m),
        recompute=recompute.scaled(m),
        tp_comm=ZERO,
        pp_comm=received.scaled(m),
        dp_comm=data.scaled(m) + reduced,
        optimizer=updated,
    )


def kept_bytes(strategy: ShardStrategy, stage: int, tables: RangeTables) -> float:
    """Bytes that a virtual stage saves of one micro-batch between its passes."""
    run, b = strategy.stages[stage], strategy.layout.micro_batch_size
    saved = sum(
        tables.price_cache.saved_bytes(shard, run.level(shard), b)
        for shard in range(run.first, run.end)
    )
    return saved + float(tables.passes(b).besides[run.first, run.end])


def _whole_bytes(strategy: ShardStrategy, stage: int, tables: RangeTables) -> float:
    """Bytes that a virtual stage saves of one micro-batch without recompute."""
    run, b = strategy.stages[stage], strategy.layout.micro_batch_size
    saved = sum(
        tables.price_cache.saved_bytes(shard, Recompute.NONE, b)
        for shard in range(run.first, run.end)
    )
    return saved + float(tables.passes(b).besides[run.first, run.end])


@lru_cache(maxsize=1024)
def held_stashes(layout: ParallelLayout, rank: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of micro-batches of each chunk in flight on a rank, at its undominated moments.

    One of these moments is the fullest, whatever the bytes of the chunks.
    """
    if layout.virtual_stages == 1:
        return ((in_flight(layout.schedule, rank, layout.mesh.pp, layout.num_micro_batches),),)
    order = actions(
        layout.schedule, rank, layout.mesh.pp, layout.num_micro_batches, layout.virtual_stages
    )
    changes = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}
    held = [0] * layout.virtual_stages
    seen: set[tuple[int, ...]] = set()
    for action in order:
        held[action.chunk] += changes.get(action.work, 0)
        if action.work is ActionKind.FORWARD:
            seen.add(tuple(held))
    return tuple(
        sorted(counts for counts in seen if not any(_covers(larger, counts) for larger in seen))
    )


def _covers(larger: tuple[int, ...], smaller: tuple[int, ...]) -> bool:
    return larger != smaller and all(a >= b for a, b in zip(larger, smaller, strict=True))


def shard_rank_memory(strategy: ShardStrategy, rank: int, tables: RangeTables) -> RankMemory:
    """Peak bytes of one device of a pipeline rank, by class (EQUATIONS M6)."""
    layout, price_cache = strategy.layout, tables.price_cache
    runs = [(stage, strategy.stages[stage]) for stage in layout.stages_of(rank)]
    kept = [kept_bytes(strategy, stage, tables) for stage, _ in runs]
    sent = sum(_sent_bytes(strategy, stage, price_cache) for stage, _ in runs)
    activations = sent + max(
        sum(n * size for n, size in zip(held, kept, strict=True))
        for held in held_stashes(layout, rank)
    )
    states = StateBytes()
    copies = buffer = 0
    for _, run in runs:
        for shard in range(run.first, run.end):
            shard_states = price_cache.states(
                price_cache.classes.key(shard, run.first), layout.mesh, ONE, run.zero
            )
            states = states + shard_states.states
            copies = copies + shard_states.step_copies
            buffer = max(buffer, shard_states.zero_buffer)
    temporaries = buffer + max(_workspace(strategy, stage, tables) for stage, _ in runs)
    spare = price_cache.training.stack.allocator_share * (states.total + activations + temporaries)
    return RankMemory(
        states=states,
        activations=activations,
        temporaries=temporaries,
        allocator_reserve=spare + copies,
        communicators=communicator_bytes(layout.mesh, price_cache),
        context=price_cache.machine.cluster.device.context_bytes,
    )


def _workspace(strategy: ShardStrategy, stage: int, tables: RangeTables) -> float:
    """Largest bytes that a backward pass adds to saved activations.

    With recompute ahead of the pass, all recomputed activations are there at once.
    """
    run, layout = strategy.stages[stage], strategy.layout
    if layout.schedule in AHEAD and run.recomputed:
        remade = _whole_bytes(strategy, stage, tables) - kept_bytes(strategy, stage, tables)
        return remade + _largest_workspace(
            ((shard, Recompute.NONE) for shard in range(run.first, run.end)), layout, tables
        )
    return _largest_workspace(
        ((shard, run.level(shard)) for shard in range(run.first, run.end)), layout, tables
    )


def _largest_workspace(
    levels: Iterable[tuple[int, Recompute]], layout: ParallelLayout, tables: RangeTables
) -> float:
    """Largest temporaries of a shard, less the saved activations of later shards, free by then."""
    price_cache = tables.price_cache
    b = layout.micro_batch_size
    listed = list(levels)[::-1]
    saved = [float(price_cache.saved_bytes(shard, level, b)) for shard, level in listed]
    freed = [0.0, *accumulate(saved)]
    sizes = (
        price_cache.activations(price_cache.classes.key(shard, shard), b, ONE, level).workspace
        for shard, level in listed
    )
    return max(size - before for size, before in zip(sizes, freed, strict=False))


def _sent_bytes(strategy: ShardStrategy, stage: int, price_cache: ShardPriceCache) -> float:
    """Bytes that a stage has sent in a step, both ways, if the stack holds them until its end."""
    layout, run = strategy.layout, strategy.stages[stage]
    if not price_cache.training.stack.keeps_sent:
        return 0.0
    cuts = [shard for shard in (run.first, run.end) if 0 < shard < price_cache.num_shards]
    return float(
        layout.num_micro_batches
        * sum(
            sum(price_cache.flow.handed_on(shard, layout.micro_batch_size).values())
            for shard in cuts
        )
    )


def _redundant(
    strategy: ShardStrategy, rank: int, memory: RankMemory, price_cache: ShardPriceCache
) -> RedundantBytes:
    """Bytes beyond the device's share of one copy (EQUATIONS R1).

    Activations are divided by batch, so that only sent ones are held twice.
    """
    layout, ideal = strategy.layout, [0.0, 0.0, 0.0]
    runs = [strategy.stages[stage] for stage in layout.stages_of(rank)]
    for run in runs:
        for shard in range(run.first, run.end):
            parts = price_cache.states(
                price_cache.classes.key(shard, run.first), layout.mesh, ONE, run.zero
            ).ideal
            ideal = [total + part for total, part in zip(ideal, parts, strict=True)]
        copied = sum(
            elements for _, elements, shards in price_cache.sharded.shared if _is_copy(shards, run)
        )
        parts = ideal_states(copied, layout.mesh.ranks_per_stage, price_cache.training)
        ideal = [total - part for total, part in zip(ideal, parts, strict=True)]
    sent = sum(_sent_bytes(strategy, stage, price_cache) for stage in layout.stages_of(rank))
    return RedundantBytes(
        parameters=memory.states.parameters - ideal[0],
        gradients=memory.states.gradients - ideal[1],
        optimizer=memory.states.optimizer - ideal[2],
        activations=sent,
        temporaries=memory.temporaries,
    )


def _is_copy(shards: tuple[int, ...], run: ShardRun) -> bool:
    """True if an earlier stage has the parameter, so that all of it is redundant."""
    return shards[0] < run.first and any(run.first <= shard < run.end for shard in shards)
