"""Columns of the master: for a virtual stage, every range of shards that it may hold, with the best
ways to run it within memory.

A stage that has its rank alone (one virtual stage a rank) needs one column a ZeRO stage, the
fastest that fits its device. Where several share a rank, each has a few points of its front of time
and memory, and the master adds up what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parplan.costmodels.memory.rank_memory import usable_bytes
from parplan.costmodels.schedules.schedule import AHEAD, LAST_KEEPS_ALL
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.traced.range_tables import RangePasses, RangeStates, RangeTables
from parplan.planner.traced.recompute_labels import LabelTable
from parplan.planner.traced.shard_flow import Array
from parplan.planner.traced.shard_price_cache import exposed_time, link
from parplan.planner.traced.shard_strategy import held_stashes

Rows = npt.NDArray[np.int64]
POINTS = 4  # of the front of a range that shares its rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardColumn:
    """One way to run one virtual stage: shards [first, end) at ZeRO stage `zero`, `again` those
    that run again.

    time_s of one micro-batch; walk_s what of it a micro-batch waits for on its way; tail_s after
    the last micro-batch
    fixed_bytes, kept_bytes    whatever is in flight, and of each micro-batch that is
    peak_bytes                 temporaries, of which a rank has the largest of its stages
    shares                     whether another stage holds one of its parameters
    """

    first: int
    end: int
    zero: int
    again: tuple[int, ...]
    time_s: float
    walk_s: float
    tail_s: float
    fixed_bytes: float
    kept_bytes: float
    peak_bytes: float
    shares: bool


Labelled = Callable[
    [int, tuple[int, ...]], LabelTable
]  # of a micro-batch size, and of what a shard may do


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What pins leave of a stage: ZeRO stages, and whether a shard may run once (0) or again
    (1).
    """

    zeros: tuple[int, ...]
    levels: tuple[int, ...]


class StageTable:
    """Everything about one virtual stage of a layout, by range [first, end): least seconds first,
    columns when they are asked for.
    """

    def __init__(
        self,
        stage: int,
        layout: ParallelLayout,
        tables: RangeTables,
        allowed: Allowed,
        labels: Labelled,
        limit_bytes: float,
    ) -> None:
        self.stage, self.layout, self.tables, self.labels = stage, layout, tables, labels
        self.rank, self.zeros = layout.rank_of(stage), allowed.zeros
        self.usable_bytes = usable_bytes(limit_bytes, layout.mesh, tables.price_cache)
        self.passes: RangePasses = tables.passes(layout.micro_batch_size)
        self.held: dict[int, RangeStates] = {
            zero: tables.held(layout.micro_batch_size, layout.mesh, zero) for zero in allowed.zeros
        }
        self.alone, self.ahead = layout.virtual_stages == 1, layout.schedule in AHEAD
        self.stashes = max(
            held[layout.stages_of(self.rank).index(stage)]
            for held in held_stashes(layout, self.rank)
        )
        last = stage == layout.num_virtual_stages - 1
        self.levels = (0,) if last and layout.schedule in LAST_KEEPS_ALL else allowed.levels
        self.sent = (
            layout.num_micro_batches
            * self.passes.sent
            * tables.price_cache.training.stack.keeps_sent
        )
        self.base_s = self.passes.time_s + self.passes.constants_s + self._received_s()
        self.base_s[np.arange(tables.size)[:, None] >= np.arange(tables.size + 1)[None, :]] = np.inf

    def _received_s(self) -> Array:
        """Seconds for the inputs, by first shard, and for the gradients of outputs, by end."""
        last = self.layout.num_virtual_stages - 1
        before = (
            self._from(self.layout.rank_of(self.stage - 1))
            if self.stage > 0
            else np.zeros(self.tables.size + 1)
        )
        behind = (
            self._from(self.layout.rank_of(self.stage + 1))
            if self.stage < last
            else np.zeros(self.tables.size + 1)
        )
        return np.asarray(before[: self.tables.size, None] + behind[None, :])

    def _from(self, other: int) -> Array:
        layout, price_cache = self.layout, self.tables.price_cache
        if other == self.rank:
            return np.zeros(self.tables.size + 1)
        crosses, sharing = link(other, self.rank, layout, price_cache)
        return exposed_time(layout, price_cache) * self.tables.received(
            layout.micro_batch_size, crosses_nodes=crosses, sharing=sharing
        )

    @property
    def least_s(self) -> Array:
        """Seconds of a micro-batch at least."""
        again_s = 0.0 if 0 in self.levels else self.passes.again_s
        return np.asarray(
            self.base_s
            + again_s
            + np.minimum.reduce([held.per_micro_batch_s for held in self.held.values()])
        )

    @property
    def least_tail_s(self) -> Array:
        """Seconds after the last micro-batch at least."""
        return np.asarray(np.minimum.reduce([held.tail_s for held in self.held.values()]))

    def least_bytes(self) -> Array:
        """What tensors of a range fill at least, whatever runs again, temporaries left out."""
        kept = np.minimum.reduce([self.passes.saved[level] for level in self.levels])
        states = np.minimum.reduce(
            [held.states + held.step_copies + held.buffers for held in self.held.values()]
        )
        return np.asarray(states + self.stashes * (kept + self.passes.besides) + self.sent)

    def columns(self, first: int, end: int) -> list[ShardColumn]:
        """The columns of one range that fit the device by themselves, but for those that another
        stands for.
        """
        found = [column for zero in self.zeros for column in self._of_zero(first, end, zero)]
        kept: list[ShardColumn] = []
        for column in sorted(found, key=_values):
            if not any(_beats(other, column) for other in kept):
                kept.append(column)
        return kept

    def leanest(self, first: int, end: int) -> ShardColumn:
        """The column of a range that holds least, whether it fits or not."""
        found = (self._of_rows(first, end, zero, _least) for zero in self.zeros)
        columns = [column for columns in found for column in columns]
        return min(
            columns,
            key=lambda column: (
                column.fixed_bytes + self.stashes * column.kept_bytes + column.peak_bytes
            ),
        )

    def _of_zero(self, first: int, end: int, zero: int) -> list[ShardColumn]:
        """Those that fit: the fastest where the stage has its rank alone, else some of the
        front.
        """
        at, passes = (first, end), self.passes
        room = (
            self.usable_bytes
            - self._fixed_bytes(first, end, zero)
            - self.stashes * float(passes.besides[at])
        )
        once = float(self.stashes * passes.saved[0][at] + passes.temporaries[at])
        if once <= room and 0 in self.levels and (self.alone or self.levels == (0,)):
            return [
                self._column(
                    first,
                    end,
                    zero,
                    0.0,
                    float(passes.saved[0][at]),
                    float(passes.temporaries[at]),
                    (),
                )
            ]
        if self.levels == (0,):
            return []

        def chosen(needs: Array) -> Rows:
            fits = np.flatnonzero(needs <= room)
            return (
                fits[:1]
                if self.alone or not len(fits)
                else np.unique(np.append(_spread(fits), needs.argmin()))
            )

        return self._of_rows(first, end, zero, chosen)

    def _of_rows(
        self, first: int, end: int, zero: int, chosen: Callable[[Array], Rows]
    ) -> list[ShardColumn]:
        """Columns of the labels that `chosen` picks by the bytes that each needs besides the fixed
        ones.
        """
        passes, at = self.passes, (first, end)
        table = self.labels(self.layout.micro_batch_size, self.levels)
        labels = table.of_range(first, end)
        ahead = (
            passes.saved[0][at] - labels.kept + passes.temporaries[at]
        )  # all that runs again is there at once
        peak = np.where(self.ahead & (labels.added_s > 0), ahead, labels.temporaries)
        return [
            self._column(
                first,
                end,
                zero,
                float(labels.added_s[row]),
                float(labels.kept[row]),
                float(peak[row]),
                table.again(first, end, int(row)) if labels.added_s[row] else (),
            )
            for row in chosen(self.stashes * labels.kept + peak)
        ]

    def _fixed_bytes(self, first: int, end: int, zero: int) -> float:
        held, at = self.held[zero], (first, end)
        return float(held.states[at] + held.step_copies[at] + held.buffers[at] + self.sent[at])

    def _column(
        self,
        first: int,
        end: int,
        zero: int,
        added_s: float,
        kept: float,
        peak: float,
        again: tuple[int, ...],
    ) -> ShardColumn:
        held, at = self.held[zero], (first, end)
        walk_s = float(self.base_s[at] + held.per_micro_batch_s[at])
        return ShardColumn(
            first=first,
            end=end,
            zero=zero,
            again=again,
            time_s=walk_s + added_s,
            walk_s=walk_s + added_s * (not self.ahead),
            tail_s=float(held.tail_s[at]),
            fixed_bytes=self._fixed_bytes(first, end, zero),
            kept_bytes=kept + float(self.passes.besides[at]),
            peak_bytes=peak,
            shares=bool(held.shares[at]),
        )


def _values(column: ShardColumn) -> tuple[float, ...]:
    return (
        column.time_s,
        column.walk_s,
        column.tail_s,
        column.fixed_bytes,
        column.kept_bytes,
        column.peak_bytes,
    )


def _beats(one: ShardColumn, other: ShardColumn) -> bool:
    """Whether a column is at least as good as another of the same range, which it can stand for."""
    if one.shares and (one.zero > 0) != (other.zero > 0):
        return False
    return all(a <= b for a, b in zip(_values(one), _values(other), strict=True))


def _least(needs: Array) -> Rows:
    return np.array([int(needs.argmin())])


def _spread(rows: Rows) -> Rows:
    """POINTS of the rows, the first and the last among them."""
    if len(rows) <= POINTS:
        return rows
    return np.asarray(
        rows[np.unique(np.linspace(0, len(rows) - 1, POINTS).round().astype(np.int64))]
    )
