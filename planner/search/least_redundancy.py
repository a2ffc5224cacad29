"""The second pass of the memory objective (EQUATIONS R3).

It finds the least redundant bytes within the slowdown, and among equals the least peak.
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
from parplan.planner.search.memory_descent import Descent
from parplan.planner.search.search_session import INFINITY, SearchSession, SolvedCandidate
from parplan.planner.solver import Unsolved
from parplan.planner.stage_columns.chunk_columns import Columns
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.stage_column import StageColumn

_LEFT_OUT = "some cuts into stages were not tried, and the others are not in time"


class _RedundancyPass:
    """The layouts of one search, with a lower bound of their redundant bytes in `least_bytes`."""

    def __init__(
        self,
        layouts: Sequence[ParallelLayout],
        fastest: SolvedCandidate,
        known: SolvedCandidate,
        session: SearchSession,
    ) -> None:
        self.layouts, self.session = layouts, session
        self.known = as_memory(known)
        self.slowest_s = fastest.value * session.slowdown
        self.least_bytes: dict[ParallelLayout, float] = {}

    def search(self) -> BranchOutcome[SolvedCandidate]:
        """Searches the layouts by their bound, until none can be below the best."""
        session = self.session
        return branch_and_bound(
            self._bounded(),
            self._solve,
            best_of,
            BranchWatch(
                objective=Objective.MEMORY, left_s=session.left_s, on_progress=session.on_progress
            ),
            known=self.known,
        )

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
        options = session.columns(
            layout,
            lambda rank, count: prices.lean_columns(rank, count, session.limit_bytes),
            self.slowest_s,
        )
        covers = prices.covers(layout, self.slowest_s, session.limit_bytes)
        least = self._least(layout, options) if covers else bound
        self.least_bytes[layout] = max(bound, least)
        if least >= cut or (covers and options is None):
            return None
        if options is None:
            raise Unsolved(_LEFT_OUT)
        choice = self._master(layout, options).leanest(
            self.slowest_s, session.options.solver, session.solver_limit_s()
        )
        if choice is None and not covers:
            raise Unsolved(_LEFT_OUT)
        if choice is None:
            self.least_bytes[layout] = INFINITY
            return None
        proven = choice.proven and covers
        if proven:
            self.least_bytes[layout] = choice.redundant_bytes
        return SolvedCandidate(
            layout,
            choice,
            choice.redundant_bytes,
            choice.redundant_bytes if proven else max(bound, least),
        )

    def _as_lean(
        self, layout: ParallelLayout, redundant_bytes: float, session: SearchSession
    ) -> MasterChoice | None:
        """The fastest choice within the session's limit that is in time and no more redundant."""
        if not session.prices.may_fit(layout, session.limit_bytes) or not self._may_be_in_time(
            layout, session
        ):
            return None

        def make(rank: Columns, count: int) -> list[StageColumn]:
            assert isinstance(rank, RankColumns), "the memory objective has no chunks"
            return rank.leanest(count, session.limit_bytes)

        options = session.columns(layout, make, self.slowest_s)
        if options is None or self._least(layout, options) > slackened(redundant_bytes):
            return None
        choice = self._master(layout, options).fastest_of_redundancy(
            redundant_bytes, session.options.solver, session.solver_limit_s()
        )
        return choice if choice and choice.step_s <= self.slowest_s else None

    def _least(
        self, layout: ParallelLayout, options: Sequence[Sequence[StageColumn]] | None
    ) -> float:
        """Lower bound of the columns' redundant bytes, infinite where they take too long."""
        if options is None:
            return INFINITY
        num_layers = self.session.num_blocks
        share = bubble_share(layout, self.session.price_cache)
        least_s = lower_bound_s(layout, options, num_layers, share)
        least = columns_redundancy_bound_bytes(layout, options, num_layers)
        return INFINITY if least_s is None or least is None or least_s > self.slowest_s else least

    def _master(self, layout: ParallelLayout, options: Sequence[Sequence[StageColumn]]) -> Master:
        price_cache = self.session.price_cache
        return Master(
            layout,
            options,
            self.session.num_blocks,
            tied=price_cache.tied,
            share=bubble_share(layout, price_cache),
        )


def then_leanest(
    first: BranchOutcome[SolvedCandidate],
    layouts: Sequence[ParallelLayout],
    session: SearchSession,
    known: SolvedCandidate | None = None,
) -> BranchOutcome[SolvedCandidate]:
    """Runs the second pass of the memory objective.

    known: a choice in time and within the session's limit, by default the fastest of `first`

    It is proven only if the first pass is, whose step the slowdown refers to.
    """
    if first.interrupted:
        return BranchOutcome(
            (as_memory(first.solved[0]),),
            0.0,
            finished=False,
            interrupted=True,
            failures=first.failures,
        )
    fastest = first.solved[0]
    leanest = _RedundancyPass(layouts, fastest, known or fastest, session)
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
