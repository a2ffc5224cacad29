"""The moments of a schedule's list at which a rank can hold most: micro-batches in flight, and
those recomputed ahead of the gradient.

An ordinary recompute makes the activations of one layer at a time, as the backward pass comes to
it. One that runs ahead makes those of the whole stage, and they are there until the backward pass
of that micro-batch. So there are two kinds of moments: a backward pass with its recompute inside,
over the workspace of one layer more; and one after a recompute ahead, over those of a stage more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from parplan.costmodels.schedules.actions import ActionKind, parse_row
from parplan.costmodels.schedules.schedule import AHEAD, Schedule, actions, in_flight
from parplan.costmodels.strategy import ParallelLayout

# times as many micro-batches as ranks: from there on a longer list of those that recompute ahead
# has no other moments
_ENOUGH = 2


@dataclass(frozen=True, slots=True)
class PeakCandidate:
    """The begin of a backward pass on a rank.

    stashes   (chunk, micro-batch) that it holds, the one whose backward pass begins among them
    remade    of those, how many were recomputed ahead
    alone     whether the backward pass has no recompute in it
    """

    stashes: int
    remade: int = 0
    alone: bool = False

    @property
    def made(self) -> float:
        """The share of the gradients that is there: all of them, but where they come and go
        (costmodels/memory/peak_memory.py).
        """
        return 1.0


def moments(rank: int, layout: ParallelLayout) -> tuple[PeakCandidate, ...]:
    """Those of a rank of which one is the fullest, whatever the bytes, where backward passes are
    whole.

    What a stage holds at one: stashes x (what it keeps of a micro-batch) + remade x (what it would
    keep without recompute, less what it keeps) + the workspace of a layer with its recompute, or
    where `alone` without. Only the last of the moments of a kind that hold no less of both are
    there: one where nothing is recomputed ahead, two at most in Merak's schedules.
    """
    pp, num_micro_batches = layout.mesh.pp, layout.num_micro_batches
    if layout.schedule is Schedule.CUSTOM:
        return _of_text(layout.actions[rank], rank)
    if layout.schedule in AHEAD:
        return _of_schedule(layout.schedule, rank, pp, min(num_micro_batches, max(_ENOUGH * pp, 4)))
    return (
        PeakCandidate(
            in_flight(layout.schedule, rank, pp, num_micro_batches, layout.virtual_stages)
        ),
    )


@lru_cache(maxsize=256)
def _of_schedule(
    schedule: Schedule, rank: int, num_ranks: int, num_micro_batches: int
) -> tuple[PeakCandidate, ...]:
    order = actions(schedule, rank, num_ranks, num_micro_batches)
    return _fullest(_walk((action.work, action.chunk, action.micro_batch) for action in order))


@lru_cache(maxsize=64)
def _of_text(row: str, rank: int) -> tuple[PeakCandidate, ...]:
    return _fullest(
        _walk((work, stage, micro_batch) for stage, work, micro_batch in parse_row(row, rank))
    )


def _walk(order: Iterable[tuple[ActionKind, int, int]]) -> Iterator[PeakCandidate]:
    """Every backward pass of a list; of one in two parts the first frees nothing."""
    stashes, ahead = 0, set[tuple[int, int]]()
    for work, chunk, micro_batch in order:
        one = chunk, micro_batch
        if work is ActionKind.FORWARD:
            stashes += 1
        elif work is ActionKind.RECOMPUTE:
            ahead.add(one)
        else:
            yield PeakCandidate(stashes, len(ahead), one in ahead)
            stashes -= work is not ActionKind.INPUT_GRADIENT
            ahead.discard(one)


def _fullest(found: Iterable[PeakCandidate]) -> tuple[PeakCandidate, ...]:
    """Those that no other of their kind is above."""
    kinds = sorted(set(found), key=lambda one: (one.alone, one.stashes, one.remade))
    return tuple(
        one
        for one in kinds
        if not any(
            other != one
            and other.alone == one.alone
            and other.stashes >= one.stashes
            and other.remade >= one.remade
            for other in kinds
        )
    )
