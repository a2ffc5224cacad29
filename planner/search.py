"""The search: space -> bound -> columns -> integer program -> simulation -> Plan.

Frames are taken in the order of a valid lower bound. The search ends when the next bound is above the worst of the
candidates worth replaying, so the best closed form is proven; the time limit or Ctrl-C ends it earlier with the best so
far and the bound reached. The best frames are replayed in the event simulator, and the fastest of them becomes the plan.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodels.book import PriceBook
from costmodels.chunks.home import Home
from costmodels.chunks.price import Chunking
from costmodels.memory import ideal_states
from costmodels.recompute import Recompute
from costmodels.schedules import Schedule
from costmodels.step import StepPrice, bubble_share, price_step
from costmodels.strategy import Frame, Strategy
from planner.assemble import assemble, runner_up
from planner.baselines.space import counted_ends, equal_blocks
from planner.baselines.stage_aware import Room, stage_aware
from planner.frames.bounds import TimeBound, ahead_bound_s, in_reach, may_fit, redundancy_bound_bytes, time_bound
from planner.frames.branch import REPLAYED, Answer, Outcome, best_of, branch, worth_replaying
from planner.frames.chunk_bounds import ChunkBound
from planner.frames.faults import can_place, failure_text
from planner.frames.space import Pruned, Space, describe, enumerate_space, no_frame_error
from planner.host.costs import host_share_bytes
from planner.host_leanest import Lean, search_leanest_on_host
from planner.infeasible.shortfall import infeasible_error, limit_bytes
from planner.layers.levels import illegal_full_recompute, paying
from planner.plan.plan import Plan
from planner.plan.prediction import Candidates, Objective, SearchRecord, Status
from planner.ranks.blocks import block_counts, to_strategy
from planner.ranks.chunk_columns import Columns, rank_columns
from planner.ranks.columns import Column, RankColumns
from planner.ranks.either_table import Ways
from planner.ranks.master import Choice, Master, lower_bound_s
from planner.ranks.master import redundancy_bound_bytes as columns_redundancy_bound_bytes
from planner.ranks.mix_table import MixTable
from planner.ranks.prices import tied_ends
from planner.request import SEARCHED_OFFLOAD, Constraints, OnProgress, SearchOptions
from planner.solver import Unsolved
from profiles.errors import InfeasibleError, SolverError
from profiles.hardware import Cluster
from profiles.measured import machine_for
from profiles.spec import ModelSpec, TrainingSpec
from profiles.units import GIB

LEAST_LEFT_S = 1e-3  # of a time limit that is over: a search takes no zero
LEAST_SOLVE_S = 1.0  # a master takes 0.02 to 0.2 s; a shorter limit would only make it fail
MOST_SOLVE_S = 60.0  # a frame that needs longer keeps its bound, and the gap says so
WORTH_PROVING = 0.0005  # a bound that is closer than this to the best is not worth another program
ROUNDING = 1e-9  # relative: sums of the same terms in another order
INFINITY = float("inf")
SCHEDULED = 4  # columns of one frame whose exact schedules are compared
WORTH_CHUNKS = 0.01  # how much faster chunks must be where nothing leaves the device
SLACK = 0.02  # of the memory limit
Explain = Callable[[ModelSpec, Cluster, TrainingSpec, Constraints, SearchOptions], InfeasibleError]


@dataclass(frozen=True, slots=True)
class Solved:
    """The best choice of one frame: its objective value and a proven lower bound of that frame's objective."""

    frame: Frame
    choice: Choice
    value: float
    bound: float


@dataclass(frozen=True, slots=True)
class Found:
    """The plan of one search, the fastest choice that it is measured by, and whether Ctrl-C ended the search.

    best: the choice that the plan was made of, by its strategy and price
    """

    plan: Plan
    fastest: Solved
    interrupted: bool
    best: Solved
    strategy: Strategy
    price: StepPrice


class Prices:
    """What all searches of one request share, whatever their objective and limits: candidates, prices and bounds.

    Raises ConfigError when no mesh is legal.
    """

    def __init__(self, model: ModelSpec, cluster: Cluster, training: TrainingSpec, pins: Constraints) -> None:
        space = enumerate_space(model, cluster, training, pins)
        if not space.frames:
            raise no_frame_error(space, cluster)
        self.book = PriceBook(model, training, machine_for(cluster), zero_ranks=pins.zero_ranks)
        frames, beaten = paying(space.frames, self.book)
        self.space = Space(frames, (*space.pruned, *(Pruned(describe(frame), reason) for frame, reason in beaten)))
        self.table, self.recompute = MixTable(self.book, pins.resolved()), pins.resolved().recompute
        self._bounds: dict[Frame, TimeBound] = {}
        self._chunk_bounds: dict[tuple[Frame, float], ChunkBound] = {}
        self._raised: dict[Frame, tuple[float, float]] = {}
        self._lean: dict[tuple[Frame, int, bool, int, float], list[Column]] = {}

    def time_bound(self, frame: Frame) -> TimeBound:
        """The frame's lower bound of time, computed once: both passes and the columns ask for it."""
        if frame not in self._bounds:
            self._bounds[frame] = time_bound(frame, self.table)
        return self._bounds[frame]

    def least_s(self, frame: Frame, limit_bytes: float) -> float:
        """The best known bound of the frame's time within `limit_bytes`: what was proven under a looser limit holds."""
        under_bytes, least_s = self._raised.get(frame, (0.0, 0.0))
        step_s = self.chunk_bound(frame, limit_bytes).step_s() if frame.chunked else self.time_bound(frame).step_s
        return max(step_s, least_s if limit_bytes <= under_bytes else 0.0)

    def chunk_bound(self, frame: Frame, limit_bytes: float) -> ChunkBound:
        """The bound of a frame in chunks."""
        key = frame, limit_bytes
        if key not in self._chunk_bounds:
            self._chunk_bounds[key] = ChunkBound(frame, self.table, self.time_bound(frame), limit_bytes, bubble_share(frame, self.book))
        return self._chunk_bounds[key]

    def longest_rank(self, frame: Frame, cut_s: float, limit_bytes: float) -> int | None:
        """How many blocks a rank may hold before the frame takes `cut_s` or more; None when there is no such limit."""
        if frame.chunked:
            return self.chunk_bound(frame, limit_bytes).longest_rank(cut_s)
        return self.time_bound(frame).longest_rank(frame, cut_s)

    def may_fit(self, frame: Frame, limit_bytes: float) -> bool:
        """Whether the frame is not ruled out within `limit_bytes` by what it holds at least (planner/frames/bounds.py)."""
        return may_fit(frame, self.table, limit_bytes)

    def raise_bound(self, frame: Frame, limit_bytes: float, least_s: float) -> None:
        """Remember that within `limit_bytes` the frame takes at least `least_s` (infinity: it does not fit)."""
        self._raised[frame] = limit_bytes, max(least_s, self.least_s(frame, limit_bytes))

    def lean_columns(self, rank: Columns | Ways, num_blocks: int, limit_bytes: float) -> list[Column]:
        """The columns of the memory objective, which do not depend on its slowdown, made once."""
        assert isinstance(rank, RankColumns), "the memory objective has no chunks"
        key = (rank.frame, rank.rank, rank.looks_up, num_blocks, limit_bytes)
        if key not in self._lean:
            self._lean[key] = rank.leanest(num_blocks, limit_bytes)
        return self._lean[key]


class Session:
    """What the steps of one search share: prices, options, the memory limit and the clock.

    slack: share of the limit that the columns leave free, where the schedules of chunks need more than they say
    """

    def __init__(self, prices: Prices, options: SearchOptions, on_progress: OnProgress | None, slack: float = 0.0) -> None:
        self.prices, self.options, self.on_progress, self.slack = prices, options, on_progress, slack
        self.table, self.time_bound = prices.table, prices.time_bound
        limit = limit_bytes(prices.book.machine.cluster, prices.book.training.stack, options)
        self.book, self.limit_bytes = prices.book.within(Chunking(limit_bytes=limit)), limit * (1 - slack)
        self.deadline_s = None if options.time_limit_s is None else time.monotonic() + options.time_limit_s

    def left_s(self) -> float | None:
        """Seconds until the time limit (negative after it), or None without one."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    def solver_limit_s(self) -> float:
        """What one solve may take: the time left within bounds, so that one hard frame cannot hold up all others."""
        left_s = self.left_s()
        return MOST_SOLVE_S if left_s is None else min(max(left_s, LEAST_SOLVE_S), MOST_SOLVE_S)

    def book_of(self, choice: Choice) -> PriceBook:
        """The prices of a choice, by where it has the token table."""
        return self.book.with_table(on_host=any(column.looks_up for column in choice.columns))

    def columns(
        self, frame: Frame, make: Callable[[Columns, int], list[Column]], cut_s: float, counts: Sequence[Collection[int]] | None = None,
    ) -> list[list[Column]] | None:
        """The columns of every rank, over all block counts, or those of `counts`, with which the frame can take less than `cut_s`.

        None as soon as one rank has none, because nothing fits its device, or of equal ranks one alone takes longer than the cut.
        """
        longest = self.prices.longest_rank(frame, cut_s, self.limit_bytes)
        options: list[list[Column]] = []
        for rank in range(frame.mesh.pp):
            columns, possible = rank_columns(rank, frame, self.table), block_counts(rank, frame, self.book.model.num_layers, longest)
            tried = (count for count in possible if counts is None or count in counts[rank])
            per_count = itertools.takewhile(bool, (make(columns, count) for count in tried))  # more blocks never need less memory
            options.append(list(itertools.chain.from_iterable(per_count)))
            if not options[-1] or (frame.equal_ranks and all(self._too_slow(frame, column, cut_s) for column in options[-1])):
                return None
        return options

    def relaxed(self, frame: Frame, cut_s: float) -> list[list[Column]] | None:
        """Columns of real numbers of blocks (`RankColumns.relaxed`): what they cannot reach no plan of the frame can.

        Without those that alone take longer than the cut, as more blocks then do too.
        """

        def make(rank: Columns, count: int) -> list[Column]:
            return [column for column in rank.relaxed(count, self.limit_bytes) if not self._too_slow(frame, column, cut_s)]

        return self.columns(frame, make, cut_s)

    def _too_slow(self, frame: Frame, column: Column, cut_s: float) -> bool:
        """Whether the frame takes longer than the cut by one rank's column, whatever the others have."""
        if frame.recomputes_ahead or cut_s == INFINITY:
            return False
        share, others_s = bubble_share(frame, self.prices.book), self.prices.time_bound(frame).total_s
        return others_s + (frame.num_micro_batches - share) * column.time_s + column.tail_s > cut_s * (1 + ROUNDING)


def _search_fastest(frames: Sequence[Frame], session: Session) -> Outcome[Solved]:
    """Frames that even mixes of real numbers of blocks cannot bring below the cut are left; the others are solved.

    A schedule that only moves recompute has no plan below what 1F1B takes with the same layers and none of it: where 1F1B
    already does, it need not be solved, and where it is not faster it need not be replayed.
    """
    num_layers, limit, prices = session.book.model.num_layers, session.limit_bytes, session.prices
    values_s: dict[Frame, float] = {}
    relaxed_values_s: dict[Frame, float] = {}
    beaten: list[Solved] = []

    def solve(frame: Frame, bound_s: float, cut_s: float, _: float) -> Solved | None:
        usual = replace(frame, schedule=Schedule.ONE_F_ONE_B)
        if frame.recomputes_ahead:
            cut_s = min(cut_s, values_s.get(usual, INFINITY))
            prices.raise_bound(frame, limit, ahead_bound_s(frame, relaxed_values_s.get(usual, 0.0), session.table))
            if prices.least_s(frame, limit) >= cut_s:
                return None
        relaxed = session.relaxed(frame, cut_s)
        share = bubble_share(frame, prices.book)
        relaxed_s = lower_bound_s(frame, relaxed, num_layers, share) if relaxed else None
        relaxed_values_s[frame] = min(relaxed_s or 0.0, cut_s)  # what takes longer than the cut is not among the columns
        prices.raise_bound(frame, limit, cut_s if relaxed_s is None else min(relaxed_s, cut_s))
        if relaxed is None or relaxed_s is None or relaxed_s >= cut_s:
            return None
        counts = [{column.num_blocks for column in columns} for columns in relaxed]
        options = session.columns(frame, lambda rank, count: rank.fastest(count, limit), cut_s, counts)
        least_s = lower_bound_s(frame, options, num_layers, share) if options else None
        if options is None or least_s is None or least_s >= cut_s:
            return None
        master = Master(frame, options, num_layers, tied=session.book.tied, share=share)
        choice = master.fastest(session.options.solver, session.solver_limit_s())
        if choice is None:
            _require_infeasible(frame, options, session)
            return None
        found = Solved(frame, choice, choice.step_s, prices.least_s(frame, limit))
        if frame.recomputes_ahead and found.value >= values_s.get(usual, INFINITY):
            beaten.append(found)
            return None
        values_s[frame] = found.value
        return found

    possible = [frame for frame in frames if prices.may_fit(frame, limit)]
    bounded = ((prices.least_s(frame, limit), frame) for frame in possible)
    outcome = branch(
        Objective.THROUGHPUT, bounded, solve, worth_replaying, left_s=session.left_s, on_progress=session.on_progress)
    if not outcome.finished:
        return outcome
    if outcome.solved:
        tried = (*outcome.solved, *beaten)
        others = set(possible).difference(found.frame for found in tried)
        _certify(tried, min((prices.least_s(frame, limit) for frame in others), default=INFINITY), session)
    return replace(outcome, bound=min((best_of(outcome.solved), *(prices.least_s(frame, limit) for frame in possible))))


def _certify(solved: Sequence[Solved], others_s: float, session: Session) -> None:
    """Raise the bounds of frames that might hold something better than the best: the master over relaxed columns.

    others_s: the least bound of all other frames; to raise one above it proves no more.
    Its optimum is below every way to choose an option of the catalogue for each layer by itself that is below the best.
    """
    best, limit, num_layers = solved[0].value, session.limit_bytes, session.book.model.num_layers
    for frame in (found.frame for found in solved):
        if session.prices.least_s(frame, limit) >= min(others_s, best * (1 - WORTH_PROVING)):
            continue
        relaxed, share = session.relaxed(frame, best), bubble_share(frame, session.book)
        if relaxed is None or lower_bound_s(frame, relaxed, num_layers, share) is None:  # nothing of it is below the best
            session.prices.raise_bound(frame, limit, best)
            continue
        try:
            choice = Master(frame, relaxed, num_layers, share=share).fastest(session.options.solver, session.solver_limit_s())
        except (Unsolved, SolverError):  # the bound stays as it is
            continue
        if choice is not None and choice.proven:
            session.prices.raise_bound(frame, limit, min(best, choice.step_s * (1 - ROUNDING)))


def _require_infeasible(frame: Frame, options: Sequence[Sequence[Column]], session: Session) -> None:
    """Raises SolverError when what the solver calls infeasible has a solution: the frame must not pass for one that does not fit."""
    if can_place(options, session.book.model.num_layers, tied=session.book.tied and bool(tied_ends(frame))):
        raise SolverError(f"{session.options.solver} calls a problem infeasible that is not", hint="use the other --solver")


def _search_leanest(frames: Sequence[Frame], fastest: Solved, session: Session) -> Outcome[Solved]:
    num_layers, slowest_s = session.book.model.num_layers, fastest.value * (1 + session.options.max_slowdown) * (1 + ROUNDING)

    def solve(frame: Frame, bound: float, cut: float, _: float) -> Solved | None:
        options = session.columns(frame, lambda rank, count: session.prices.lean_columns(rank, count, session.limit_bytes), slowest_s)
        if options is None:
            return None
        share = bubble_share(frame, session.book)
        least_s, least = lower_bound_s(frame, options, num_layers, share), columns_redundancy_bound_bytes(frame, options, num_layers)
        if least_s is None or least is None or least_s > slowest_s or least >= cut:
            return None
        master = Master(frame, options, num_layers, tied=session.book.tied, share=share)
        choice = master.leanest(slowest_s, session.options.solver, session.solver_limit_s())
        if choice is None:
            return None
        return Solved(frame, choice, choice.redundant_bytes, choice.redundant_bytes if choice.proven else max(bound, least))

    bounded = (
        (redundancy_bound_bytes(frame, session.table), frame)
        for frame in frames
        if session.prices.may_fit(frame, session.limit_bytes) and session.prices.least_s(frame, session.limit_bytes) <= slowest_s)
    return branch(
        Objective.MEMORY, bounded, solve, best_of, left_s=session.left_s, on_progress=session.on_progress, known=_as_memory(fastest))


def _then_leanest(first: Outcome[Solved], frames: Sequence[Frame], session: Session) -> Outcome[Solved]:
    """The second pass of the memory objective: it is proven only if the first is, which the slowdown is measured by."""
    if first.interrupted:
        return Outcome((_as_memory(first.solved[0]),), 0.0, finished=False, interrupted=True, failures=first.failures)
    second = _search_leanest(frames, first.solved[0], session)
    return replace(second, finished=first.finished and second.finished, failures=first.failures + second.failures)


def _as_memory(fastest: Solved) -> Solved:
    """The fastest plan as an answer to the memory objective, with nothing proven about it."""
    return Solved(fastest.frame, fastest.choice, fastest.choice.redundant_bytes, 0.0)


def _equal_stages(solved: Solved, session: Session) -> Iterator[Strategy]:
    """The frame of `solved` with as many blocks on every stage, or where an end counts as one, each on its fastest column.

    On equal stages the closed form is exact. On others it may be too short by less than a percent, and would then put a plan first
    that a rule of thumb on equal stages beats.
    """
    frame, num_layers, pp = solved.frame, session.book.model.num_layers, solved.frame.mesh.pp
    for ends in counted_ends(num_layers, pp) if pp > 1 and frame.virtual_stages == 1 else ():
        blocks = equal_blocks(frame, num_layers, ends)
        ranks = [
            [c for c in rank_columns(rank, frame, session.table).fastest(count, session.limit_bytes)
             if (c.zero, c.looks_up) == (chosen.zero, chosen.looks_up)]
            for rank, (count, chosen) in enumerate(zip(blocks, solved.choice.columns, strict=True))]
        if all(ranks):
            passes = frame.num_micro_batches
            yield to_strategy(frame, tuple(min(columns, key=lambda c: passes * c.time_s + c.tail_s) for columns in ranks))


def _by_the_rule(solved: Solved, session: Session) -> Iterator[Strategy]:
    """Merak's one knob of recompute on equal stages, the least that fits, where the frame has such: no plan is slower than the rule."""
    frame, book, num_layers = solved.frame, session.book_of(solved.choice), session.book.model.num_layers
    if frame.mesh.pp == 1 or frame.virtual_stages > 1 or frame.chunked:
        return
    allowed = session.prices.recompute or tuple(Recompute)
    if not {Recompute.NONE, Recompute.FULL} <= set(allowed) or illegal_full_recompute(frame.tp_overlap, book.model):
        return
    for ends in counted_ends(num_layers, frame.mesh.pp):
        blocks = equal_blocks(frame, num_layers, ends)
        for zero in sorted({column.zero for column in solved.choice.columns}):
            counts = Room(frame, blocks, zero, book, session.limit_bytes).least_knob()
            if counts is not None:
                yield stage_aware(frame, blocks, counts, zero)


def _other_homes(solved: Solved, session: Session) -> Iterator[Strategy]:
    """Of a frame in chunks without pipeline the best columns: what waits for copies, the exact schedules know better."""
    frame, passes = solved.frame, solved.frame.num_micro_batches
    if frame.chunked and frame.mesh.pp == 1:
        columns = rank_columns(0, frame, session.table).fastest(session.book.model.num_layers, session.limit_bytes)
        alike = (column for column in columns if column.looks_up == solved.choice.columns[0].looks_up)
        for column in sorted(alike, key=lambda c: passes * c.time_s + c.tail_s)[:SCHEDULED]:
            yield to_strategy(frame, (column,))


def _idle_chunks(strategy: Strategy) -> bool:
    """Whether a strategy holds blocks in chunks of which none leaves the device: the same without chunks is simpler."""
    return strategy.frame.chunked and all(choice.home is Home.DEVICE for stage in strategy.stages for choice in stage)


def _price(strategy: Strategy, book: PriceBook) -> StepPrice | None:
    """What a strategy takes, or None where the exact schedule of its chunks, or its host, needs more than there is."""
    try:
        price = price_step(strategy, book)
    except InfeasibleError:
        return None
    host = max(memory.host for memory in price.memory)
    return price if host <= host_share_bytes(book.machine.cluster) * (1 + ROUNDING) else None


def _replay(outcome: Outcome[Solved], objective: Objective, session: Session) -> list[tuple[Solved, Strategy, StepPrice]]:
    """The best solved frames priced in full, in the order of the search; an interrupt keeps what is replayed."""
    replayed: list[tuple[Solved, Strategy, StepPrice]] = []
    try:
        for solved in outcome.to_replay:
            tried = [to_strategy(solved.frame, solved.choice.columns)]
            if objective is Objective.THROUGHPUT:
                tried += [*_equal_stages(solved, session), *_by_the_rule(solved, session), *_other_homes(solved, session)]
            book = session.book_of(solved.choice)
            priced = [(solved, strategy, price) for strategy in dict.fromkeys(tried) if (price := _price(strategy, book))]
            replayed += [min(priced, key=lambda found: found[2].step_s)] if priced else []
    except KeyboardInterrupt:
        if not replayed:
            raise
    return replayed


def search(
    prices: Prices, objective: Objective, options: SearchOptions, on_progress: OnProgress | None = None, fastest: Solved | None = None,
    slack: float = 0.0,
) -> Found | None:
    """One search over `prices`, or None when nothing fits its memory limit.

    fastest: what an earlier search found under the same memory limit; the memory objective need not look for it again
    slack: share of the memory limit that columns leave free
    Raises SolverError, and KeyboardInterrupt before the first plan.
    """
    space, session = prices.space, Session(prices, options, on_progress, slack)
    if not in_reach(prices.table, session.limit_bytes):
        return None
    outcome = _search_fastest(space.frames, session) if fastest is None else Outcome((fastest,), fastest.bound, finished=True)
    if not outcome.solved and not outcome.finished:
        raise SolverError("the solver found no plan in its time", hint="use the other --solver, or pin some degrees")
    if not outcome.solved:
        return None
    fastest = outcome.solved[0]
    if objective is Objective.MEMORY:
        outcome = _then_leanest(outcome, space.frames, session)
    replayed = _replay(outcome, objective, session)
    if not replayed:  # the exact schedules of the chunks need more than their closed form says
        return search(prices, objective, options, on_progress, slack=slack + SLACK)
    if objective is Objective.THROUGHPUT:
        replayed.sort(key=lambda found: found[2].step_s * (1 + WORTH_CHUNKS * _idle_chunks(found[1])))
    (best, strategy, price), *others = replayed
    record = _record(objective, best, fastest, outcome, space)
    runners_up = tuple(runner_up(strategy, price) for _, strategy, price in others)
    plan = assemble(strategy, price, replace(record, runners_up=runners_up), session.book_of(best.choice))
    return Found(plan, fastest, outcome.interrupted, best, strategy, price)


def search_leaner(prices: Prices, found: Found, options: SearchOptions, on_progress: OnProgress | None = None) -> Found:
    """The least redundant plan where the host may keep what `prices` allow, `found` where none is below it.

    found: the least redundant plan without the host, or where nothing fits without it the fastest with it. The slowdown is measured by
    its `fastest`, and no device holds more than its fullest does.
    """
    lean = found.plan.search.objective is Objective.MEMORY
    fullest = int(max(memory.total for memory in found.price.memory))
    session = Session(prices, replace(options, memory_limit_bytes=fullest), on_progress)
    held = found.strategy.frame.mesh.ranks_per_stage * sum(rank.total for rank in found.price.redundant)
    value, bound = (found.best.value, found.best.bound) if lean else (held, held)
    incumbent = Lean(
        frame=found.strategy.frame, choice=found.best.choice, value=value, bound=bound, strategy=found.strategy, price=found.price,
        book=session.book_of(found.best.choice))
    one_copy = float(sum(ideal_states(prices.book.graph(1).num_parameters, 1, prices.book.training)))
    if found.interrupted:
        outcome = Outcome((incumbent,), -one_copy, finished=False, interrupted=True)
    else:
        closed_s = found.fastest.choice.step_s
        fastest = price_step(to_strategy(found.fastest.frame, found.fastest.choice.columns), prices.book) if lean else found.price
        slowdown = (1 + options.max_slowdown) * (1 + ROUNDING)
        outcome = search_leanest_on_host(
            prices.space.frames, session, incumbent, closed_s=closed_s * slowdown, step_s=max(closed_s, fastest.step_s) * slowdown)
    best, *others = outcome.solved
    on_host = any(memory.host for memory in best.price.memory)
    record = replace(
        _record(Objective.MEMORY, best, found.fastest, outcome, prices.space, one_copy * on_host),
        runners_up=tuple(runner_up(other.strategy, other.price) for other in others[:REPLAYED - 1]))
    if found.plan.search.status is not Status.OPTIMAL:
        record = replace(record, status=Status.FEASIBLE)
    plan = replace(found.plan, search=record) if best is incumbent else assemble(best.strategy, best.price, record, best.book)
    return replace(found, plan=plan, interrupted=outcome.interrupted, strategy=best.strategy, price=best.price)


def find_plan(
    model: ModelSpec, cluster: Cluster, training: TrainingSpec, objective: Objective | str = Objective.THROUGHPUT, *,
    constraints: Constraints | None = None, options: SearchOptions | None = None, on_progress: OnProgress | None = None,
    explain: Explain = infeasible_error,
) -> Plan:
    """The best plan to train `model` on `cluster`: the fastest, or the one with least redundant memory within a slowdown.

    Raises ConfigError when no mesh is legal, the error that `explain` makes when nothing fits (an InfeasibleError that
    says what is missing; `planner.report.relaxations.explained_error` also says what would fit), SolverError.
    """
    objective, pins, options = Objective(objective), constraints or Constraints(), options or SearchOptions()
    if objective is Objective.MEMORY:
        found = _find_leanest(model, cluster, training, pins, options, on_progress)
        if found is not None:
            return found.plan
        pins = replace(pins, offload=SEARCHED_OFFLOAD if pins.offload is None else pins.offload)
        raise explain(model, cluster, training, pins, options)
    for allowed in ((), SEARCHED_OFFLOAD) if pins.offload is None else (pins.offload,):
        pins = replace(pins, offload=allowed)
        found = search(Prices(model, cluster, training, pins), objective, options, on_progress)
        if found is not None:
            return found.plan
    raise explain(model, cluster, training, pins, options)


def _find_leanest(
    model: ModelSpec, cluster: Cluster, training: TrainingSpec, pins: Constraints, options: SearchOptions, on_progress: OnProgress | None,
) -> Found | None:
    """The least redundant plan without the host, and then with what it may keep: all of it where nothing is said and nothing fits."""
    deadline_s = None if options.time_limit_s is None else time.monotonic() + options.time_limit_s

    def left() -> SearchOptions:
        return options if deadline_s is None else replace(options, time_limit_s=max(deadline_s - time.monotonic(), LEAST_LEFT_S))

    alone = search(Prices(model, cluster, training, replace(pins, offload=())), Objective.MEMORY, options, on_progress)
    offload = pins.offload if pins.offload is not None else () if alone else SEARCHED_OFFLOAD
    if not offload or (alone and alone.interrupted):
        return alone
    prices = Prices(model, cluster, training, replace(pins, offload=offload))
    found = alone or search(prices, Objective.THROUGHPUT, left(), on_progress)
    return found and search_leaner(prices, found, left(), on_progress)


def _record(
    objective: Objective, best: Answer, fastest: Solved, outcome: Outcome[Any], space: Space, one_copy_bytes: float = 0.0,
) -> SearchRecord:
    """What the search proved about `best`, in the units of the plan file.

    one_copy_bytes: of the states on all devices, of which the gap is a share too where the host may keep them
    """
    unit, whole = GIB if objective is Objective.MEMORY else 1.0, best.value + one_copy_bytes
    considered, solved = len(space.frames) + len(space.pruned), len(outcome.solved)
    return SearchRecord(
        objective=objective, status=Status.OPTIMAL if outcome.finished else Status.FEASIBLE,
        value=round(best.value / unit, 6), bound=round(outcome.bound / unit, 6),
        gap=round(max(0.0, best.value - outcome.bound) / whole, 6) if whole > 0 else 0.0,
        fastest_step_time_s=round(fastest.choice.step_s, 6),
        candidates=Candidates(considered=considered, pruned=considered - solved - outcome.left, solved=solved, left=outcome.left),
        solver_failure=failure_text(outcome.failures))
