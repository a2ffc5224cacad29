"""Times one communication case on this rank, together with all others.

Every rank calls `measure_case` with the same case; ranks outside its groups wait. A time is that of
one call in a row of calls after a barrier, as in nccl-tests; the slowest rank of each repeat
counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parplan.profiles.machines.measurements import Case, CaseFigures, CaseOutcome, Record, Timing
from parplan.profiles.profiler.communication.collective_calls import (
    Products,
    Run,
    collective_call,
    zeros,
)
from parplan.profiles.profiler.communication.comm_cases import (
    COMMUNICATOR,
    OVERLAP,
    POINT_TO_POINT,
    shape_of,
)
from parplan.profiles.profiler.communication.group_shapes import Members, group_members, pairs
from parplan.profiles.profiler.communication.measuring_ranks import MeasuringRank
from parplan.profiles.profiler.gpus import gpu, is_gpu
from parplan.profiles.units import US_PER_S

Made = TypeVar("Made")
WARM_UP_REPEATS = 2  # after the first call
MIN_REPEATS = 5
MEASURED_S = 0.2  # repeats go on for about this long,
STEADY_SPREAD = 0.1  # longer if they spread more, because other work on the machine comes in bursts
REPEAT_S = 0.002  # a repeat takes at least about this long, in several calls if needed
LEAD_S = 0.05  # in longer calls the skew of ranks leaving a barrier is negligible
MAX_CALLS = 20  # in one repeat, the default of nccl-tests
HIDDEN_FACTOR = 1.5  # products run this much longer than the all-reduce that they hide
MAX_PRODUCTS = 2000
DEADLINE_SHARE = 0.8  # share of a group's timeout
MS_PER_S = 1e3
_POLL_S = 5e-5
# torch's words for a collective that a backend lacks.
_NOT_THERE = ("not support", "unsupported", "not implement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The most repeats of a case in one go, and the seconds of repeats if they spread."""

    repeats: int = 30
    patience_s: float = 1.0


FULL = Effort()


class UnsupportedError(Exception):
    """The backend lacks this collective; all ranks know."""


class DoesNotFitError(Exception):
    """The tensors of some rank do not fit its memory; all ranks know."""


def measure_case(case: Case, ranks: MeasuringRank, effort: Effort = FULL) -> Record:
    """Returns the record of `case`, the same on all ranks.

    Raises RuntimeError when a collective fails or passes its timeout.
    """
    try:
        figures = _WORKS.get(case.work, _timed)(_Together(case, ranks), effort)
    except UnsupportedError as error:
        return Record(case=case, outcome=CaseOutcome.UNSUPPORTED, detail=str(error))
    except DoesNotFitError as error:
        return Record(case=case, outcome=CaseOutcome.OUT_OF_MEMORY, detail=str(error))
    return Record(case=case, outcome=CaseOutcome.MEASURED, measured=figures)


class _Together:
    """The concurrent groups of a case, and the index of this rank's group, if it is in one."""

    def __init__(self, case: Case, ranks: MeasuringRank) -> None:
        self.case, self.ranks = case, ranks
        self.members: Members = (pairs if case.work == POINT_TO_POINT else group_members)(
            shape_of(case), ranks.world
        )
        self.group_index = next(
            (index for index, group in enumerate(self.members) if ranks.rank in group), None
        )
        self.calls = 1
        self.leads = False  # True if an untimed call precedes the timed ones

    @property
    def limit_s(self) -> float:
        """Seconds after which a call is given up, before NCCL's watchdog ends the process."""
        return DEADLINE_SHARE * self.ranks.timeout.total_seconds()

    def made(self, make: Callable[[dist.ProcessGroup, tuple[int, ...]], Made]) -> Made | None:
        """Makes the tensors of this rank's group, or None for a rank without a group.

        Raises DoesNotFitError on all ranks if one lacks the memory.
        """
        groups = self.ranks.groups(self.members)
        made = None
        short = False
        self.ranks.make_barrier(self.members)
        try:
            if self.group_index is not None:
                made = make(groups[self.group_index], self.members[self.group_index])
        except RuntimeError:  # torch has no separate error for it on CPUs
            short = True
        if self.ranks.any([short])[0]:
            raise DoesNotFitError(f"the tensors of {self.case.key} do not fit the memory of a rank")
        return made

    def first(self, run: Run | None) -> None:
        """Runs the first call, which connects.

        A backend without this collective fails here, on all ranks of a group.
        """
        reason = ""
        try:
            if run is not None:
                elapsed_s(run, 1, self.ranks.device, self.limit_s)
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            if not any(words in reason.lower() for words in _NOT_THERE):
                raise
        if self.ranks.any([bool(reason)])[0]:
            raise UnsupportedError(reason or "another rank's backend lacks it")

    def seconds(self, run: Run | None, repeats: int) -> list[float]:
        """Seconds of one call in each repeat, of the slowest rank; a rank without a call waits."""
        times_s = [0.0] * repeats
        for index in range(repeats if run is not None else 0):
            self.ranks.barrier(self.members)
            if run is not None and self.leads:
                run()
            if run is not None:
                elapsed = elapsed_s(run, self.calls, self.ranks.device, self.limit_s)
                times_s[index] = elapsed / self.calls
        return self.ranks.largest(times_s)

    def choose(self, call_s: float, repeats: int) -> int:
        """Sets the calls per repeat and returns the number of repeats, for calls of `call_s`.

        All ranks choose alike if `call_s` is alike. Short calls follow an untimed one, after which
        ranks are closer together than after a barrier.
        """
        self.leads = call_s < LEAD_S
        self.calls = max(1, min(MAX_CALLS, math.ceil(REPEAT_S / max(call_s, _POLL_S))))
        steady = math.ceil(MEASURED_S / max(call_s * self.calls, _POLL_S))
        return min(repeats, max(MIN_REPEATS, steady))


def _timed(together: _Together, effort: Effort) -> CaseFigures:
    """Times a collective, or a message as half of there and back."""
    case, device = together.case, together.ranks.device
    run = together.made(lambda group, ranks: collective_call(case, group, ranks, device))
    together.first(run)
    turns = together.choose(together.seconds(run, WARM_UP_REPEATS)[-1], effort.repeats)
    share = 0.5 if case.work == POINT_TO_POINT else 1.0
    times_s: list[float] = []
    while not times_s or (
        timing_of(times_s).spread > STEADY_SPREAD
        and together.calls * sum(times_s) < effort.patience_s
    ):
        times_s += together.seconds(run, turns)
    return CaseFigures(times={"time": timing_of([share * seconds for seconds in times_s])})


def _overlap(together: _Together, effort: Effort) -> CaseFigures:
    """Times an all-reduce alone, enough products to hide it alone, and both together, in turns."""
    case, device = together.case, together.ranks.device
    beside = together.made(lambda group, _: Products(case, group, device))
    runs = [
        getattr(beside, name) if beside is not None else None
        for name in ("compute", "communicate", "both")
    ]
    for run in runs:
        together.first(run)
    product_s = statistics.median(together.seconds(runs[0], MIN_REPEATS))
    reduce_s = statistics.median(together.seconds(runs[1], MIN_REPEATS))
    count = max(1, min(MAX_PRODUCTS, math.ceil(HIDDEN_FACTOR * reduce_s / product_s)))
    if beside is not None:
        beside.count = count
    turns = max(
        MIN_REPEATS, min(effort.repeats, math.ceil(MEASURED_S / max(reduce_s, product_s * count)))
    )
    times_s = [[together.seconds(run, 1)[0] for run in runs] for _ in range(turns)]
    alone_s, communication_s, both_s = map(statistics.median, zip(*times_s, strict=True))
    figures = {
        "compute_alone_s": alone_s,
        "communication_alone_s": communication_s,
        "both_s": both_s,
        "products": float(count),
    }
    return CaseFigures(figures=figures)


def _communicator(together: _Together, effort: Effort) -> CaseFigures:
    """Device memory that the first collective of new groups takes, the most of all ranks."""
    ranks = together.ranks
    if not is_gpu(ranks.device):
        raise UnsupportedError(
            "on a CPU the buffers of a communicator cannot be told from other memory of the process"
        )
    tensor = zeros(4, "fp32", ranks.device)
    groups = ranks.groups(together.members, fresh=True)
    gpu(ranks.device).synchronize(ranks.device)
    before, _ = gpu(ranks.device).mem_get_info(ranks.device)
    if together.group_index is not None:
        dist.all_reduce(tensor, group=groups[together.group_index])
    gpu(ranks.device).synchronize(ranks.device)
    after, _ = gpu(ranks.device).mem_get_info(ranks.device)
    taken = ranks.largest([float(before - after)])[0]
    if together.group_index is not None:
        dist.destroy_process_group(groups[together.group_index])
    return CaseFigures(figures={"buffer_bytes": taken})


_WORKS: dict[str, Callable[[_Together, Effort], CaseFigures]] = {
    OVERLAP: _overlap,
    COMMUNICATOR: _communicator,
}


def elapsed_s(run: Run, calls: int, device: torch.device, limit_s: float) -> float:
    """Seconds of `calls` in a row, between device events or by the host's clock.

    Raises RuntimeError if the device does not finish them in `limit_s`.
    """
    if is_gpu(device):
        return _device_elapsed_s(run, calls, device, limit_s)
    begin_s = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - begin_s


def _device_elapsed_s(run: Run, calls: int, device: torch.device, limit_s: float) -> float:
    make: Any = gpu(device).Event
    begin = make(enable_timing=True)
    end = make(enable_timing=True)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    deadline_s = time.monotonic() + limit_s
    while not end.query():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"timed out: {calls} calls have not ended after {limit_s:.0f} s")
        time.sleep(_POLL_S)
    return float(begin.elapsed_time(end)) / MS_PER_S


def timing_of(seconds: list[float]) -> Timing:
    """The median of repeats, and half of their interquartile range relative to it."""
    median_s = statistics.median(seconds)
    low_s = high_s = median_s
    if len(seconds) > 1:
        low_s, _, high_s = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(
        median_us=median_s * US_PER_S, spread=(high_s - low_s) / 2 / median_s, repeats=len(seconds)
    )
