"""Columns of the master: ranges of shards of a virtual stage, with the best ways to run them.

A stage alone on its rank needs one column a ZeRO stage, the fastest that fits its device. A stage
that shares its rank has a few points of its front of time and memory, and the master adds up the
bytes of the stages of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parplan.costmodels.memory.rank_memory import stashes, usable_bytes
from parplan.costmodels.schedules.schedule import AHEAD, LAST_KEEPS_ALL
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.traced.range_tables import RangePasses, RangeStates, RangeTables
from parplan.planner.traced.recompute_labels import LabelTable
from parplan.planner.traced.shard_flow import Array
from parplan.profiles.models.operator_graph import LayerKind

Rows = npt.NDArray[np.int64]
POINTS = 4  # points of the front of a range that shares its rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardColumn:
    """One way to run shards [first, end) as a virtual stage at ZeRO stage `zero`.

    recomputed   shards that are recomputed
    time_s       seconds of one micro-batch
    walk_s       seconds that a micro-batch waits for on its way through the pipeline
    tail_s       seconds after the last micro-batch
    fixed_bytes  bytes independent of the micro-batches in flight
    kept_bytes   bytes of each micro-batch in flight
    peak_bytes   temporaries; a rank has the largest of its stages
    shares       true if another stage holds one of its parameters
    """

    first: int
    end: int
    zero: int
    recomputed: tuple[int, ...]
    time_s: float
    walk_s: float
    tail_s: float
    fixed_bytes: float
    kept_bytes: float
    peak_bytes: float
    shares: bool


# the label table of a micro-batch size and of allowed levels
Labelled = Callable[[int, tuple[int, ...]], LabelTable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Choices of a stage under the pins: ZeRO stages, and levels saved (0) and recomputed (1)."""

    zeros: tuple[int, ...]
    levels: tuple[int, ...]


class StageTable:
    """Least seconds, least bytes and columns of one virtual stage of a layout, by range."""

    def __init__(
        self,
        stage: int,
        layout: ParallelLayout,
        tables: RangeTables,
        allowed: Allowed,
        labels: Labelled,
        limit_bytes: float,
    ) -> None:
        self.stage = stage
        self.layout = layout
        self.tables = tables
        self.labels = labels
        self.rank, self.zeros = layout.rank_of(stage), allowed.zeros
        self.usable_bytes = usable_bytes(limit_bytes, layout.mesh, tables.price_cache)
        self.passes: RangePasses = tables.passes(layout.micro_batch_size)
        self.held: dict[int, RangeStates] = {
            zero: tables.held(layout.micro_batch_size, layout.mesh, zero) for zero in allowed.zeros
        }
        self.alone, self.ahead = layout.virtual_stages == 1, layout.schedule in AHEAD
        self.stashes = stashes(LayerKind.BLOCK, self.rank, layout)
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
        """Seconds to receive inputs, by first shard, and gradients of outputs, by end."""
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

    def _from(self, rank: int) -> Array:
        if rank == self.rank:
            return np.zeros(self.tables.size + 1)
        return self.tables.received(rank, self.rank, self.layout)

    @property
    def least_s(self) -> Array:
        """Lower bound of the seconds of a micro-batch, by range."""
        recompute_s = 0.0 if 0 in self.levels else self.passes.recompute_s
        return np.asarray(
            self.base_s
            + recompute_s
            + np.minimum.reduce([held.per_micro_batch_s for held in self.held.values()])
        )

    @property
    def least_tail_s(self) -> Array:
        """Lower bound of the seconds after the last micro-batch, by range."""
        return np.asarray(np.minimum.reduce([held.tail_s for held in self.held.values()]))

    def least_bytes(self) -> Array:
        """Lower bound of bytes by range for any recompute, without temporaries."""
        kept = np.minimum.reduce([self.passes.saved[level] for level in self.levels])
        states = np.minimum.reduce(
            [held.states + held.step_copies + held.buffers for held in self.held.values()]
        )
        return np.asarray(states + self.stashes * (kept + self.passes.besides) + self.sent)

    def columns(self, first: int, end: int) -> list[ShardColumn]:
        """Returns the undominated columns of one range that fit the device by themselves."""
        columns = [column for zero in self.zeros for column in self._of_zero(first, end, zero)]
        kept: list[ShardColumn] = []
        for column in sorted(columns, key=_values):
            if not any(_beats(better, column) for better in kept):
                kept.append(column)
        return kept

    def leanest(self, first: int, end: int) -> ShardColumn:
        """Returns the column of a range that holds least, even if it does not fit."""
        candidates = (self._of_rows(first, end, zero, _least) for zero in self.zeros)
        columns = [column for columns in candidates for column in columns]
        return min(
            columns,
            key=lambda column: (
                column.fixed_bytes + self.stashes * column.kept_bytes + column.peak_bytes
            ),
        )

    def _of_zero(self, first: int, end: int, zero: int) -> list[ShardColumn]:
        """Returns columns that fit: the fastest if the stage is alone, else points of the front."""
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
        """Returns columns of the labels that `chosen` picks by their bytes without fixed ones."""
        passes, at = self.passes, (first, end)
        table = self.labels(self.layout.micro_batch_size, self.levels)
        labels = table.of_range(first, end)
        # with recompute ahead, all recomputed activations are there at once
        ahead = passes.saved[0][at] - labels.kept + passes.temporaries[at]
        peak = np.where(self.ahead & (labels.added_s > 0), ahead, labels.temporaries)
        return [
            self._column(
                first,
                end,
                zero,
                float(labels.added_s[row]),
                float(labels.kept[row]),
                float(peak[row]),
                table.recomputed(first, end, int(row)) if labels.added_s[row] else (),
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
        recomputed: tuple[int, ...],
    ) -> ShardColumn:
        held, at = self.held[zero], (first, end)
        walk_s = float(self.base_s[at] + held.per_micro_batch_s[at])
        return ShardColumn(
            first=first,
            end=end,
            zero=zero,
            recomputed=recomputed,
            time_s=walk_s + added_s,
            walk_s=walk_s if self.ahead else walk_s + added_s,
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


def _beats(better: ShardColumn, column: ShardColumn) -> bool:
    """True if `better` is at least as good as `column` of the same range, and can replace it."""
    if better.shares and (better.zero > 0) != (column.zero > 0):
        return False
    return all(a <= b for a, b in zip(_values(better), _values(column), strict=True))


def _least(needs: Array) -> Rows:
    return np.array([int(needs.argmin())])


def _spread(rows: Rows) -> Rows:
    """Returns POINTS of the rows, with the first and the last."""
    if len(rows) <= POINTS:
        return rows
    return np.asarray(
        rows[np.unique(np.linspace(0, len(rows) - 1, POINTS).round().astype(np.int64))]
    )
