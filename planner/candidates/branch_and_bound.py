"""Branch and bound over candidates, in the order of a valid lower bound (EQUATIONS I5).

It ends when the next bound cannot win. The searches of described models and of traced modules share
it; each of them solves its candidates itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.solver_faults import GaveUp, Unanswered
from parplan.planner.objective import Objective
from parplan.planner.request import OnProgress, Progress
from parplan.profiles.errors import OutOfTimeError, SolverError

REPLAYED = 10  # number of the best layouts that the simulator replays
# Those within 10 % of the best: for unequal stages the closed form is off by up to that much.
WORTH_REPLAYING = 1.10


class CandidateAnswer(Protocol):
    """The best of one layout: its objective value, and a proven lower bound for the layout."""

    @property
    def value(self) -> float: ...

    @property
    def bound(self) -> float: ...


S = TypeVar("S", bound=CandidateAnswer)
# layout, its bound, the bound from which on no layout is worth a solve, the best value so far
Solve = Callable[[ParallelLayout, float, float, float], S | None]


@dataclass(frozen=True, slots=True)
class BranchOutcome(Generic[S]):
    """The solved layouts, best first, and the proven bound over all layouts.

    finished      whether the search ran to its end
    interrupted   whether Ctrl-C ended it
    left          number of layouts that were not solved
    failures      the errors of the solver on layouts that it left without an answer
    earlier       answers of an earlier search that are worth a replay too
    """

    solved: tuple[S, ...]
    bound: float
    finished: bool
    interrupted: bool = False
    left: int = 0
    failures: tuple[SolverError, ...] = ()
    earlier: tuple[S, ...] = ()

    def then(self, later: BranchOutcome[S]) -> BranchOutcome[S]:
        """Returns the outcome of both searches, of which the later knew these answers."""
        return replace(
            later,
            bound=min(self.bound, later.bound),
            finished=self.finished and later.finished,
            left=self.left + later.left,
            failures=(*self.failures, *later.failures),
            earlier=self.to_replay,
        )

    @property
    def to_replay(self) -> tuple[S, ...]:
        """Returns the best layouts that are worth a replay."""
        best = tuple(
            answer
            for answer in self.solved[:REPLAYED]
            if answer.value <= WORTH_REPLAYING * best_of(self.solved)
        )
        return *best, *(answer for answer in self.earlier if answer not in best)


def best_of(solved: Sequence[S]) -> float:
    """Returns the value of the first answer, infinite where there is none."""
    return solved[0].value if solved else math.inf


def worth_replaying(solved: Sequence[S]) -> float:
    """Returns the value from which on a layout will not be replayed."""
    tenth = solved[REPLAYED - 1].value if len(solved) >= REPLAYED else math.inf
    return min(tenth, WORTH_REPLAYING * best_of(solved))


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchWatch:
    """The clock of a search and the receiver of its progress.

    left_s    seconds until the time limit, negative after it
    """

    objective: Objective
    left_s: Callable[[], float]
    on_progress: OnProgress | None


def branch_and_bound(
    bounded: Iterable[tuple[float, ParallelLayout]],
    solve: Solve[S],
    cut: Callable[[Sequence[S]], float],
    watch: BranchWatch,
    *,
    known: S | None = None,
    incumbents: Sequence[S] = (),
) -> BranchOutcome[S]:
    """Solves layouts by ascending bound until the next bound reaches `cut` of the solved ones.

    known       the answer when no layout was solved; without it an interrupt, the end of the time,
                or the last error of the solver is raised again
    incumbents  answers of another search that must be beaten
    """
    solved: list[S] = list(incumbents)
    open_ = Unanswered()
    ordered: list[tuple[float, int, ParallelLayout]] = []
    proven = 0.0  # the least bound of the layouts that are still to solve
    finished = True
    interrupted = False
    reached = 0
    try:
        ordered = sorted(((bound, index, layout) for index, (bound, layout) in enumerate(bounded)))
        for reached, (bound, _, layout) in enumerate(ordered):
            limit, proven = cut(solved), bound
            if bound >= limit:
                break
            if solved and watch.left_s() <= 0:  # a late plan is better than none
                finished = False
                break
            answer = open_.attempt(partial(solve, layout, bound, limit, best_of(solved)), bound)
            if answer:
                solved = sorted([*solved, answer], key=lambda each: each.value)
            if watch.on_progress:
                watch.on_progress(
                    Progress(
                        objective=watch.objective,
                        done=reached + 1,
                        total=len(ordered),
                        incumbent=solved[0].value if solved else None,
                        bound=min(bound, best_of(solved), *open_.bounds),
                    )
                )
        else:
            proven = math.inf
    except GaveUp:
        finished = False
        reached += 1  # the bound of the last candidate is among the open ones
    except KeyboardInterrupt:
        if not solved and known is None:
            raise
        finished = False
        interrupted = True
    except OutOfTimeError as error:
        if not solved and known is None:
            looked = (
                f"{reached} of {len(ordered)} candidates were searched"
                if ordered
                else "candidates were still being listed"
            )
            raise OutOfTimeError(
                f"the time limit was over before a plan was found: {looked}", hint=error.hint
            ) from None
        finished = False
    if not solved and known is None and open_.failures:
        raise open_.failures[-1]
    left = len(open_.bounds) + (0 if finished else len(ordered) - reached)
    if not solved and known is not None:
        solved = [known]
        finished = False
    bounds = (proven, *open_.bounds, *(each.bound for each in solved))
    return BranchOutcome(
        tuple(solved),
        min(bounds),
        finished and not open_.bounds,
        interrupted,
        left,
        tuple(open_.failures),
    )
