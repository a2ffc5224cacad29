"""Depth-first branch and bound: a layout is filled rank by rank and way by way.

A branch ends where its bound is not below the best step:

    max(max_r c_r, (sum of all c_r and the least cost of the other blocks) / P)

c_r is the cost of rank r so far. Both terms hold for every way to go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from parplan.planner.search_methods.costs_by_way import LayoutCosts, RankBytes, promising
from parplan.planner.search_methods.ledger import Ledger
from parplan.planner.search_methods.method_space import Counts, Point
from parplan.planner.stage_columns.block_counts import block_counts


def depth_first(ledger: Ledger, draw: Random) -> None:
    """Searches every promising layout in depth, with each ZeRO stage of the ends."""
    for costs in promising(ledger):
        if costs.fastest_alike is not None:  # a first step to be below
            ledger.point_s(costs.fastest_alike)
        for ends in ledger.space.ends(costs.layout):
            ledger.check()
            tree = Tree(costs, ends, ledger)
            for ranks in tree.filled((), ledger.space.num_blocks):
                ledger.point_s(Point(costs.layout, ends, ranks))


@dataclass(frozen=True, slots=True)
class Tree:
    """The choices of one layout with given ZeRO stages of the ends."""

    costs: LayoutCosts
    ends: tuple[int, int]
    ledger: Ledger

    def filled(
        self, ranks: tuple[Counts, ...], left: int, slowest_s: float = 0.0, sum_s: float = 0.0
    ) -> Iterator[tuple[Counts, ...]]:
        """Yields the ways to fill the ranks after `ranks` with `left` blocks."""
        layout, rank = self.costs.layout, len(ranks)
        if rank == layout.mesh.pp:
            yield from (ranks,) if left == 0 else ()
            return
        self.ledger.check()
        fixed_s = self.costs.ends_s(rank, self.ends)
        held, block_s = self.costs.rank_bytes(rank, self.ends), self.costs.block_s(rank)
        order = [int(way) for way in np.argsort(block_s)]
        later_s = self.costs.least_block_s(rank + 1)
        others = layout.mesh.pp - rank - 1
        numbers = block_counts(rank, layout, self.costs.space.num_blocks)
        equal = left / (others + 1)
        for number in sorted(numbers, key=lambda number: abs(number - equal)):
            if others <= left - number if others else left == number:
                for counts in self._fitting(number, held, order, self.costs.limit_bytes(rank)):
                    cost_s = fixed_s + float(block_s @ counts)
                    slowest = max(slowest_s, cost_s)
                    least_s = sum_s + cost_s + (left - number) * later_s
                    if max(slowest, least_s / layout.mesh.pp) < self.ledger.step_s:
                        yield from self.filled(
                            (*ranks, counts), left - number, slowest, sum_s + cost_s
                        )

    def _fitting(
        self, number: int, held: RankBytes, order: Sequence[int], limit: float
    ) -> Iterator[Counts]:
        """Yields the ways to run blocks of a rank that fit, in the order of ways."""
        counts = [0] * len(order)

        def go(depth: int, left: int, used: float, beside: float) -> Iterator[Counts]:
            self.ledger.check()
            if left == 0:
                yield tuple(counts)
                return
            rest = list(order[depth:])
            if not rest or used + beside + left * held.block[rest].min() > limit:
                return
            way = order[depth]
            for count in range(left, -1, -1):
                bytes_of = used + count * float(held.block[way])
                most = max(beside, float(held.beside[way])) if count else beside
                if bytes_of + most <= limit:
                    counts[way] = count
                    yield from go(depth + 1, left - count, bytes_of, most)
            counts[way] = 0

        yield from go(0, number, 0.0, 0.0)
