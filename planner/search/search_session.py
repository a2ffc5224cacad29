"""What the steps of one search share: prices and the bounds proven under them, the columns of a frame, the clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil

from parplan.costmodels.keyed_cache import Once
from parplan.costmodels.layers.chunked_layer import Chunking
from parplan.costmodels.price_cache import PriceBook
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import Frame
from parplan.planner.candidates.chunk_lower_bounds import ChunkBound
from parplan.planner.candidates.enumeration import (
    Pruned,
    Space,
    describe,
    enumerate_space,
    no_frame_error,
)
from parplan.planner.candidates.lower_bounds import TimeBound, may_fit, time_bound
from parplan.planner.deadline import NEVER, Deadline, in_time
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.layer_options.overlap_levels import paying
from parplan.planner.master import Choice
from parplan.planner.request import Constraints, OnProgress, SearchOptions
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.planner.stage_columns.chunk_columns import Columns, rank_columns
from parplan.planner.stage_columns.columns import Column, RankColumns
from parplan.planner.stage_columns.embedding_columns import Ways
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

LEAST_SOLVE_S = 1.0  # a master takes 0.02 to 0.2 s; a shorter limit would only make it fail
MOST_SOLVE_S = 60.0  # a frame that needs longer keeps its bound, and the gap says so
ROUNDING = 1e-9  # relative: sums of the same terms in another order
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Solved:
    """The best choice of one frame: its objective value and a proven lower bound of that frame's objective."""

    frame: Frame
    choice: Choice
    value: float
    bound: float


class Prices:
    """What all searches of one request share, whatever their objective and limits: candidates, prices and bounds.

    Raises ConfigError when no mesh is legal, OutOfTimeError at the end of `deadline`, as do all that make something of it.
    """

    def __init__(
        self, model: ModelSpec, cluster: Cluster, training: TrainingSpec, pins: Constraints, deadline: Deadline = NEVER,
    ) -> None:
        space = enumerate_space(model, cluster, training, pins, deadline)
        if not space.frames:
            raise no_frame_error(space, cluster)
        self.book = PriceBook(model, training, machine_for(cluster), zero_ranks=pins.zero_ranks)
        frames, beaten = paying(space.frames, self.book, deadline)
        self.space = Space(frames, (*space.pruned, *(Pruned(describe(frame), reason) for frame, reason in beaten)))
        allowed = pins.resolved(training.stack)
        self.table, self.recompute = MixTable(self.book, allowed, deadline), allowed.recompute
        self._raised: dict[Frame, tuple[float, float]] = {}
        self._once, self._check = Once(deadline.check), deadline.check

    def time_bound(self, frame: Frame) -> TimeBound:
        """The frame's lower bound of time, computed once: both passes and the columns ask for it."""
        return self._once(("time", frame), lambda: time_bound(frame, self.table))

    def least_s(self, frame: Frame, limit_bytes: float) -> float:
        """The best known bound of the frame's time within `limit_bytes`: what was proven under a looser limit holds."""
        under_bytes, least_s = self._raised.get(frame, (0.0, 0.0))
        step_s = self.chunk_bound(frame, limit_bytes).step_s() if frame.chunked else self.time_bound(frame).step_s
        return max(step_s, least_s if limit_bytes <= under_bytes else 0.0)

    def chunk_bound(self, frame: Frame, limit_bytes: float) -> ChunkBound:
        """The bound of a frame in chunks."""
        return self._once(("chunks", frame, limit_bytes), lambda: ChunkBound(
            frame, self.table, self.time_bound(frame), limit_bytes, bubble_share(frame, self.book)))

    def longest_rank(self, frame: Frame, cut_s: float, limit_bytes: float) -> int | None:
        """How many blocks a rank may hold before the frame takes `cut_s` or more; None when there is no such limit."""
        if frame.chunked:
            return self.chunk_bound(frame, limit_bytes).longest_rank(cut_s)
        return self.time_bound(frame).longest_rank(frame, cut_s)

    def may_fit(self, frame: Frame, limit_bytes: float) -> bool:
        """Whether the frame is not ruled out within `limit_bytes` by what it holds at least (planner/candidates/lower_bounds.py)."""
        self._check()
        return may_fit(frame, self.table, limit_bytes)

    def raise_bound(self, frame: Frame, limit_bytes: float, least_s: float) -> None:
        """Remember that within `limit_bytes` the frame takes at least `least_s` (infinity: it does not fit)."""
        self._raised[frame] = limit_bytes, max(least_s, self.least_s(frame, limit_bytes))

    def lean_columns(self, rank: Columns | Ways, num_blocks: int, limit_bytes: float) -> list[Column]:
        """The columns of the memory objective, which do not depend on its slowdown, made once."""
        assert isinstance(rank, RankColumns), "the memory objective has no chunks"
        key = rank.frame, rank.rank, rank.looks_up, num_blocks, limit_bytes
        return self._once(("lean", *key), lambda: rank.leanest(num_blocks, limit_bytes))


class Session:
    """What the steps of one search share: prices, options, the memory limit and the clock.

    slack: share of the limit that the columns leave free, where the schedules of chunks need more than they say
    """

    def __init__(self, prices: Prices, options: SearchOptions, on_progress: OnProgress | None, slack: float = 0.0) -> None:
        self.prices, self.options, self.on_progress, self.slack = prices, options, on_progress, slack
        self.table, self.time_bound = prices.table, prices.time_bound
        limit = limit_bytes(prices.book.machine.cluster, prices.book.training.stack, options)
        self.book, self.limit_bytes = prices.book.within(Chunking(limit_bytes=limit)), limit * (1 - slack)
        self.deadline = options.deadline

    @property
    def slowdown(self) -> float:
        """How many times the fastest step a plan of another objective may take."""
        return (1 + self.options.max_slowdown) * (1 + ROUNDING)

    def within(self, limit_bytes: float) -> Session:
        """The same search where a plan may fill so many bytes of a device."""
        options = replace(self.options, memory_limit_bytes=ceil(limit_bytes / (1 - self.slack)))
        return Session(self.prices, options, self.on_progress, self.slack)

    def left_s(self) -> float:
        """Seconds until the time limit, negative after it, infinite without one."""
        return self.deadline.left_s

    def solver_limit_s(self) -> float:
        """What one solve may take: the time left within bounds, so that one hard frame cannot hold up all others."""
        return self.deadline.solver_limit_s(LEAST_SOLVE_S, MOST_SOLVE_S)

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
            tried = in_time((count for count in possible if counts is None or count in counts[rank]), self.deadline)
            per_count = itertools.takewhile(bool, (make(columns, count) for count in tried))  # more blocks never need less memory
            options.append(list(itertools.chain.from_iterable(per_count)))
            if not options[-1] or (frame.equal_ranks and all(self._too_slow(frame, column, cut_s) for column in options[-1])):
                return None
        return options

    def relaxed(self, frame: Frame, cut_s: float, *, plain: bool = False) -> list[list[Column]] | None:
        """Columns of real numbers of blocks (`RankColumns.relaxed`): what they cannot reach no plan of the frame can.

        Without the numbers of blocks all of whose columns alone take longer than the cut, as more blocks then do too. An average of two
        columns may be below the cut where one of them is not.
        """

        def make(rank: Columns, count: int) -> list[Column]:
            found = rank.relaxed(count, self.limit_bytes, plain=plain)
            return [] if all(self._too_slow(frame, column, cut_s) for column in found) else found

        return self.columns(frame, make, cut_s)

    def _too_slow(self, frame: Frame, column: Column, cut_s: float) -> bool:
        """Whether the frame takes longer than the cut by one rank's column, whatever the others have."""
        if frame.recomputes_ahead or cut_s == INFINITY:
            return False
        share, others_s = bubble_share(frame, self.prices.book), self.prices.time_bound(frame).total_s
        return others_s + (frame.num_micro_batches - share) * column.time_s + column.tail_s > cut_s * (1 + ROUNDING)
