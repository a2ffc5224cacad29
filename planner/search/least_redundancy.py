"""The second pass of the memory objective (EQUATIONS R3), in either order.

Time first: the least redundant bytes within the slowdown, and among equals the least peak. Memory
first: the least redundant bytes at any step time, then the fastest plan with at most a share more.
Where the simulated step of a choice is too long, the layout is solved again within a lower limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.branch_and_bound import (
    BranchOutcome,
    BranchWatch,
    best_of,
    branch_and_bound,
)
from parplan.planner.master import Master, MasterChoice, lower_bound_s, slackened
from parplan.planner.master import redundancy_bound_bytes as columns_redundancy_bound_bytes
from parplan.planner.objective import Objective
from parplan.planner.search.allowed_steps import AllowedSteps
from parplan.planner.search.memory_descent import Descent
from parplan.planner.search.search_results import one_copy_bytes
from parplan.planner.search.search_session import (
    INFINITY,
    ROUNDING,
    SearchSession,
    SolvedCandidate,
)
from parplan.planner.solver import Unsolved
from parplan.planner.stage_columns.chunk_columns import Columns
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.embedding_columns import AnyEnds
from parplan.planner.stage_columns.stage_column import StageColumn

TRIES = 6  # choices of a layout until one is in time when it is simulated
_LEFT_OUT = "some cuts into stages were not tried, and the others are not in time"


class _Tries:
    """The choices of one layout within falling limits of the closed form.

    slowest_s    limit of simulated steps
    limit_s      limit of the closed form for the next choice
    """

    def __init__(self, slowest_s: float, limit_s: float) -> None:
        self.slowest_s, self.limit_s = slowest_s, limit_s
        self._ratio = INFINITY
        self._least: list[tuple[float, float]] = []  # by limit, the least redundant bytes

    def in_time(self, closed_s: float, step_s: float, least_bytes: float) -> bool:
        """Returns whether a choice is in time, else lowers the limit below it."""
        self._least.append((self.limit_s, least_bytes))
        self._ratio = min(self._ratio, step_s / closed_s)
        self.limit_s = (1 - ROUNDING) * closed_s * min(1.0, self.slowest_s / step_s)
        return step_s <= self.slowest_s

    @property
    def least_bytes(self) -> float:
        """Redundant bytes that no plan in time is below.

        No simulated step is taken to be below its closed form by more than those of the choices,
        which is measured, not proven.
        """
        reached_s = (1 - ROUNDING) * self.slowest_s / self._ratio
        first = self._least[0][1]
        return max([first, *(least for limit_s, least in self._least if limit_s >= reached_s)])


class _RedundancyPass:
    """The layouts of one search, with a lower bound of their redundant bytes in `least_bytes`."""

    def __init__(
        self,
        layouts: Sequence[ParallelLayout],
        known: SolvedCandidate,
        allowed: AllowedSteps,
        session: SearchSession,
    ) -> None:
        self.layouts, self.session = layouts, session
        self.known, self.allowed = as_memory(known), allowed
        self.slowest_s = allowed.closed_s
        self.least_bytes: dict[ParallelLayout, float] = {}
        self._dropped: list[float] = []

    def search(self) -> BranchOutcome[SolvedCandidate]:
        """Searches the layouts by their bound, until none can be below the best."""
        session = self.session
        outcome = branch_and_bound(
            self._bounded(),
            self._solve,
            best_of,
            BranchWatch(
                objective=Objective.MEMORY, left_s=session.left_s, on_progress=session.on_progress
            ),
            known=self.known,
            floor=-one_copy_bytes(session.prices),
        )
        return replace(outcome, bound=min(outcome.bound, *self._dropped, INFINITY))

    def _bounded(self) -> Iterator[tuple[float, ParallelLayout]]:
        """Yields the layouts that may be in time, each with its bound. Raises OutOfTimeError."""
        session = self.session
        for layout in self.layouts:
            if session.prices.may_fit(layout, session.limit_bytes) and self._may_be_in_time(
                layout, session
            ):
                self.least_bytes[layout] = self._bound_bytes(layout)
                if self.least_bytes[layout] < INFINITY:
                    yield self.least_bytes[layout], layout

    def _bound_bytes(self, layout: ParallelLayout) -> float:
        """Lower bound of the redundant bytes in time, infinite where no plan is in time."""
        return self.session.prices.least_redundant_bytes(
            layout, self.slowest_s, self.session.limit_bytes
        )

    def lowered(self, outcome: BranchOutcome[SolvedCandidate]) -> BranchOutcome[SolvedCandidate]:
        """Returns the outcome with the least peak among the equally redundant choices first."""
        best, most_bytes = outcome.solved[0], slackened(outcome.solved[0].value)
        ties = [
            layout
            for layout, least in self.least_bytes.items()
            if least <= most_bytes and layout != best.layout
        ]
        ties.sort(key=lambda layout: self.least_bytes[layout])
        descent = Descent(
            best,
            lambda layout, limit_bytes: self._as_lean(
                layout, best.value, self.session.within(limit_bytes)
            ),
            self.session.deadline,
            self.session.on_progress,
        )
        descent.run([best.layout, *ties])
        lowest = replace(descent.best, value=best.value, bound=best.bound)
        rest = tuple(
            solved for solved in outcome.solved if solved.layout not in (lowest.layout, best.layout)
        )
        return replace(
            outcome,
            solved=(lowest, *rest),
            finished=outcome.finished and descent.finished,
            interrupted=descent.interrupted,
            failures=(*outcome.failures, *descent.failures),
        )

    def _may_be_in_time(self, layout: ParallelLayout, session: SearchSession) -> bool:
        return session.prices.least_s(layout, session.limit_bytes) <= self.slowest_s

    def _solve(
        self, layout: ParallelLayout, bound: float, cut: float, _: float
    ) -> SolvedCandidate | None:
        session, prices = self.session, self.session.prices
        options = _lean_columns(layout, session, self.slowest_s)
        covers = prices.covers(layout, self.slowest_s, session.limit_bytes)
        least = self._least_in_time(layout, options, session) if covers else bound
        self.least_bytes[layout] = max(bound, least)
        if least >= cut or (covers and options is None):
            return None
        if options is None:
            raise Unsolved(_LEFT_OUT)
        tries = _Tries(self.allowed.slowest_s, self.slowest_s)
        for _ in range(TRIES):
            choice = _master(layout, options, session).leanest(
                tries.limit_s, session.options.solver, session.solver_limit_s()
            )
            if choice is None:
                break
            proven = choice.redundant_bytes if choice.proven and covers else max(bound, least)
            if tries.in_time(choice.step_s, self.allowed.step_s(layout, choice), proven):
                self.least_bytes[layout] = tries.least_bytes
                return SolvedCandidate(layout, choice, choice.redundant_bytes, tries.least_bytes)
        else:
            self._dropped.append(tries.least_bytes)
        if choice is None and not covers:
            raise Unsolved(_LEFT_OUT)
        self.least_bytes[layout] = INFINITY
        return None

    def _as_lean(
        self, layout: ParallelLayout, redundant_bytes: float, session: SearchSession
    ) -> MasterChoice | None:
        """The fastest choice within the session's limit that is in time and no more redundant."""
        if not session.prices.may_fit(layout, session.limit_bytes) or not self._may_be_in_time(
            layout, session
        ):
            return None

        def make(rank: Columns, count: int) -> list[StageColumn]:
            assert isinstance(rank, RankColumns | AnyEnds), "the memory objective has no chunks"
            return rank.leanest(count, session.limit_bytes)

        options = session.columns(layout, make, self.slowest_s)
        least = self._least_in_time(layout, options, session)
        if options is None or least > slackened(redundant_bytes):
            return None
        choice = _master(layout, options, session).fastest_of_redundancy(
            redundant_bytes, session.options.solver, session.solver_limit_s()
        )
        if choice is None or choice.step_s > self.slowest_s:
            return None
        in_time = self.allowed.step_s(layout, choice) <= self.allowed.slowest_s
        return choice if in_time else None

    def _least_in_time(
        self,
        layout: ParallelLayout,
        options: Sequence[Sequence[StageColumn]] | None,
        session: SearchSession,
    ) -> float:
        """Lower bound of the columns' redundant bytes, infinite where they take too long."""
        least_s, least = _bounds(layout, options, session)
        return INFINITY if least_s > self.slowest_s else least


def _lean_columns(
    layout: ParallelLayout, session: SearchSession, slowest_s: float
) -> list[list[StageColumn]] | None:
    """Returns the columns of a layout in time, None where a rank has none."""
    return session.columns(
        layout,
        lambda rank, count: session.prices.lean_columns(rank, count, session.limit_bytes),
        slowest_s,
    )


def _bounds(
    layout: ParallelLayout,
    options: Sequence[Sequence[StageColumn]] | None,
    session: SearchSession,
) -> tuple[float, float]:
    """Lower bounds of the columns' seconds and redundant bytes, infinite where nothing fits."""
    if options is None:
        return INFINITY, INFINITY
    share = bubble_share(layout, session.price_cache)
    least_s = lower_bound_s(layout, options, session.num_blocks, share)
    least = columns_redundancy_bound_bytes(layout, options, session.num_blocks)
    return (INFINITY, INFINITY) if least_s is None or least is None else (least_s, least)


def _master(
    layout: ParallelLayout, options: Sequence[Sequence[StageColumn]], session: SearchSession
) -> Master:
    return Master(
        layout,
        options,
        session.num_blocks,
        tied=session.price_cache.tied,
        share=bubble_share(layout, session.price_cache),
    )


def then_leanest(
    first: BranchOutcome[SolvedCandidate],
    layouts: Sequence[ParallelLayout],
    session: SearchSession,
    allowed: AllowedSteps,
    known: SolvedCandidate | None = None,
) -> BranchOutcome[SolvedCandidate]:
    """Runs the second pass of the memory objective within the `allowed` steps.

    known: a choice in time and within the session's limit, by default the fastest of `first`

    It is proven only if the first pass is, whose step the slowdown refers to.
    """
    if first.interrupted:
        return BranchOutcome(
            (as_memory(first.solved[0]),),
            -one_copy_bytes(session.prices),
            finished=False,
            interrupted=True,
            failures=first.failures,
        )
    fastest = first.solved[0]
    leanest = _RedundancyPass(layouts, known or fastest, allowed, session)
    second = leanest.search()
    if not second.interrupted:
        second = leanest.lowered(second)
    return replace(
        second,
        finished=first.finished and second.finished,
        failures=first.failures + second.failures,
    )


def as_memory(fastest: SolvedCandidate) -> SolvedCandidate:
    """The fastest plan as an answer to the memory objective, with nothing proven about it."""
    return SolvedCandidate(fastest.layout, fastest.choice, fastest.choice.redundant_bytes, 0.0)


def then_fastest(
    least: BranchOutcome[SolvedCandidate],
    layouts: Sequence[ParallelLayout],
    session: SearchSession,
    slack: float,
) -> BranchOutcome[SolvedCandidate]:
    """Returns the fastest choices with at most `slack` more redundant bytes than the leanest.

    least    the result of `then_leanest` at any step time; its first choice is the last resort
    """
    leanest = least.solved[0]
    most_bytes = leanest.value + slack * abs(leanest.value)
    step_s = leanest.choice.step_s
    known = replace(leanest, value=step_s, bound=step_s)
    prices, limit = session.prices, session.limit_bytes

    def solve(
        layout: ParallelLayout, bound: float, cut_s: float, _: float
    ) -> SolvedCandidate | None:
        if prices.least_redundant_bytes(layout, cut_s, limit) > slackened(most_bytes):
            return None
        options = _lean_columns(layout, session, cut_s)
        least_s, least_bytes = _bounds(layout, options, session)
        covers = prices.covers(layout, cut_s, limit)
        if options is None or least_s >= cut_s or least_bytes > slackened(most_bytes):
            if covers:
                return None
            raise Unsolved(_LEFT_OUT)
        choice = _master(layout, options, session).fastest_of_redundancy(
            most_bytes, session.options.solver, session.solver_limit_s()
        )
        if choice is None or choice.step_s >= cut_s:
            return None
        proven = choice.proven and covers
        return SolvedCandidate(layout, choice, choice.step_s, choice.step_s if proven else bound)

    outcome = branch_and_bound(
        ((prices.least_s(each, limit), each) for each in layouts if prices.may_fit(each, limit)),
        solve,
        best_of,
        BranchWatch(
            objective=Objective.THROUGHPUT, left_s=session.left_s, on_progress=session.on_progress
        ),
        incumbents=(known,),
    )
    return replace(
        outcome,
        finished=least.finished and outcome.finished,
        failures=least.failures + outcome.failures,
    )
