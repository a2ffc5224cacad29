"""Event simulation of a pipeline step: the exact length of a schedule's action lists for unequal stages (EQUATIONS P, I6).

A rank runs its actions in list order. The forward of virtual stage k and micro-batch i waits for the forward of k - 1,
the backward for that of k + 1, and the backward of the last virtual stage for its own forward; so a micro-batch walks
a chain of 2 K positions, K = P v: forwards 0..K-1, then backwards K-1..0. An action starts when its rank is free and
the chain has arrived, and takes the exposed receive, then the forward or the recompute and backward:

    end(action) = max(end of the rank's previous action, end of the chain's previous position) + receive + work
    step = max over ranks of (end of its last action + tail)

Leaves out: sends that block the sender, links shared by several transfers, recompute ahead of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from costmodels.schedules import Action, Schedule, Work, actions

_PENDING = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One micro-batch on one virtual stage. `receive_*_s` is the exposed transfer before the action, on the receiver.

    backward_s      without recompute
    stash_bytes     what the forward keeps for the backward, held from the forward's start to the backward's end
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    receive_forward_s: float
    receive_backward_s: float
    stash_bytes: float


@dataclass(frozen=True, slots=True)
class Event:
    """An action as it ran; its receive is inside [start_s, end_s]."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """What one rank did: busy_s + transfer_s + tail_s + bubble_s is the step, so bubble_s holds all of its idle time.

    finish_s            end of its last action, before the tail
    peak_stash_bytes    the largest sum of stashes held at once
    in_flight           the largest number of (chunk, micro-batch) stashes held at once
    events              in order, only when asked for
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

    tail_s      by rank: seconds after its last action (exposed gradient synchronisation, optimizer); empty: none
    Raises ConfigError when the schedule is not legal for these counts.
    """
    num_ranks, virtual_stages = len(costs), len(costs[0])
    orders = [actions(schedule, rank, num_ranks, num_micro_batches, virtual_stages) for rank in range(num_ranks)]
    return replay(orders, num_micro_batches, costs, tail_s, keep_events)


def least_step_s(num_micro_batches: int, costs: Sequence[Sequence[StageCost]], tail_s: Sequence[float]) -> float:
    """A lower bound of the simulated step of every schedule here, exact for equal ranks:

        max over q <= r of   sum_{i<r} f_i + M t_r + sum_{q<=i<r} b_i + tail_q

    t_r all that rank r does for one micro-batch, f_i and b_i the forward and the backward of the first chunk of rank i, each
    with what it receives. The first forward of rank r comes after those of all ranks before it, and its last action, a backward
    of its first chunk, before those of the ranks from r - 1 down to q; between the two it does M t_r of work. [derived]
    """
    forward_s = [row[0].receive_forward_s + row[0].forward_s for row in costs]
    backward_s = [row[0].receive_backward_s + row[0].recompute_s + row[0].backward_s for row in costs]
    work_s = [num_micro_batches * sum(
        c.receive_forward_s + c.forward_s + c.receive_backward_s + c.recompute_s + c.backward_s for c in row) for row in costs]
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
) -> SimulatedStep:
    """Simulates one step of any action lists, `orders[rank]`; the other arguments as in `simulate`.

    Raises AssertionError with the stuck actions when the lists wait for each other.
    """
    tails = tuple(tail_s) or (0.0,) * len(costs)
    assert len(orders) == len(costs) == len(tails), f"{len(orders)} lists, {len(costs)} ranks, {len(tails)} tails"
    slots = [_slots(order, rank, costs, num_micro_batches) for rank, order in enumerate(orders)]
    duration_s = _durations_s(costs)
    end_s = _sweep(slots, duration_s, num_micro_batches)
    stuck = {rank: _unfinished(order, slots[rank], end_s) for rank, order in enumerate(orders)}
    assert not any(stuck.values()), f"deadlock, rank: next actions that never start: {_shown(stuck)}"
    finish_s = [end_s[own[-1]] for own in slots]
    step_s = max(finish + tail for finish, tail in zip(finish_s, tails, strict=True))
    events = [_events(order, own, duration_s, end_s, num_micro_batches) if keep_events else ()
              for order, own in zip(orders, slots, strict=True)]
    timelines = zip(orders, costs, tails, finish_s, events, strict=True)
    return SimulatedStep(step_s=step_s, ranks=tuple(_timeline(step_s, num_micro_batches, *one) for one in timelines))


def _slots(order: Sequence[Action], rank: int, costs: Sequence[Sequence[StageCost]], num_micro_batches: int) -> list[int]:
    """The actions as slots (position + 1) M + micro-batch, so that `slot - M` is always the one it waits for.

    Position: virtual stage k for a forward, 2 K - 1 - k for a backward. Slots below M stand for "nothing to wait for".
    """
    num_ranks, num_chunks = len(costs), len(costs[rank])
    last = 2 * num_ranks * num_chunks - 1
    row = {}
    for chunk in range(num_chunks):
        stage = chunk * num_ranks + rank
        row[Work.FORWARD, chunk] = (stage + 1) * num_micro_batches
        row[Work.BACKWARD, chunk] = (last - stage + 1) * num_micro_batches
    return [row[action.work, action.chunk] + action.micro_batch for action in order]


def _durations_s(costs: Sequence[Sequence[StageCost]]) -> list[float]:
    """Receive and work by slot row: 0 for the row that nobody runs, then the 2 K positions."""
    stages = [cost for chunk in zip(*costs, strict=True) for cost in chunk]
    forward = [cost.receive_forward_s + cost.forward_s for cost in stages]
    backward = [cost.receive_backward_s + cost.recompute_s + cost.backward_s for cost in reversed(stages)]
    return [0.0, *forward, *backward]


def _sweep(slots: Sequence[Sequence[int]], duration_s: Sequence[float], num_micro_batches: int) -> list[float]:
    """The end of every slot; _PENDING for those that never ran.

    A rank runs until it meets a slot that is not there yet and leaves its name at it; whoever fills the slot wakes it.
    Every action is visited once, and once more when it had to wait.
    """
    end_s = [0.0] * num_micro_batches + [_PENDING] * (num_micro_batches * (len(duration_s) - 1))
    todo = [iter(own) for own in slots]
    clock_s = [0.0] * len(slots)
    waiting: dict[int, tuple[int, int]] = {}
    awake = [(rank, next(todo[rank])) for rank in reversed(range(len(slots)))]
    while awake:
        rank, slot = awake.pop()
        clock = clock_s[rank]
        own = todo[rank]
        while True:
            arrived = end_s[slot - num_micro_batches]
            if arrived < 0.0:
                waiting[slot - num_micro_batches] = rank, slot
                break
            clock = (arrived if arrived > clock else clock) + duration_s[slot // num_micro_batches]
            end_s[slot] = clock
            if slot in waiting:
                awake.append(waiting.pop(slot))
            slot = next(own, -1)
            if slot < 0:
                break
        clock_s[rank] = clock
    return end_s


def _unfinished(order: Sequence[Action], own: Sequence[int], end_s: Sequence[float]) -> list[Action]:
    return [action for action, slot in zip(order, own, strict=True) if end_s[slot] == _PENDING]


def _shown(stuck: dict[int, list[Action]]) -> str:
    """The first actions of each stuck rank, as `0: F0.1 B0.0 ...`."""
    return "; ".join(f"{rank}: {' '.join(map(str, rest[:3]))}" for rank, rest in stuck.items() if rest)


def _events(
    order: Sequence[Action], own: Sequence[int], duration_s: Sequence[float], end_s: Sequence[float], num_micro_batches: int
) -> tuple[Event, ...]:
    return tuple(
        Event(action, end_s[slot] - duration_s[slot // num_micro_batches], end_s[slot])
        for action, slot in zip(order, own, strict=True)
    )


def _timeline(
    step_s: float,
    num_micro_batches: int,
    order: Sequence[Action],
    costs: Sequence[StageCost],
    tail_s: float,
    finish_s: float,
    events: tuple[Event, ...],
) -> RankTimeline:
    """Sums over one rank. Its actions never overlap, so the stash held at any time follows from the order alone."""
    busy_s = num_micro_batches * sum(cost.forward_s + cost.recompute_s + cost.backward_s for cost in costs)
    transfer_s = num_micro_batches * sum(cost.receive_forward_s + cost.receive_backward_s for cost in costs)
    change = [1 if action.work is Work.FORWARD else -1 for action in order]
    stash = [cost.stash_bytes for cost in costs]
    held_bytes = accumulate(sign * stash[action.chunk] for sign, action in zip(change, order, strict=True))
    return RankTimeline(
        busy_s=busy_s,
        transfer_s=transfer_s,
        tail_s=tail_s,
        bubble_s=max(0.0, step_s - busy_s - transfer_s - tail_s),
        finish_s=finish_s,
        peak_stash_bytes=max(held_bytes),
        in_flight=max(accumulate(change)),
        events=events,
    )
