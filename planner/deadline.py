"""When a command must be done: one moment, made where its options are read and handed down to all
that it does.

A search that has a plan ends at the limit. One that has none yet goes on for a moment, since a plan
late is better than none; at the end of that every step raises OutOfTimeError, and whoever has an
answer by then gives that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from parplan.profiles.errors import ConfigError, OutOfTimeError

GRACE_S = 1.5  # after the limit, for a first plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Moments of `clock`, in seconds.

    stops_s: when a search that has a plan looks for no better one; ends_s: when all steps end
    """

    stops_s: float = inf
    ends_s: float = inf
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        """Seconds until a search with a plan stops, negative after that, infinite without a
        limit.
        """
        return self.stops_s - self.clock()

    @property
    def is_over(self) -> bool:
        """Whether what has an answer stops with it."""
        return self.left_s <= 0

    @property
    def has_ended(self) -> bool:
        """Whether all steps end."""
        return self.clock() >= self.ends_s

    def check(self) -> None:
        """Raises OutOfTimeError at the end. Every step that may take long asks this before the next
        part of it.
        """
        if self.has_ended:
            raise OutOfTimeError(
                "the time limit was over before there was an answer",
                hint="give it a longer --time-limit, or pin more",
            )

    def require_left(self) -> None:
        """Raises OutOfTimeError where whatever has an answer stops with it: for steps that only
        make an answer better.
        """
        if self.is_over:
            raise OutOfTimeError(
                "the time limit was over before there was a better answer",
                hint="give it a longer --time-limit",
            )

    def solver_limit_s(self, least_s: float, most_s: float) -> float:
        """What one solve may take: the time left, at least `least_s` as long as that is before the
        end, and at most `most_s`.
        """
        now_s = self.clock()
        return min(max(self.stops_s - now_s, min(least_s, self.ends_s - now_s), 0.0), most_s)

    def within(self, seconds: float) -> Deadline:
        """This one, or `seconds` from now where that is earlier."""
        stops_s = self.clock() + seconds
        return (
            self
            if stops_s >= self.stops_s
            else replace(self, stops_s=stops_s, ends_s=min(self.ends_s, stops_s + GRACE_S))
        )

    def share(self, count: int) -> Deadline:
        """For one of `count` things that are still to do: as much of the time left as for each of
        the others.
        """
        return self if self.stops_s == inf else self.within(max(0.0, self.left_s) / count)

    def first_plan(self) -> Deadline:
        """For a search of which any plan will do."""
        return replace(self, stops_s=-inf)


NEVER = Deadline()
T = TypeVar("T")


def in_time(things: Iterable[T], deadline: Deadline) -> Iterator[T]:
    """The things, each before the end. Raises OutOfTimeError."""
    for thing in things:
        deadline.check()
        yield thing


def deadline_after(seconds: float | None, clock: Callable[[], float] = time.monotonic) -> Deadline:
    """The deadline that `--time-limit` sets; without it there is none. Raises ConfigError."""
    if seconds is None:
        return NEVER
    if not seconds > 0:
        raise ConfigError(
            f"--time-limit is {seconds}, it must be positive",
            hint="say the seconds: --time-limit 30",
        )
    stops_s = clock() + seconds
    return Deadline(stops_s=stops_s, ends_s=stops_s + GRACE_S, clock=clock)
