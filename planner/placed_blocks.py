"""The fastest choice of a pipeline of unequal ranks, and the columns that its program needs.

The rows (C2) to (C4) and (C8) of the master (planner/master.py) join its ranks. With a longest
time, tail and time without recompute given, only (C2) is left, and dynamic programming over (rank,
blocks placed) finds the least sum of ramps (planner/limit_boxes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter

import numpy as np

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array
from parplan.planner.limit_boxes import faster_and_faster, longer_never_pays, repeats_of
from parplan.planner.master import MasterChoice, smallest_pace_s
from parplan.planner.stage_columns.stage_column import StageColumn, alike_ends
from parplan.planner.stage_columns.stage_prices import tied_ends

Options = Sequence[Sequence[StageColumn]]
NEAR = 1e-9  # share of the step by which columns out of reach are slower


def joined_by_blocks(layout: ParallelLayout, options: Options, share: float) -> bool:
    """Returns whether the ranks may hold any numbers of equal blocks, and longer never pays."""
    placed = any(column.layers or column.corner for columns in options for column in columns)
    apart = placed or layout.equal_ranks or layout.mesh.pp == 1
    return not apart and longer_never_pays(layout, share)


def fastest_placed(
    layout: ParallelLayout,
    options: Options,
    num_blocks: int,
    share: float,
    cut_s: float = math.inf,
    *,
    tied: bool = False,
    check: Callable[[], None] = lambda: None,
) -> MasterChoice | None:
    """Returns the optimum of `Master.fastest` of ranks `joined_by_blocks`, or None.

    None where no choice takes less than `cut_s`. Where an embedding is tied, its copies are alike
    (C7). `check` is called before each box and may raise if no time is left.
    """
    ends = tied_ends(layout) if tied else ()
    best: MasterChoice | None = None
    for allowed in alike_ends(options, ends):
        if all(allowed):
            ranks = [_RankArrays(columns, num_blocks) for columns in allowed]
            least_ramps = partial(_least_ramps, ranks, num_blocks=num_blocks)
            for choice in faster_and_faster(layout, ranks, least_ramps, share, cut_s, check):
                best, cut_s = choice, choice.step_s
    return best


def in_reach_of(
    layout: ParallelLayout, options: Options, num_blocks: int, share: float, step_s: float
) -> list[list[StageColumn]]:
    """Returns the columns that a choice of at most `step_s` may have; the program needs no others.

    A choice with a column takes at least its seconds in each kind of limit, or the least that any
    choice has, and the least sum of ramps of choices with it.
    """
    repeats = repeats_of(layout, share)
    ranks = [_RankArrays(columns, num_blocks) for columns in options]
    least_s = np.array([max(rank.limited_s[k].min() for rank in ranks) for k in range(3)])
    least_s[0] = smallest_pace_s(options, num_blocks, lambda column: column.time_s) or 0.0
    before_s = _placed_s(ranks, num_blocks)
    after_s = _placed_s(ranks[::-1], num_blocks)[::-1]
    kept = []
    for place, rank in enumerate(ranks):
        others_s = {
            held: (before_s[place][: left + 1] + after_s[place + 1][left::-1]).min()
            for held in rank.counts.tolist()
            if (left := num_blocks - held) >= 0
        }
        through_s = [others_s.get(c.num_blocks, math.inf) for c in rank.columns]
        bound_s = repeats @ np.maximum(rank.limited_s, least_s[:, None])
        bound_s += share * (rank.ramp_s + through_s)
        within = bound_s <= step_s * (1 + NEAR)
        kept.append([c for c, holds in zip(rank.columns, within, strict=True) if holds])
    return kept


def contents_in_reach(
    layout: ParallelLayout, options: Options, num_blocks: int, share: float, step_s: float
) -> list[set[Hashable]]:
    """Returns by rank the contents that a choice of at most `step_s` may have.

    `options` are bounds, of which averages stand for plans. A number of blocks is out of reach if
    it is with the least of each of its seconds.
    """
    equal = layout.equal_ranks or layout.mesh.pp == 1
    placed = equal or any(column.layers for columns in options for column in columns)
    if placed or not longer_never_pays(layout, share):
        return [{column.contents for column in columns} for columns in options]
    number = attrgetter("num_blocks")
    least = [
        [_least_of(list(alike)) for _, alike in groupby(sorted(columns, key=number), number)]
        for columns in options
    ]
    near = in_reach_of(layout, least, num_blocks, share, step_s)
    return [{column.contents for column in columns} for columns in near]


def _least_of(columns: Sequence[StageColumn]) -> StageColumn:
    """Returns a column with the least of each of the seconds of some columns."""
    return replace(
        columns[0],
        **{
            name: min(getattr(column, name) for column in columns)
            for name in ("time_s", "tail_s", "plain_s", "ramp_s")
        },
    )


def _placed_s(ranks: Sequence[_RankArrays], num_blocks: int) -> list[Array]:
    """Returns by number of leading ranks the least ramps that place each number of blocks."""
    placed_s = [np.append(0.0, np.full(num_blocks + 1, math.inf))]
    for rank in ranks:
        added_s = np.minimum.reduceat(rank.ramp_s, rank.starts)
        sums_s = placed_s[-1][rank.before] + added_s[:, None]
        placed_s.append(np.append(sums_s.min(axis=0), math.inf))
    return placed_s


class _RankArrays:
    """The columns of one rank as arrays, in the order of their numbers of blocks.

    limited_s    by kind of limit, the seconds of each column: time, tail, time without recompute
    counts       the numbers of blocks, ascending; `starts` are the first columns of each
    before       by count and number of blocks placed, the blocks that the earlier ranks placed; the
                 last place stands for fewer than none
    """

    def __init__(self, columns: Sequence[StageColumn], num_blocks: int) -> None:
        self.columns = sorted(columns, key=lambda column: column.num_blocks)
        seconds = [[c.time_s, c.tail_s, c.plain_s, c.ramp_s] for c in self.columns]
        *limited_s, self.ramp_s = np.array(seconds).T
        self.limited_s = np.array(limited_s)
        self.counts, self.starts = np.unique(
            [c.num_blocks for c in self.columns], return_index=True
        )
        before = np.arange(num_blocks + 1) - self.counts[:, None]
        self.before = np.where(before < 0, num_blocks + 1, before)


def _least_ramps(
    ranks: Sequence[_RankArrays], limits_s: Array, num_blocks: int
) -> list[StageColumn] | None:
    """Returns the columns within the limits that place all blocks with the least sum of ramps."""
    placed_s = np.full(num_blocks + 2, math.inf)
    placed_s[0] = 0.0
    steps: list[tuple[Array, Array]] = []
    for rank in ranks:
        within = (rank.limited_s <= limits_s[:, None]).all(axis=0)
        allowed_s = np.where(within, rank.ramp_s, math.inf)
        added_s = np.minimum.reduceat(allowed_s, rank.starts)
        sums_s = placed_s[rank.before] + added_s[:, None]
        steps.append((allowed_s, sums_s))
        placed_s = np.append(sums_s.min(axis=0), math.inf)
    if placed_s[num_blocks] == math.inf:
        return None
    picked: list[StageColumn] = []
    left = num_blocks
    for rank, (allowed_s, sums_s) in zip(reversed(ranks), reversed(steps), strict=True):
        count = int(sums_s[:, left].argmin())
        ends = [*rank.starts[1:], len(rank.columns)]
        of_count = allowed_s[rank.starts[count] : ends[count]]
        picked.append(rank.columns[rank.starts[count] + int(of_count.argmin())])
        left -= int(rank.counts[count])
    return picked[::-1]
