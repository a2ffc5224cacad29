"""Event simulation of a pipeline step of unequal stages (EQUATIONS P2, I6).

A rank runs its actions in list order. The forward of virtual stage k and micro-batch i waits for
the forward of k - 1, the backward for that of k + 1, and the backward of the last virtual stage for
its own forward; so a micro-batch walks a chain of 2 K positions, K = P v: forwards 0..K-1, then
backwards K-1..0. An action starts when its rank is free and the chain has arrived, and takes the
exposed receive, then the forward or the recompute and backward:

    end(action) = max(end of the rank's previous action, end of the chain's previous position)
                  + receive + work
    step        = max over ranks of (end of its last action + tail)

Where the backward is in two parts, the input gradient (with the recompute) is the one in the chain;
the weight gradient comes later on its rank and waits for nothing. On the first stage, whose input
has no gradient, that part is the whole backward, as in torch. A stash stays until the weight
gradient is over: autograd holds the graph of the micro-batch, and from the input gradient on the
gradients of the outputs of operators with weights as well.

A recompute ahead of the gradient (R) waits for nothing but its turn in the list, and the gradient
is received while it runs. The backward after it is the backward alone; recomputed activations are
held until that is over.

Leaves out: sends that block the sender, links shared by several transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from parplan.costmodels.schedules.actions import Action, ActionKind
from parplan.costmodels.schedules.schedule import Schedule, actions, stages_of

_PENDING = -1.0
_NONE = (-1, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One micro-batch on one virtual stage.

    receive_*_s     exposed transfer before the action, on the receiver
    backward_s      without recompute
    weight_s        part of backward_s for the gradients of weights
    stash_bytes     activations that the forward saves, held from its start to the backward's end
    waiting_bytes   further bytes of a weight gradient that waits
    remade_bytes    further bytes of a recompute ahead of the gradient, held until the backward
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    receive_forward_s: float
    receive_backward_s: float
    stash_bytes: float
    weight_s: float = 0.0
    waiting_bytes: float = 0.0
    remade_bytes: float = 0.0

    @property
    def hidden_s(self) -> float:
        """The part of a gradient's receive that runs under the recompute ahead of it."""
        return min(self.receive_backward_s, self.recompute_s)


@dataclass(frozen=True, slots=True)
class Event:
    """An action as it ran; its receive is inside [start_s, end_s]."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """Sums over one rank: busy_s + transfer_s + tail_s + bubble_s is the step.

    bubble_s            all idle time of the rank
    finish_s            end of its last action, before the tail
    peak_stash_bytes    the largest sum of stashes held at once
    in_flight           the largest number of (chunk, micro-batch) stashes held at once
    events              its actions in order, only on request
    """

    busy_s: float
    transfer_s: float
    tail_s: float
    bubble_s: float
    finish_s: float
    peak_stash_bytes: float
    in_flight: int
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The step and, by rank, its timelines."""

    step_s: float
    ranks: tuple[RankTimeline, ...]


def simulate(
    schedule: Schedule,
    num_micro_batches: int,
    costs: Sequence[Sequence[StageCost]],
    tail_s: Sequence[float] = (),
    keep_events: bool = False,
) -> SimulatedStep:
    """Simulates one step of `schedule` with the stage costs `costs[rank][chunk]`.

    tail_s      by rank: seconds after its last action (exposed gradient synchronisation,
                optimizer); empty: none
    Custom schedules are excluded. Raises ConfigError when the schedule is not legal for these
    counts.
    """
    num_ranks, virtual_stages = len(costs), len(costs[0])
    orders = [
        actions(schedule, rank, num_ranks, num_micro_batches, virtual_stages)
        for rank in range(num_ranks)
    ]
    placement = [stages_of(schedule, rank, num_ranks, virtual_stages) for rank in range(num_ranks)]
    return replay(orders, num_micro_batches, costs, tail_s, keep_events, placement)


def least_step_s(
    num_micro_batches: int,
    costs: Sequence[Sequence[StageCost]],
    tail_s: Sequence[float],
    *,
    ahead: bool = False,
) -> float:
    """A lower bound of the simulated step of GPipe, 1F1B and interleaved, exact for equal ranks.

        max over q <= r of   sum_{i<r} f_i + M t_r + sum_{q<=i<r} b_i + tail_q

    t_r is all work of rank r for one micro-batch, f_i and b_i the forward and the backward of the
    first chunk of rank i, each with its receive. The first forward of rank r comes after those of
    all ranks before it, and its last action, a backward of its first chunk, before those of the
    ranks from r - 1 down to q; between the two it does M t_r of work. [derived]

    ahead: for schedules that recompute ahead of the gradient, a bound alone: b_i leaves out the
    recompute, and t_r the hidden receive
    """
    forward_s = [row[0].receive_forward_s + row[0].forward_s for row in costs]
    backward_s = [
        row[0].receive_backward_s + row[0].backward_s + (0.0 if ahead else row[0].recompute_s)
        for row in costs
    ]
    work_s = [
        num_micro_batches
        * sum(
            c.receive_forward_s
            + c.forward_s
            + c.receive_backward_s
            + c.recompute_s
            + c.backward_s
            - (c.hidden_s if ahead else 0.0)
            for c in row
        )
        for row in costs
    ]
    before_s, after_s = [0.0, *accumulate(forward_s)], [0.0, *accumulate(backward_s)]
    latest_s = least_s = 0.0
    for rank in reversed(range(len(costs))):
        latest_s = max(latest_s, before_s[rank] + work_s[rank] + after_s[rank])
        least_s = max(least_s, latest_s - after_s[rank] + tail_s[rank])
    return least_s


def replay(
    orders: Sequence[Sequence[Action]],
    num_micro_batches: int,
    costs: Sequence[Sequence[StageCost]],
    tail_s: Sequence[float] = (),
    keep_events: bool = False,
    placement: Sequence[Sequence[int]] = (),
) -> SimulatedStep:
    """Simulates one step of any action lists, `orders[rank]`; the other arguments as in `simulate`.

    placement       by rank and chunk its virtual stage; empty: chunk c of rank r is stage c P + r
    Raises AssertionError with the stuck actions when the lists wait for each other.
    """
    tails = tuple(tail_s) or (0.0,) * len(costs)
    assert len(orders) == len(costs) == len(tails), (
        f"{len(orders)} lists, {len(costs)} ranks, {len(tails)} tails"
    )
    placed = placement or [
        range(rank, len(costs) * len(chunks), len(costs)) for rank, chunks in enumerate(costs)
    ]
    num_stages = sum(map(len, costs))
    runs = [
        _Run(
            order=order,
            costs=chunks,
            slots=_slots(order, stages, chunks, num_stages, num_micro_batches),
            ahead=_after_recompute(order),
        )
        for order, stages, chunks in zip(orders, placed, costs, strict=True)
    ]
    late_s = _hide(runs)
    end_s = _sweep([run.slots for run in runs], late_s, num_stages, num_micro_batches)
    stuck = {rank: _unfinished(run, end_s) for rank, run in enumerate(runs)}
    assert not any(stuck.values()), (
        f"deadlock, rank: next actions that never start: {_shown(stuck)}"
    )
    finish_s = [end_s[run.slots[-1][0]] for run in runs]
    step_s = max(finish + tail for finish, tail in zip(finish_s, tails, strict=True))
    timelines = [
        _timeline(
            run, step_s, num_micro_batches, tail, finish, _events(run, end_s) if keep_events else ()
        )
        for run, tail, finish in zip(runs, tails, finish_s, strict=True)
    ]
    return SimulatedStep(step_s=step_s, ranks=tuple(timelines))


_Slot = tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The actions of one rank with their slots.

    ahead   places in `order` of the backwards whose recompute ran ahead
    """

    order: Sequence[Action]
    costs: Sequence[StageCost]
    slots: list[_Slot]
    ahead: Sequence[int]


def _slots(
    order: Sequence[Action],
    stages: Sequence[int],
    costs: Sequence[StageCost],
    num_stages: int,
    num_micro_batches: int,
) -> list[_Slot]:
    """The actions as slots, and their seconds.

    A slot is (position + 1) M + micro-batch, so that `slot - M` is always the one it waits for.
    Position: virtual stage k for a forward, 2 K - 1 - k for a backward. Slots below M stand for
    "nothing to wait for"; each weight gradient, or recompute ahead, has a row of its own for that,
    and behind it the row in which it ends.
    """
    first: dict[tuple[ActionKind, int], _Slot] = {}
    for chunk, (stage, cost) in enumerate(zip(stages, costs, strict=True)):
        received = cost.receive_backward_s
        backward_s = cost.recompute_s + cost.backward_s
        apart_s = backward_s if stage == 0 else cost.weight_s
        at = (2 * num_stages - stage) * num_micro_batches
        first[ActionKind.FORWARD, chunk] = (
            (stage + 1) * num_micro_batches,
            cost.receive_forward_s + cost.forward_s,
        )
        first[ActionKind.BACKWARD, chunk] = at, received + backward_s
        first[ActionKind.INPUT_GRADIENT, chunk] = at, received + backward_s - apart_s
        free = 2 * (num_stages + stage + 1) * num_micro_batches
        first[ActionKind.WEIGHT_GRADIENT, chunk] = free, apart_s
        first[ActionKind.RECOMPUTE, chunk] = free, cost.recompute_s
    slots = []
    for action in order:
        start, duration_s = first[action.work, action.chunk]
        slots.append((start + action.micro_batch, duration_s))
    return slots


def _after_recompute(order: Sequence[Action]) -> list[int]:
    """The places in a list of the backwards whose recompute ran ahead."""
    ahead = {
        (action.chunk, action.micro_batch)
        for action in order
        if action.work is ActionKind.RECOMPUTE
    }
    if not ahead:
        return []
    return [
        place
        for place, action in enumerate(order)
        if action.work is ActionKind.BACKWARD and (action.chunk, action.micro_batch) in ahead
    ]


def _hide(runs: Sequence[_Run]) -> dict[int, float]:
    """Shortens the backwards after a recompute ahead; returns by slot their delay.

    The delay is the time between the end of the awaited gradient and the earliest start.
    """
    late_s = dict[int, float]()
    for run in runs:
        for place in run.ahead:
            slot, cost = run.slots[place][0], run.costs[run.order[place].chunk]
            late_s[slot] = cost.hidden_s
            run.slots[place] = slot, cost.receive_backward_s - cost.hidden_s + cost.backward_s
    return late_s


def _sweep(
    slots: Sequence[Sequence[_Slot]],
    late_s: Mapping[int, float],
    num_stages: int,
    num_micro_batches: int,
) -> list[float]:
    """The end of every slot; _PENDING for slots that never ran.

    late_s: seconds between the end of the awaited slot and the earliest start of a slot

    A rank runs until it meets a slot that is not there yet and leaves its name at it; the rank that
    fills the slot wakes it. Every action is visited once, and once more when it had to wait.
    """
    nothing, row = [0.0] * num_micro_batches, [_PENDING] * num_micro_batches
    end_s = nothing + row * (2 * num_stages) + (nothing + row) * num_stages
    todo = [iter(of_rank) for of_rank in slots]
    clock_s = [0.0] * len(slots)
    waiting: dict[int, tuple[int, _Slot]] = {}
    awake = [(rank, next(todo[rank])) for rank in reversed(range(len(slots)))]
    while awake:
        rank, (slot, duration_s) = awake.pop()
        clock = clock_s[rank]
        rest = todo[rank]
        while True:
            arrived = end_s[slot - num_micro_batches]
            if arrived < 0.0:
                waiting[slot - num_micro_batches] = rank, (slot, duration_s)
                break
            if late_s and slot in late_s:
                arrived += late_s[slot]
            clock = (arrived if arrived > clock else clock) + duration_s
            end_s[slot] = clock
            if slot in waiting:
                awake.append(waiting.pop(slot))
            slot, duration_s = next(rest, _NONE)
            if slot < 0:
                break
        clock_s[rank] = clock
    return end_s


def _unfinished(run: _Run, end_s: Sequence[float]) -> list[Action]:
    slots = zip(run.order, run.slots, strict=True)
    return [action for action, (slot, _) in slots if end_s[slot] == _PENDING]


def _shown(stuck: dict[int, list[Action]]) -> str:
    """The first actions of each stuck rank, as `0: F0.1 B0.0 ...`."""
    return "; ".join(
        f"{rank}: {' '.join(map(str, rest[:3]))}" for rank, rest in stuck.items() if rest
    )


def _events(run: _Run, end_s: Sequence[float]) -> tuple[Event, ...]:
    return tuple(
        Event(action, end_s[slot] - duration_s, end_s[slot])
        for action, (slot, duration_s) in zip(run.order, run.slots, strict=True)
    )


def _timeline(
    run: _Run,
    step_s: float,
    num_micro_batches: int,
    tail_s: float,
    finish_s: float,
    events: tuple[Event, ...],
) -> RankTimeline:
    """Sums over one rank.

    Its actions never overlap, so the stash held at any time follows from the order alone.
    """
    busy_s = num_micro_batches * sum(
        cost.forward_s + cost.recompute_s + cost.backward_s for cost in run.costs
    )
    transfer_s = num_micro_batches * sum(
        cost.receive_forward_s + cost.receive_backward_s for cost in run.costs
    )
    transfer_s -= sum(run.costs[run.order[place].chunk].hidden_s for place in run.ahead)
    change = [_STASHES[action.work] for action in run.order]
    return RankTimeline(
        busy_s=busy_s,
        transfer_s=transfer_s,
        tail_s=tail_s,
        bubble_s=max(0.0, step_s - busy_s - transfer_s - tail_s),
        finish_s=finish_s,
        peak_stash_bytes=max(accumulate(_held_bytes(run))),
        in_flight=max(accumulate(change)),
        events=events,
    )


_STASHES = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: -1,
    ActionKind.INPUT_GRADIENT: 0,
    ActionKind.WEIGHT_GRADIENT: -1,
    ActionKind.RECOMPUTE: 0,
}


def _held_bytes(run: _Run) -> list[float]:
    """Bytes that each action adds to the held bytes of the rank."""
    held = {
        (work, chunk): _bytes(work, cost)
        for work in ActionKind
        for chunk, cost in enumerate(run.costs)
    }
    added = [held[action.work, action.chunk] for action in run.order]
    for place in run.ahead:
        added[place] -= run.costs[run.order[place].chunk].remade_bytes
    return added


def _bytes(work: ActionKind, cost: StageCost) -> float:
    """Bytes that an action adds to the held bytes of the rank.

    A backward after a recompute ahead also frees the recomputed activations (`_held_bytes`).
    """
    besides = {
        ActionKind.INPUT_GRADIENT: cost.waiting_bytes,
        ActionKind.WEIGHT_GRADIENT: -cost.waiting_bytes,
        ActionKind.RECOMPUTE: cost.remade_bytes,
    }
    return _STASHES[work] * cost.stash_bytes + besides.get(work, 0.0)
