"""`--trace-memory N`: the first steps of a run measure the memory that is no chunk's.

In these warm-up steps chunks fill a small share of the budget. Then every rank takes the most of
all ranks of its pipeline rank, moment by moment, and its schedule of evictions and fetches is made
again by the planner's own code (costmodels/chunks/measured_bytes.py). Schedules of one pipeline
rank stay equal, since its ranks gather and reduce together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parplan.costmodels.chunks.chunk_budget import NonChunkBytes
from parplan.costmodels.chunks.chunk_operations import RankChunks
from parplan.costmodels.chunks.measured_bytes import (
    WARM_UP_SHARE,
    ChunkScheduler,
    by_moment,
    most_of,
)
from parplan.executor.chunks.chunk_manager import ChunkManager
from parplan.executor.chunks.moment_trace import MomentTrace
from parplan.planner.runs.run_file import MemoryTrace, PlannedAndCorrected, PredictedAndMeasured
from parplan.profiles.errors import InfeasibleError


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """The warm-up of a run.

    steps        steps that are measured
    schedulers   of every pipeline rank
    share        share of the budget that chunks may fill in these steps
    """

    steps: int
    schedulers: tuple[ChunkScheduler, ...]
    share: float = WARM_UP_SHARE


class MemoryTracing:
    """The warm-up of one rank: surround each step with `step`, and call `end_step` after it.

    `outside_bytes` returns the bytes that the device holds outside of chunks between two steps.
    """

    def __init__(
        self,
        manager: ChunkManager,
        request: TraceRequest,
        rank: int,
        device: torch.device,
        outside_bytes: Callable[[], int],
    ) -> None:
        self._manager = manager
        self._request = request
        self._rank = rank
        self._scheduler = request.schedulers[rank]
        self._warm_up = self._scheduler.warm_up(request.share)
        self._trace = MomentTrace(manager.ledger, device, outside_bytes)
        self._done = 0
        manager.trace = self._trace
        manager.follow(self._warm_up)

    def step(self) -> AbstractContextManager[None]:
        """Returns the context of a step, which is measured in the warm-up."""
        return nullcontext() if self._manager.trace is None else self._trace.counted()

    def end_step(self, *, skipped: bool) -> None:
        """Ends a step; after the last of the warm-up the schedule is made again. Collective.

        A step that a loss scale skipped is not counted: the optimizer has made no states in it.
        Raises InfeasibleError on every rank where the budget of one is too small for what was
        measured.
        """
        if self._manager.trace is None or skipped:
            return
        self._done += 1
        if self._done == self._request.steps:
            self._manager.trace = None
            self._correct()

    def _correct(self) -> None:
        gathered: list[tuple[int, NonChunkBytes]] = [(0, self._trace.most())]
        gathered *= dist.get_world_size()
        dist.all_gather_object(gathered, (self._rank, self._trace.most()))
        corrected = list(_corrected(self._request.schedulers, gathered))
        own = most_of([measured for rank, measured in gathered if rank == self._rank])
        self._manager.follow(corrected[self._rank])
        self._manager.traced = self._record(own, corrected[self._rank])

    def _record(self, measured: NonChunkBytes, corrected: RankChunks) -> MemoryTrace:
        planned = self._scheduler.planned()
        moments = [
            (name, predicted, traced)
            for (name, predicted), (_, traced) in zip(
                by_moment(self._scheduler.predicted(), planned),
                by_moment(measured, planned),
                strict=True,
            )
        ]
        worst, predicted, traced = max(moments, key=lambda moment: abs(moment[2] - moment[1]))
        return MemoryTrace(
            steps=self._done,
            warm_up_bytes=self._warm_up.device_bytes,
            most_bytes=PredictedAndMeasured(
                predicted=max(moment[1] for moment in moments),
                measured=max(moment[2] for moment in moments),
            ),
            worst_moment=worst,
            worst_bytes=PredictedAndMeasured(predicted=predicted, measured=traced),
            device_bytes=_both(planned, corrected, "most_bytes"),
            in_bytes=_both(planned, corrected, "in_bytes"),
            out_bytes=_both(planned, corrected, "out_bytes"),
        )


def _both(planned: RankChunks, corrected: RankChunks, figure: str) -> PlannedAndCorrected:
    return PlannedAndCorrected(
        planned=getattr(planned, figure), corrected=getattr(corrected, figure)
    )


def _corrected(
    schedulers: Sequence[ChunkScheduler], gathered: Sequence[tuple[int, NonChunkBytes]]
) -> Iterator[RankChunks]:
    """Yields the schedule of every pipeline rank, so that all ranks raise the same error."""
    for rank, scheduler in enumerate(schedulers):
        measured = most_of([each for where, each in gathered if where == rank])
        try:
            yield scheduler.corrected(measured)
        except InfeasibleError as error:
            raise InfeasibleError(
                f"by the traced memory {error.message}", hint=error.hint
            ) from None
