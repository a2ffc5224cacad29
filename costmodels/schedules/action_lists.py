"""The action lists of a step in an order in which they can run, whatever the actions take.

Which action waits for which follows from the lists alone. So the order is found once for a schedule
and its counts, and each simulation (costmodels/schedules/simulator.py) only adds seconds along it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from parplan.costmodels.schedules.actions import Action, ActionKind, orders_of, placement_of
from parplan.costmodels.schedules.schedule import Schedule, actions, stages_of

AFTER_RECOMPUTE = "B after R"  # a backward whose recompute ran ahead of the gradient
# The passes of a chunk, and the stashes that each adds.
STASHES: dict[str, int] = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: -1,
    ActionKind.INPUT_GRADIENT: 0,
    ActionKind.WEIGHT_GRADIENT: -1,
    ActionKind.RECOMPUTE: 0,
    AFTER_RECOMPUTE: -1,
}
PASSES = tuple(STASHES)
_NUMBER = {name: number for number, name in enumerate(PASSES)}

Orders = Sequence[Sequence[Action]]
_Slot = tuple[int, int]  # a slot and its pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionLists:
    """Action lists with their slots.

    Each end of an action has a slot: (position + 1) M + micro-batch, so that `slot - M` is always
    the one that it waits for. Position: virtual stage k for a forward, 2 K - 1 - k for a backward.
    Slots below M stand for "nothing to wait for"; each weight gradient, or recompute ahead, has a
    row of its own for that, and behind it the row in which it ends.

    orders, placement    by rank: its actions, and its virtual stages by chunk
    passes               by rank: (chunk, number in PASSES) of its actions, as chunk * passes + pass
    slots                by rank: the slots of its actions
    in_flight            by rank: the largest number of stashes held at once
    num_slots            length of a table of slots
    ran_rank, ran_slot, ran_pass    by turn: rank, slot, and its pass among those of all ranks
    """

    orders: Orders
    placement: Sequence[Sequence[int]]
    num_micro_batches: int
    passes: tuple[array[int], ...]
    slots: tuple[array[int], ...]
    in_flight: tuple[int, ...]
    num_slots: int
    ran_rank: array[int]
    ran_slot: array[int]
    ran_pass: array[int]

    def after_recompute(self, rank: int) -> list[int]:
        """Chunks of the rank's backwards whose recompute ran ahead, in their order."""
        return [
            number // len(PASSES)
            for number in self.passes[rank]
            if number % len(PASSES) == _NUMBER[AFTER_RECOMPUTE]
        ]


@lru_cache(maxsize=8)
def lists_of(
    schedule: Schedule,
    num_ranks: int,
    num_micro_batches: int,
    virtual_stages: int,
    rows: tuple[str, ...] = (),
) -> ActionLists:
    """Returns the lists of a schedule, a custom one with its CSV lines `rows`.

    Raises ConfigError when the schedule is not legal for these counts.
    """
    if schedule is Schedule.CUSTOM:
        return action_lists(orders_of(rows), placement_of(rows), num_micro_batches)
    ranks = range(num_ranks)
    return action_lists(
        [actions(schedule, rank, num_ranks, num_micro_batches, virtual_stages) for rank in ranks],
        [stages_of(schedule, rank, num_ranks, virtual_stages) for rank in ranks],
        num_micro_batches,
    )


def action_lists(
    orders: Orders, placement: Sequence[Sequence[int]], num_micro_batches: int
) -> ActionLists:
    """Returns any lists in an order in which they can run.

    placement: by rank and chunk its virtual stage
    Raises AssertionError with the stuck actions when the lists wait for each other.
    """
    num_stages = sum(map(len, placement))
    passes = tuple(array("q", _passes(order)) for order in orders)
    slots = tuple(
        array("q", _slots(order, stages, num_stages, num_micro_batches))
        for order, stages in zip(orders, placement, strict=True)
    )
    num_slots = (1 + 4 * num_stages) * num_micro_batches
    turns = _turns(slots, num_slots, num_stages, num_micro_batches)
    offsets = [0]
    for stages in placement:
        offsets.append(offsets[-1] + len(stages) * len(PASSES))
    rest = [iter(of_rank) for of_rank in passes]
    placed = [iter(of_rank) for of_rank in slots]
    ran_slot = array("q", (next(placed[rank]) for rank in turns))
    ran_pass = array("q", (offsets[rank] + next(rest[rank]) for rank in turns))
    stuck = {
        rank: order[len(order) - len(list(placed[rank])) :] for rank, order in enumerate(orders)
    }
    assert not any(stuck.values()), (
        f"deadlock, rank: next actions that never start: {_shown(stuck)}"
    )
    return ActionLists(
        orders=orders,
        placement=placement,
        num_micro_batches=num_micro_batches,
        passes=passes,
        slots=slots,
        in_flight=tuple(
            max(accumulate(STASHES[PASSES[number % len(PASSES)]] for number in of_rank))
            for of_rank in passes
        ),
        num_slots=num_slots,
        ran_rank=turns,
        ran_slot=ran_slot,
        ran_pass=ran_pass,
    )


def _passes(order: Sequence[Action]) -> Iterator[int]:
    ahead = {
        (action.chunk, action.micro_batch)
        for action in order
        if action.work is ActionKind.RECOMPUTE
    }
    for action in order:
        late = action.work is ActionKind.BACKWARD and (action.chunk, action.micro_batch) in ahead
        yield action.chunk * len(PASSES) + _NUMBER[AFTER_RECOMPUTE if late else action.work]


def _slots(
    order: Sequence[Action], stages: Sequence[int], num_stages: int, num_micro_batches: int
) -> Iterator[int]:
    first: dict[tuple[ActionKind, int], int] = {}
    for chunk, stage in enumerate(stages):
        backward = (2 * num_stages - stage) * num_micro_batches
        free = 2 * (num_stages + stage + 1) * num_micro_batches
        first[ActionKind.FORWARD, chunk] = (stage + 1) * num_micro_batches
        first[ActionKind.BACKWARD, chunk] = backward
        first[ActionKind.INPUT_GRADIENT, chunk] = backward
        first[ActionKind.WEIGHT_GRADIENT, chunk] = free
        first[ActionKind.RECOMPUTE, chunk] = free
    return (first[action.work, action.chunk] + action.micro_batch for action in order)


def _turns(
    slots: Sequence[Sequence[int]], num_slots: int, num_stages: int, num_micro_batches: int
) -> array[int]:
    """The ranks in the order in which their next actions run, without actions that never do.

    A rank runs until it meets a slot that is not there yet and leaves its name at it; the rank that
    fills the slot wakes it. Every action is visited once, and once more when it had to wait.
    """
    filled = bytearray(num_slots)
    filled[:num_micro_batches] = b"\1" * num_micro_batches
    for stage in range(num_stages):
        free = (2 * num_stages + 1 + 2 * stage) * num_micro_batches
        filled[free : free + num_micro_batches] = b"\1" * num_micro_batches
    turns = array("q")
    place = [0] * len(slots)
    waiting: dict[int, int] = {}
    awake = list(reversed(range(len(slots))))
    while awake:
        rank = awake.pop()
        todo = slots[rank]
        while place[rank] < len(todo):
            slot = todo[place[rank]]
            if not filled[slot - num_micro_batches]:
                waiting[slot - num_micro_batches] = rank
                break
            filled[slot] = 1
            turns.append(rank)
            place[rank] += 1
            if slot in waiting:
                awake.append(waiting.pop(slot))
    return turns


def _shown(stuck: dict[int, Sequence[Action]]) -> str:
    """The first actions of each stuck rank, as `0: F0.1 B0.0 ...`."""
    return "; ".join(
        f"{rank}: {' '.join(map(str, rest[:3]))}" for rank, rest in stuck.items() if rest
    )
