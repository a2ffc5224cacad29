"""Layer-wise dynamic programming, in the shape of Galvatron and Alpa.

Galvatron (Miao et al. 2022, arXiv 2211.13878, section 3.3) gives each layer a strategy under the
memory of the device, with memory in steps. Alpa (Zheng et al. 2022, arXiv 2201.12023, section 5.2)
cuts the model into stages so that the slowest is fastest. Here the first runs inside each stage:

    C(n, m) = min over ways w of  C(n - 1, m - m_w) + c_w         n blocks in m steps of memory

and the second over the stages:

    B(s, n) = min over k of  (max(b, c_s(k)), t + c_s(k))         (b, t) = B(s - 1, n - k)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from random import Random

import numpy as np

from parplan.planner.dominance import Array
from parplan.planner.search_methods.costs_by_way import LayoutCosts, RankBytes, promising
from parplan.planner.search_methods.ledger import Ledger
from parplan.planner.search_methods.method_space import Counts, Point
from parplan.planner.stage_columns.block_counts import block_counts

STEPS = 512  # of memory
TIGHTER = (1.0, 0.98, 0.95)  # shares of the memory limit, until the answer fits
Ends = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankChoice:
    """The cost of a number of blocks on a rank, with their ways, and the ZeRO stages of the ends.

    An end that is not on the rank has the stage None.
    """

    cost_s: float
    counts: Counts
    ends: tuple[int | None, int | None]


RankTable = dict[int, RankChoice]  # the best choice of a rank by its number of blocks
Divide = Callable[[list[RankTable], int], list[RankChoice]]


def dynamic_program(ledger: Ledger, draw: Random) -> None:
    """Solves every promising layout by dynamic programming over blocks, then over stages."""
    by_stages(ledger, cut)


def by_stages(ledger: Ledger, divide: Divide) -> None:
    """Divides the blocks of every promising layout among its ranks, with the best ways of each."""
    for costs in promising(ledger):
        for room in TIGHTER:
            ledger.check()
            points = best_points(costs, room, ledger, divide)
            steps_s = [ledger.point_s(point) for point in points]
            if not steps_s or min(steps_s) < inf:
                break


def best_points(costs: LayoutCosts, room: float, ledger: Ledger, divide: Divide) -> list[Point]:
    """Returns the best point of a layout, of tied ends one for whole and one for sharded ends.

    room    share of the memory of every device
    """
    space, layout = costs.space, costs.layout
    groups: dict[bool, list[Ends]] = {}
    for ends in space.ends(layout):
        whole = space.price_cache.tied and layout.mesh.pp > 1 and ends[0] == 0
        groups.setdefault(whole, []).append(ends)
    points = []
    for group in groups.values():
        tables: list[RankTable] = []
        for rank in range(layout.mesh.pp):
            ledger.check()
            tables.append(rank_choices(costs, rank, group, room * costs.limit_bytes(rank)))
        chosen = divide(tables, space.num_blocks)
        if chosen:
            first, last = chosen[0].ends[0], chosen[-1].ends[1]
            assert first is not None, "the first rank has the embedding"
            assert last is not None, "the last rank has the head"
            points.append(Point(layout, (first, last), tuple(each.counts for each in chosen)))
    return points


def rank_choices(costs: LayoutCosts, rank: int, group: list[Ends], room_bytes: float) -> RankTable:
    """Returns the best ways of each number of blocks that a rank may hold within its memory."""
    layout, best = costs.layout, dict[int, RankChoice]()
    first, last = rank == 0, rank == layout.mesh.pp - 1
    numbers = tuple(block_counts(rank, layout, costs.space.num_blocks))
    block_s = costs.block_s(rank)
    own_ends = {(e if first else None, h if last else None): (e, h) for e, h in group}
    tables: dict[tuple[int, ...], BlockTable] = {}
    for own, ends in own_ends.items():
        fixed_s, held = costs.ends_s(rank, ends), costs.rank_bytes(rank, ends)
        for ways, beside in allowed_ways(block_s, held):
            if ways not in tables:
                tables[ways] = BlockTable(block_s, held.block, ways, room_bytes, max(numbers))
            table, room = tables[ways], int(STEPS * (1 - beside / room_bytes))
            for number in numbers if room > 0 else ():
                cost_s = fixed_s + float(table.cost_s[number, room])
                if cost_s < (best[number].cost_s if number in best else inf):
                    best[number] = RankChoice(cost_s, table.counts(number, room), own)
    return best


def allowed_ways(block_s: Array, held: RankBytes) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields sets of ways with the bytes beside their blocks, from those that need least beside.

    A way that another beats in seconds and both bytes is left out.
    """
    values = np.stack([block_s, held.block, held.beside], axis=1)
    kept = [
        way
        for way, own in enumerate(values)
        if not any((v <= own).all() and ((v < own).any() or w < way) for w, v in enumerate(values))
    ]
    for beside in sorted({float(held.beside[way]) for way in kept}):
        yield tuple(way for way in kept if held.beside[way] <= beside), beside


class BlockTable:
    """C(n, m) for all numbers of blocks and steps of memory, with the way of each last block."""

    def __init__(
        self, block_s: Array, block: Array, ways: tuple[int, ...], room_bytes: float, most: int
    ) -> None:
        self.num_ways = len(block_s)
        self.steps = np.ceil(STEPS * block / room_bytes).astype(int)
        self.cost_s = np.full((most + 1, STEPS + 1), inf)
        self.cost_s[0] = 0.0
        self.way = np.zeros((most + 1, STEPS + 1), int)
        chosen = np.array(ways)
        before = np.arange(STEPS + 1) - self.steps[chosen, None]
        for number in range(1, most + 1):
            after = self.cost_s[number - 1][np.maximum(before, 0)] + block_s[chosen, None]
            after[before < 0] = inf
            best = after.argmin(axis=0)
            self.cost_s[number] = after.min(axis=0)
            self.way[number] = chosen[best]

    def counts(self, number: int, room: int) -> Counts:
        """Returns the blocks on each way within `room` steps of memory."""
        counts = [0] * self.num_ways
        for left in range(number, 0, -1):
            way = int(self.way[left, room])
            counts[way] += 1
            room -= int(self.steps[way])
        return tuple(counts)


def cut(tables: list[RankTable], num_blocks: int) -> list[RankChoice]:
    """Returns a choice for each rank whose slowest is fastest, then with the least sum; or none."""
    best: dict[int, tuple[float, float, list[RankChoice]]] = {0: (0.0, 0.0, [])}
    for table in tables:
        after: dict[int, tuple[float, float, list[RankChoice]]] = {}
        for held, (slowest_s, sum_s, chosen) in best.items():
            for number, choice in table.items():
                total = held + number
                value = max(slowest_s, choice.cost_s), sum_s + choice.cost_s
                if total <= num_blocks and (total not in after or value < after[total][:2]):
                    after[total] = (*value, [*chosen, choice])
        best = after
    return best[num_blocks][2] if num_blocks in best else []
