"""The space that every search method can express, and its points.

A point is a layout with the ZeRO stages of embedding and head, and for each pipeline rank the
number of its blocks that run in each way: a recompute level and a ZeRO stage. The layout has the
mesh, 1F1B or interleaved 1F1B, the virtual stages, the micro-batch and sequence parallelism. On
unequal nodes it also has the pool of every pipeline rank. A search of the planner is pinned to the
same space by `pinned`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from random import Random
from typing import Any

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.baselines.uniform_strategies import layer_choice
from parplan.planner.request import ZERO_STAGES, Request
from parplan.planner.search.price_factory import described_factory
from parplan.planner.search.search_session import DescribedPrices
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.planner.stage_columns.dealing import dealt_blocks
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.transformer import has_unlike_blocks

Way = tuple[Recompute, int]  # recompute level and ZeRO stage of a block
Counts = tuple[int, ...]  # blocks of a pipeline rank, by way


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the space: the ZeRO stages of embedding and head, and each rank's blocks."""

    layout: ParallelLayout
    ends: tuple[int, int]
    ranks: tuple[Counts, ...]


# choices of a plan that the points do not have; a pin of one of them cannot be met
_OUTSIDE = ("offload", "access", "zero_by_operator", "zero_ranks", "recompute_first_stage")


def pinned(request: Request) -> Request:
    """Returns the request whose search has exactly the space of the methods.

    Raises ConfigError for a pin of the request that no point of the space meets.
    """
    given = request.constraints
    space: dict[str, tuple[object, ...]] = {
        "schedule": (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
        "mesh_order": (MeshOrder(request.training.stack.mesh_orders[0]),),
        "cp": (1,),
        "tp_rows": (1,),
        "tp_overlap": (0,),
        "weights_over_data": (False,),
    }
    for name in _OUTSIDE:
        if getattr(given, name):
            raise _outside_error(name)
    for name, values in space.items():
        asked = getattr(given, name)
        if asked is not None:
            space[name] = tuple(value for value in values if value in asked)
            if not space[name]:
                raise _outside_error(name)
    levels = given.recompute or tuple(Recompute)
    own: dict[str, Any] = {**space, "recompute": levels, "megatron_sharding": True}
    return replace(request, constraints=replace(given, **own))


def _outside_error(name: str) -> ConfigError:
    return ConfigError(
        f"--{name.replace('_', '-')} asks for a choice that the search methods do not have",
        hint="leave it out, or leave out --search",
    )


class MethodSpace:
    """The points of one request, with what prices them.

    Raises ConfigError where no layout is legal, or where the blocks of the model are not alike.
    """

    def __init__(self, request: Request) -> None:
        if has_unlike_blocks(request.model, request.training):
            raise ConfigError(
                f"the blocks of {request.model.name} are not alike, the methods count equal blocks",
                hint="choose a model whose blocks are alike, for example mixtral-8x7b",
            )
        self.request = pinned(request)
        prices = described_factory(self.request).prices(())
        assert isinstance(prices, DescribedPrices), "the blocks are alike"
        self.layouts, self.price_cache = prices.space.layouts, prices.price_cache
        self.time_bound = prices.time_bound
        self.limit_bytes = prices.limit_bytes(request.options)
        pins = self.request.constraints.resolved(request.training.stack)
        self._levels = pins.recompute or tuple(Recompute)
        self._zeros = pins.zero or ZERO_STAGES

    @property
    def num_blocks(self) -> int:
        return self.request.model.num_layers

    def zeros(self, layout: ParallelLayout) -> tuple[int, ...]:
        """Returns the ZeRO stages of a layout, one without replicas."""
        return self._zeros if layout.mesh.replicas > 1 else (0,)

    def ways(self, layout: ParallelLayout) -> tuple[Way, ...]:
        """Returns the ways to run a block, from the fastest level to the leanest."""
        return tuple(product(self._levels, self.zeros(layout)))

    def ends(self, layout: ParallelLayout) -> tuple[tuple[int, int], ...]:
        """Returns the ZeRO stages that embedding and head may have.

        They are equal on one rank. Tied ones are both whole or both sharded.
        """
        zeros = self.zeros(layout)
        if layout.mesh.pp == 1:
            return tuple((zero, zero) for zero in zeros)
        tied = self.price_cache.tied
        return tuple(
            (first, last)
            for first, last in product(zeros, zeros)
            if not tied or (first > 0) == (last > 0)
        )

    def equal_split(self, layout: ParallelLayout) -> tuple[int, ...]:
        """Returns the blocks of each rank, as equal as the layout allows; later ranks have less."""
        ranks = range(layout.mesh.pp)
        if layout.equal_ranks:
            return tuple(next(block_counts(rank, layout, self.num_blocks)) for rank in ranks)
        share, more = divmod(self.num_blocks, layout.mesh.pp)
        return tuple(share + (rank < more) for rank in ranks)

    def alike(self, layout: ParallelLayout, way: int, ends: tuple[int, int]) -> Point:
        """Returns the point of a layout whose blocks all run in one way, equally divided."""
        num_ways = len(self.ways(layout))
        ranks = tuple(one_way(count, way, num_ways) for count in self.equal_split(layout))
        return Point(layout, ends, ranks)

    def strategy(self, point: Point) -> Strategy:
        """Returns the strategy of a point: its blocks in the order of their ways."""
        layout, ways = point.layout, self.ways(point.layout)
        stages: list[tuple[LayerChoice, ...]] = [()] * layout.num_virtual_stages
        for rank, counts in enumerate(point.ranks):
            blocks = [
                layer_choice(LayerKind.BLOCK, zero, level)
                for (level, zero), count in zip(ways, counts, strict=True)
                for _ in range(count)
            ]
            chunks = dealt_blocks(rank, len(blocks), layout)
            for stage, chunk in zip(layout.stages_of(rank), chunks, strict=True):
                stages[stage] = tuple(blocks[number] for number in chunk)
        first, last = point.ends
        stages[0] = (layer_choice(LayerKind.EMBEDDING, first, Recompute.NONE), *stages[0])
        stages[-1] = (*stages[-1], layer_choice(LayerKind.HEAD, last, Recompute.NONE))
        return Strategy(layout=layout, stages=tuple(stages))

    def random_point(self, draw: Random) -> Point:
        """Returns a random layout, a random split, and one or two random ways on each rank."""
        layout = draw.choice(self.layouts)
        num_ways = len(self.ways(layout))
        ranks = []
        for count in self._random_split(layout, draw):
            share = draw.randint(0, count)
            here, there = draw.randrange(num_ways), draw.randrange(num_ways)
            ranks.append(moved(one_way(count, here, num_ways), here, there, share))
        return Point(layout, draw.choice(self.ends(layout)), tuple(ranks))

    def _random_split(self, layout: ParallelLayout, draw: Random) -> Sequence[int]:
        if layout.equal_ranks or draw.random() < 1 / 2:
            return self.equal_split(layout)
        cuts = sorted(draw.sample(range(1, self.num_blocks), layout.mesh.pp - 1))
        return [end - first for first, end in pairwise((0, *cuts, self.num_blocks))]

    def changes(self, point: Point) -> Iterator[Point]:
        """Yields the points that differ in one step of one choice, inside the layout.

        A choice is a half or one of the blocks of a rank that run in another way, a block on a
        neighbouring rank, or the ZeRO stages of the ends.
        """
        for rank in range(len(point.ranks)):
            yield from self.changes_of(point, rank)
        for ends in self.ends(point.layout):
            if ends != point.ends:
                yield replace(point, ends=ends)

    def changes_of(self, point: Point, rank: int) -> Iterator[Point]:
        """Yields the changes of the blocks of one rank."""
        counts = point.ranks[rank]
        for here, count in enumerate(counts):
            for amount in sorted({1, count // 2, count}) if count else ():
                for there in range(len(counts)):
                    if amount and there != here:
                        yield with_rank(point, rank, moved(counts, here, there, amount))
        for other in (rank - 1, rank + 1):
            yield from self.handed_over(point, rank, other)

    def handed_over(self, point: Point, rank: int, other: int) -> Iterator[Point]:
        """Yields the point with a block of `rank` on `other`, for each way that it may have."""
        few = sum(point.ranks[rank]) <= 1
        if point.layout.equal_ranks or few or not 0 <= other < len(point.ranks):
            return
        for way, count in enumerate(point.ranks[rank]):
            if count:
                less = with_rank(point, rank, added(point.ranks[rank], way, -1))
                yield with_rank(less, other, added(point.ranks[other], way, 1))

    def random_change(self, point: Point, draw: Random) -> Point:
        """Returns a point that differs in one random choice; one in four has another layout."""
        kind = draw.random()
        if kind < 1 / 4:
            return self.with_layout(point, draw.choice(self.layouts))
        if kind < 1 / 3:
            return replace(point, ends=draw.choice(self.ends(point.layout)))
        rank = draw.randrange(len(point.ranks))
        if kind < 1 / 2:
            over = list(self.handed_over(point, rank, rank + draw.choice((-1, 1))))
            if over:
                return draw.choice(over)
        counts = point.ranks[rank]
        here = draw.choice([way for way, count in enumerate(counts) if count])
        there = draw.randrange(len(counts))
        changed = moved(counts, here, there, draw.randint(1, counts[here]))
        if draw.random() < 1 / 2:
            return with_rank(point, rank, changed)
        return self._as_on(point, rank, changed)

    def _as_on(self, point: Point, rank: int, counts: Counts) -> Point:
        """Returns the point where all ranks that hold as many blocks as `rank` run them alike."""
        size = sum(counts)
        ranks = tuple(counts if sum(each) == size else each for each in point.ranks)
        return replace(point, ranks=ranks)

    def with_layout(self, point: Point, layout: ParallelLayout) -> Point:
        """Returns a point of another layout whose blocks run in the most frequent way of `point`.

        A ZeRO stage that the layout does not have becomes its first.
        """
        ways, before = self.ways(layout), self.ways(point.layout)
        total = [sum(column) for column in zip(*point.ranks, strict=True)]
        most = before[max(range(len(total)), key=total.__getitem__)]
        way = ways.index(most) if most in ways else ways.index((most[0], ways[0][1]))
        ends = point.ends if point.ends in self.ends(layout) else self.ends(layout)[-1]
        return self.alike(layout, way, ends)


def one_way(count: int, way: int, num_ways: int) -> Counts:
    """Returns `count` blocks that all run in one way."""
    return tuple(count if index == way else 0 for index in range(num_ways))


def added(counts: Counts, way: int, amount: int) -> Counts:
    """Returns the counts with `amount` more blocks on a way."""
    return tuple(count + amount * (index == way) for index, count in enumerate(counts))


def moved(counts: Counts, here: int, there: int, amount: int) -> Counts:
    """Returns the counts with `amount` blocks that run in another way."""
    return added(added(counts, here, -amount), there, amount)


def with_rank(point: Point, rank: int, counts: Counts) -> Point:
    """Returns the point with other blocks on one rank."""
    return replace(point, ranks=(*point.ranks[:rank], counts, *point.ranks[rank + 1 :]))
