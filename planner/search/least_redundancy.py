"""The second pass of the memory objective (EQUATIONS R3): least redundant bytes within the slowdown, and of equals the least peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import Frame
from parplan.planner.candidates.branch_and_bound import Outcome, best_of, branch
from parplan.planner.candidates.lower_bounds import redundancy_bound_bytes
from parplan.planner.master import Choice, Master, lower_bound_s, slackened
from parplan.planner.master import redundancy_bound_bytes as columns_redundancy_bound_bytes
from parplan.planner.plan.prediction import Objective
from parplan.planner.search.memory_descent import Descent
from parplan.planner.search.search_session import INFINITY, Session, Solved
from parplan.planner.stage_columns.chunk_columns import Columns
from parplan.planner.stage_columns.columns import Column, RankColumns


class _Leanest:
    """The frames of one search; `least_bytes` is what each was seen to be redundant at least, whatever its peak."""

    def __init__(self, frames: Sequence[Frame], fastest: Solved, session: Session) -> None:
        self.frames, self.fastest, self.session = frames, fastest, session
        self.slowest_s = fastest.value * session.slowdown
        self.least_bytes: dict[Frame, float] = {}

    def search(self) -> Outcome[Solved]:
        """The frames in the order of what they are redundant at least, until none can be below the best."""
        session = self.session
        return branch(
            Objective.MEMORY, self._bounded(), self._solve, best_of, left_s=session.left_s, on_progress=session.on_progress,
            known=as_memory(self.fastest))

    def _bounded(self) -> Iterator[tuple[float, Frame]]:
        """The frames that may be in time, each with its bound. Raises OutOfTimeError, which is for the search that takes them."""
        session = self.session
        for frame in self.frames:
            if session.prices.may_fit(frame, session.limit_bytes) and self._may_be_in_time(frame, session):
                self.least_bytes[frame] = redundancy_bound_bytes(frame, session.table)
                yield self.least_bytes[frame], frame

    def lowered(self, outcome: Outcome[Solved]) -> Outcome[Solved]:
        """The outcome with the choice first that is as little redundant as its best and whose fullest device holds least."""
        best, most_bytes = outcome.solved[0], slackened(outcome.solved[0].value)
        ties = [frame for frame, least in self.least_bytes.items() if least <= most_bytes and frame != best.frame]
        ties.sort(key=lambda frame: self.least_bytes[frame])
        descent = Descent(
            best, lambda frame, limit_bytes: self._as_lean(frame, best.value, self.session.within(limit_bytes)),
            self.session.deadline, self.session.on_progress)
        descent.run([best.frame, *ties])
        found = replace(descent.best, value=best.value, bound=best.bound)
        others = tuple(one for one in outcome.solved if one.frame not in (found.frame, best.frame))
        return replace(
            outcome, solved=(found, *others), finished=outcome.finished and descent.finished, interrupted=descent.interrupted,
            failures=(*outcome.failures, *descent.failures))

    def _may_be_in_time(self, frame: Frame, session: Session) -> bool:
        return session.prices.least_s(frame, session.limit_bytes) <= self.slowest_s

    def _solve(self, frame: Frame, bound: float, cut: float, _: float) -> Solved | None:
        session, prices = self.session, self.session.prices
        options = session.columns(frame, lambda rank, count: prices.lean_columns(rank, count, session.limit_bytes), self.slowest_s)
        least = self._least(frame, options)
        self.least_bytes[frame] = max(bound, least)
        if options is None or least >= cut:
            return None
        choice = self._master(frame, options).leanest(self.slowest_s, session.options.solver, session.solver_limit_s())
        if choice is None:
            self.least_bytes[frame] = INFINITY
            return None
        if choice.proven:
            self.least_bytes[frame] = choice.redundant_bytes
        return Solved(frame, choice, choice.redundant_bytes, choice.redundant_bytes if choice.proven else max(bound, least))

    def _as_lean(self, frame: Frame, redundant_bytes: float, session: Session) -> Choice | None:
        """The fastest choice within a session's limit that is no more redundant, None where none is in time."""
        if not session.prices.may_fit(frame, session.limit_bytes) or not self._may_be_in_time(frame, session):
            return None

        def make(rank: Columns, count: int) -> list[Column]:
            assert isinstance(rank, RankColumns), "the memory objective has no chunks"
            return rank.leanest(count, session.limit_bytes)

        options = session.columns(frame, make, self.slowest_s)
        if options is None or self._least(frame, options) > slackened(redundant_bytes):
            return None
        choice = self._master(frame, options).fastest_of_redundancy(redundant_bytes, session.options.solver, session.solver_limit_s())
        return choice if choice and choice.step_s <= self.slowest_s else None

    def _least(self, frame: Frame, options: Sequence[Sequence[Column]] | None) -> float:
        """The least redundant bytes that the columns may have, infinite where they take too long."""
        if options is None:
            return INFINITY
        num_layers, share = self.session.book.model.num_layers, bubble_share(frame, self.session.book)
        least_s, least = lower_bound_s(frame, options, num_layers, share), columns_redundancy_bound_bytes(frame, options, num_layers)
        return INFINITY if least_s is None or least is None or least_s > self.slowest_s else least

    def _master(self, frame: Frame, options: Sequence[Sequence[Column]]) -> Master:
        book = self.session.book
        return Master(frame, options, book.model.num_layers, tied=book.tied, share=bubble_share(frame, book))


def then_leanest(first: Outcome[Solved], frames: Sequence[Frame], session: Session) -> Outcome[Solved]:
    """The second pass of the memory objective: it is proven only if the first is, which the slowdown is measured by."""
    if first.interrupted:
        return Outcome((as_memory(first.solved[0]),), 0.0, finished=False, interrupted=True, failures=first.failures)
    leanest = _Leanest(frames, first.solved[0], session)
    second = leanest.search()
    if not second.interrupted:
        second = leanest.lowered(second)
    return replace(second, finished=first.finished and second.finished, failures=first.failures + second.failures)


def as_memory(fastest: Solved) -> Solved:
    """The fastest plan as an answer to the memory objective, with nothing proven about it."""
    return Solved(fastest.frame, fastest.choice, fastest.choice.redundant_bytes, 0.0)
