"""Shared state of one search: prices with their proven bounds, columns of layouts, the clock."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Self

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.price_cache import PriceCache, described_prices
from parplan.costmodels.step import StepPrice, bubble_share
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.candidates.chunk_lower_bounds import ChunkBound
from parplan.planner.candidates.context_forms import without_beaten_forms
from parplan.planner.candidates.enumeration import (
    CandidateSpace,
    enumerate_candidates,
    layout_text,
    no_candidate_error,
)
from parplan.planner.candidates.lower_bounds import (
    TimeBound,
    ahead_bounds_s,
    in_reach,
    may_fit,
    time_bound,
)
from parplan.planner.candidates.memory_bounds import corner_bound_s, memory_bound_s
from parplan.planner.candidates.meshes import Pruned
from parplan.planner.candidates.redundancy_bounds import RedundancyBound
from parplan.planner.deadline import Deadline, in_time
from parplan.planner.infeasible.shortfall import limit_bytes, price_cache_of
from parplan.planner.layer_options.over_data import with_weights_over_data
from parplan.planner.layer_options.overlap_levels import paying_layouts
from parplan.planner.master import MasterChoice
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.request import (
    ANY_SLOWDOWN,
    Constraints,
    OnProgress,
    Request,
    SearchOptions,
)
from parplan.planner.stage_columns.block_counts import block_counts, to_strategy
from parplan.planner.stage_columns.chunk_columns import Columns, rank_columns
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.embedding_columns import AnyEnds, ColumnMaker
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_column import RankTimeLimit, StageColumn
from parplan.profiles.machines.hardware import Cluster

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


@dataclass(frozen=True, slots=True)
class ContentsMaker:
    """Contents that a pipeline rank may have, with the maker of their columns.

    contents    a number of blocks, or places of layers that are not alike
    """

    contents: Hashable
    columns: Columns
    num_blocks: int


class SearchPrices(ABC):
    """Candidates, prices and bounds that all searches of one request share.

    They hold for any objective and any limits. The methods that compute raise OutOfTimeError at the
    end of the deadline.

    space         the candidates
    num_blocks    layers that stages divide among them
    recompute     the allowed levels of recompute, None for any list of operators
    devices       the cluster whose memory limits the plans, None for that of the prices
    floor_s       bounds of layouts that are known before their own, None for none
    """

    devices: Cluster | None = None
    floor_s: Callable[[ParallelLayout], float] | None = None

    def __init__(
        self,
        space: CandidateSpace,
        price_cache: LayerPriceCache,
        allowed: Constraints,
        deadline: Deadline,
    ) -> None:
        self.space, self.price_cache = space, price_cache
        self.recompute = allowed.recompute
        self._raised: dict[ParallelLayout, tuple[float, float]] = {}
        self._once, self._check = KeyedCache(deadline.check), deadline.check
        self.held = deadline.held

    ascending = True  # the contents of a rank come by number of blocks
    any_list = False  # blocks recompute any list of operators, so that columns take long
    parts_last = False  # layouts with several parts a rank take long, and come after the others

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    @abstractmethod
    def within(self, limit_bytes: float) -> LayerPriceCache:
        """Returns the prices for devices with a memory limit."""

    def limit_bytes(self, options: SearchOptions) -> float:
        """Returns the bytes that a plan may fill on the device with most room."""
        prices = self.price_cache
        return limit_bytes(self.devices or prices.machine.cluster, prices.training.stack, options)

    def shared_with(self, request: Request, space: CandidateSpace) -> Self:
        """Returns the prices and bounds of a request that differs in three things at most.

        They are its candidates, its batch and the memory of its devices. Plans of the request have
        the machine of these prices.
        """
        shared = copy(self)
        shared.space, shared.devices = space, request.cluster
        shared.price_cache = copy(self.price_cache)
        shared.price_cache.training = request.training
        return shared

    @abstractmethod
    def in_reach(self, limit_bytes: float) -> bool:
        """Returns whether all devices and hosts together can hold the states once."""

    @abstractmethod
    def may_fit(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        """Returns False if the least bytes exceed the limit."""

    @abstractmethod
    def step_bound_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        """Returns a lower bound of the layout's step within a limit, before any column is made."""

    @abstractmethod
    def memory_bound_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        """Returns a closer bound of the step within a limit, which takes longer to find."""

    def closer_bounds_s(self, layout: ParallelLayout, limit_bytes: float) -> Iterator[float]:
        """Yields bounds of the step within a limit, each closer than the one before."""
        yield self.memory_bound_s(layout, limit_bytes)

    @abstractmethod
    def ramps_s(self, layout: ParallelLayout) -> float:
        """Returns the least seconds of all layers in the ramps of the pipeline."""

    @abstractmethod
    def ahead_bounds_s(self, layout: ParallelLayout, usual_s: float) -> Iterator[float]:
        """Yields bounds of a schedule with recompute ahead from that of its 1F1B."""

    @abstractmethod
    def least_redundant_bytes(
        self, layout: ParallelLayout, slowest_s: float, limit_bytes: float
    ) -> float:
        """Returns a bound of the redundant bytes of a layout's plans within `slowest_s`."""

    @abstractmethod
    def makers(
        self, layout: ParallelLayout, rank: int, cut_s: float, limit_bytes: float
    ) -> Iterator[ContentsMaker]:
        """Yields the contents that a rank may have below the cut, each with its column maker."""

    def covers(self, layout: ParallelLayout, cut_s: float, limit_bytes: float) -> bool:
        """Returns whether `makers` yields all contents below the cut; else they bound nothing."""
        return True

    def first_choice(
        self, layout: ParallelLayout, cut_s: float, session: SearchSession
    ) -> MasterChoice | None:
        """Returns a choice below the cut that takes little to find, to look only for better ones.

        It is None where no choice is that easy.
        """
        return None

    def also_replayed(
        self, layout: ParallelLayout, session: SearchSession
    ) -> Iterator[Sequence[StageColumn]]:
        """Yields other columns of a layout whose simulated step may be shorter."""
        yield from ()

    def moved(self, strategy: Strategy) -> Iterator[tuple[Strategy, tuple[int, ...]]]:
        """Yields the strategy with other cuts, and the ranks that differ."""
        yield from ()

    @abstractmethod
    def strategy(self, layout: ParallelLayout, columns: Sequence[StageColumn]) -> Strategy:
        """Returns the strategy of one column for each pipeline rank."""

    @abstractmethod
    def assembled(
        self, strategy: Strategy, price: StepPrice, record: SearchRecord, book: LayerPriceCache
    ) -> Any:
        """Returns the plan of a priced strategy."""

    @abstractmethod
    def book_of(
        self, layout: ParallelLayout, choice: MasterChoice, prices: LayerPriceCache
    ) -> LayerPriceCache:
        """Returns `prices` with what the host holds in a choice of a layout."""

    def least_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        """Returns the best known bound of the layout's time within `limit_bytes`.

        A proof under a looser limit holds.
        """
        under_bytes, least_s = self._raised.get(layout, (0.0, 0.0))
        step_s = self.floor_s(layout) if self.floor_s else self.step_bound_s(layout, limit_bytes)
        return max(step_s, least_s if limit_bytes <= under_bytes else 0.0)

    def raise_bound(self, layout: ParallelLayout, limit_bytes: float, least_s: float) -> None:
        """Stores the least step time within `limit_bytes`, infinite where nothing fits."""
        self._raised[layout] = limit_bytes, max(least_s, self.least_s(layout, limit_bytes))

    def lean_columns(
        self, rank: Columns | ColumnMaker, num_blocks: int, limit_bytes: float
    ) -> list[StageColumn]:
        """Returns the columns of the memory objective, made once: no slowdown enters them."""
        assert isinstance(rank, RankColumns | AnyEnds), "the memory objective has no chunks"
        key = rank, num_blocks, limit_bytes
        return self._once(("lean", *key), lambda: rank.leanest(num_blocks, limit_bytes))


def described_space(request: Request, price_cache: PriceCache) -> CandidateSpace:
    """Returns the candidates of a request whose blocks are alike, less those that others beat.

    Raises ConfigError when no mesh is legal, OutOfTimeError at the end of the deadline.
    """
    space, deadline = enumerate_candidates(request), request.options.deadline
    if not space.layouts:
        raise no_candidate_error(space, request.cluster)
    space = without_beaten_forms(space, price_cache, deadline)
    layouts, beaten = paying_layouts(space.layouts, price_cache, deadline)
    layouts, unpaid = with_weights_over_data(layouts, request, price_cache)
    dropped = (Pruned(layout_text(layout), reason) for layout, reason in (*beaten, *unpaid))
    space = CandidateSpace(layouts, (*space.pruned, *dropped))
    if not layouts:
        raise no_candidate_error(space, request.cluster)
    return space


class DescribedPrices(SearchPrices):
    """The prices of a described model.

    Raises ConfigError when no mesh is legal, OutOfTimeError at the end of the deadline.
    """

    price_cache: PriceCache

    def __init__(self, request: Request) -> None:
        price_cache = price_cache_of(request)
        space = described_space(request, price_cache)
        deadline = request.options.deadline.capped(request.options.memory_cap_bytes)
        allowed = request.constraints.resolved(request.training.stack)
        super().__init__(space, price_cache, allowed, deadline)
        self.table = MixTable(price_cache, allowed, deadline)
        self.any_list = self.table.catalogue.by_operator
        self._may_fit: dict[ParallelLayout, tuple[float, float]] = {}

    @property
    def num_blocks(self) -> int:
        return self.price_cache.model.num_layers

    def candidates(self, request: Request) -> CandidateSpace:
        """Returns the candidates of a request with another batch at these prices.

        Raises errors as `described_space` does.
        """
        return described_space(request, self.price_cache)

    def table_of(self, layout: ParallelLayout, rank: int) -> MixTable:
        """Returns the mixes of a pipeline rank of a layout."""
        return self.table

    def within(self, limit_bytes: float) -> LayerPriceCache:
        return self.price_cache.within(replace(self.price_cache.chunking, limit_bytes=limit_bytes))

    def in_reach(self, limit_bytes: float) -> bool:
        return in_reach(self.table, limit_bytes)

    def time_bound(self, layout: ParallelLayout) -> TimeBound:
        """Returns the layout's lower bound of time, computed once for both passes and columns."""
        return self._once(("time", layout), lambda: time_bound(layout, self.table))

    def step_bound_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        if layout.chunked:
            return self.chunk_bound(layout, limit_bytes).step_s()
        return self.time_bound(layout).step_s

    def memory_bound_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        return memory_bound_s(layout, self.table, limit_bytes, self.time_bound(layout))

    def closer_bounds_s(self, layout: ParallelLayout, limit_bytes: float) -> Iterator[float]:
        yield corner_bound_s(layout, self.table, limit_bytes, self.time_bound(layout))
        yield self.memory_bound_s(layout, limit_bytes)

    def ramps_s(self, layout: ParallelLayout) -> float:
        return self.time_bound(layout).total_s

    def ahead_bounds_s(self, layout: ParallelLayout, usual_s: float) -> Iterator[float]:
        if self.table.stage_recompute is None:  # else its recompute depends on the schedule
            yield from ahead_bounds_s(layout, usual_s, self.table)

    def least_redundant_bytes(
        self, layout: ParallelLayout, slowest_s: float, limit_bytes: float
    ) -> float:
        bound = self._once(
            ("redundancy", layout),
            lambda: RedundancyBound(
                layout,
                [self.table_of(layout, rank) for rank in range(layout.mesh.pp)],
                bubble_share(layout, self.price_cache),
            ),
        )
        return bound.least_bytes(slowest_s, self.longest_rank(layout, slowest_s, limit_bytes))

    def chunk_bound(self, layout: ParallelLayout, limit_bytes: float) -> ChunkBound:
        """Returns the bound of a layout in chunks within a memory limit."""
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

    def makers(
        self, layout: ParallelLayout, rank: int, cut_s: float, limit_bytes: float
    ) -> Iterator[ContentsMaker]:
        """Yields ascending block counts; more blocks never need less memory."""
        columns = rank_columns(rank, layout, self.table_of(layout, rank))
        longest = self.longest_rank(layout, cut_s, limit_bytes)
        for count in block_counts(rank, layout, self.num_blocks, longest):
            yield ContentsMaker(count, columns, count)

    def strategy(self, layout: ParallelLayout, columns: Sequence[StageColumn]) -> Strategy:
        return to_strategy(layout, tuple(columns))

    def book_of(
        self, layout: ParallelLayout, choice: MasterChoice, prices: LayerPriceCache
    ) -> LayerPriceCache:
        return prices.with_table(on_host=any(column.looks_up for column in choice.columns))

    def assembled(
        self, strategy: Strategy, price: StepPrice, record: SearchRecord, book: LayerPriceCache
    ) -> Plan:
        return assemble(strategy, price, record, described_prices(book))


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
        limit = prices.limit_bytes(options)
        self.price_cache = prices.within(limit)
        self.limit_bytes = limit * (1 - slack)
        self.deadline = replace(options.deadline, held=prices.held)

    @property
    def slowdown(self) -> float:
        """Largest ratio to the fastest step for a plan of another objective."""
        memory_first = self.options.memory_slack is not None
        slowdown = ANY_SLOWDOWN if memory_first else self.options.max_slowdown
        return (1 + slowdown) * (1 + ROUNDING)

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

    def least_s(self, layout: ParallelLayout) -> float:
        """Returns the best known bound of a layout's step within the memory limit."""
        return self.prices.least_s(layout, self.limit_bytes)

    def raised_s(self, layout: ParallelLayout, bound_s: float) -> float:
        """Stores a bound of a layout, and returns the best known one."""
        self.prices.raise_bound(layout, self.limit_bytes, bound_s)
        return self.least_s(layout)

    @property
    def num_blocks(self) -> int:
        """Layers that stages divide among them."""
        return self.prices.num_blocks

    @property
    def table(self) -> MixTable:
        """The mixes of a described model."""
        return self.described.table

    @property
    def described(self) -> DescribedPrices:
        """The prices, which are those of a described model."""
        assert isinstance(self.prices, DescribedPrices), "the layers have several classes"
        return self.prices

    def book_of(self, layout: ParallelLayout, choice: MasterChoice) -> LayerPriceCache:
        """Returns the prices with what the host holds in a choice of a layout."""
        return self.prices.book_of(layout, choice, self.price_cache)

    def columns(
        self,
        layout: ParallelLayout,
        make: Callable[[Columns, int], list[StageColumn]],
        cut_s: float,
        counts: Sequence[Collection[Hashable]] | None = None,
    ) -> list[list[StageColumn]] | None:
        """Returns the columns of every rank with which the layout can take less than `cut_s`.

        They cover all contents that a rank may have, or those of `counts`. None as soon as one rank
        has no column, because nothing fits its device, or because each column of an equal rank
        alone takes longer than the cut.
        """
        options: list[list[StageColumn]] = []
        for rank in range(layout.mesh.pp):
            possible = self.prices.makers(layout, rank, cut_s, self.limit_bytes)
            tried = in_time(
                (each for each in possible if counts is None or each.contents in counts[rank]),
                self.deadline,
            )
            # more blocks never need less memory
            per_contents = itertools.takewhile(
                lambda columns: bool(columns) or not self.prices.ascending,
                (make(each.columns, each.num_blocks) for each in tried),
            )
            options.append(list(itertools.chain.from_iterable(per_contents)))
            if not options[-1] or (
                layout.equal_ranks
                and all(self._too_slow(layout, column, cut_s) for column in options[-1])
            ):
                return None
        return options

    def relaxed(
        self,
        layout: ParallelLayout,
        cut_s: float,
        *,
        plain: bool = False,
        averages: bool = False,
        counts: Sequence[Collection[Hashable]] | None = None,
    ) -> list[list[StageColumn]] | None:
        """Returns columns of real numbers of blocks (`RankColumns.relaxed`), a bound of every plan.

        A number of blocks is left out if each of its columns alone takes longer than the cut;
        larger numbers then do too. An average of two columns may be below the cut where one of
        them is not.

        averages    the columns of `RankColumns.averages`, which take less to find
        counts      by rank, the contents that count
        """

        def make(rank: Columns, count: int) -> list[StageColumn]:
            bounds = rank.bounds if isinstance(rank, AnyEnds) else rank
            if averages and isinstance(bounds, RankColumns):
                columns = bounds.averages(count, self.limit_bytes, plain=plain)
            else:
                columns = rank.relaxed(count, self.limit_bytes, plain=plain)
            too_slow = all(self._too_slow(layout, column, cut_s) for column in columns)
            return [] if too_slow else columns

        return self.columns(layout, make, cut_s, counts)

    def fastest(
        self, rank: Columns, count: int, layout: ParallelLayout, cut_s: float
    ) -> list[StageColumn]:
        """Returns the fastest columns of a rank; without some that exceed the cut."""
        if isinstance(rank, RankColumns | AnyEnds):
            return rank.fastest(count, self.limit_bytes, self._reach(layout, cut_s))
        return rank.fastest(count, self.limit_bytes)

    def _reach(self, layout: ParallelLayout, cut_s: float) -> RankTimeLimit | None:
        """Returns the limit on one rank that a cut leaves, whatever the others run."""
        if cut_s == INFINITY or (layout.recomputes_ahead and not self.prices.any_list):
            return None
        share = bubble_share(layout, self.prices.price_cache)
        room_s = cut_s * (1 + ROUNDING) - self.prices.ramps_s(layout)
        return RankTimeLimit(layout.num_micro_batches - share, room_s)

    def _too_slow(self, layout: ParallelLayout, column: StageColumn, cut_s: float) -> bool:
        """True if the layout takes longer than the cut with this column, for any other columns."""
        reach = self._reach(layout, cut_s)
        if reach is None:
            return False
        return reach.repeats * column.plain_s + column.tail_s > reach.room_s
