"""Measurements of a run: spans of the last steps on every rank, memory peaks, aligned clocks.

A span costs a few microseconds and stops nothing: on a CPU it reads the clock twice, on a GPU it
records two CUDA events on the current stream, which are read at the end of the step (untested: no
GPU was at hand). Each span is also a range of torch's profiler (`torch.profiler.record_function`),
so that a user's own profile shows F0.3 and B0.3 around the kernels.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from parplan.executor.watch.allocated import PeakBytes
from parplan.executor.watch.state_bytes import Row
from parplan.planner.plan.plan import Plan
from parplan.planner.runs.run_account import RankMeasured, RecordedStep, TimedSteps, make_run
from parplan.planner.runs.run_file import ChunkMoved, RunEnvironment, RunFile, WorkSpan
from parplan.profiles.profiler.gpus import gpu, is_gpu
from parplan.profiles.units import KIB

RECORDED_STEPS = 5
# In the first step allocators and caches are empty; both are metered (executor/training/train.py).
WARM_UP_STEPS = 2
CLOCK_ROUNDS = 9
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOTHING = nullcontext()

Mark = float | torch.Event


class RunRecorder:
    """Times and losses of `num_steps` steps, and the spans of the last RECORDED_STEPS.

    With `num_steps` 0 it records no spans.
    """

    def __init__(self, device: torch.device, num_steps: int) -> None:
        self.device = device
        self.on_gpu = is_gpu(device)
        self.expect(num_steps)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.skipped: list[int] = []
        self.steps: list[RecordedStep] = []
        self.cpu_peak = PeakBytes()
        self._active = False
        self._marks: list[tuple[str, int, int, Mark, Mark]] = []
        self._started_s = 0.0
        self._anchor: Mark = 0.0

    def expect(self, num_steps: int, traced: int = 0) -> None:
        """Sets the number of steps that will be run, of which the first `traced` are profiled."""
        self.warm_up = min(WARM_UP_STEPS + traced, max(0, num_steps - 1))
        self.first = max(self.warm_up, num_steps - RECORDED_STEPS) if num_steps > 0 else sys.maxsize

    def start(self) -> None:
        """Begins a step."""
        self._active = len(self.seconds) >= self.first
        if not self._active:
            return
        self._marks = []
        if self.on_gpu:
            gpu(self.device).synchronize(self.device)
            if not self.steps:
                gpu(self.device).reset_peak_memory_stats(self.device)
        self._anchor = self._mark()
        self._started_s = time.perf_counter()

    def counted(self) -> AbstractContextManager[None]:
        """Context manager around a step, which may count its memory.

        On CPUs, the last warm-up step is counted byte by byte if the optimizer already has states.
        """
        done = len(self.seconds)
        counts = not self.on_gpu and 0 < done == self.warm_up - 1 and self.first < sys.maxsize
        # a step that traces its memory is profiled already (executor/watch/allocated.py)
        return self.cpu_peak.counted() if counts else _NOTHING

    def span(self, work: str, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
        """Context manager around one piece of work of a step."""
        return self._spanned(work, stage, micro_batch) if self._active else _NOTHING

    @contextmanager
    def _spanned(self, work: str, stage: int, micro_batch: int) -> Iterator[None]:
        with torch.profiler.record_function(work if stage < 0 else f"{work}{stage}.{micro_batch}"):
            start = self._mark()
            yield
            self._marks.append((work, stage, micro_batch, start, self._mark()))

    def finish(self, seconds: float, loss: float, *, skipped: bool = False) -> None:
        """Ends a step that is over on the device too; a `skipped` step updated nothing."""
        if skipped:
            self.skipped.append(len(self.seconds))
        self.seconds.append(seconds)
        self.losses.append(loss)
        if self._active:
            spans = tuple(
                WorkSpan(
                    work=work,
                    stage=stage,
                    micro_batch=micro_batch,
                    start_s=self._clock_s(start),
                    end_s=self._clock_s(end),
                )
                for work, stage, micro_batch, start, end in self._marks
            )
            self.steps.append(RecordedStep(started_s=self._started_s, seconds=seconds, spans=spans))
        self._active = False

    def _mark(self) -> Mark:
        if not self.on_gpu:
            return time.perf_counter()
        event = gpu(self.device).Event(enable_timing=True)
        event.record()
        return event

    def _clock_s(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._started_s + self._anchor.elapsed_time(mark) / 1000


def memory_peaks(
    device: torch.device, cpu_peak: PeakBytes, on_host_bytes: int = 0
) -> dict[str, int | None]:
    """Peak bytes of this rank.

    CUDA allocator peaks count from the first recorded step; on a CPU they are those of the counted
    step. The resident size is the process's.

    on_host_bytes: bytes of CPU memory that are host bytes in the plan
    """
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rss = most if sys.platform == "darwin" else most * KIB  # macOS counts bytes
    on_gpu = is_gpu(device)
    counted = None if cpu_peak.num_bytes is None else cpu_peak.num_bytes - on_host_bytes
    return {
        "allocated_bytes": gpu(device).max_memory_allocated(device) if on_gpu else counted,
        "reserved_bytes": gpu(device).max_memory_reserved(device) if on_gpu else None,
        "host_rss_bytes": rss,
    }


@dataclass(frozen=True, slots=True)
class Clock:
    """Times of this rank's clock as it left each of a few barriers, and the clock's machine."""

    machine: str
    left_s: tuple[float, ...]


def read_clock(device: torch.device) -> Clock:
    """Reads the clock after each of a few barriers. Collective."""
    left = []
    for _ in range(CLOCK_ROUNDS):
        dist.barrier()
        if is_gpu(device):
            gpu(device).synchronize(device)
        left.append(time.perf_counter())
    return Clock(_BOOT_ID.read_text() if _BOOT_ID.exists() else "", tuple(left))


def clock_offsets(clocks: Sequence[Clock]) -> tuple[list[float], float]:
    """Seconds by which each rank's clock is ahead of rank 0's, and the error of these, in seconds.

    Ranks of one machine share a clock. Ranks of other machines leave a barrier at about the same
    time: the offset is the median difference over the rounds, the error half of its spread. A rank
    that always leaves later than rank 0 is not detected.
    """
    first = clocks[0]
    offsets: list[float] = []
    error_s = 0.0
    for clock in clocks:
        if clock is first or (clock.machine and clock.machine == first.machine):
            offsets.append(0.0)
            continue
        ahead = [there - here for here, there in zip(first.left_s, clock.left_s, strict=True)]
        offsets.append(median(ahead))
        error_s = max(error_s, (max(ahead) - min(ahead)) / 2)
    return offsets, error_s


def collect(
    plan: Plan,
    recorder: RunRecorder,
    states: Row,
    device: torch.device,
    chunks: ChunkMoved | None = None,
    on_host_bytes: int = 0,
    in_flight: int | None = None,
) -> RunFile | None:
    """Returns the run on rank 0; None on other ranks and where nothing was recorded. Collective.

    chunks      chunk copies of the last step
    in_flight   the most micro-batches that this rank held at once, None without a pipeline
    """
    if not recorder.steps:
        return None
    (pp, dp, tp), predicted, held = states
    measured = RankMeasured(
        pp=pp,
        dp=dp,
        tp=tp,
        predicted=predicted,
        held=held,
        steps=tuple(recorder.steps),
        chunks=chunks,
        in_flight=in_flight,
        **memory_peaks(device, recorder.cpu_peak, on_host_bytes),
    )
    gathered: list[tuple[RankMeasured, Clock] | None] | None = (
        [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    )
    dist.gather_object((measured, read_clock(device)), gathered)
    if gathered is None:
        return None
    offsets, error_s = clock_offsets([clock for _, clock in gathered])
    return make_run(
        plan,
        environment(device),
        [replace(rank, ahead_s=ahead) for (rank, _), ahead in zip(gathered, offsets, strict=True)],
        TimedSteps(
            seconds=recorder.seconds,
            losses=recorder.losses,
            warm_up=recorder.warm_up,
            skipped=recorder.skipped,
        ),
        clock_error_s=error_s,
        date=date.today().isoformat(),
    )


def environment(device: torch.device) -> RunEnvironment:
    """Software, device and size of the run."""
    name = gpu(device).get_device_name(device) if is_gpu(device) else "cpu"
    return RunEnvironment(
        torch=str(torch.__version__),
        device=name,
        world_size=dist.get_world_size(),
        cpu_count=os.cpu_count() or 1,
    )
