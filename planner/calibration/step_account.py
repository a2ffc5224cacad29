"""The time of a traced step by cause: every moment belongs to exactly one.

A moment with a kernel that computes belongs to the phase of that kernel. One without belongs to the
collective that runs, which is then exposed; else to a copy between device and host; else the device
waits for the host, and the moment belongs to the phase of the next kernel. Prices have the same
rule: a layer takes what its kernels take, or the host if that is slower.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from parplan.profiles.traces.trace_record import (
    Phase,
    TracedCollective,
    TracedStep,
    TracedWork,
    WorkClass,
)

UNTOLD = "passes"  # forward and backward passes that the trace does not tell apart
BETWEEN = "between steps"
COPIES = "copies"


@dataclass(slots=True)
class StepAccount:
    """Seconds of one step of one rank.

    by_cause      forward, backward, optimizer (or passes) with the host's waits; tensor, data and
                  pipeline where exposed; copies; between steps. They add up to the step
    host_s        the part of them in which the device waits for the host
    by_class      busy seconds by class of kernels, also where several run at once
    collectives   by operation, cause and group size
    """

    step_s: float
    by_cause: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    host_s: float = 0.0
    by_class: defaultdict[WorkClass, float] = field(default_factory=lambda: defaultdict(float))
    collectives: dict[tuple[str, str, int | None], CollectiveSum] = field(default_factory=dict)


@dataclass(slots=True)
class CollectiveSum:
    """The collectives of one kind in one step.

    num_bytes   None where a call does not say its bytes
    """

    calls: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    num_bytes: int | None = 0


def account_of(step: TracedStep, cause: Callable[[TracedCollective], str]) -> StepAccount:
    """Returns the account of a step.

    cause   returns the cause of a collective
    """
    account = StepAccount(step_s=step.seconds)
    computing = [work for work in step.work if work.computes]
    moving = [work for work in step.work if work.kind is WorkClass.COLLECTIVES]
    copying = [work for work in step.work if work.kind is WorkClass.COPIES]
    for work in step.work:
        account.by_class[work.kind] += work.seconds
    for work in moving:
        _count(work, cause, account)
    gaps: list[_Gap] = []
    for work, seconds in _covered([_Gap(step.start_s, step.end_s, None)], computing, gaps):
        account.by_cause[_phase_name(work.phase)] += seconds
    waits: list[_Gap] = []
    for work, seconds in _covered(gaps, moving, waits):
        assert work.collective is not None, "a collective says its operation"
        account.by_cause[cause(work.collective)] += seconds
        account.collectives[_key(work.collective, cause)].exposed_s += seconds
    idle: list[_Gap] = []
    for _, seconds in _covered(waits, copying, idle):
        account.by_cause[COPIES] += seconds
    for gap in idle:
        account.by_cause[_phase_name(gap.before.phase) if gap.before else BETWEEN] += gap.seconds
        account.host_s += gap.seconds
    return account


@dataclass(frozen=True, slots=True)
class _Gap:
    """An interval without work; `before` is the computing work that ends it."""

    start_s: float
    end_s: float
    before: TracedWork | None

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def _covered(
    gaps: Sequence[_Gap], works: Sequence[TracedWork], left: list[_Gap]
) -> Iterator[tuple[TracedWork, float]]:
    """Yields the seconds that each work covers of `gaps`, once each; what stays is added to `left`.

    The works are in the order of their starts, of which the first that runs gets a moment.
    """
    index, latest = 0, None
    for gap in gaps:
        now = gap.start_s
        if latest is not None and latest.end_s > now:
            end_s = min(latest.end_s, gap.end_s)
            yield latest, end_s - now
            now = end_s
        while index < len(works) and works[index].start_s < gap.end_s:
            work = works[index]
            index += 1
            if latest is None or work.end_s > latest.end_s:
                latest = work
            if work.end_s <= now:
                continue
            start_s, end_s = max(work.start_s, now), min(work.end_s, gap.end_s)
            if start_s > now:
                left.append(_Gap(now, start_s, gap.before or _if_computing(work)))
            yield work, end_s - start_s
            now = end_s
        if now < gap.end_s:
            left.append(_Gap(now, gap.end_s, gap.before))


def _if_computing(work: TracedWork) -> TracedWork | None:
    return work if work.computes else None


def _phase_name(phase: Phase | None) -> str:
    return UNTOLD if phase is None else phase.value


def _key(
    collective: TracedCollective, cause: Callable[[TracedCollective], str]
) -> tuple[str, str, int | None]:
    return collective.operation, cause(collective), collective.group_size


def _count(
    work: TracedWork, cause: Callable[[TracedCollective], str], account: StepAccount
) -> None:
    assert work.collective is not None, "a collective says its operation"
    total = account.collectives.setdefault(_key(work.collective, cause), CollectiveSum())
    total.calls += 1
    total.busy_s += work.seconds
    if total.num_bytes is not None:
        num_bytes = work.collective.num_bytes
        total.num_bytes = None if num_bytes is None else total.num_bytes + num_bytes
