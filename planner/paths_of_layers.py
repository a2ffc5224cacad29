"""The columns of a pipeline that lie on a path of layers, and a bound of all paths.

With one part a rank, the rows (C9) of the master (planner/master.py) say that the range of a rank
begins where that of the rank before ends. Dynamic programming over the cuts finds the least of each
term of the step of all paths through a range. A column that no path has, or whose paths all take
too long, needs no program. With a longest time, tail and time without recompute given, it also
finds the path with the least sum of ramps (planner/limit_boxes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from parplan.costmodels.schedules.hidden_recompute import hidden_passes
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints
from parplan.planner.limit_boxes import faster_and_faster
from parplan.planner.master import MasterChoice, joined_by_cuts
from parplan.planner.stage_columns.stage_column import StageColumn, alike_ends
from parplan.planner.stage_columns.stage_prices import tied_ends

Options = Sequence[Sequence[StageColumn]]
NEAR = 1e-9  # share of the step by which columns out of reach are slower


@dataclass(frozen=True, slots=True)
class OnPaths:
    """The columns of each rank that are on some path, and seconds that no path is below.

    The bound is infinite where there is no path.
    """

    options: list[list[StageColumn]]
    bound_s: float


def one_range_a_rank(layout: ParallelLayout, options: Options) -> bool:
    """Returns whether each rank has one range of layers, which must follow one another."""
    return layout.virtual_stages == 1 and joined_by_cuts(layout, options)


def fastest_path(
    layout: ParallelLayout,
    options: Options,
    share: float,
    cut_s: float = math.inf,
    *,
    tied: bool = False,
    check: Callable[[], None] = lambda: None,
) -> MasterChoice | None:
    """Returns the optimum of `Master.fastest` of ranks with `one_range_a_rank`, or None.

    None where no path takes less than `cut_s`. Corners of a group count as one column with the
    least of each of their seconds, so that no average of them is faster than what is returned.
    Ranks that share parameters, or a tied embedding, agree (C7). The layout must be one where
    `longer_never_pays`. `check` is called at times and may raise if no time is left.
    """
    best: MasterChoice | None = None
    for alike in alike_ends(options, tied_ends(layout) if tied else ()):
        for allowed in filter(all, _shared_alike(alike)):
            ranks = [
                _RankPlaces(columns, rows) for columns, rows in zip(alike, allowed, strict=True)
            ]
            least_ramps = partial(_least_ramps, alike, ranks)
            for choice in faster_and_faster(layout, ranks, least_ramps, share, cut_s, check):
                best, cut_s = choice, choice.step_s
    return best


def _least_ramps(
    options: Options, ranks: Sequence[_RankPlaces], limits_s: Array
) -> list[StageColumn] | None:
    """Returns the columns within the limits on the path with the least sum of ramps."""
    size = 1 + max((int(rank.end.max(initial=0)) for rank in ranks), default=0)
    reached_s = np.full(size, math.inf)
    reached_s[0] = 0.0
    steps: list[Array] = []
    for rank in ranks:
        within = (rank.limited_s <= limits_s[:, None]).all(axis=0)
        steps.append(np.where(within, reached_s[rank.first] + rank.seconds[-1], math.inf))
        reached_s = np.full(size, math.inf)
        np.minimum.at(reached_s, rank.end, steps[-1])
    if reached_s[-1] == math.inf:
        return None
    picked: list[StageColumn] = []
    cut = size - 1
    for columns, rank, sums_s in zip(options[::-1], ranks[::-1], steps[::-1], strict=True):
        place = int(np.where(rank.end == cut, sums_s, math.inf).argmin())
        picked.append(rank.column(columns, place))
        cut = int(rank.first[place])
    return picked[::-1]


def on_paths(
    layout: ParallelLayout, options: Options, share: float, cut_s: float = math.inf
) -> OnPaths:
    """Returns the columns of ranks with `one_range_a_rank` whose paths may take at most `cut_s`.

    Ranks that share parameters all shard their states, or none does (C7). The bound holds for
    averages of columns too.

    share    the bubble share, as in `Master`
    """
    kept: list[set[int]] = [set() for _ in options]
    bound_s = math.inf
    for allowed in _shared_alike(options):
        ranks = [_RankPlaces(columns, rows) for columns, rows in zip(options, allowed, strict=True)]
        through_s = _through_s(layout, ranks, share)
        bound_s = min(bound_s, max(float(each.min(initial=math.inf)) for each in through_s))
        for rank, place_s, rows in zip(ranks, through_s, kept, strict=True):
            within = np.isfinite(place_s) & (place_s <= cut_s * (1 + NEAR))
            rows.update(rank.rows[within].tolist())
    chosen = [
        [column for row, column in enumerate(columns) if row in rows]
        for columns, rows in zip(options, kept, strict=True)
    ]
    return OnPaths(chosen, bound_s)


def _shared_alike(options: Options) -> list[list[list[int]]]:
    """Returns by way to shard shared parameters and by rank the columns that agree with it."""
    ways = (False, True) if any(c.shares for columns in options for c in columns) else (False,)
    return [
        [
            [
                row
                for row, column in enumerate(columns)
                if not column.shares or (column.zero > 0) == sharded
            ]
            for columns in options
        ]
        for sharded in ways
    ]


class _RankPlaces:
    """The places of the columns of one rank, as arrays.

    rows         the column of each place
    first, end   its range of layers
    seconds      by term of the step, the least seconds of its column or of its group: time, tail,
                 time without recompute, ramp
    limited_s    all of them but the ramp
    """

    def __init__(self, columns: Sequence[StageColumn], rows: Sequence[int]) -> None:
        places = [(row, *range_) for row in rows for range_ in columns[row].layers[0]]
        numbers: Ints = np.array(places, np.int64).reshape(-1, 3)
        self.rows, self.first, self.end = numbers.T
        least = np.full((4, len(columns)), math.inf)
        groups: dict[Hashable, list[int]] = {}
        for row in rows:
            column = columns[row]
            groups.setdefault(column.group if column.corner else row, []).append(row)
            least[:, row] = column.time_s, column.tail_s, column.plain_s, column.ramp_s
        for group in groups.values():
            least[:, group] = least[:, group].min(axis=1, keepdims=True)
        self.seconds: Array = least[:, self.rows]
        self.limited_s = self.seconds[:3]

    def column(self, columns: Sequence[StageColumn], place: int) -> StageColumn:
        """Returns the column of a place, with the least seconds of its group."""
        time_s, tail_s, plain_s, ramp_s = self.seconds[:, place].tolist()
        column = columns[int(self.rows[place])]
        if not column.corner:
            return column
        return replace(column, time_s=time_s, tail_s=tail_s, plain_s=plain_s, ramp_s=ramp_s)


def _through_s(layout: ParallelLayout, ranks: Sequence[_RankPlaces], share: float) -> list[Array]:
    """Returns by rank and place the least seconds of a step of all paths through it."""
    hidden = hidden_passes(layout.schedule)
    repeats = layout.num_micro_batches - share - hidden
    factors = np.array([repeats, 1.0, float(hidden), share])
    if repeats < 0:  # a longer pace pays, so that only the path counts
        factors = np.zeros(4)
    size = 1 + max((int(rank.end.max(initial=0)) for rank in ranks), default=0)
    joins = (np.maximum, np.maximum, np.maximum, np.add)
    before = _reached(ranks, size, joins, start=0, backward=False)
    behind = _reached(ranks[::-1], size, joins, start=size - 1, backward=True)[::-1]
    through = []
    for place, rank in enumerate(ranks):
        terms = np.array(
            [
                join(join(before[place][k, rank.first], own), behind[place + 1][k, rank.end])
                for k, (join, own) in enumerate(zip(joins, rank.seconds, strict=True))
            ]
        ).reshape(4, -1)
        connected = np.isfinite(terms[0])
        steps_s = factors @ np.where(connected, terms, 0.0)
        through.append(np.asarray(np.where(connected, steps_s, math.inf)))
    return through


def _reached(
    ranks: Sequence[_RankPlaces],
    size: int,
    joins: Sequence[Callable[[Array, Array], Array]],
    *,
    start: int,
    backward: bool,
) -> list[Array]:
    """Returns by number of leading ranks the least of each term [term, cut] that ends at a cut."""
    first = np.full((len(joins), size), math.inf)
    first[:, start] = 0.0
    reached = [first]
    for rank in ranks:
        there = np.full_like(first, math.inf)
        begins, ends = (rank.end, rank.first) if backward else (rank.first, rank.end)
        for k, join in enumerate(joins):
            np.minimum.at(there[k], ends, join(reached[-1][k, begins], rank.seconds[k]))
        reached.append(there)
    return reached
