"""Candidates one after the other, in the order of a valid lower bound, until the next bound cannot
win: EQUATIONS I5.

The search of described models and that of traced modules go through their candidates so; what a
candidate's best is, each knows itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.solver_faults import GaveUp, Unanswered
from parplan.planner.plan.prediction import Objective
from parplan.planner.request import OnProgress, Progress
from parplan.profiles.errors import OutOfTimeError, SolverError

REPLAYED = 10  # how many of the best layouts the simulator replays
WORTH_REPLAYING = (
    1.10  # those within 10 % of the best: for unequal stages the closed form is up to that much off
)


class CandidateAnswer(Protocol):
    """The best of one layout: its objective value, and a proven lower bound of that layout's
    objective.
    """

    @property
    def value(self) -> float: ...

    @property
    def bound(self) -> float: ...


S = TypeVar("S", bound=CandidateAnswer)
Solve = Callable[
    [ParallelLayout, float, float, float], S | None
]  # layout, its bound, what is worth solving, the best value so far


@dataclass(frozen=True, slots=True)
class BranchOutcome(Generic[S]):
    """Solved layouts, best first; the proven bound over all layouts; whether the search ran to its
    end or Ctrl-C came; and how many layouts were left unsolved.

    failures: the errors of the solver on layouts that it left without an answer
    """

    solved: tuple[S, ...]
    bound: float
    finished: bool
    interrupted: bool = False
    left: int = 0
    failures: tuple[SolverError, ...] = ()

    @property
    def to_replay(self) -> tuple[S, ...]:
        """The best, as far as they are worth it."""
        return tuple(
            one
            for one in self.solved[:REPLAYED]
            if one.value <= WORTH_REPLAYING * best_of(self.solved)
        )


def best_of(solved: Sequence[S]) -> float:
    """The value of the first, infinite where there is none."""
    return solved[0].value if solved else math.inf


def worth_replaying(solved: Sequence[S]) -> float:
    """From which value on a layout will not be replayed."""
    tenth = solved[REPLAYED - 1].value if len(solved) >= REPLAYED else math.inf
    return min(tenth, WORTH_REPLAYING * best_of(solved))


def branch_and_bound(
    objective: Objective,
    bounded: Iterable[tuple[float, ParallelLayout]],
    solve: Solve[S],
    cut: Callable[[Sequence[S]], float],
    *,
    left_s: Callable[[], float],
    on_progress: OnProgress | None,
    known: S | None = None,
    incumbent: S | None = None,
) -> BranchOutcome[S]:
    """Solve layouts in ascending order of their bound until the next bound reaches `cut` of what is
    solved.

    left_s: seconds until the time limit, negative after it. `known` is the answer when no layout
    was solved; without it an interrupt, the end of the time, or the solver's last error is raised
    again. `incumbent` is one to be beaten, of another search.
    """
    solved: list[S] = [] if incumbent is None else [incumbent]
    open_ = Unanswered()
    ordered: list[tuple[float, int, ParallelLayout]] = []
    proven, finished, interrupted, reached = (
        0.0,
        True,
        False,
        0,
    )  # `proven`: the least bound of the layouts still to solve
    try:
        ordered = sorted(((bound, index, layout) for index, (bound, layout) in enumerate(bounded)))
        for reached, (bound, _, layout) in enumerate(ordered):
            limit, proven = cut(solved), bound
            if bound >= limit:
                break
            if solved and left_s() <= 0:  # a plan late is better than none
                finished = False
                break
            found = open_.attempt(partial(solve, layout, bound, limit, best_of(solved)), bound)
            if found:
                solved = sorted([*solved, found], key=lambda one: one.value)
            if on_progress:
                on_progress(
                    Progress(
                        objective=objective,
                        done=reached + 1,
                        total=len(ordered),
                        incumbent=solved[0].value if solved else None,
                        bound=min(bound, best_of(solved), *open_.bounds),
                    )
                )
        else:
            proven = math.inf
    except GaveUp:
        finished, reached = False, reached + 1  # its own bound is among the open ones
    except KeyboardInterrupt:
        if not solved and known is None:
            raise
        finished, interrupted = False, True
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
        solved, finished = [known], False
    bounds = (proven, *open_.bounds, *(one.bound for one in solved))
    return BranchOutcome(
        tuple(solved),
        min(bounds),
        finished and not open_.bounds,
        interrupted,
        left,
        tuple(open_.failures),
    )
