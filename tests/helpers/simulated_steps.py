"""Simulated steps of schedules by name, and of any lists of actions."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.costmodels.schedules.action_lists import action_lists, lists_of
from parplan.costmodels.schedules.actions import Action
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.schedules.simulator import SimulatedStep, StageCost, run_lists


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
    lists = lists_of(schedule, len(costs), num_micro_batches, len(costs[0]))
    return run_lists(lists, costs, tail_s, keep_events=keep_events)


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
    assert len(orders) == len(costs), f"{len(orders)} lists, {len(costs)} ranks"
    placed = placement or [
        range(rank, len(costs) * len(chunks), len(costs)) for rank, chunks in enumerate(costs)
    ]
    lists = action_lists(orders, placed, num_micro_batches)
    return run_lists(lists, costs, tail_s, keep_events=keep_events)
