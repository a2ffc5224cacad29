"""Measured bytes on a device outside of its chunks, at every moment of the chunk schedule.

A moment is the pass of a block. The bytes of all tensors are counted from mark to mark, by torch's
profiler on a CPU (executor/watch/allocated.py) and by the caching allocator on a GPU (not run: no
GPU was at hand); those of chunks are the ledger's. Left out are allocations of libraries, such as
gloo's and NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch

from parplan.costmodels.chunks.chunk_budget import NonChunkBytes
from parplan.costmodels.chunks.measured_bytes import most_of
from parplan.executor.chunks.chunk_buffers import DeviceLedger
from parplan.executor.watch.allocated import MarkedBytes, SpanBytes
from parplan.profiles.profiler.gpus import gpu, is_gpu


class Mark(StrEnum):
    """The end of a span of a step.

    ARRIVED     before the operations that a pass needs
    BEGUN       the pass begins
    ENDED       the pass has ended
    COLLECTED   chunks have taken its gradients
    LEFT        after the operations behind it
    CLOSING     the last backward pass of the step has ended
    CLOSED      the gradients are where the update runs
    UPDATED     the update has ended
    """

    ARRIVED = "arrived"
    BEGUN = "begun"
    ENDED = "ended"
    COLLECTED = "collected"
    LEFT = "left"
    CLOSING = "closing"
    CLOSED = "closed"
    UPDATED = "updated"


@dataclass(frozen=True, slots=True)
class _Held:
    """The bytes of chunks at a mark."""

    mark: Mark
    chunk_bytes: int


class MomentTrace:
    """Counts the bytes of steps in `counted`, whose marks the chunk manager sets.

    `outside_bytes` returns the bytes that a device holds outside of chunks between two steps: a CPU
    holds those of its host in the same memory.
    """

    def __init__(
        self, ledger: DeviceLedger, device: torch.device, outside_bytes: Callable[[], int]
    ) -> None:
        self._ledger = ledger
        self._outside_bytes = outside_bytes
        self._bytes = GpuBytes(device) if is_gpu(device) else MarkedBytes(self._at_rest)
        self._held: list[_Held] = []
        self._active = False
        self._steps: list[NonChunkBytes] = []

    def mark(self, mark: Mark) -> None:
        """Ends a span of the step, if the step is counted."""
        if self._active:
            self._held.append(_Held(mark, self._ledger.total_bytes))
            self._bytes.mark()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Surrounds a step and its update.

        Bytes that stay after it, as the states that the optimizer makes in its first step, count at
        every moment.
        """
        self._held = []
        before = self._outside_bytes()
        self._active = True
        try:
            with self._bytes.counted():
                yield
        finally:
            self._active = False
        kept = self._outside_bytes() - before
        self._steps.append(_outside(self._held, self._bytes.spans, kept))

    def _at_rest(self) -> int:
        return self._ledger.total_bytes + self._outside_bytes()

    def most(self) -> NonChunkBytes:
        """Returns the most bytes of all counted steps, moment by moment."""
        return most_of(self._steps)


class GpuBytes:
    """Bytes of torch's caching allocator between marks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.spans: list[SpanBytes] = []

    def mark(self) -> None:
        """Ends a span, and begins the next."""
        most = gpu(self._device).max_memory_allocated(self._device)
        self.spans.append(SpanBytes(most, gpu(self._device).memory_allocated(self._device)))
        gpu(self._device).reset_peak_memory_stats(self._device)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a step, of which `spans` has one for each mark afterwards."""
        self.spans = []
        gpu(self._device).reset_peak_memory_stats(self._device)
        yield


def _outside(held: list[_Held], spans: list[SpanBytes], kept: int) -> NonChunkBytes:
    """Returns the bytes outside of chunks from the spans of a step, and `kept` at any time.

    Chunks hold the same bytes from a pass's beginning to its end, and between two passes.
    """
    by_mark: dict[Mark, list[tuple[int, int]]] = {mark: [] for mark in Mark}
    before = 0
    for at, span in zip(held, spans, strict=True):
        # the update casts gradients of chunks, which the schedule counts for the update
        chunks = before if at.mark is Mark.UPDATED else at.chunk_bytes
        by_mark[at.mark].append((span.most - chunks + kept, span.end - chunks + kept))
        before = at.chunk_bytes
    rests = [end for _, end in by_mark[Mark.LEFT]]
    last = max(most for mark in (Mark.CLOSING, Mark.UPDATED) for most, _ in by_mark[mark])
    return NonChunkBytes(
        moments=tuple(most for most, _ in by_mark[Mark.ENDED]),
        gaps=(*(most for most, _ in by_mark[Mark.ARRIVED]), last),
        rests=tuple(rests),
        made=tuple(
            max(0, most - rest)
            for (most, _), rest in zip(by_mark[Mark.COLLECTED], rests, strict=True)
        ),
        end=by_mark[Mark.CLOSED][-1][1],
    )
