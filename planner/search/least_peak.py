"""The least peak of the fullest device among the plans within the slowdown, and its lower bound.

No plan of a layout is faster than its relaxed columns. Where these take too long within a limit,
the layout provably has no plan there. Where only its columns do, there is no proof, and the bound
is lowered to the limit at which the relaxed columns take too long as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.branch_and_bound import BranchOutcome
from parplan.planner.master import MasterChoice
from parplan.planner.search.allowed_steps import AllowedSteps
from parplan.planner.search.memory_descent import Descent, below, halve_in
from parplan.planner.search.one_candidate import fastest_choice, proven_s, relaxed_bound_s
from parplan.planner.search.search_session import SearchSession, SolvedCandidate
from parplan.profiles.errors import OutOfTimeError, SolverError

COARSELY = 0.95  # precision of the least bytes of a layout, which only order the layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastPeak:
    """The choice with the least peak on its fullest device, and how the search ended.

    peak_bytes: its peak
    bound_bytes: a limit within which no plan is in time
    """

    best: SolvedCandidate
    peak_bytes: float
    bound_bytes: float
    finished: bool
    interrupted: bool
    failures: tuple[SolverError, ...]


class _Layouts:
    """Attempts at each layout within `allowed`, and the limits within which none can succeed."""

    def __init__(self, session: SearchSession, allowed: AllowedSteps) -> None:
        self.session, self.allowed = session, allowed
        self.slowest_s = allowed.closed_s
        self.proven_bytes: dict[ParallelLayout, float] = {}

    def attempt(self, layout: ParallelLayout, limit_bytes: float) -> MasterChoice | None:
        """Returns the fastest choice of a layout within a limit, None where none is in time.

        Raises SolverError and Unsolved.
        """
        inner, cut_s = self.session.within(limit_bytes), self.slowest_s
        out = self.is_out(layout, inner)
        relaxed = None if out else inner.relaxed(layout, cut_s)
        if out or relaxed_bound_s(layout, relaxed, cut_s, inner) >= cut_s:
            self.proven_bytes[layout] = max(limit_bytes, self.proven_bytes.get(layout, 0.0))
            return None
        if relaxed is None:
            return None
        choice = fastest_choice(layout, relaxed, cut_s, inner)
        if choice is None or choice.step_s >= cut_s:
            return None
        in_time = self.allowed.step_s(layout, choice) <= self.allowed.slowest_s
        return choice if in_time else None

    def least_bytes(self, layout: ParallelLayout) -> float:
        """Approximate lower bound of the bytes on a device of the layout."""
        limit = self.session.limit_bytes
        low, _ = halve_in(
            0.0,
            limit,
            lambda within: within if self.session.prices.may_fit(layout, within) else None,
            enough=lambda high: COARSELY * high,
        )
        return low

    def bound_bytes(self, layouts: Sequence[ParallelLayout], peak_bytes: float) -> float:
        """Returns a limit below the peak within which provably no layout has a plan in time."""
        bound, left = below(peak_bytes), list(layouts)
        try:
            while left:
                layout = left[-1]
                if self.proven_bytes.get(layout, 0.0) < bound and not self._has_nothing(
                    layout, bound
                ):
                    low = self.proven_bytes.get(layout, 0.0)
                    bound, _ = halve_in(low, bound, partial(self._not_ruled_out, layout))
                left.pop()
        except (KeyboardInterrupt, OutOfTimeError):
            bound = min([bound, *(self.proven_bytes.get(layout, 0.0) for layout in left)])
        return max(0.0, bound)

    def _not_ruled_out(self, layout: ParallelLayout, limit_bytes: float) -> float | None:
        return None if self._has_nothing(layout, limit_bytes) else limit_bytes

    def _has_nothing(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        """True if a layout provably has no plan in time within a limit."""
        self.session.deadline.require_left()
        inner = self.session.within(limit_bytes)
        return (
            self.is_out(layout, inner)
            or proven_s(layout, 2 * self.slowest_s, inner) >= self.slowest_s
        )

    def is_out(self, layout: ParallelLayout, inner: SearchSession) -> bool:
        """True if cheap bounds rule out a plan in time within the limit of session `inner`."""
        prices, limit = inner.prices, inner.limit_bytes
        return not prices.may_fit(layout, limit) or prices.least_s(layout, limit) >= self.slowest_s


def least_peak(
    layouts: Sequence[ParallelLayout],
    first: BranchOutcome[SolvedCandidate],
    session: SearchSession,
    allowed: AllowedSteps,
) -> LeastPeak:
    """Finds the least peak within the slowdown of the fastest plan, which `first` found.

    Ctrl-C and the time limit end it with the best so far.
    """
    fastest = first.solved[0]
    attempts = _Layouts(session, allowed)
    descent = Descent(fastest, attempts.attempt, session.deadline, session.on_progress)
    possible: list[ParallelLayout] = []
    try:
        possible = [layout for layout in layouts if not attempts.is_out(layout, session)]
        if first.interrupted:
            raise KeyboardInterrupt
        descent.run(sorted(possible, key=attempts.least_bytes))
    except KeyboardInterrupt:
        descent.finished, descent.interrupted = False, True
    except OutOfTimeError:
        descent.finished = False
    bound = attempts.bound_bytes(possible, descent.peak_bytes) if descent.finished else 0.0
    return LeastPeak(
        best=descent.best,
        peak_bytes=descent.peak_bytes,
        bound_bytes=bound,
        finished=descent.finished,
        interrupted=descent.interrupted,
        failures=tuple(descent.failures),
    )
