"""Shared state of one search: prices with their proven bounds, columns of layouts, the clock."""

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
from parplan.planner.candidates.redundancy_bounds import RedundancyBound
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
ROUNDING = 1e-9  # relative, against another order of summation
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class SolvedCandidate:
    """The best choice of one layout.

    value: its objective
    bound: a proven lower bound of the layout's objective
    """

    layout: ParallelLayout
    choice: MasterChoice
    value: float
    bound: float


class SearchPrices:
    """Candidates, prices and bounds that all searches of one request share.

    They hold for any objective and any limits. Raises ConfigError when no mesh is legal,
    OutOfTimeError at the end of the deadline; the methods that compute raise it too.
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
        self._may_fit: dict[ParallelLayout, tuple[float, float]] = {}
        self._once, self._check = KeyedCache(deadline.check), deadline.check

    def time_bound(self, layout: ParallelLayout) -> TimeBound:
        """Returns the layout's lower bound of time, computed once for both passes and columns."""
        return self._once(("time", layout), lambda: time_bound(layout, self.table))

    def redundancy_bound(self, layout: ParallelLayout) -> RedundancyBound:
        """Returns the bound of the layout's redundant bytes, made once for all slowdowns."""
        return self._once(
            ("redundancy", layout),
            lambda: RedundancyBound(
                layout,
                self.table,
                bubble_share(layout, self.price_cache),
                self.time_bound(layout).total_s,
            ),
        )

    def least_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        """Returns the best known bound of the layout's time within `limit_bytes`.

        A proof under a looser limit holds.
        """
        under_bytes, least_s = self._raised.get(layout, (0.0, 0.0))
        step_s = (
            self.chunk_bound(layout, limit_bytes).step_s()
            if layout.chunked
            else self.time_bound(layout).step_s
        )
        return max(step_s, least_s if limit_bytes <= under_bytes else 0.0)

    def chunk_bound(self, layout: ParallelLayout, limit_bytes: float) -> ChunkBound:
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
        """Returns the most blocks of a rank below `cut_s`, None when there is no such limit."""
        if layout.chunked:
            return self.chunk_bound(layout, limit_bytes).longest_rank(cut_s)
        return self.time_bound(layout).longest_rank(layout, cut_s)

    def may_fit(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        """Returns False if the least bytes exceed the limit (candidates/lower_bounds.py).

        A layout that fits a limit fits every larger one.
        """
        self._check()
        too_little_bytes, enough_bytes = self._may_fit.get(layout, (0.0, INFINITY))
        if too_little_bytes < limit_bytes < enough_bytes:
            if may_fit(layout, self.table, limit_bytes):
                enough_bytes = limit_bytes
            else:
                too_little_bytes = limit_bytes
            self._may_fit[layout] = too_little_bytes, enough_bytes
        return limit_bytes >= enough_bytes

    def raise_bound(self, layout: ParallelLayout, limit_bytes: float, least_s: float) -> None:
        """Stores the least step time within `limit_bytes`, infinite where nothing fits."""
        self._raised[layout] = limit_bytes, max(least_s, self.least_s(layout, limit_bytes))

    def lean_columns(
        self, rank: Columns | ColumnMaker, num_blocks: int, limit_bytes: float
    ) -> list[StageColumn]:
        """Returns the columns of the memory objective, made once: no slowdown enters them."""
        assert isinstance(rank, RankColumns), "the memory objective has no chunks"
        key = rank.layout, rank.rank, rank.looks_up, num_blocks, limit_bytes
        return self._once(("lean", *key), lambda: rank.leanest(num_blocks, limit_bytes))


class SearchSession:
    """Prices, options, memory limit and clock of one search.

    slack: share of the limit that the columns leave free, where the schedules of chunks need more
    than the columns state
    """

    def __init__(
        self,
        prices: SearchPrices,
        options: SearchOptions,
        on_progress: OnProgress | None,
        slack: float = 0.0,
    ) -> None:
        self.prices, self.options = prices, options
        self.on_progress, self.slack = on_progress, slack
        self.table, self.time_bound = prices.table, prices.time_bound
        limit = limit_bytes(
            prices.price_cache.machine.cluster, prices.price_cache.training.stack, options
        )
        self.price_cache = prices.price_cache.within(Chunking(limit_bytes=limit))
        self.limit_bytes = limit * (1 - slack)
        self.deadline = options.deadline

    @property
    def slowdown(self) -> float:
        """Largest ratio to the fastest step for a plan of another objective."""
        return (1 + self.options.max_slowdown) * (1 + ROUNDING)

    def within(self, limit_bytes: float) -> SearchSession:
        """Returns the same search with a limit of `limit_bytes` on every device."""
        options = replace(self.options, memory_limit_bytes=ceil(limit_bytes / (1 - self.slack)))
        return SearchSession(self.prices, options, self.on_progress, self.slack)

    def left_s(self) -> float:
        """Returns the seconds until the time limit, negative after it, infinite without one."""
        return self.deadline.left_s

    def solver_limit_s(self) -> float:
        """Returns the seconds that one solve may take, so that it cannot hold up all others."""
        return self.deadline.solver_limit_s(LEAST_SOLVE_S, MOST_SOLVE_S)

    def book_of(self, choice: MasterChoice) -> PriceCache:
        """Returns the prices for the token table's location in a choice."""
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
        """Returns the columns of every rank with which the layout can take less than `cut_s`.

        They cover all block counts, or those of `counts`. None as soon as one rank has no column,
        because nothing fits its device, or because each column of an equal rank alone takes longer
        than the cut.
        """
        longest = self.prices.longest_rank(layout, cut_s, self.limit_bytes)
        options: list[list[StageColumn]] = []
        for rank in range(layout.mesh.pp):
            columns = rank_columns(rank, layout, self.table)
            possible = block_counts(rank, layout, self.price_cache.model.num_layers, longest)
            tried = in_time(
                (count for count in possible if counts is None or count in counts[rank]),
                self.deadline,
            )
            # More blocks never need less memory.
            per_count = itertools.takewhile(bool, (make(columns, count) for count in tried))
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
        """Returns columns of real numbers of blocks (`RankColumns.relaxed`), a bound of every plan.

        A number of blocks is left out if each of its columns alone takes longer than the cut;
        larger numbers then do too. An average of two columns may be below the cut where one of
        them is not.
        """

        def make(rank: Columns, count: int) -> list[StageColumn]:
            columns = rank.relaxed(count, self.limit_bytes, plain=plain)
            too_slow = all(self._too_slow(layout, column, cut_s) for column in columns)
            return [] if too_slow else columns

        return self.columns(layout, make, cut_s)

    def _too_slow(self, layout: ParallelLayout, column: StageColumn, cut_s: float) -> bool:
        """True if the layout takes longer than the cut with this column, for any other columns."""
        if layout.recomputes_ahead or cut_s == INFINITY:
            return False
        share = bubble_share(layout, self.prices.price_cache)
        fixed_s = self.prices.time_bound(layout).total_s
        repeats = layout.num_micro_batches - share
        step_s = fixed_s + repeats * column.time_s + column.tail_s
        return step_s > cut_s * (1 + ROUNDING)
