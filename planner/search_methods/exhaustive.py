"""Exhaustive search: every point of the space, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.search_methods.ledger import Ledger
from parplan.planner.search_methods.method_space import Counts, MethodSpace, Point
from parplan.planner.stage_columns.block_counts import block_counts


def exhaustive(ledger: Ledger, draw: Random) -> None:
    """Prices every point of every layout."""
    for layout in ledger.space.layouts:
        for point in every_point(ledger.space, layout):
            ledger.point_s(point)


def every_point(space: MethodSpace, layout: ParallelLayout) -> Iterator[Point]:
    """Yields all points of a layout."""
    num_ways, num_ranks = len(space.ways(layout)), layout.mesh.pp
    for split in every_split(space, layout, num_ranks, space.num_blocks):
        for ends in space.ends(layout):
            for ranks in every_ranks(split, num_ways):
                yield Point(layout, ends, ranks)


def every_split(
    space: MethodSpace, layout: ParallelLayout, num_ranks: int, num_blocks: int
) -> Iterator[tuple[int, ...]]:
    """Yields all ways to divide blocks over the first ranks of a layout."""
    if num_ranks == 0:
        yield from ((),) if num_blocks == 0 else ()
        return
    for number in block_counts(num_ranks - 1, layout, space.num_blocks):
        if number <= num_blocks - (num_ranks - 1):
            for rest in every_split(space, layout, num_ranks - 1, num_blocks - number):
                yield *rest, number


def every_ranks(split: Sequence[int], num_ways: int) -> Iterator[tuple[Counts, ...]]:
    """Yields all ways to run the blocks of some ranks, one at a time: lists would be too long."""
    if not split:
        yield ()
        return
    for counts in every_count(split[0], num_ways):
        for rest in every_ranks(split[1:], num_ways):
            yield counts, *rest


def every_count(number: int, num_ways: int) -> Iterator[Counts]:
    """Yields all ways to run a number of blocks, by the blocks on each way."""
    if num_ways == 1:
        yield (number,)
        return
    for first in range(number, -1, -1):
        for rest in every_count(number - first, num_ways - 1):
            yield first, *rest
