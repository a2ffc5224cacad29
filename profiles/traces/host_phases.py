"""The phase of a moment on a thread of the host, which launches a device's work."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from parplan.profiles.traces.trace_record import Interval, Phase


@dataclass(slots=True)
class HostThread:
    """Intervals of one thread in which it runs a backward pass, or updates parameters."""

    backward: list[Interval] = field(default_factory=list)
    update: list[Interval] = field(default_factory=list)


class HostPhases:
    """The phases of all threads; `known` is false where nothing tells a backward pass.

    backward_threads   threads that run nothing but backward passes
    """

    def __init__(
        self,
        threads: Mapping[Hashable, HostThread],
        backward_threads: Collection[Hashable] = (),
    ) -> None:
        self.known = bool(backward_threads) or any(each.backward for each in threads.values())
        self._backward_threads = backward_threads
        self._marks = {
            name: (
                (Phase.BACKWARD, outermost(thread.backward)),
                (Phase.OPTIMIZER, outermost(thread.update)),
            )
            for name, thread in threads.items()
        }

    def at(self, thread: Hashable, moment: float) -> Phase | None:
        """Returns the phase of a moment; None where the trace does not tell."""
        if thread in self._backward_threads:
            return Phase.BACKWARD
        for phase, intervals in self._marks.get(thread, ()):
            index = bisect_right(intervals, (moment, float("inf"))) - 1
            if index >= 0 and moment <= intervals[index][1]:
                return phase
        return Phase.FORWARD if self.known else None


def outermost(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the intervals that lie in no other one, in their order."""
    outer: list[Interval] = []
    for start, end in sorted(intervals, key=lambda each: (each[0], -each[1])):
        if not outer or start >= outer[-1][1]:
            outer.append((start, end))
    return outer
