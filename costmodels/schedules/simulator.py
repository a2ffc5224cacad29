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

Leaves out: sends that block the sender, links shared by several transfers, and receives under the
receiver's computation before, as in the warm-up of GPipe: each takes its full time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from parplan.costmodels.schedules.action_lists import (
    AFTER_RECOMPUTE,
    PASSES,
    STASHES,
    ActionLists,
)
from parplan.costmodels.schedules.actions import Action, ActionKind


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


def run_lists(
    lists: ActionLists,
    costs: Sequence[Sequence[StageCost]],
    tail_s: Sequence[float] = (),
    *,
    keep_events: bool = False,
) -> SimulatedStep:
    """Simulates one step of `lists`; the other arguments as in `simulate`."""
    tails = tuple(tail_s) or (0.0,) * len(costs)
    durations_s = _durations_s(lists, costs)
    end_s, finish_s = _ends(lists, costs, durations_s)
    step_s = max(finish + tail for finish, tail in zip(finish_s, tails, strict=True))
    timelines = []
    for rank, (tail, finish) in enumerate(zip(tails, finish_s, strict=True)):
        events = _events(lists, rank, end_s, durations_s) if keep_events else ()
        timelines.append(_timeline(lists, rank, costs[rank], step_s, tail, finish, events))
    return SimulatedStep(step_s=step_s, ranks=tuple(timelines))


def step_of_lists_s(
    lists: ActionLists, costs: Sequence[Sequence[StageCost]], tail_s: Sequence[float]
) -> float:
    """The step of `run_lists` alone."""
    _, finish_s = _ends(lists, costs, _durations_s(lists, costs))
    return max(finish + tail for finish, tail in zip(finish_s, tail_s, strict=True))


def _durations_s(lists: ActionLists, costs: Sequence[Sequence[StageCost]]) -> list[float]:
    """Seconds of each pass of each chunk of each rank, in the order of PASSES."""
    return [
        duration_s
        for stages, chunks in zip(lists.placement, costs, strict=True)
        for stage, cost in zip(stages, chunks, strict=True)
        for duration_s in _passes_s(stage, cost)
    ]


def _passes_s(stage: int, cost: StageCost) -> tuple[float, ...]:
    received_s = cost.receive_backward_s
    backward_s = cost.recompute_s + cost.backward_s
    apart_s = backward_s if stage == 0 else cost.weight_s
    seconds: dict[str, float] = {
        ActionKind.FORWARD: cost.receive_forward_s + cost.forward_s,
        ActionKind.BACKWARD: received_s + backward_s,
        ActionKind.INPUT_GRADIENT: received_s + backward_s - apart_s,
        ActionKind.WEIGHT_GRADIENT: apart_s,
        ActionKind.RECOMPUTE: cost.recompute_s,
        AFTER_RECOMPUTE: received_s - cost.hidden_s + cost.backward_s,
    }
    return tuple(seconds[name] for name in PASSES)


def _ends(
    lists: ActionLists, costs: Sequence[Sequence[StageCost]], durations_s: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The end of every slot, and of the last action of every rank.

    A backward after a recompute ahead starts at least its hidden receive after the awaited
    gradient.
    """
    late_s = [
        cost.hidden_s if name == AFTER_RECOMPUTE else 0.0
        for chunks in costs
        for cost in chunks
        for name in PASSES
    ]
    before = lists.num_micro_batches
    end_s = [0.0] * lists.num_slots
    clock_s = [0.0] * len(costs)
    for rank, slot, number in zip(lists.ran_rank, lists.ran_slot, lists.ran_pass, strict=True):
        arrived, clock = end_s[slot - before] + late_s[number], clock_s[rank]
        clock_s[rank] = end_s[slot] = (arrived if arrived > clock else clock) + durations_s[number]
    return end_s, clock_s


def _events(
    lists: ActionLists, rank: int, end_s: Sequence[float], durations_s: Sequence[float]
) -> tuple[Event, ...]:
    first = sum(map(len, lists.placement[:rank])) * len(PASSES)
    return tuple(
        Event(action, end_s[slot] - durations_s[first + number], end_s[slot])
        for action, slot, number in zip(
            lists.orders[rank], lists.slots[rank], lists.passes[rank], strict=True
        )
    )


def _timeline(
    lists: ActionLists,
    rank: int,
    costs: Sequence[StageCost],
    step_s: float,
    tail_s: float,
    finish_s: float,
    events: tuple[Event, ...],
) -> RankTimeline:
    """Sums over one rank.

    Its actions never overlap, so the stash held at any time follows from the order alone.
    """
    busy_s = lists.num_micro_batches * sum(
        cost.forward_s + cost.recompute_s + cost.backward_s for cost in costs
    )
    transfer_s = lists.num_micro_batches * sum(
        cost.receive_forward_s + cost.receive_backward_s for cost in costs
    )
    transfer_s -= sum(costs[chunk].hidden_s for chunk in lists.after_recompute(rank))
    held = [_bytes(name, cost) for cost in costs for name in PASSES]
    return RankTimeline(
        busy_s=busy_s,
        transfer_s=transfer_s,
        tail_s=tail_s,
        bubble_s=max(0.0, step_s - busy_s - transfer_s - tail_s),
        finish_s=finish_s,
        peak_stash_bytes=max(accumulate(held[number] for number in lists.passes[rank])),
        in_flight=lists.in_flight[rank],
        events=events,
    )


def _bytes(name: str, cost: StageCost) -> float:
    """Bytes that a pass adds to the held bytes of the rank."""
    besides = {
        ActionKind.INPUT_GRADIENT: cost.waiting_bytes,
        ActionKind.WEIGHT_GRADIENT: -cost.waiting_bytes,
        ActionKind.RECOMPUTE: cost.remade_bytes,
        AFTER_RECOMPUTE: -cost.remade_bytes,
    }
    return STASHES[name] * cost.stash_bytes + besides.get(name, 0.0)
