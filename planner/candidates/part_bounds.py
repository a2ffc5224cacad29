"""Lower bounds of a layout whose pipeline ranks run several parts of the model each.

Part k is on pipeline rank k mod pp. The parts of a rank share its seconds and its bytes, so the
pace is the largest sum over the parts of a rank (EQUATIONS I7). A path that is cheapest part by
part bounds all ranks together: its sum over pp is a pace that no plan is below. Bytes are in this
sum at a price: at any seconds for a byte of a rank, its parts take no less than their seconds and
bytes at that price, less the price of all bytes of the device (a Lagrangian bound).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.candidates.range_bounds import RangeBounds, may_recompute
from parplan.planner.candidates.range_tables import RangeStates, from_first
from parplan.planner.dominance import Array, Ints
from parplan.planner.stage_columns.rank_moment import RankMoment, fullest_moment
from parplan.planner.stage_columns.stage_contents import Range

MOST_CONTENTS = 256  # contents of a rank that get columns; with more, some are left out
ROUNDING = 1e-9  # relative, against another order of summation


@dataclass(frozen=True, slots=True)
class RankParts:
    """Contents that a rank may have: by chunk, ranges that cost the same.

    complete    no contents below the cut are left out
    """

    contents: tuple[tuple[tuple[Range, ...], ...], ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class _Parts:
    """The first chunks of a rank, each with a class of ranges.

    own      their values, as in `PartBounds.values`
    walk_s   by cut, least seconds of all parts up to there
    """

    classes: tuple[int, ...]
    own: Array
    walk_s: Array


class _Chunk:
    """The ranges that one chunk may be, in the order of their classes.

    own      by class, the least values of its ranges
    """

    def __init__(self, stage: int, ranges: Ints, classes: Ints, bounds: PartBounds) -> None:
        order = np.argsort(classes, kind="stable")
        self.stage = stage
        self.first, self.end = ranges[order].T
        self.classes, self.starts = np.unique(classes[order], return_index=True)
        values = bounds.values(stage)[:, self.first, self.end]
        self.own = np.minimum.reduceat(values, self.starts, axis=1).T
        self.time_s = bounds.time_s[stage][self.first, self.end]

    def rows(self, number: int) -> slice:
        """Returns the rows of the ranges of one class, by its place among the classes."""
        ends = [*self.starts[1:].tolist(), len(self.first)]
        return slice(int(self.starts[number]), ends[number])

    def ranges(self, number: int) -> tuple[Range, ...]:
        rows = self.rows(number)
        return tuple(zip(self.first[rows].tolist(), self.end[rows].tolist(), strict=True))


class PartBounds(RangeBounds):
    """The bounds of a layout with several virtual stages a rank.

    A rank alone takes its passes and its tail, so that the seconds of a part include its share of
    the tail: that of the rank over the passes that the pace counts.
    """

    @cached_property
    def tail_s(self) -> Array:
        """None besides the share of each part."""
        return np.zeros((self.tables.size, self.tables.size + 1))

    @property
    def repeats(self) -> float:
        """Micro-batches that the pace counts."""
        return self.layout.num_micro_batches - self._share

    @cached_property
    def _tailed_s(self) -> list[Array]:
        """Seconds of data parallelism by range, with the share of the tail, by ZeRO stage."""
        return [
            s.per_micro_batch_s + (s.tail_s - self._unsure_s) / self.repeats for s in self._states
        ]

    def unlimited_s(self, stage: int) -> Array:
        times = super().unlimited_s(stage) - self._data_s + np.minimum.reduce(self._tailed_s)
        return np.asarray(np.where(self._reachable(stage), times, np.inf))

    def _reachable(self, stage: int) -> npt.NDArray[np.bool_]:
        """Returns by range whether every part before and behind it can have a layer."""
        behind = self.layout.num_virtual_stages - 1 - stage
        first = np.arange(self.tables.size)[:, None]
        left = self.tables.size - np.arange(self.tables.size + 1)[None, :]
        return np.asarray(
            (first >= stage)
            & (left >= behind)
            & ((first == 0) == (stage == 0))
            & ((left == 0) == (behind == 0))
        )

    @cached_property
    def _ramps_s(self) -> float:
        """Least seconds of all parts in the ramps of the pipeline, where no tail counts."""
        stages = range(self.layout.num_virtual_stages)
        times = [super(PartBounds, self).unlimited_s(stage) for stage in stages]
        walk_s = float(from_first(times, np.add)[-1][-1])
        return walk_s * self._share

    def _step_s(self, pace_s: Array | float, walk_s: Array | float) -> Array:
        slowest_s = np.maximum(pace_s, walk_s / self.layout.mesh.pp)
        return np.asarray(self.repeats * slowest_s + self._ramps_s)

    @cached_property
    def _moments(self) -> list[RankMoment]:
        ranks = range(self.layout.mesh.pp)
        return [fullest_moment(self.layout, rank, frees=self._frees) for rank in ranks]

    def _stashes(self, stage: int) -> float:
        rank = self.layout.rank_of(stage)
        chunk = self.layout.stages_of(rank).index(stage)
        return self._moments[rank].stashes[chunk]

    def least_bytes(self, stage: int) -> Array:
        """Lower bound of the bytes that a part adds to its rank."""
        saved = self._passes.kept
        if not may_recompute(self._levels):
            saved = self._passes.whole
        held = [self._part_bytes(stage, states) for states in self._states]
        return np.asarray(np.minimum.reduce(held) + self._stashes(stage) * saved)

    def _part_bytes(self, stage: int, states: RangeStates) -> Array:
        """Bytes of a part besides activations, of which those of the head count once at most."""
        layout, moment = self.layout, self._moments[self.layout.rank_of(stage)]
        sent = moment.sent * layout.num_micro_batches * self._passes.sent
        held = states.held - states.buffer + sent
        if not moment.made:
            held = held - states.gradients
        if stage == layout.num_virtual_stages - 1:
            held[:, -1] -= self._head_bytes
        return np.asarray(held)

    @property
    def _head_bytes(self) -> float:
        """Activations of the head that count for more than one micro-batch in flight."""
        over = max(0.0, self._stashes(self.layout.num_virtual_stages - 1) - 1)
        return 0.0 if self._frees else over * float(self._passes.whole[-1, -1])

    @cached_property
    def _prices(self) -> Array:
        """Seconds for a byte of a device, by rank and price; none where nothing is to choose."""
        if Recompute.NONE not in self._levels or not may_recompute(self._levels):
            return np.zeros((self.layout.mesh.pp, 0))
        held = [np.mean(moment.stashes) for moment in self._moments]
        return np.asarray(self._passes.prices)[None, :] / np.array(held)[:, None]

    def values(self, stage: int) -> Array:
        """Returns least values of a part by range, which add up over the parts of a rank.

        They are its seconds, its seconds and bytes at each price of a byte, and its bytes.
        """
        if stage not in self._values:
            self._values[stage] = self._make_values(stage)
        return self._values[stage]

    @cached_property
    def _values(self) -> dict[int, Array]:
        return {}

    def _make_values(self, stage: int) -> Array:
        prices, stashes = self._prices[self.layout.rank_of(stage)], self._stashes(stage)
        return part_values(
            self.time_s[stage],
            self._tailed_s,
            [self._part_bytes(stage, states) for states in self._states],
            self.least_bytes(stage),
            [(price, self._passes.priced(float(price) * stashes)) for price in prices],
        )

    @cached_property
    def least_pace_s(self) -> float:
        """Least seconds of the slowest rank, infinite where the model does not fit.

        A rank takes no less than any ranges with as many layers as its own have, one for each of
        its chunks. All ranks within the pace must hold all layers.
        """
        alone_s = float(self._paces[0][-1][-1])
        if not np.isfinite(alone_s):
            return np.inf
        by_count = [self._least_by_count(rank) for rank in range(self.layout.mesh.pp)]
        paces = np.unique(np.concatenate(by_count))
        paces = paces[np.isfinite(paces)]
        low, high = 0, len(paces)
        while low < high:
            middle = (low + high) // 2
            within = [np.flatnonzero(each <= paces[middle]) for each in by_count]
            if all(map(len, within)) and sum(n[-1] for n in within) >= self.tables.size:
                high = middle
            else:
                low = middle + 1
        return max(alone_s, float(paces[low])) if low < len(paces) else np.inf

    def _least_by_count(self, rank: int) -> Array:
        """Least seconds of a rank by the number of its layers, wherever they are."""
        size = self.tables.size
        ranges, starts = _ranges_by_length(size)
        total: Array | None = None
        for stage in self.layout.stages_of(rank):
            values = self.values(stage)
            least = np.full((len(values), size + 1), np.inf)
            of_range = values.reshape(len(values), -1)[:, ranges]
            least[:, 1:] = np.minimum.reduceat(of_range, starts, axis=1)
            total = least if total is None else least_sums(total, least)
        assert total is not None, "a rank has stages"
        return self.own_s(rank, total.T)

    @cached_property
    def least_walk_s(self) -> float:
        """Least seconds of all parts together, infinite where they do not fit all devices."""
        reached = np.full((2 + self._prices.shape[1], self.tables.size + 1), np.inf)
        reached[:, 0] = 0.0
        for stage in range(self.layout.num_virtual_stages):
            reached = np.min(reached[:, :-1, None] + self.values(stage), axis=1)
        return self.walk_of(reached[:, -1])

    def walk_of(self, totals: Array) -> float:
        """Least seconds of all parts by least sums of their values, infinite without room."""
        if totals[-1] > self.layout.mesh.pp * self._usable * (1 + ROUNDING):
            return np.inf
        room_s = self._usable * self._prices.sum(axis=0)
        return float(max(totals[0], *(totals[1:-1] - room_s), 0.0))

    def own_s(self, rank: int, own: Array) -> Array:
        """Least seconds of a rank by sums of values, infinite where its parts do not fit."""
        priced_s = own[..., 1:-1] - self._usable * self._prices[rank]
        times = np.concatenate([own[..., :1], priced_s], axis=-1).max(axis=-1)
        fits = own[..., -1] <= self._usable * (1 + ROUNDING)
        return np.asarray(np.where(fits, times, np.inf))

    def parts(self, rank: int, cut_s: float, class_of: Callable[[Range], int]) -> RankParts:
        """Returns the contents of a rank with which the layout may take less than `cut_s`.

        class_of    a number that is equal for ranges with equal prices
        """
        chunks: list[_Chunk] = []
        for stage in self.layout.stages_of(rank):
            ranges = np.argwhere(self.near(stage, cut_s))
            if not len(ranges):
                return RankParts((), complete=True)
            classes = np.array([class_of((int(i), int(j))) for i, j in ranges])
            chunks.append(_Chunk(stage, ranges, classes, self))
        complete, least = True, [chunk.own.min(axis=0) for chunk in chunks]
        nodes = [_Parts((), np.zeros_like(least[0]), self._sums[0][chunks[0].stage])]
        for number, chunk in enumerate(chunks):
            rest = sum(least[number + 1 :], np.zeros_like(least[0]))
            longer = [
                each for node in nodes for each in self._longer(node, chunk, rank, rest, cut_s)
            ]
            longer.sort(key=lambda each: each[0])
            complete = complete and len(longer) <= MOST_CONTENTS
            nodes = [node for _, node in longer[:MOST_CONTENTS]]
        contents = (
            tuple(chunk.ranges(n) for chunk, n in zip(chunks, node.classes, strict=True))
            for node in nodes
        )
        return RankParts(tuple(contents), complete)

    def _longer(
        self, node: _Parts, chunk: _Chunk, rank: int, rest: Array, cut_s: float
    ) -> list[tuple[float, _Parts]]:
        """Returns the parts with each class of ranges of the next chunk, and their bounds."""
        walk_s = node.walk_s
        if node.classes:
            before = self.layout.stages_of(rank)[len(node.classes) - 1]
            for stage in range(before + 1, chunk.stage):
                walk_s = np.min(walk_s[:-1, None] + self.time_s[stage], axis=0)
        ends_s = walk_s[chunk.first] + chunk.time_s
        after_s = self._sums[1][chunk.stage + 1][chunk.end]
        through_s = np.minimum.reduceat(ends_s + after_s, chunk.starts)
        own = node.own + chunk.own
        whole = own + rest
        own_s = self.own_s(rank, whole)
        others_s = np.maximum(0.0, through_s - whole[:, 0])
        if len(node.classes) + 1 == self.layout.virtual_stages:
            through_s = others_s + own_s
            own_s = np.maximum(own_s, others_s / (self.layout.mesh.pp - 1))
        own_s = np.maximum(own_s, self.least_pace_s)
        bounds_s = self._step_s(own_s, np.maximum(through_s, self.least_walk_s))
        longer = []
        for number in np.flatnonzero(np.isfinite(bounds_s) & (bounds_s < cut_s)).tolist():
            rows = chunk.rows(number)
            there_s = np.full_like(walk_s, np.inf)
            np.minimum.at(there_s, chunk.end[rows], ends_s[rows])
            parts = _Parts((*node.classes, number), own[number], there_s)
            longer.append((float(bounds_s[number]), parts))
        return longer


def part_values(
    time_s: Array,
    data_s: Sequence[Array],
    held: Sequence[Array],
    least_bytes: Array,
    priced_s: Sequence[tuple[float | Array, Array]],
) -> Array:
    """Returns the values of parts (`PartBounds.values`), for arrays of parts of one shape.

    time_s     least seconds of a micro-batch, infinite where a part cannot be used
    data_s     seconds of data parallelism by ZeRO stage, of which `time_s` has the least
    held       bytes besides activations, by ZeRO stage
    priced_s   prices of a byte, each with the seconds of recompute and of the saved bytes at it
    """
    passes_s = time_s - np.minimum.reduce(data_s)
    priced = [
        passes_s
        + again_s
        + np.minimum.reduce([s + price * b for s, b in zip(data_s, held, strict=True)])
        for price, again_s in priced_s
    ]
    return np.stack([time_s, *priced, least_bytes])


@cache
def _ranges_by_length(num_layers: int) -> tuple[Ints, Ints]:
    """Returns the flat places of all ranges in a table [first, end], the shortest ranges first.

    The second array has the place at which each length begins.
    """
    first, end = np.triu_indices(num_layers, 1, num_layers + 1)
    order = np.argsort(end - first, kind="stable")
    lengths = np.arange(num_layers, 0, -1)
    return (first * (num_layers + 1) + end)[order], np.cumsum(lengths) - lengths


def least_sums(left: Array, right: Array) -> Array:
    """Returns by kind and number the least sum of two values whose numbers add up to it."""
    size = left.shape[1]
    sums = np.full_like(left, np.inf)
    for count in range(size):
        added = left[:, count : count + 1] + right[:, : size - count]
        sums[:, count:] = np.minimum(sums[:, count:], added)
    return sums
