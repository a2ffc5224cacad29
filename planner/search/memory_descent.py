"""Lowers the peak of the fullest device, one memory limit after the other, until nothing fits.

A limit within which a layout has no answer also rules it out at lower limits. So each layout is
first tried just below the best peak so far, and the limit is bisected only where that has an
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.solver_faults import GaveUp, Unanswered
from parplan.planner.deadline import Deadline
from parplan.planner.master import MasterChoice
from parplan.planner.objective import Objective
from parplan.planner.request import OnProgress, Progress
from parplan.planner.search.search_session import SolvedCandidate
from parplan.profiles.errors import OutOfTimeError, SolverError
from parplan.profiles.units import MIB

TOLD_APART = 0.001  # relative precision of peaks, which is 1 MiB at least

# Takes a layout and the bytes that a plan may fill on a device.
Attempt = Callable[[ParallelLayout, float], MasterChoice | None]


def peak_of_choice(choice: MasterChoice) -> float:
    """Bytes of the fullest device of a choice."""
    return max(column.memory_bytes for column in choice.columns)


def below(peak_bytes: float) -> float:
    """The largest limit whose plans count as fuller by less than `peak_bytes`."""
    return peak_bytes - max(MIB, TOLD_APART * peak_bytes)


def halve_in(
    low_bytes: float,
    high_bytes: float,
    probe: Callable[[float], float | None],
    guesses: Iterable[float] = (),
    *,
    enough: Callable[[float], float] = below,
) -> tuple[float, float]:
    """The largest limit at which `probe` has no answer, and the least peak that it returned.

    Bisects from `low_bytes` and `high_bytes`.

    probe: returns the peak within a limit, or None
    guesses: limits that are tried first
    enough: for the least peak so far, the value that the lower limit must reach
    """
    first = list(guesses)
    while low_bytes < enough(high_bytes):
        limit = first.pop(0) if first else (low_bytes + high_bytes) // 2
        if not low_bytes < limit < high_bytes:
            continue
        peak_bytes = probe(limit)
        if peak_bytes is None:
            low_bytes = limit
        else:
            high_bytes = min(peak_bytes, limit)
    return low_bytes, high_bytes


class Descent:
    """The choice with the least peak so far, from `start` on, and the state of its proof.

    finished: True while no layout is left out; interrupted: True once Ctrl-C came
    """

    def __init__(
        self,
        start: SolvedCandidate,
        attempt: Attempt,
        deadline: Deadline,
        on_progress: OnProgress | None,
    ) -> None:
        self.best, self.attempt = start, attempt
        self.deadline, self.on_progress = deadline, on_progress
        self.finished, self.interrupted = True, False
        self.failures: Sequence[SolverError] = []

    @property
    def peak_bytes(self) -> float:
        """Peak bytes of the best so far."""
        return peak_of_choice(self.best.choice)

    def run(self, layouts: Sequence[ParallelLayout]) -> None:
        """Tries one layout after the other.

        Ctrl-C, the time limit and a broken solver end it with the best so far.
        """
        unanswered = Unanswered()
        try:
            for done, layout in enumerate(layouts, 1):
                unanswered.attempt(lambda layout=layout: self._lower(layout), 0.0)  # type: ignore[misc]
                if self.on_progress:
                    self.on_progress(
                        Progress(
                            objective=Objective.PEAK,
                            done=done,
                            total=len(layouts),
                            incumbent=self.peak_bytes,
                            bound=None,
                        )
                    )
        except KeyboardInterrupt:
            self.finished, self.interrupted = False, True
        except (OutOfTimeError, GaveUp):
            self.finished = False
        self.failures = unanswered.failures
        self.finished = self.finished and not unanswered.bounds

    def _lower(self, layout: ParallelLayout) -> SolvedCandidate | None:
        before = self.best

        def probe(limit_bytes: float) -> float | None:
            self.deadline.require_left()
            choice = self.attempt(layout, limit_bytes)
            if choice is None:
                return None
            self.best = SolvedCandidate(layout, choice, choice.step_s, 0.0)
            return self.peak_bytes

        halve_in(0.0, self.peak_bytes, probe, (below(self.peak_bytes),))
        return None if self.best is before else self.best
