"""The search: space -> bound -> columns -> integer program -> simulation -> Plan.

Frames are taken in the order of a valid lower bound. The search ends when the next bound is above the worst of the
candidates worth replaying, so the best closed form is proven; the time limit or Ctrl-C ends it earlier with the best so
far and the bound reached. The best frames are replayed in the event simulator, and the fastest of them becomes the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from costmodels.book import PriceBook
from costmodels.step import StepPrice, price_step
from costmodels.strategy import Frame, Strategy
from planner.assemble import assemble, runner_up
from planner.bounds import redundancy_bound_bytes, time_bound
from planner.columns import Column, MixTable, RankColumns, block_counts, to_strategy
from planner.infeasible import infeasible_error, limit_bytes
from planner.plan import Candidates, Objective, Plan, SearchRecord, Status
from planner.request import Constraints, OnProgress, Progress, SearchOptions
from planner.space import Space, enumerate_space
from planner.stage_ilp import Choice, Master, lower_bound_s
from planner.stage_ilp import redundancy_bound_bytes as columns_redundancy_bound_bytes
from profiles.errors import ConfigError
from profiles.hardware import Cluster
from profiles.measured import machine_for
from profiles.spec import ModelSpec, TrainingSpec
from profiles.units import GIB

REPLAYED = 10  # how many of the best frames the simulator replays
WORTH_REPLAYING = 1.05  # those within 5 % of the best: what the closed form leaves out is smaller
LEAST_SOLVE_S = 1.0  # a master takes 0.02 to 0.2 s; a shorter limit would only make it fail
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Solved:
    """The best choice of one frame: its objective value and a proven lower bound of that frame's objective."""

    frame: Frame
    choice: Choice
    value: float
    bound: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Solved frames, best first; the proven bound over all frames; whether the search ran to its end."""

    solved: tuple[Solved, ...]
    bound: float
    finished: bool


class Session:
    """What the steps of one search share: prices, options, the memory limit and the clock."""

    def __init__(self, book: PriceBook, pins: Constraints, options: SearchOptions, on_progress: OnProgress | None) -> None:
        self.book, self.options, self.on_progress = book, options, on_progress
        self.table = MixTable(book, pins)
        self.limit_bytes = limit_bytes(book.machine.cluster, options)
        self.deadline_s = None if options.time_limit_s is None else time.monotonic() + options.time_limit_s

    def left_s(self) -> float | None:
        """Seconds until the time limit (negative after it), or None without one."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    def solver_limit_s(self) -> float | None:
        """What one solve may take: the time left, and enough to find some plan when none is known."""
        left_s = self.left_s()
        return None if left_s is None else max(left_s, LEAST_SOLVE_S)

    def columns(self, frame: Frame, make: Callable[[RankColumns, int], list[Column]], cut_s: float) -> list[list[Column]]:
        """The columns of every rank, over all block counts with which the frame can take less than `cut_s`."""
        longest = time_bound(frame, self.table).longest_rank(frame, cut_s)
        counts = tuple(block_counts(frame, self.book.model.num_layers, longest))
        ranks = [RankColumns(rank, frame, self.table) for rank in range(frame.mesh.pp)]
        return [[column for count in counts for column in make(rank, count)] for rank in ranks]


def _branch(
    bounded: Iterable[tuple[float, Frame]], solve: Callable[[Frame, float, float], Solved | None], cut: Callable[[Sequence[Solved]], float],
    session: Session, known: Solved | None = None,
) -> Outcome:
    """Solve frames in ascending order of their bound until the next bound reaches `cut` of what is solved.

    `known` is what an interrupt before the first solved frame falls back to. Raises KeyboardInterrupt without one.
    """
    ordered = sorted(((bound, index, frame) for index, (bound, frame) in enumerate(bounded)))
    solved: list[Solved] = []
    proven = ordered[0][0] if ordered else INFINITY  # the least bound of the frames still to solve
    finished = True
    try:
        for done, (bound, _, frame) in enumerate(ordered):
            limit, left_s, proven = cut(solved), session.left_s(), bound
            if bound >= limit:
                break
            if solved and left_s is not None and left_s <= 0:  # a plan late is better than none
                finished = False
                break
            found = solve(frame, bound, limit)
            if found:
                solved = sorted([*solved, found], key=lambda s: s.value)
            if session.on_progress:
                session.on_progress(Progress(
                    done=done + 1, total=len(ordered), incumbent=solved[0].value if solved else None, bound=min(bound, _best(solved))))
        else:
            proven = INFINITY
    except KeyboardInterrupt:
        if not solved and known is None:
            raise
        solved, finished = solved or [known], False  # type: ignore[list-item]
    return Outcome(tuple(solved), min([proven, *(s.bound for s in solved)]), finished)


def _best(solved: Sequence[Solved]) -> float:
    return solved[0].value if solved else INFINITY


def _worth_replaying(solved: Sequence[Solved]) -> float:
    tenth = solved[REPLAYED - 1].value if len(solved) >= REPLAYED else INFINITY
    return min(tenth, WORTH_REPLAYING * _best(solved))


def _search_fastest(frames: Sequence[Frame], session: Session) -> Outcome:
    num_layers = session.book.model.num_layers

    def solve(frame: Frame, bound_s: float, cut_s: float) -> Solved | None:
        options = session.columns(frame, lambda rank, count: rank.fastest(count, session.limit_bytes), cut_s)
        least_s = lower_bound_s(frame, options, num_layers)
        if least_s is None or least_s >= cut_s:
            return None
        master = Master(frame, options, num_layers, tied=session.book.tied)
        choice = master.fastest(session.options.solver, session.solver_limit_s())
        if choice is None:
            return None
        return Solved(frame, choice, choice.step_s, choice.step_s if choice.proven else max(bound_s, least_s))

    bounded = ((time_bound(frame, session.table).step_s, frame) for frame in frames)
    return _branch(bounded, solve, _worth_replaying, session)


def _search_leanest(frames: Sequence[Frame], fastest: Solved, session: Session) -> Outcome:
    num_layers, slowest_s = session.book.model.num_layers, fastest.value * (1 + session.options.max_slowdown)

    def solve(frame: Frame, bound: float, cut: float) -> Solved | None:
        options = session.columns(frame, lambda rank, count: rank.leanest(count, session.limit_bytes), slowest_s)
        least_s, least = lower_bound_s(frame, options, num_layers), columns_redundancy_bound_bytes(frame, options, num_layers)
        if least_s is None or least is None or least_s > slowest_s or least >= cut:
            return None
        master = Master(frame, options, num_layers, tied=session.book.tied)
        choice = master.leanest(slowest_s, session.options.solver, session.solver_limit_s())
        if choice is None:
            return None
        return Solved(frame, choice, choice.redundant_bytes, choice.redundant_bytes if choice.proven else max(bound, least))

    bounded = (
        (redundancy_bound_bytes(frame, session.table), frame)
        for frame in frames if time_bound(frame, session.table).step_s <= slowest_s)
    known = Solved(fastest.frame, fastest.choice, fastest.choice.redundant_bytes, 0.0)
    return _branch(bounded, solve, _best, session, known)


def _replay(outcome: Outcome, book: PriceBook) -> list[tuple[Solved, Strategy, StepPrice]]:
    """The best solved frames priced in full, in the order of the search; an interrupt keeps what is replayed."""
    replayed: list[tuple[Solved, Strategy, StepPrice]] = []
    worth = [solved for solved in outcome.solved[:REPLAYED] if solved.value <= WORTH_REPLAYING * outcome.solved[0].value]
    try:
        for solved in worth:
            strategy = to_strategy(solved.frame, solved.choice.columns)
            replayed.append((solved, strategy, price_step(strategy, book)))
    except KeyboardInterrupt:
        if not replayed:
            raise
    return replayed


def find_plan(
    model: ModelSpec, cluster: Cluster, training: TrainingSpec, *, constraints: Constraints | None = None,
    options: SearchOptions | None = None, on_progress: OnProgress | None = None,
) -> Plan:
    """The best plan to train `model` on `cluster`: the fastest, or the least redundant within a slowdown.

    Raises ConfigError when no mesh is legal, InfeasibleError when nothing fits (with what is missing), SolverError.
    """
    pins, options = constraints or Constraints(), options or SearchOptions()
    space = enumerate_space(model, cluster, training, pins)
    if not space.frames:
        raise _no_frame_error(space, cluster)
    book = PriceBook(model, training, machine_for(cluster))
    session = Session(book, pins, options, on_progress)
    outcome = _search_fastest(space.frames, session)
    if not outcome.solved:
        raise infeasible_error(model, cluster, training, pins, options)
    if options.objective is Objective.MEMORY:
        outcome = _search_leanest(space.frames, outcome.solved[0], session)
        return _plan(_replay(outcome, book), outcome, space, session)
    replayed = sorted(_replay(outcome, book), key=lambda found: found[2].step_s)
    return _plan(replayed, outcome, space, session)


def _plan(
    replayed: Sequence[tuple[Solved, Strategy, StepPrice]], outcome: Outcome, space: Space, session: Session,
) -> Plan:
    best, strategy, price = replayed[0]
    memory = session.options.objective is Objective.MEMORY
    unit = GIB if memory else 1.0
    record = SearchRecord(
        objective=session.options.objective,
        status=Status.OPTIMAL if outcome.finished else Status.FEASIBLE,
        value=round(best.value / unit, 6), bound=round(outcome.bound / unit, 6),
        gap=round(max(0.0, 1 - outcome.bound / best.value), 6) if best.value > 0 else 0.0,
        candidates=Candidates(
            considered=len(space.frames) + len(space.pruned), pruned=len(space.frames) + len(space.pruned) - len(outcome.solved),
            solved=len(outcome.solved)),
        runners_up=tuple(runner_up(strategy, price) for _, strategy, price in replayed[1:]))
    return assemble(strategy, price, record, session.book)


def _no_frame_error(space: Space, cluster: Cluster) -> ConfigError:
    """The most common reason why no candidate is legal."""
    reasons = [pruned.reason for pruned in space.pruned]
    common = max(set(reasons), key=lambda reason: (reasons.count(reason), reason))
    return ConfigError(
        f"no legal way to use {cluster.num_gpus} GPUs: of {len(reasons)} candidates most fall because {common}",
        hint="choose another --gpus or --global-batch-size, or drop a pinned degree")
