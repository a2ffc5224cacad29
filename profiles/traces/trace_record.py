"""The work of training steps on one rank, as a profiler recorded it, whatever the format."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from parplan.profiles.documents.ranges import Range
from parplan.profiles.errors import ConfigError


class WorkClass(StrEnum):
    """Classes of kernels, and of a host's operators where the host is the device."""

    PRODUCTS = "products"
    ATTENTION = "attention"
    NORMS = "norms"
    ELEMENTWISE = "elementwise"
    OPTIMIZER = "optimizer"
    COLLECTIVES = "collectives"
    COPIES = "copies"


class Phase(StrEnum):
    """The phase of a step that launched a kernel; a recompute is part of the backward pass."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCollective:
    """A collective or a message; None where the trace does not say.

    operation   in the words of torch.distributed: all_reduce, all_gather, send, ..
    num_bytes   the larger of its input and its output on one rank
    ranks       global ranks of its group
    group       the name or the description of its group
    """

    operation: str
    num_bytes: int | None = None
    group_size: int | None = None
    ranks: tuple[int, ...] | None = None
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWork:
    """One kernel, or one operator of a host that is the device; seconds on the trace's clock.

    launched_s   the moment of the host that belongs to it
    phase        None where the trace does not tell
    """

    start_s: float
    end_s: float
    launched_s: float
    kind: WorkClass
    phase: Phase | None = None
    collective: TracedCollective | None = None

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def computes(self) -> bool:
        return self.kind not in (WorkClass.COLLECTIVES, WorkClass.COPIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step of one rank: from its first work to the first work of the next step."""

    start_s: float
    end_s: float
    work: tuple[TracedWork, ...]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The steps of one rank.

    file, tool    for messages and sources
    date          YYYY-MM-DD of the recording
    fingerprint   of the file's bytes
    device        the device's name as its driver says it; cpu for the host itself
    rank, world_size   None where the trace does not say
    """

    file: str
    tool: str
    date: str
    fingerprint: str
    device: str
    rank: int | None
    world_size: int | None
    steps: tuple[TracedStep, ...]


Interval = tuple[float, float]
MOMENT = Range(0, 10**19)  # nanoseconds of a clock or shorter; no clock is so late


def steps_of(
    work: Iterable[TracedWork], marked: Sequence[Interval], where: str, *, host_is_device: bool
) -> tuple[TracedStep, ...]:
    """Returns the steps of a rank.

    marked   intervals of the steps on the host's clock, empty where nobody marked them: a step then
             ends with its update of the parameters
    Raises ConfigError where neither shows a step.
    """
    in_order = sorted(work, key=lambda each: each.start_s)
    bounds = sorted(marked) or _between_updates(in_order)
    starts = [start for start, _ in bounds]
    by_step: list[list[TracedWork]] = [[] for _ in bounds]
    for each in in_order:
        index = bisect_right(starts, each.launched_s) - 1
        if index >= 0 and each.launched_s <= bounds[index][1]:
            by_step[index].append(each)
    steps = [
        (bound, _with_updates(inside))
        for bound, inside in zip(bounds, by_step, strict=True)
        if any(each.computes for each in inside)
    ]
    if not steps:
        raise ConfigError(
            f"{where}: no step is in it: no ProfilerStep mark and no update of parameters",
            hint="record whole steps, with prof.step() after each",
        )
    if host_is_device:
        return tuple(
            TracedStep(start_s=start, end_s=end, work=tuple(inside))
            for (start, end), inside in steps
        )
    firsts = [
        next(each.start_s for each in inside if each.kind is not WorkClass.COPIES)
        for _, inside in steps
    ]
    (start_s, end_s), last = steps[-1]
    # The host's interval also has the time between two steps.
    end = max(max(each.end_s for each in last), firsts[-1] + (end_s - start_s if marked else 0.0))
    return tuple(
        TracedStep(start_s=start_s, end_s=end_s, work=tuple(inside))
        for start_s, end_s, (_, inside) in zip(firsts, [*firsts[1:], end], steps, strict=True)
    )


def _with_updates(work: Sequence[TracedWork]) -> list[TracedWork]:
    """Returns a step's work, where all after the last backward pass belongs to the update.

    This is the norm and the clipping of gradients, which no profiler marks.
    """
    backward = [each.launched_s for each in work if each.phase is Phase.BACKWARD]
    end_s = max(backward, default=float("inf"))
    return [
        _of_phase(each, Phase.OPTIMIZER)
        if each.phase is Phase.OPTIMIZER
        or (each.phase is Phase.FORWARD and each.launched_s > end_s)
        else each
        for each in work
    ]


def _of_phase(work: TracedWork, phase: Phase) -> TracedWork:
    kind = WorkClass.OPTIMIZER if work.computes else work.kind
    return replace(work, phase=phase, kind=kind)


def _between_updates(work: Sequence[TracedWork]) -> list[Interval]:
    """Returns the intervals that end with the last update before other work.

    The part before the first end is a step only where no other is there, since it may be cut.
    """
    ends: list[float] = []
    updating = False
    for each in work:
        if not each.computes:
            continue
        if each.phase is Phase.OPTIMIZER:
            ends[-1:] = [each.launched_s] if updating else [*ends[-1:], each.launched_s]
        updating = each.phase is Phase.OPTIMIZER
    if not ends:
        return []
    first = min(each.launched_s for each in work)
    if len(ends) == 1:
        return [(first, ends[0])]
    return [(start + 1e-9, end) for start, end in pairwise(ends)]
