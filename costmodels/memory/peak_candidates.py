"""The candidates for the peak of a pipeline rank, from its schedule's action list.

They differ in the number of micro-batches in flight and of those recomputed ahead of the gradient.
An ordinary recompute makes the activations of one layer at a time during the backward pass. A
recompute ahead makes those of the whole stage, which stay until the backward pass of that
micro-batch. So there are two kinds of candidates: a backward pass with its recompute inside, which
adds the workspace of one layer; and one after a recompute ahead, which adds the activations of a
stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from parplan.costmodels.schedules.actions import ActionKind, parse_row
from parplan.costmodels.schedules.schedule import AHEAD, Schedule, actions, in_flight
from parplan.costmodels.strategy import ParallelLayout

# micro-batches per rank from which on a longer list with recompute ahead has no new candidates
_ENOUGH = 2


@dataclass(frozen=True, slots=True)
class PeakCandidate:
    """The begin of a backward pass on a rank.

    stashes    held (chunk, micro-batch) pairs, with the one whose backward pass begins
    remade     pairs among them that were recomputed ahead
    alone      the backward pass has no recompute in it
    """

    stashes: int
    remade: int = 0
    alone: bool = False

    @property
    def made(self) -> float:
        """The share of the gradients that exist.

        It is 1 unless gradients come and go (costmodels/memory/peak_memory.py).
        """
        return 1.0


def peak_candidates(rank: int, layout: ParallelLayout) -> tuple[PeakCandidate, ...]:
    """Returns candidates of a rank that include the peak for all layer sizes.

    Backward passes are whole. A stage holds at a candidate: stashes x (saved bytes of a
    micro-batch) + remade x (saved bytes without recompute - saved bytes) + the workspace of a layer
    with its recompute, or without recompute if `alone`. Candidates that another of their kind
    dominates are left out: one remains without recompute ahead, two at most in Merak's schedules.
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
    """Yields a candidate for every backward pass of an action list.

    The first part of a split backward pass frees nothing.
    """
    stashes = 0
    ahead = set[tuple[int, int]]()
    for work, chunk, micro_batch in order:
        pair = chunk, micro_batch
        if work is ActionKind.FORWARD:
            stashes += 1
        elif work is ActionKind.RECOMPUTE:
            ahead.add(pair)
        else:
            yield PeakCandidate(stashes, len(ahead), pair in ahead)
            if work is not ActionKind.INPUT_GRADIENT:
                stashes -= 1
            ahead.discard(pair)


def _fullest(candidates: Iterable[PeakCandidate]) -> tuple[PeakCandidate, ...]:
    """Returns the candidates that no other of their kind dominates."""
    unique = sorted(set(candidates), key=lambda peak: (peak.alone, peak.stashes, peak.remade))
    return tuple(
        peak
        for peak in unique
        if not any(
            rival != peak
            and rival.alone == peak.alone
            and rival.stashes >= peak.stashes
            and rival.remade >= peak.remade
            for rival in unique
        )
    )
