"""Branch and bound over candidates, in the order of a valid lower bound (EQUATIONS I5).

It ends when the next bound cannot win. The searches of described models and of traced modules share
it; each of them solves its candidates itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
CloserBounds = Callable[[ParallelLayout], Iterator[float]]


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
            if answer.value <= near(best_of(self.solved), WORTH_REPLAYING)
        )
        return *best, *(answer for answer in self.earlier if answer not in best)


def best_of(solved: Sequence[S]) -> float:
    """Returns the value of the first answer, infinite where there is none."""
    return solved[0].value if solved else math.inf


def worth_replaying(solved: Sequence[S], most: float = WORTH_REPLAYING) -> float:
    """Returns the value from which on a layout will not be replayed, `most` times the best."""
    tenth = solved[REPLAYED - 1].value if len(solved) >= REPLAYED else math.inf
    return min(tenth, near(best_of(solved), most))


def near(best: float, most: float) -> float:
    """Returns the value `most - 1` of the best above it; redundant bytes may be negative."""
    return best * (most if best >= 0 else 2 - most)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchWatch:
    """The clock of a search and the receiver of its progress.

    left_s       seconds until the time limit, negative after it
    is_capped    whether the memory cap is what ends the search
    """

    objective: Objective
    left_s: Callable[[], float]
    on_progress: OnProgress | None
    is_capped: Callable[[], bool] = lambda: False


class _Queue:
    """The open layouts, the least bound first; of equals the one that was listed first.

    A layout with closer bounds goes back into the queue after each of them.
    """

    def __init__(self, closer: CloserBounds | None) -> None:
        self._closer = closer
        self._heap: list[tuple[float, int, ParallelLayout]] = []
        self._bounds: dict[int, Iterator[float]] = {}
        self.total = 0

    def fill(self, bounded: Iterable[tuple[float, ParallelLayout]]) -> None:
        self._heap = [(bound, index, layout) for index, (bound, layout) in enumerate(bounded)]
        heapq.heapify(self._heap)
        self.total = len(self._heap)

    @property
    def left(self) -> int:
        return len(self._heap)

    @property
    def least(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def next(self, cut: Callable[[], float]) -> tuple[float, ParallelLayout] | None:
        """Removes the layout whose closest bound is least, None where none is below the cut."""
        while self._heap and self._heap[0][0] < cut():
            bound, index, layout = self._heap[0]
            if self._closer is not None:
                closer = self._bounds.setdefault(index, self._closer(layout))
                closer_s = next(closer, None)
                if closer_s is not None:
                    heapq.heapreplace(self._heap, (max(bound, closer_s), index, layout))
                    continue
            heapq.heappop(self._heap)
            return bound, layout
        return None


class _Branching(Generic[S]):
    """The solved layouts, the open ones and the errors of a search while it runs."""

    def __init__(
        self,
        incumbents: Sequence[S],
        closer: CloserBounds | None,
        watch: BranchWatch,
        floor: float,
    ) -> None:
        self.solved: list[S] = list(incumbents)
        self.queue, self.open = _Queue(closer), Unanswered()
        self.watch = watch
        self._running: tuple[float, ...] = ()  # the bound of the layout that is being solved
        self._unlisted: tuple[float, ...] = (floor,)  # below all layouts until they are listed

    @property
    def left(self) -> int:
        """Number of layouts that were not solved."""
        return self.queue.left + len(self._running)

    @property
    def least_open(self) -> float:
        """The least bound of the layouts that have no answer."""
        return min((self.queue.least, *self._running, *self._unlisted, *self.open.bounds))

    def run(
        self,
        bounded: Iterable[tuple[float, ParallelLayout]],
        solve: Solve[S],
        cut: Callable[[Sequence[S]], float],
    ) -> bool:
        """Returns True when nothing open is below the cut, False when the time is over."""
        self.queue.fill(bounded)
        self._unlisted = ()
        while (best := self.queue.next(lambda: cut(self.solved))) is not None:
            bound, layout = best
            limit = cut(self.solved)
            if self.solved and self.watch.left_s() <= 0:  # a late plan is better than none
                self.open.bounds.append(bound)
                return False
            self._running = (bound,)
            attempted = partial(solve, layout, bound, limit, best_of(self.solved))
            try:
                answer = self.open.attempt(attempted, bound)
            except GaveUp:
                self._running = ()
                return False
            self._running = ()
            if answer:
                self.solved = sorted([*self.solved, answer], key=lambda each: each.value)
            self._report(bound)
        return True

    def _report(self, bound: float) -> None:
        if self.watch.on_progress:
            self.watch.on_progress(
                Progress(
                    objective=self.watch.objective,
                    done=self.queue.total - self.left,
                    total=self.queue.total,
                    incumbent=self.solved[0].value if self.solved else None,
                    bound=min(bound, best_of(self.solved), *self.open.bounds),
                )
            )

    def nothing_found(self, error: OutOfTimeError) -> OutOfTimeError:
        """Returns the error of a search whose time was over before it had an answer."""
        total = self.queue.total
        looked = (
            f"{total - self.left} of {total} candidates were searched"
            if total
            else "candidates were still being listed"
        )
        reached = "memory cap was reached" if self.watch.is_capped() else "time limit was over"
        return OutOfTimeError(f"the {reached} before a plan was found: {looked}", hint=error.hint)


def branch_and_bound(
    bounded: Iterable[tuple[float, ParallelLayout]],
    solve: Solve[S],
    cut: Callable[[Sequence[S]], float],
    watch: BranchWatch,
    *,
    known: S | None = None,
    incumbents: Sequence[S] = (),
    closer: CloserBounds | None = None,
    floor: float = 0.0,
) -> BranchOutcome[S]:
    """Solves layouts by ascending bound until the next bound reaches `cut` of the solved ones.

    known       the answer when no layout was solved; without it an interrupt, the end of the time,
                or the last error of the solver is raised again
    incumbents  answers of another search that must be beaten
    closer      further bounds of a layout, each found when no other layout has a lower bound
    floor       value that no layout is below: the bound where the time ends before all are listed
    """
    search = _Branching(incumbents, closer, watch, floor)
    finished = interrupted = False
    try:
        finished = search.run(bounded, solve, cut)
    except KeyboardInterrupt:
        if not search.solved and known is None:
            raise
        interrupted = True
    except OutOfTimeError as error:
        if not search.solved and known is None:
            raise search.nothing_found(error) from None
    if not search.solved and known is None and search.open.failures:
        raise search.open.failures[-1]
    left = len(search.open.bounds) + (0 if finished else search.left)
    if not search.solved and known is not None:
        search.solved = [known]
        finished = False
    return BranchOutcome(
        tuple(search.solved),
        min((search.least_open, *(each.bound for each in search.solved))),
        finished and not search.open.bounds,
        interrupted,
        left,
        tuple(search.open.failures),
    )
