"""The prices of one search over a model of several layer classes, such as a traced module."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from parplan.costmodels.keyed_cache import RecentCache
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.recompute import Recompute, RecomputedOperators
from parplan.costmodels.schedules.hidden_recompute import hidden_passes
from parplan.costmodels.schedules.schedule import LAST_KEEPS_ALL, Schedule
from parplan.costmodels.step import StepPrice, bubble_share
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.candidates.enumeration import CandidateSpace
from parplan.planner.candidates.given_parts import GivenParts
from parplan.planner.candidates.lower_bounds import least_ahead
from parplan.planner.candidates.part_bounds import PartBounds, RankParts
from parplan.planner.candidates.range_bounds import CloserBounds, PathBounds, RangeBounds
from parplan.planner.candidates.range_tables import even_path
from parplan.planner.deadline import Deadline
from parplan.planner.host_options.state_locations import with_locations
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.master import MasterChoice, evaluate
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.request import Constraints
from parplan.planner.search.node_tables import Books, Bounds, NodeTables, books_of
from parplan.planner.search.part_moves import PartMoves
from parplan.planner.search.search_session import ContentsMaker, SearchPrices, SearchSession
from parplan.planner.stage_columns.sequence_chunk_columns import SequenceChunkColumns
from parplan.planner.stage_columns.sequence_columns import SequenceColumns
from parplan.planner.stage_columns.sequence_table import SequenceTable
from parplan.planner.stage_columns.stage_column import StageColumn, worth_scheduling
from parplan.planner.stage_columns.stage_contents import Range, StageContents
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

# the ranges that a user gives to the virtual stages of a layout, None where the search cuts
GivenCuts = Callable[[ParallelLayout], tuple[Range, ...] | None]
MOST_BOUNDS = 16  # layouts whose bounds by range are held: each is up to 10 MiB
# the prices on each pool of a cluster, under no name where all nodes are equal
ByPool = Callable[[Books], Mapping[str, Books]]
Assembler = Callable[[Strategy, StepPrice, SearchRecord], Any]


class SequencePrices(SearchPrices):
    """The prices of a model whose layers are cut into stages anywhere."""

    ascending = False
    parts_last = True

    def __init__(
        self,
        space: CandidateSpace,
        price_cache: LayerPriceCache,
        allowed: Constraints,
        deadline: Deadline,
        given: GivenCuts,
        assembler: Assembler,
        table: type[SequenceTable] = SequenceTable,
        pools: ByPool = lambda books: {"": books},
    ) -> None:
        self._machines = {
            pool: NodeTables(books, allowed, deadline, table)
            for pool, books in pools(books_of(price_cache, space.layouts)).items()
        }
        super().__init__(space, price_cache, allowed, deadline)
        self._given, self._assembler = given, assembler
        self._classes: dict[Hashable, int] = {}  # of ranges with equal prices
        self._recent = RecentCache(MOST_BOUNDS, deadline.check)

    def _table(self, layout: ParallelLayout, rank: int = 0) -> SequenceTable:
        """Returns the options on a rank of a layout."""
        return self._machines[layout.pools[rank] if layout.pools else ""].table(layout)

    @property
    def num_blocks(self) -> int:
        layers = range(self.price_cache.num_layers)
        keys = (self.price_cache.key(layer, layer) for layer in layers)
        return sum(key.role is LayerKind.BLOCK for key in keys)

    def within(self, limit_bytes: float) -> LayerPriceCache:
        return self.price_cache.within(replace(self.price_cache.chunking, limit_bytes=limit_bytes))

    def in_reach(self, limit_bytes: float) -> bool:
        training = self.price_cache.training
        parameters, gradients, optimizer = self.price_cache.ideal_states(1)
        least = parameters + optimizer + (0.0 if training.stack.frees_gradients else gradients)
        cluster = self.price_cache.machine.cluster
        layouts = self.space.layouts
        hosts = any(layout.states_on_host or layout.chunked for layout in layouts)
        host_bytes = cluster.nodes * cluster.host_memory_bytes if hosts else 0
        return least <= cluster.num_gpus * limit_bytes + host_bytes

    def bounds(self, layout: ParallelLayout, limit_bytes: float) -> PathBounds:
        """Returns the bounds of a layout over all cuts within a memory limit."""
        return self._recent(
            ("bounds", layout, limit_bytes), lambda: self._bounds(RangeBounds, layout, limit_bytes)
        )

    def closer(self, layout: ParallelLayout, limit_bytes: float) -> PathBounds:
        """Returns the bounds with the recompute that a limit enforces."""
        if layout.virtual_stages > 1:
            return self.part_bounds(layout, limit_bytes)
        return self._recent(
            ("closer", layout, limit_bytes), lambda: self._bounds(CloserBounds, layout, limit_bytes)
        )

    def part_bounds(self, layout: ParallelLayout, limit_bytes: float) -> PartBounds:
        """Returns the bounds of a layout with several virtual stages a rank."""
        kind = PartBounds if self._given(layout) is None else GivenParts
        return self._recent(
            ("parts", layout, limit_bytes), lambda: self._bounds(kind, layout, limit_bytes)
        )

    def _bounds(self, kind: type[Bounds], layout: ParallelLayout, limit_bytes: float) -> Bounds:
        return self._machines[""].bounds(kind, layout, limit_bytes, self._given(layout))

    def memory_bound_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        return self.closer(layout, limit_bytes).least_s

    def may_fit(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        return self._range_bound_s(layout, limit_bytes) < float("inf")

    def step_bound_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        return self._range_bound_s(layout, limit_bytes)

    def _range_bound_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        return self._once(
            ("least", layout, limit_bytes), lambda: self.bounds(layout, limit_bytes).least_s
        )

    def ramps_s(self, layout: ParallelLayout) -> float:
        def make() -> float:
            walk_s = self.bounds(layout, float("inf")).least_walk_s
            return walk_s * bubble_share(layout, self.price_cache)

        return self._once(("ramps", layout), make)

    def ahead_bounds_s(self, layout: ParallelLayout, usual_s: float) -> Iterator[float]:
        """Yields that of `planner.candidates.lower_bounds` with the largest share of any layer."""
        table = self._table(layout)
        if table.stage_recompute is not None:
            return  # its recompute depends on the schedule
        if layout.schedule not in LAST_KEEPS_ALL or Recompute.NONE in table.levels:
            share = self.bounds(layout, float("inf")).most_share
            yield usual_s * least_ahead(layout, share)

    def least_redundant_bytes(
        self, layout: ParallelLayout, slowest_s: float, limit_bytes: float
    ) -> float:
        return self.bounds(layout, limit_bytes).least_redundant_bytes

    def makers(
        self, layout: ParallelLayout, rank: int, cut_s: float, limit_bytes: float
    ) -> Iterator[ContentsMaker]:
        if layout.virtual_stages > 1:
            for places in self._parts(layout, rank, cut_s, limit_bytes).contents:
                yield self._maker(layout, rank, places)
            return
        stages = layout.stages_of(rank)
        alike: dict[Hashable, list[Range]] = {}
        for layers in ranges_of(self.closer(layout, limit_bytes).near(rank, cut_s)):
            alike.setdefault(self._signature(stages, layers), []).append(layers)
        for ranges in alike.values():
            yield self._maker(layout, rank, (tuple(ranges),))

    def _parts(
        self, layout: ParallelLayout, rank: int, cut_s: float, limit_bytes: float
    ) -> RankParts:
        """Returns the contents of a rank with several chunks below a cut."""
        bounds, stages = self.part_bounds(layout, limit_bytes), layout.stages_of(rank)[:1]

        def class_of(layers: Range) -> int:
            signature = self._signature(stages, layers)
            return self._classes.setdefault(signature, len(self._classes))

        return self._once(
            ("rank parts", layout, rank, cut_s, limit_bytes),
            lambda: bounds.parts(rank, cut_s, class_of),
        )

    def covers(self, layout: ParallelLayout, cut_s: float, limit_bytes: float) -> bool:
        return layout.virtual_stages == 1 or all(
            self._parts(layout, rank, cut_s, limit_bytes).complete for rank in range(layout.mesh.pp)
        )

    def _signature(self, stages: tuple[int, ...], layers: Range) -> Hashable:
        contents = StageContents(stages, (layers,))
        return self._once(("signature", layers), lambda: contents.signature(self.price_cache))

    def _maker(
        self, layout: ParallelLayout, rank: int, places: tuple[tuple[Range, ...], ...]
    ) -> ContentsMaker:
        columns = self.columns_of(layout, rank, tuple(ranges[0] for ranges in places))
        there = self._once(("columns at", layout, rank, places), lambda: columns.at(places))
        return ContentsMaker(places, there, columns.num_blocks)

    def columns_of(
        self, layout: ParallelLayout, rank: int, place: tuple[Range, ...]
    ) -> SequenceColumns | SequenceChunkColumns:
        """Returns the columns of a rank whose chunks have these layers."""
        contents = StageContents(layout.stages_of(rank), place)
        make = SequenceChunkColumns if layout.chunked else SequenceColumns
        return self._once(
            ("columns", layout, rank, place),
            lambda: make(contents, rank, layout, self._table(layout, rank)),
        )

    def first_choice(
        self, layout: ParallelLayout, cut_s: float, session: SearchSession
    ) -> MasterChoice | None:
        """Returns the cuts whose slowest stage is fastest, each stage on its fastest column.

        A column is made only for a stage on the best path so far; the others keep their bounds.
        """
        if layout.mesh.pp == 1:
            return None  # one column or few
        if layout.virtual_stages > 1:
            return self._first_parts(layout, cut_s, session.limit_bytes)
        bounds = self.closer(layout, session.limit_bytes)
        usual = replace(layout, schedule=Schedule.ONE_F_ONE_B)  # with all recompute in its time
        least_s = [
            np.where(bounds.near(rank, cut_s), np.maximum(times, usual_s), np.inf)
            for rank, (times, usual_s) in enumerate(
                zip(bounds.time_s, self.closer(usual, session.limit_bytes).time_s, strict=True)
            )
        ]
        hidden = hidden_passes(layout.schedule)
        repeats = layout.num_micro_batches - 1 - hidden
        hidden_s = hidden * bounds.least_pace_s + bounds.least_walk_s
        fastest: dict[tuple[int, Range], StageColumn | None] = {}
        while (cuts := even_path(least_s)) is not None:
            places = list(enumerate(cuts))
            pace_s = max(float(least_s[rank][layers]) for rank, layers in places)
            if hidden_s + repeats * pace_s >= cut_s:
                return None
            unknown = [place for place in places if place not in fastest]
            if not unknown:
                columns = [fastest[place] for place in places]
                chosen = self._chosen(layout, columns, cut_s)
                return chosen or self._alike(layout, columns, cut_s, session.limit_bytes)
            for rank, layers in unknown:
                column = self._fastest_of(layout, rank, (layers,), session.limit_bytes)
                fastest[rank, layers] = column
                least_s[rank][layers] = column.time_s if column else np.inf
        return None

    def _first_parts(
        self, layout: ParallelLayout, cut_s: float, limit_bytes: float
    ) -> MasterChoice | None:
        """Returns the faster choice of cuts that moves of a layer improved and of even cuts."""
        choices = self._first_cuts(layout, limit_bytes)
        first = min(choices, key=lambda choice: choice.step_s, default=None)
        return first if first and first.step_s < cut_s else None

    def _first_cuts(self, layout: ParallelLayout, limit_bytes: float) -> list[MasterChoice]:
        """Returns choices for cuts that no move of one layer shortens, and for even cuts."""

        def column(rank: int, place: tuple[Range, ...]) -> StageColumn | None:
            return self._fastest_of(layout, rank, place, limit_bytes)

        def make() -> list[MasterChoice]:
            ranks, tried = range(layout.mesh.pp), []
            cuts = self._given(layout)
            if cuts is None:
                chosen = PartMoves(self.part_bounds(layout, limit_bytes), column).descended()
                if chosen:
                    tried.append([tuple(ranges[0] for ranges in each.layers) for each in chosen])
                cuts = self.bounds(layout, limit_bytes).even_cuts
            assert cuts is not None, "a candidate has no more stages than layers"
            tried.append([tuple(cuts[k] for k in layout.stages_of(rank)) for rank in ranks])
            agreed = (self._agreed(layout, places, limit_bytes) for places in tried)
            return [choice for choice in agreed if choice is not None]

        return self._once(("first cuts", layout, limit_bytes), make)

    def _agreed(
        self,
        layout: ParallelLayout,
        places: Sequence[tuple[Range, ...]],
        limit_bytes: float,
    ) -> MasterChoice | None:
        """Returns the fastest columns of given layers, None where nothing fits.

        Those that share parameters all shard their states, or none does.
        """
        every = [self.columns_of(layout, rank, place) for rank, place in enumerate(places)]
        options = [each.fastest(each.num_blocks, limit_bytes) for each in every]
        choices = []
        for sharded in (False, True):
            allowed = [
                [c for c in columns if not c.shares or (c.zero > 0) == sharded]
                for columns in options
            ]
            if all(allowed):
                fastest = [min(columns, key=lambda c: (c.time_s, c.tail_s)) for columns in allowed]
                choices.append(self._chosen(layout, fastest, float("inf")))
        return min(filter(None, choices), key=lambda choice: choice.step_s, default=None)

    def also_replayed(
        self, layout: ParallelLayout, session: SearchSession
    ) -> Iterator[Sequence[StageColumn]]:
        if layout.virtual_stages > 1 and layout.mesh.pp > 1:
            for choice in self._first_cuts(layout, session.limit_bytes):
                yield choice.columns
        if layout.chunked and layout.mesh.pp == 1:
            columns = self.columns_of(layout, 0, ((0, self.price_cache.num_layers),))
            located = columns.fastest(columns.num_blocks, session.limit_bytes)
            alone = worth_scheduling(located, layout.num_micro_batches)
            yield from ((column,) for column in alone)

    def _alike(
        self, layout: ParallelLayout, columns: list[StageColumn | None], cut_s: float, limit: float
    ) -> MasterChoice | None:
        """Returns the faster choice of the same layers whose shared parameters are alike (C7)."""
        ways = (
            [
                self._fastest_of(layout, rank, column.layers[0], limit, sharded)
                if column is not None and column.shares
                else column
                for rank, column in enumerate(columns)
            ]
            for sharded in (False, True)
        )
        choices = (self._chosen(layout, way, cut_s) for way in ways if None not in way)
        return min(filter(None, choices), key=lambda choice: choice.step_s, default=None)

    def _fastest_of(
        self,
        layout: ParallelLayout,
        rank: int,
        place: tuple[Range, ...],
        limit_bytes: float,
        sharded: bool | None = None,
    ) -> StageColumn | None:
        """Returns the fastest column of the layers of a rank, None where nothing fits."""
        columns = self.columns_of(layout, rank, place)
        found = columns.fastest(columns.num_blocks, limit_bytes)
        if sharded is not None:
            found = [column for column in found if (column.zero > 0) is sharded]
        return min(found, key=lambda column: (column.time_s, column.tail_s), default=None)

    def _chosen(
        self, layout: ParallelLayout, columns: Sequence[StageColumn | None], cut_s: float
    ) -> MasterChoice | None:
        """Returns a choice of columns, None where they do not match or take longer than `cut_s`."""
        chosen = [column for column in columns if column is not None]
        if len({column.zero > 0 for column in chosen if column.shares}) > 1:
            return None
        share = bubble_share(layout, self.price_cache)
        choice = evaluate(layout, chosen, proven=False, share=share)
        return choice if choice.step_s < cut_s else None

    def strategy(self, layout: ParallelLayout, columns: Sequence[StageColumn]) -> Strategy:
        places = path_of([column.layers for column in columns], layout)
        stages: dict[int, tuple[LayerChoice, ...]] = {}
        for rank, column in enumerate(columns):
            blocks = iter(option for option, count in column.mix for _ in range(count))
            for stage, (first, end) in zip(layout.stages_of(rank), places[rank], strict=True):
                keys = [self.price_cache.key(layer, first) for layer in range(first, end)]
                stages[stage] = tuple(
                    self._of_option(next(blocks), column, layout)
                    if key.role is LayerKind.BLOCK
                    else self._choice(layout, key, Recompute.NONE, column.zero)
                    for key in keys
                )
        in_order = tuple(stages[k] for k in range(layout.num_virtual_stages))
        if layout.chunked:
            in_order = with_locations(in_order, layout, [column.homes for column in columns])
        return Strategy(layout=layout, stages=in_order)

    def moved(self, strategy: Strategy) -> Iterator[tuple[Strategy, tuple[int, ...]]]:
        """Yields the strategy with some cuts shifted by one layer, few of them first.

        A layer on another part has its ZeRO stage, and is recomputed as before. None where the cuts
        are given, and where states lie in chunks, whose locations are counted from a rank's end.
        """
        layout, count = strategy.layout, len(strategy.stages)
        if self._given(layout) is not None or layout.chunked:
            return
        recomputed = [choice.recompute for stage in strategy.stages for choice in stage]
        ends = [0, *accumulate(map(len, strategy.stages))]
        spans = ((a, b) for a, b in combinations(range(1, count + 1), 2))
        for a, b in sorted(spans, key=lambda span: span[1] - span[0]):
            for by in (-1, 1):
                moved = [*ends[:a], *(end + by for end in ends[a:b]), *ends[b:]]
                if min(end - first for first, end in pairwise(moved)) < 1:
                    continue
                stages = list(strategy.stages)
                for stage in range(a - 1, b):
                    first, end = moved[stage], moved[stage + 1]
                    zero = strategy.stages[stage][0].zero
                    stages[stage] = tuple(
                        self._choice(
                            layout, self.price_cache.key(layer, first), recomputed[layer], zero
                        )
                        for layer in range(first, end)
                    )
                ranks = tuple({layout.rank_of(stage) for stage in range(a - 1, b)})
                yield replace(strategy, stages=tuple(stages)), ranks

    @staticmethod
    def _of_option(option: LayerOption, column: StageColumn, layout: ParallelLayout) -> LayerChoice:
        own = option.sharding if option.sharding != layout.sharding else None
        return LayerChoice(option.kind, option.recompute, column.zero, own)

    def _choice(
        self, layout: ParallelLayout, key: LayerKey, how: RecomputedOperators, zero: int
    ) -> LayerChoice:
        own = self._table(layout).price_cache.own_sharding(key, layout.sharding)
        return LayerChoice(key, how, zero, own if own != layout.sharding else None)

    def book_of(
        self, layout: ParallelLayout, choice: MasterChoice, prices: LayerPriceCache
    ) -> LayerPriceCache:
        return prices.with_states(on_host=layout.states_on_host).with_tower(layout.tower)

    def assembled(
        self, strategy: Strategy, price: StepPrice, record: SearchRecord, book: LayerPriceCache
    ) -> Any:
        return self._assembler(strategy, price, record)


def ranges_of(possible: npt.NDArray[np.bool_]) -> list[Range]:
    """Returns the ranges [i, j) whose entry is true."""
    return [(int(i), int(j)) for i, j in np.argwhere(possible)]


def path_of(
    places: Sequence[Sequence[Sequence[Range]]], layout: ParallelLayout
) -> list[tuple[Range, ...]]:
    """Returns the ranges of each rank by chunk, of those that each may be, on one path of layers.

    Raises ValueError where there is none.
    """
    if layout.mesh.pp == 1:
        return [tuple(ranges[0] for ranges in each) for each in places]
    reached: list[dict[int, Range | None]] = [{0: None}]
    for stage in range(layout.num_virtual_stages):
        rank = layout.rank_of(stage)
        ranges = places[rank][layout.stages_of(rank).index(stage)]
        reached.append({end: (first, end) for first, end in ranges if first in reached[-1]})
    path: list[Range] = []
    end = max(reached[-1], default=-1)
    for ends in reached[:0:-1]:
        layers = ends.get(end)
        if layers is None:
            raise ValueError("the stages are not contiguous")
        path.insert(0, layers)
        end = layers[0]
    return [
        tuple(path[stage] for stage in layout.stages_of(rank)) for rank in range(layout.mesh.pp)
    ]
