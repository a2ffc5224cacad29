"""What the steps of one search share: prices and the bounds proven under them, the columns of a
layout, the clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.chunked_layer import Chunking
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.chunk_lower_bounds import ChunkBound
from parplan.planner.candidates.enumeration import (
    CandidateSpace,
    Pruned,
    enumerate_candidates,
    layout_text,
    no_candidate_error,
)
from parplan.planner.candidates.lower_bounds import TimeBound, may_fit, time_bound
from parplan.planner.deadline import in_time
from parplan.planner.infeasible.shortfall import limit_bytes, price_cache_of
from parplan.planner.layer_options.overlap_levels import paying_layouts
from parplan.planner.master import MasterChoice
from parplan.planner.request import OnProgress, Request, SearchOptions
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.planner.stage_columns.chunk_columns import Columns, rank_columns
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.embedding_columns import ColumnMaker
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_column import StageColumn

LEAST_SOLVE_S = 1.0  # a master takes 0.02 to 0.2 s; a shorter limit would only make it fail
MOST_SOLVE_S = 60.0  # a layout that needs longer keeps its bound, and the gap says so
ROUNDING = 1e-9  # relative: sums of the same terms in another order
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class SolvedCandidate:
    """The best choice of one layout: its objective value and a proven lower bound of that layout's
    objective.
    """

    layout: ParallelLayout
    choice: MasterChoice
    value: float
    bound: float


class SearchPrices:
    """What all searches of one request share, whatever their objective and limits: candidates,
    prices and bounds.

    Raises ConfigError when no mesh is legal, OutOfTimeError at the end of `deadline`, as do all
    that make something of it.
    """

    def __init__(self, request: Request) -> None:
        space = enumerate_candidates(request)
        if not space.layouts:
            raise no_candidate_error(space, request.cluster)
        deadline = request.options.deadline
        self.price_cache = price_cache_of(request)
        layouts, beaten = paying_layouts(space.layouts, self.price_cache, deadline)
        self.space = CandidateSpace(
            layouts,
            (*space.pruned, *(Pruned(layout_text(layout), reason) for layout, reason in beaten)),
        )
        allowed = request.constraints.resolved(request.training.stack)
        self.table = MixTable(self.price_cache, allowed, deadline)
        self.recompute = allowed.recompute
        self._raised: dict[ParallelLayout, tuple[float, float]] = {}
        self._once, self._check = KeyedCache(deadline.check), deadline.check

    def time_bound(self, layout: ParallelLayout) -> TimeBound:
        """The layout's lower bound of time, computed once: both passes and the columns ask for
        it.
        """
        return self._once(("time", layout), lambda: time_bound(layout, self.table))

    def least_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        """The best known bound of the layout's time within `limit_bytes`: what was proven under a
        looser limit holds.
        """
        under_bytes, least_s = self._raised.get(layout, (0.0, 0.0))
        step_s = (
            self.chunk_bound(layout, limit_bytes).step_s()
            if layout.chunked
            else self.time_bound(layout).step_s
        )
        return max(step_s, least_s if limit_bytes <= under_bytes else 0.0)

    def chunk_bound(self, layout: ParallelLayout, limit_bytes: float) -> ChunkBound:
        """The bound of a layout in chunks."""
        return self._once(
            ("chunks", layout, limit_bytes),
            lambda: ChunkBound(
                layout,
                self.table,
                self.time_bound(layout),
                limit_bytes,
                bubble_share(layout, self.price_cache),
            ),
        )

    def longest_rank(self, layout: ParallelLayout, cut_s: float, limit_bytes: float) -> int | None:
        """How many blocks a rank may hold before the layout takes `cut_s` or more; None when there
        is no such limit.
        """
        if layout.chunked:
            return self.chunk_bound(layout, limit_bytes).longest_rank(cut_s)
        return self.time_bound(layout).longest_rank(layout, cut_s)

    def may_fit(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        """Whether the layout is not ruled out within `limit_bytes` by what it holds at least
        (planner/candidates/lower_bounds.py).
        """
        self._check()
        return may_fit(layout, self.table, limit_bytes)

    def raise_bound(self, layout: ParallelLayout, limit_bytes: float, least_s: float) -> None:
        """Remember that within `limit_bytes` the layout takes at least `least_s` (infinity: it does
        not fit).
        """
        self._raised[layout] = limit_bytes, max(least_s, self.least_s(layout, limit_bytes))

    def lean_columns(
        self, rank: Columns | ColumnMaker, num_blocks: int, limit_bytes: float
    ) -> list[StageColumn]:
        """The columns of the memory objective, which do not depend on its slowdown, made once."""
        assert isinstance(rank, RankColumns), "the memory objective has no chunks"
        key = rank.layout, rank.rank, rank.looks_up, num_blocks, limit_bytes
        return self._once(("lean", *key), lambda: rank.leanest(num_blocks, limit_bytes))


class SearchSession:
    """What the steps of one search share: prices, options, the memory limit and the clock.

    slack: share of the limit that the columns leave free, where the schedules of chunks need more
    than they say
    """

    def __init__(
        self,
        prices: SearchPrices,
        options: SearchOptions,
        on_progress: OnProgress | None,
        slack: float = 0.0,
    ) -> None:
        self.prices, self.options, self.on_progress, self.slack = (
            prices,
            options,
            on_progress,
            slack,
        )
        self.table, self.time_bound = prices.table, prices.time_bound
        limit = limit_bytes(
            prices.price_cache.machine.cluster, prices.price_cache.training.stack, options
        )
        self.price_cache, self.limit_bytes = (
            prices.price_cache.within(Chunking(limit_bytes=limit)),
            limit * (1 - slack),
        )
        self.deadline = options.deadline

    @property
    def slowdown(self) -> float:
        """How many times the fastest step a plan of another objective may take."""
        return (1 + self.options.max_slowdown) * (1 + ROUNDING)

    def within(self, limit_bytes: float) -> SearchSession:
        """The same search where a plan may fill so many bytes of a device."""
        options = replace(self.options, memory_limit_bytes=ceil(limit_bytes / (1 - self.slack)))
        return SearchSession(self.prices, options, self.on_progress, self.slack)

    def left_s(self) -> float:
        """Seconds until the time limit, negative after it, infinite without one."""
        return self.deadline.left_s

    def solver_limit_s(self) -> float:
        """What one solve may take: the time left within bounds, so that one hard layout cannot hold
        up all others.
        """
        return self.deadline.solver_limit_s(LEAST_SOLVE_S, MOST_SOLVE_S)

    def book_of(self, choice: MasterChoice) -> PriceCache:
        """The prices of a choice, by where it has the token table."""
        return self.price_cache.with_table(
            on_host=any(column.looks_up for column in choice.columns)
        )

    def columns(
        self,
        layout: ParallelLayout,
        make: Callable[[Columns, int], list[StageColumn]],
        cut_s: float,
        counts: Sequence[Collection[int]] | None = None,
    ) -> list[list[StageColumn]] | None:
        """The columns of every rank, over all block counts, or those of `counts`, with which the
        layout can take less than `cut_s`.

        None as soon as one rank has none, because nothing fits its device, or of equal ranks one
        alone takes longer than the cut.
        """
        longest = self.prices.longest_rank(layout, cut_s, self.limit_bytes)
        options: list[list[StageColumn]] = []
        for rank in range(layout.mesh.pp):
            columns, possible = (
                rank_columns(rank, layout, self.table),
                block_counts(rank, layout, self.price_cache.model.num_layers, longest),
            )
            tried = in_time(
                (count for count in possible if counts is None or count in counts[rank]),
                self.deadline,
            )
            per_count = itertools.takewhile(
                bool, (make(columns, count) for count in tried)
            )  # more blocks never need less memory
            options.append(list(itertools.chain.from_iterable(per_count)))
            if not options[-1] or (
                layout.equal_ranks
                and all(self._too_slow(layout, column, cut_s) for column in options[-1])
            ):
                return None
        return options

    def relaxed(
        self, layout: ParallelLayout, cut_s: float, *, plain: bool = False
    ) -> list[list[StageColumn]] | None:
        """Columns of real numbers of blocks (`RankColumns.relaxed`): what they cannot reach no plan
        of the layout can.

        Without the numbers of blocks all of whose columns alone take longer than the cut, as more
        blocks then do too. An average of two columns may be below the cut where one of them is not.
        """

        def make(rank: Columns, count: int) -> list[StageColumn]:
            found = rank.relaxed(count, self.limit_bytes, plain=plain)
            return [] if all(self._too_slow(layout, column, cut_s) for column in found) else found

        return self.columns(layout, make, cut_s)

    def _too_slow(self, layout: ParallelLayout, column: StageColumn, cut_s: float) -> bool:
        """Whether the layout takes longer than the cut by one rank's column, whatever the others
        have.
        """
        if layout.recomputes_ahead or cut_s == INFINITY:
            return False
        share, others_s = (
            bubble_share(layout, self.prices.price_cache),
            self.prices.time_bound(layout).total_s,
        )
        return others_s + (
            layout.num_micro_batches - share
        ) * column.time_s + column.tail_s > cut_s * (1 + ROUNDING)
