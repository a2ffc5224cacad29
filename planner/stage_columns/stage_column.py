"""A column: one way to run one pipeline rank; and the dominance between columns."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parplan.costmodels.layers.model_layers import Ends
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array
from parplan.planner.host_options.state_locations import NOTHING, BlockLocations
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.stage_columns.stage_prices import end_kinds

SCHEDULED = 4  # columns of one layout whose exact schedules are compared

Mix = tuple[tuple[LayerOption, int], ...]


@dataclass(frozen=True, slots=True)
class StageColumn:
    """One way to run one rank: block counts by option, and the ZeRO stage of embedding and head.

    time_s             of one micro-batch
    tail_s             after the last micro-batch
    memory_bytes       the peak of a device
    redundant_bytes    per device
    plain_s, ramp_s    the part of time_s without recompute, and in the ramps of the pipeline
                       (costmodels/schedules/hidden_recompute.py)
    ends               shardings of embedding and head, where they are not those of the layout
    table              the division of a tied token table in them, alike on both ranks with it
    homes              locations of the states of its blocks, in a layout with chunks
    looks_up           the host holds its token table, or the states of a tied one
    layers             by chunk, the ranges [first, end) of a model of several layer classes that
                       it may be; none where all blocks are alike
    shares             layers of other ranks hold some of its parameters, where layers differ
    corner             part of a bound: only averages with other corners of `group` stand for plans
    """

    mix: Mix
    zero: int
    time_s: float
    tail_s: float
    memory_bytes: float
    redundant_bytes: float
    plain_s: float
    ramp_s: float
    ends: Ends = ()
    table: tuple[str | None, ...] = ()
    homes: BlockLocations = NOTHING
    looks_up: bool = False
    layers: tuple[tuple[tuple[int, int], ...], ...] = ()
    shares: bool = False
    corner: bool = False

    @property
    def contents(self) -> Hashable:
        """The number of its blocks, or the places of its layers where they are not alike."""
        return self.layers or self.num_blocks

    @property
    def group(self) -> Hashable:
        """Its contents, ZeRO stage and shardings of the ends and location of the token table.

        All columns of an average share them.
        """
        return self.contents, self.zero, self.ends, self.looks_up

    @property
    def tied_as(self) -> Hashable:
        """The value in which two ranks with a tied embedding must be alike.

        Gradients of both copies are whole, or both are sharded, one division cuts both tables, and
        both are on the device or on the host.
        """
        return self.zero > 0, self.table, self.looks_up

    @property
    def num_blocks(self) -> int:
        return sum([count for _, count in self.mix])

    def alone_s(self, num_micro_batches: int) -> float:
        """Seconds of all micro-batches of the rank and of its tail, for any other ranks."""
        return num_micro_batches * self.time_s + self.tail_s


def worth_scheduling(columns: Iterable[StageColumn], num_micro_batches: int) -> list[StageColumn]:
    """Returns the fastest columns of a rank with chunks and no pipeline, whose schedules differ.

    The exact schedules know the waits for copies better than the closed form.
    """
    return sorted(columns, key=lambda column: column.alone_s(num_micro_batches))[:SCHEDULED]


@dataclass(frozen=True, slots=True)
class RankTimeLimit:
    """The time limit of a rank: `repeats` micro-batches and its tail in `room_s` seconds."""

    repeats: float
    room_s: float

    def within(self, time_s: Array, tail_s: Array | float) -> npt.NDArray[np.bool_]:
        within: npt.NDArray[np.bool_] = self.repeats * time_s + tail_s <= self.room_s
        return within


def alike_ends(
    options: Sequence[Sequence[StageColumn]], ends: Sequence[int]
) -> Iterator[list[list[StageColumn]]]:
    """Yields the columns of all ranks with which the ranks `ends` are tied alike, by that value."""
    if not ends:
        yield [list(columns) for columns in options]
        return
    shared = set.intersection(*({column.tied_as for column in options[rank]} for rank in ends))
    for tied_as in sorted(shared, key=str):
        yield [
            [column for column in columns if rank not in ends or column.tied_as == tied_as]
            for rank, columns in enumerate(options)
        ]


def interchangeable_ends(
    rank: int, layout: ParallelLayout, column: StageColumn, rival: StageColumn
) -> bool:
    """True if either column may replace the other beside tied ends and a fixed token table."""
    if not end_kinds(rank, layout):
        return True
    return column.tied_as == rival.tied_as


def unbeaten(columns: Sequence[StageColumn]) -> list[StageColumn]:
    """Returns the undominated columns by time, tail, and seconds that count in the ramps.

    Of equals, the one with the least memory remains.
    """
    values = np.array(
        [[c.time_s, c.tail_s, c.plain_s, c.ramp_s, c.memory_bytes] for c in columns]
    ).reshape(-1, 5)
    return [columns[index] for index in unbeaten_rows(values)]


def unbeaten_rows(values: Array) -> list[int]:
    """Returns the rows that are undominated in every column but the last.

    Of rows that are equal there, the one with the least last value remains.
    """
    kept: list[int] = []
    best = np.empty((len(values), values.shape[1] - 1))
    for row in np.lexsort(values.T[::-1]):
        if not (best[: len(kept)] <= values[row, :-1]).all(axis=1).any():
            best[len(kept)] = values[row, :-1]
            kept.append(int(row))
    return kept
