"""The least peak of the fullest device among the plans within the slowdown, and what is proven of
it.

A layout has no plan within a limit where its relaxed columns, which no plan is below, take too
long: that is proven. Where they do not, but its columns do, it is only not found, and the bound is
lowered to the limit where the relaxed columns take too long as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.branch_and_bound import BranchOutcome
from parplan.planner.master import MasterChoice
from parplan.planner.search.memory_descent import Descent, below, halve_in
from parplan.planner.search.one_candidate import fastest_choice, proven_s, relaxed_bound_s
from parplan.planner.search.search_session import SearchSession, SolvedCandidate
from parplan.profiles.errors import OutOfTimeError, SolverError

# to which share the bytes that a layout needs at least are found, which only orders the layouts
COARSELY = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastPeak:
    """The choice whose fullest device holds least, its peak, a limit within which nothing is as
    fast, and how the search ended.
    """

    best: SolvedCandidate
    peak_bytes: float
    bound_bytes: float
    finished: bool
    interrupted: bool
    failures: tuple[SolverError, ...]


class _Layouts:
    """What each layout has within a limit in `slowest_s`, and within which limit each is proven to
    have nothing.
    """

    def __init__(self, session: SearchSession, slowest_s: float) -> None:
        self.session, self.slowest_s = session, slowest_s
        self.proven_bytes: dict[ParallelLayout, float] = {}

    def attempt(self, layout: ParallelLayout, limit_bytes: float) -> MasterChoice | None:
        """The fastest choice of a layout within a limit, None where none is in time. Raises
        SolverError and Unsolved.
        """
        inner, cut_s = self.session.within(limit_bytes), self.slowest_s
        relaxed = None if self.is_out(layout, inner) else inner.relaxed(layout, cut_s)
        if relaxed is None or relaxed_bound_s(layout, relaxed, inner) >= cut_s:
            self.proven_bytes[layout] = max(limit_bytes, self.proven_bytes.get(layout, 0.0))
            return None
        choice = fastest_choice(layout, relaxed, cut_s, inner)
        return choice if choice and choice.step_s < cut_s else None

    def least_bytes(self, layout: ParallelLayout) -> float:
        """About what a device of the layout holds at least."""
        limit = self.session.limit_bytes
        low, _ = halve_in(
            0.0,
            limit,
            lambda within: within if self.session.prices.may_fit(layout, within) else None,
            enough=lambda high: COARSELY * high,
        )
        return low

    def bound_bytes(self, layouts: Sequence[ParallelLayout], peak_bytes: float) -> float:
        """A limit within which no layout has a plan in time: below the peak, and as far down as the
        proof needs.
        """
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
        """Returns the limit where a layout may have a plan in time within it, else None."""
        return None if self._has_nothing(layout, limit_bytes) else limit_bytes

    def _has_nothing(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        """Whether it is proven that a layout has no plan in time within a limit."""
        self.session.deadline.require_left()
        inner = self.session.within(limit_bytes)
        return (
            self.is_out(layout, inner)
            or proven_s(layout, 2 * self.slowest_s, inner) >= self.slowest_s
        )

    def is_out(self, layout: ParallelLayout, inner: SearchSession) -> bool:
        """Whether cheap bounds say that a layout has no plan in time within the limit of a
        session.
        """
        prices, limit = inner.prices, inner.limit_bytes
        return not prices.may_fit(layout, limit) or prices.least_s(layout, limit) >= self.slowest_s


def least_peak(
    layouts: Sequence[ParallelLayout], first: BranchOutcome[SolvedCandidate], session: SearchSession
) -> LeastPeak:
    """The least peak within the slowdown of the fastest, which `first` found; Ctrl-C and the end of
    the time keep the best so far.
    """
    fastest = first.solved[0]
    asked = _Layouts(session, fastest.value * session.slowdown)
    descent = Descent(fastest, asked.attempt, session.deadline, session.on_progress)
    possible: list[ParallelLayout] = []
    try:
        possible = [layout for layout in layouts if not asked.is_out(layout, session)]
        if first.interrupted:
            raise KeyboardInterrupt
        descent.run(sorted(possible, key=asked.least_bytes))
    except KeyboardInterrupt:
        descent.finished, descent.interrupted = False, True
    except OutOfTimeError:
        descent.finished = False
    bound = asked.bound_bytes(possible, descent.peak_bytes) if descent.finished else 0.0
    return LeastPeak(
        best=descent.best,
        peak_bytes=descent.peak_bytes,
        bound_bytes=bound,
        finished=descent.finished,
        interrupted=descent.interrupted,
        failures=tuple(descent.failures),
    )
