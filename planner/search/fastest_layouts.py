"""The fastest choices of all layouts within one memory limit, by branch and bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.branch_and_bound import (
    WORTH_REPLAYING,
    BranchOutcome,
    BranchWatch,
    best_of,
    branch_and_bound,
    worth_replaying,
)
from parplan.planner.master import MasterChoice
from parplan.planner.objective import Objective
from parplan.planner.placed_blocks import contents_in_reach
from parplan.planner.search.one_candidate import (
    fastest_choice,
    nearly_equal_s,
    relaxed_bound_s,
)
from parplan.planner.search.search_session import INFINITY, SearchSession, SolvedCandidate
from parplan.planner.solver import Unsolved

Outcome = BranchOutcome[SolvedCandidate]
# share above its bound at which an easy choice of a layout that cannot win is good enough
WORTH_SOLVING = 0.01
REPLAYED_OF_LISTS = 5  # layouts that are replayed where columns take long
LOOSE = 2.0  # times the bound of a layout, from which on a cut leaves out few of its columns
MOST_CONTENTS = 2000  # numbers of blocks of all ranks that are worth columns without a first cut


@dataclass(frozen=True, slots=True)
class BoundedCandidates:
    """Layouts that cheap bounds allow in the memory limit, and those with a solved relaxation."""

    possible: tuple[ParallelLayout, ...]
    relaxed: tuple[ParallelLayout, ...]


@dataclass
class _Fastest:
    """The search of some layouts.

    values_s        the fastest choice of each solved layout
    relaxed         layouts whose relaxation is below the cut
    least_of_one_s  the fastest choice with one part a rank, once those with several are searched
    cut_s           the last cut
    near_s          a choice near the bound of its layout, once cuts were found too loose
    most            times the fastest choice up to which others are searched
    """

    session: SearchSession
    values_s: dict[ParallelLayout, float] = field(default_factory=dict)
    relaxed: list[ParallelLayout] = field(default_factory=list)
    least_of_one_s: float = INFINITY
    near_s: float | None = None
    cut_s: float = INFINITY
    most: float = WORTH_REPLAYING

    def least_s(self, layout: ParallelLayout) -> float:
        return self.session.least_s(layout)

    def searched(
        self, layouts: Sequence[ParallelLayout], known: Sequence[SolvedCandidate] = ()
    ) -> Outcome:
        """Solves layouts whose bounds are below the cut, the one with the least bound first."""
        session = self.session
        return branch_and_bound(
            ((self.least_s(layout), layout) for layout in layouts),
            self._solve,
            self._cut_s,
            BranchWatch(
                objective=Objective.THROUGHPUT,
                left_s=session.left_s,
                on_progress=session.on_progress,
                is_capped=lambda: session.deadline.is_capped,
            ),
            incumbents=known,
            closer=self._closer_bounds_s,
        )

    def _cut_s(self, solved: Sequence[SolvedCandidate]) -> float:
        """Returns the seconds from which on a layout is not worth its columns.

        A slower choice of several parts a rank is not worth them.
        """
        cut_s = self.cut_s = min(worth_replaying(solved, self.most), self.least_of_one_s)
        if self.session.prices.any_list and len(solved) >= REPLAYED_OF_LISTS:
            cut_s = self.cut_s = min(cut_s, solved[REPLAYED_OF_LISTS - 1].value)
        return cut_s

    def _closer_bounds_s(self, layout: ParallelLayout) -> Iterator[float]:
        """Yields bounds of a layout, each closer than the one before and slower to find.

        Where columns take long, the last is that of averages. Unequal ranks have it only once there
        is a cut: they may hold any number of blocks.
        """
        session = self.session
        yield from closer_bounds_s(layout, session)
        if not session.prices.any_list or layout.chunked or layout.recomputes_ahead:
            return
        cut_s = self.cut_s
        if layout.equal_ranks or layout.mesh.pp == 1 or cut_s < INFINITY:
            averages = session.relaxed(layout, cut_s, averages=True)
            bound_s = relaxed_bound_s(layout, averages, cut_s, session)
            yield session.raised_s(layout, min(bound_s, cut_s))

    def _solve(
        self, layout: ParallelLayout, _: float, cut_s: float, best_s: float
    ) -> SolvedCandidate | None:
        """Returns the best choice of a layout, None where none is below the cut."""
        prices = self.session.prices
        if layout.recomputes_ahead:
            cut_s = min(cut_s, self.values_s.get(_usual(layout), INFINITY))
        if self.least_s(layout) >= cut_s:
            return None
        known = prices.first_choice(layout, cut_s, self.session)
        if known:
            cut_s = min(cut_s, known.step_s)
            least_s = self.least_s(layout)
            if least_s >= best_s and known.step_s <= least_s * (1 + WORTH_SOLVING):
                return self._solved(layout, known)
        choice = self._relaxed_and_solved(layout, known, cut_s)
        limit = self.session.limit_bytes
        if choice is None and best_s == INFINITY and not prices.covers(layout, cut_s, limit):
            raise Unsolved("some cuts into stages were not tried, and the others do not fit")
        return self._solved(layout, choice) if choice else None

    def _relaxed_and_solved(
        self, layout: ParallelLayout, known: MasterChoice | None, cut_s: float
    ) -> MasterChoice | None:
        """Returns a choice below the cut, or the known one.

        Layouts whose mixes of real numbers of blocks are not below the cut are not solved.
        """
        session, counts = self.session, None
        if session.prices.any_list and not layout.chunked:
            if layout.recomputes_ahead:
                bounds = session.relaxed(layout, cut_s, averages=True)
                bound_s = relaxed_bound_s(layout, bounds, cut_s, session)
                if bounds is None or bound_s >= cut_s:
                    self.session.raised_s(layout, min(bound_s, cut_s))
                    return known
            elif not layout.equal_ranks and layout.mesh.pp > 1:
                cut_s = min(cut_s, nearly_equal_s(layout, session, cut_s))
        elif not layout.equal_ranks and layout.mesh.pp > 1:
            cut_s = min(cut_s, self._closer_cut_s(layout, cut_s))
            averages = session.relaxed(layout, cut_s, averages=True)
            averages_s = relaxed_bound_s(layout, averages, cut_s, session)
            if averages is None or averages_s >= cut_s:
                self.session.raised_s(layout, min(averages_s, cut_s))
                return known
            share = bubble_share(layout, session.price_cache)
            counts = contents_in_reach(layout, averages, session.num_blocks, share, cut_s)
        relaxed = session.relaxed(layout, cut_s, counts=counts)
        relaxed_s = relaxed_bound_s(layout, relaxed, cut_s, session)
        # Columns that take longer than the cut are left out.
        self.session.raised_s(layout, min(relaxed_s, cut_s))
        if relaxed is None or relaxed_s >= cut_s:
            return known
        self.relaxed.append(layout)
        try:
            return fastest_choice(layout, relaxed, cut_s, session) or known
        except Unsolved:
            if known is None:
                raise
        return known

    def _closer_cut_s(self, layout: ParallelLayout, cut_s: float) -> float:
        """Returns the seconds of another choice where a cut leaves a layout too many columns.

        Bounds of shallow pipelines may be far below all their plans. Their columns are then left
        out by the first choice near its own bound, of the deepest pipelines first. Orders of pools
        are replayed up to `WORTH_REPLAYING` above it: their simulated steps differ by as much.
        """
        if cut_s == INFINITY:
            many = layout.mesh.pp * self.session.num_blocks > MOST_CONTENTS
            return nearly_equal_s(layout, self.session) if many else INFINITY
        if self.near_s is None and cut_s > LOOSE * self.least_s(layout):
            self.near_s = INFINITY
            self.near_s = next(filter(None, map(self._near_bound_s, self._deepest())), INFINITY)
        return (self.near_s or INFINITY) * (WORTH_REPLAYING if layout.pools else 1.0)

    def _deepest(self) -> list[ParallelLayout]:
        """Returns the layout with the least bound of each pipeline degree, the deepest first."""
        least: dict[int, ParallelLayout] = {}
        unequal = (
            each
            for each in self.session.prices.space.layouts
            if each.mesh.pp > 1 and not (each.equal_ranks or each.recomputes_ahead)
        )
        for each in sorted(unequal, key=self.least_s):
            least.setdefault(each.mesh.pp, each)
        return [least[pp] for pp in sorted(least, reverse=True)]

    def _near_bound_s(self, layout: ParallelLayout) -> float | None:
        """Returns the seconds of a choice of a layout, None where they are far above its bound."""
        step_s = nearly_equal_s(layout, self.session)
        return step_s if step_s <= LOOSE * self.least_s(layout) else None

    def _solved(self, layout: ParallelLayout, choice: MasterChoice) -> SolvedCandidate | None:
        """Returns the candidate, None where the same without recompute ahead is as fast."""
        solved = SolvedCandidate(layout, choice, choice.step_s, self.least_s(layout))
        if layout.recomputes_ahead and solved.value >= self.values_s.get(_usual(layout), INFINITY):
            return None
        self.values_s[layout] = solved.value
        return solved


def search_fastest(
    layouts: Sequence[ParallelLayout], session: SearchSession, most: float = WORTH_REPLAYING
) -> tuple[Outcome, BoundedCandidates]:
    """Returns the best choices of the layouts, and the layouts that were bounded.

    A schedule that only moves recompute has no plan below 1F1B with the same layers and no
    recompute. It comes after all others: it need not be solved where 1F1B reaches that bound, nor
    replayed where it is not faster. Layouts with several parts a rank come last where their
    columns take long.

    most    times the fastest choice up to which others are searched
    """
    fastest = _Fastest(session, most=most)
    last = {layout for layout in layouts if session.prices.parts_last and layout.virtual_stages > 1}
    ahead = {layout for layout in layouts if layout.recomputes_ahead} - last
    outcome = fastest.searched([each for each in layouts if each not in last | ahead])
    if ahead and not outcome.interrupted:
        if session.prices.recompute is None:  # only a faster one is worth its columns
            fastest.least_of_one_s = best_of(outcome.solved)
        later = fastest.searched([each for each in layouts if each in ahead], outcome.solved)
        outcome = replace(outcome.then(later), earlier=())
    if last and not outcome.interrupted:
        fastest.least_of_one_s = best_of(outcome.solved)
        outcome = outcome.then(
            fastest.searched([each for each in layouts if each in last], outcome.solved)
        )
    bound = min((best_of(outcome.solved), *map(fastest.least_s, layouts)))
    return replace(outcome, bound=bound), BoundedCandidates(tuple(layouts), tuple(fastest.relaxed))


def closer_bounds_s(layout: ParallelLayout, session: SearchSession) -> Iterator[float]:
    """Yields bounds of a layout within the memory limit, before any column is made."""
    prices, limit = session.prices, session.limit_bytes
    if prices.floor_s is not None:
        yield session.raised_s(layout, prices.step_bound_s(layout, limit))
    if not prices.may_fit(layout, limit):
        yield session.raised_s(layout, INFINITY)
        return
    if layout.recomputes_ahead:
        usual_s = session.least_s(_usual(layout))
        for ahead_s in prices.ahead_bounds_s(layout, usual_s):
            yield session.raised_s(layout, ahead_s)
    for closer_s in prices.closer_bounds_s(layout, limit):
        yield session.raised_s(layout, closer_s)


def _usual(layout: ParallelLayout) -> ParallelLayout:
    """Returns the layout with 1F1B."""
    return replace(layout, schedule=Schedule.ONE_F_ONE_B)
