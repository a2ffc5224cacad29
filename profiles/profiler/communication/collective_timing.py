"""Times one case of communication on this rank, together with all others.

Every rank calls `measured` with the same case; ranks that are in none of its groups wait. A time is
that of one call in a row of calls after a barrier, as nccl-tests takes it; of each repeat that of
the slowest rank counts.
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
from parplan.profiles.profiler.communication.collective_calls import Products, Run, call, zeros
from parplan.profiles.profiler.communication.comm_cases import (
    COMMUNICATOR,
    OVERLAP,
    POINT_TO_POINT,
    shape_of,
)
from parplan.profiles.profiler.communication.group_shapes import Members, group_members, pairs
from parplan.profiles.profiler.communication.measuring_ranks import MeasuringRank
from parplan.profiles.units import US_PER_S

Made = TypeVar("Made")
WARM_UP_REPEATS = 2  # after the first call
MIN_REPEATS = 5
MEASURED_S = 0.2  # repeats go on for about so long,
STEADY_SPREAD = 0.1  # longer where they spread more: what else the machine does comes in bursts
REPEAT_S = 0.002  # a repeat takes at least about so long, in as many calls
LEAD_S = 0.05  # a longer call does not notice how ranks leave a barrier
MAX_CALLS = 20  # in one repeat, as nccl-tests has by default
HIDDEN_FACTOR = 1.5  # products go on for so much longer than the all-reduce that they hide
MAX_PRODUCTS = 2000
DEADLINE_SHARE = 0.8  # of a group's timeout
MS_PER_S = 1e3
_POLL_S = 5e-5
_NOT_THERE = (
    "not support",
    "unsupported",
    "not implement",
)  # what torch says of a collective that a backend lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How many repeats a case gets at most at once, and how many seconds of them where they
    spread.
    """

    repeats: int = 30
    patience_s: float = 1.0


FULL = Effort()


class UnsupportedError(Exception):
    """The backend lacks this collective; all ranks know."""


class DoesNotFitError(Exception):
    """The tensors of some rank do not fit its memory; all ranks know."""


def measured(case: Case, ranks: MeasuringRank, effort: Effort = FULL) -> Record:
    """What came of `case`, the same on all ranks. Raises RuntimeError when a collective fails or
    passes its timeout.
    """
    try:
        found = _WORKS.get(case.work, _timed)(_Together(case, ranks), effort)
    except UnsupportedError as error:
        return Record(case=case, outcome=CaseOutcome.UNSUPPORTED, detail=str(error))
    except DoesNotFitError as error:
        return Record(case=case, outcome=CaseOutcome.OUT_OF_MEMORY, detail=str(error))
    return Record(case=case, outcome=CaseOutcome.MEASURED, measured=found)


class _Together:
    """The groups of a case that run at once, and the one that this rank is in, if any."""

    def __init__(self, case: Case, ranks: MeasuringRank) -> None:
        self.case, self.ranks = case, ranks
        self.members: Members = (pairs if case.work == POINT_TO_POINT else group_members)(
            shape_of(case), ranks.world
        )
        self.own = next(
            (index for index, group in enumerate(self.members) if ranks.rank in group), None
        )
        self.calls = 1
        self.leads = False  # whether a call goes before those that are timed

    @property
    def limit_s(self) -> float:
        """When to give a call up: before NCCL's own watch ends the process without a word."""
        return DEADLINE_SHARE * self.ranks.timeout.total_seconds()

    def made(self, make: Callable[[dist.ProcessGroup, tuple[int, ...]], Made]) -> Made | None:
        """What this rank's group needs, None for a rank without one; for no rank where another has
        no memory for it.
        """
        groups, found, short = self.ranks.groups(self.members), None, False
        self.ranks.make_barrier(self.members)
        try:
            found = None if self.own is None else make(groups[self.own], self.members[self.own])
        except RuntimeError:  # on CPUs torch has no error of its own for it
            short = True
        if self.ranks.any([short])[0]:
            raise DoesNotFitError(f"the tensors of {self.case.key} do not fit the memory of a rank")
        return found

    def first(self, run: Run | None) -> None:
        """The first call, which connects. A backend without this collective says so here, on all
        ranks of a group.
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
        """Seconds of one call in each repeat, of the slowest rank; a rank without anything to run
        waits.
        """
        own_s = [0.0] * repeats
        for index in range(repeats if run is not None else 0):
            self.ranks.barrier(self.members)
            if run is not None and self.leads:
                run()
            own_s[index] = (
                elapsed_s(run, self.calls, self.ranks.device, self.limit_s) / self.calls
                if run is not None
                else 0.0
            )
        return self.ranks.largest(own_s)

    def choose(self, call_s: float, repeats: int) -> int:
        """How many repeats, of how many calls each, when a call takes `call_s`; the same on all
        ranks where `call_s` is.

        Short calls follow one that is not timed: ranks leave it closer together than a barrier.
        """
        self.leads = call_s < LEAD_S
        self.calls = max(1, min(MAX_CALLS, math.ceil(REPEAT_S / max(call_s, _POLL_S))))
        wanted = math.ceil(MEASURED_S / max(call_s * self.calls, _POLL_S))
        return min(repeats, max(MIN_REPEATS, wanted))


def _timed(together: _Together, effort: Effort) -> CaseFigures:
    """A collective, or a message: half of there and back."""
    case, device = together.case, together.ranks.device
    run = together.made(lambda group, ranks: call(case, group, ranks, device))
    together.first(run)
    turns = together.choose(together.seconds(run, WARM_UP_REPEATS)[-1], effort.repeats)
    share = 0.5 if case.work == POINT_TO_POINT else 1.0
    found_s: list[float] = []
    while not found_s or (
        timing(found_s).spread > STEADY_SPREAD and together.calls * sum(found_s) < effort.patience_s
    ):
        found_s += together.seconds(run, turns)
    return CaseFigures(times={"time": timing([share * seconds for seconds in found_s])})


def _overlap(together: _Together, effort: Effort) -> CaseFigures:
    """Seconds of an all-reduce alone, of as many products as hide it, and of both together, in
    turns.
    """
    case, device = together.case, together.ranks.device
    beside = together.made(lambda group, _: Products(case, group, device))
    runs = [
        getattr(beside, name) if beside is not None else None
        for name in ("compute", "communicate", "both")
    ]
    for run in runs:
        together.first(run)
    product_s, reduce_s = (
        statistics.median(together.seconds(run, MIN_REPEATS)) for run in runs[:2]
    )
    count = max(1, min(MAX_PRODUCTS, math.ceil(HIDDEN_FACTOR * reduce_s / product_s)))
    if beside is not None:
        beside.count = count
    turns = max(
        MIN_REPEATS, min(effort.repeats, math.ceil(MEASURED_S / max(reduce_s, product_s * count)))
    )
    found_s = [[together.seconds(run, 1)[0] for run in runs] for _ in range(turns)]
    alone_s, communication_s, both_s = (
        statistics.median(column) for column in zip(*found_s, strict=True)
    )
    figures = {
        "compute_alone_s": alone_s,
        "communication_alone_s": communication_s,
        "both_s": both_s,
        "products": float(count),
    }
    return CaseFigures(figures=figures)


def _communicator(together: _Together, effort: Effort) -> CaseFigures:
    """What the first collective of new groups takes of the device's memory, of the rank that has
    least left after it.
    """
    ranks = together.ranks
    if ranks.device.type != "cuda":
        raise UnsupportedError(
            "on a CPU the buffers of a communicator cannot be told from other memory of the process"
        )
    tensor = zeros(4, "fp32", ranks.device)
    groups = ranks.groups(together.members, fresh=True)
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info(ranks.device)
    if together.own is not None:
        dist.all_reduce(tensor, group=groups[together.own])
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info(ranks.device)
    taken = ranks.largest([float(before - after)])[0]
    if together.own is not None:
        dist.destroy_process_group(groups[together.own])
    return CaseFigures(figures={"buffer_bytes": taken})


_WORKS: dict[str, Callable[[_Together, Effort], CaseFigures]] = {
    OVERLAP: _overlap,
    COMMUNICATOR: _communicator,
}


def elapsed_s(run: Run, calls: int, device: torch.device, limit_s: float) -> float:
    """Seconds of `calls` in a row: between events of the device, or by the clock of the host.

    Raises RuntimeError when the device is not done with them after `limit_s`.
    """
    if device.type == "cuda":
        return _device_elapsed_s(run, calls, limit_s)
    begin_s = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - begin_s


def _device_elapsed_s(run: Run, calls: int, limit_s: float) -> float:
    make: Any = torch.cuda.Event
    begin, end = (make(enable_timing=True) for _ in range(2))
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


def timing(seconds: list[float]) -> Timing:
    """The median of repeats, and half of their interquartile range over it."""
    median_s = statistics.median(seconds)
    low_s, _, high_s = (
        statistics.quantiles(seconds, n=4, method="inclusive")
        if len(seconds) > 1
        else (median_s,) * 3
    )
    return Timing(
        median_us=median_s * US_PER_S, spread=(high_s - low_s) / 2 / median_s, repeats=len(seconds)
    )
