"""The deadline of a command: one moment, set where its options are read and handed down.

A search that has a plan ends at the limit. A search without a plan goes on for a moment, because a
late plan is better than none. After that moment every step raises OutOfTimeError, and a caller that
has an answer returns it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import numpy.typing as npt

from parplan.profiles.errors import ConfigError, OutOfTimeError
from parplan.profiles.units import GIB

GRACE_S = 1.5  # time after the limit for a first plan
MANY_GPUS = 2048  # from more GPUs on, work beside a search has a limit without being given one
LATE_SHARE = 1.25  # of the memory cap, at which a search without a plan ends


@dataclass(slots=True)
class HeldBytes:
    """Bytes that the tables of one search hold, beside a cap.

    They are those of its arrays, so that they depend on the request alone, and a search that the
    cap ends has the same answer on every machine.
    """

    most_bytes: int
    held_bytes: int = 0

    @property
    def is_over(self) -> bool:
        """Returns whether the search stops with the best plan that it has."""
        return self.held_bytes > self.most_bytes

    @property
    def has_ended(self) -> bool:
        """Returns whether a search without a plan ends as well."""
        return self.held_bytes > LATE_SHARE * self.most_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Moments of `clock`, in seconds, and the memory cap of a search.

    stops_s   a search that has a plan looks for no better one
    ends_s    all steps end
    held      the bytes of the search's tables, None without a cap
    """

    stops_s: float = inf
    ends_s: float = inf
    clock: Callable[[], float] = time.monotonic
    held: HeldBytes | None = None

    @property
    def left_s(self) -> float:
        """Seconds until a search with a plan stops.

        They are negative after that moment or above the memory cap, and infinite without a limit.
        """
        if self.is_capped:
            return -inf
        return self.stops_s - self.clock()

    @property
    def is_over(self) -> bool:
        """Returns whether steps stop that already have an answer."""
        return self.left_s <= 0

    @property
    def is_capped(self) -> bool:
        """Returns whether the memory cap stops a search with a plan."""
        return self.held is not None and self.held.is_over

    @property
    def has_ended(self) -> bool:
        """Returns whether all steps end."""
        return self.clock() >= self.ends_s

    def capped(self, most_bytes: int) -> Deadline:
        """Returns this deadline for one search, whose tables may hold `most_bytes`."""
        return replace(self, held=HeldBytes(most_bytes))

    def count(self, *arrays: npt.NDArray[Any]) -> None:
        """Counts arrays that a table of the search keeps."""
        if self.held is not None:
            self.held.held_bytes += sum(each.nbytes for each in arrays)

    def check(self) -> None:
        """Raises OutOfTimeError at the end; every long step calls it before its next part."""
        if self.held is not None and self.held.has_ended:
            raise OutOfTimeError(
                f"the tables of the search hold more than {self.held.most_bytes / GIB:g} GiB, and "
                "there is no plan",
                hint="give it a larger --memory-cap, or pin more",
            )
        if self.has_ended:
            raise OutOfTimeError(
                "the time limit was over before there was an answer",
                hint="give it a longer --time-limit, or pin more",
            )

    def require_left(self) -> None:
        """Raises OutOfTimeError once steps that only improve an answer must stop."""
        if self.is_over:
            raise OutOfTimeError(
                "the time limit was over before there was a better answer",
                hint="give it a longer --time-limit",
            )

    def solver_limit_s(self, least_s: float, most_s: float) -> float:
        """Seconds that one solve may take, at most `most_s`.

        They are the time left, or `least_s` where that is more and before the end.
        """
        now_s = self.clock()
        return min(max(self.stops_s - now_s, min(least_s, self.ends_s - now_s), 0.0), most_s)

    def within(self, seconds: float) -> Deadline:
        """Returns a deadline at most `seconds` from now."""
        stops_s = self.clock() + seconds
        if stops_s >= self.stops_s:
            return self
        return replace(self, stops_s=stops_s, ends_s=min(self.ends_s, stops_s + GRACE_S))

    def share(self, count: int) -> Deadline:
        """Returns an equal share of the time left for one of `count` tasks that are still to do."""
        return self if self.stops_s == inf else self.within(max(0.0, self.left_s) / count)

    def first_plan(self) -> Deadline:
        """Returns the deadline of a search that ends with its first plan."""
        return replace(self, stops_s=-inf)


NEVER = Deadline()
T = TypeVar("T")


def in_time(items: Iterable[T], deadline: Deadline) -> Iterator[T]:
    """Yields the items, each before the end. Raises OutOfTimeError."""
    for item in items:
        deadline.check()
        yield item


def cpu_s() -> float:
    """CPU-seconds of this process and of the processes, such as solvers, that it has waited for."""
    import resource  # not on every system

    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def cpu_deadline(ends_s: float) -> Deadline:
    """Returns the deadline at some CPU-seconds of `cpu_s`."""
    return Deadline(stops_s=ends_s, ends_s=ends_s, clock=cpu_s)


def deadline_after(seconds: float | None, clock: Callable[[], float] = time.monotonic) -> Deadline:
    """Returns the deadline of `--time-limit`, NEVER without one. Raises ConfigError."""
    if seconds is None:
        return NEVER
    if not seconds > 0:
        raise ConfigError(
            f"--time-limit is {seconds}, it must be positive",
            hint="say the seconds: --time-limit 30",
        )
    stops_s = clock() + seconds
    return Deadline(stops_s=stops_s, ends_s=stops_s + GRACE_S, clock=clock)
