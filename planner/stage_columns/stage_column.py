"""One way to run one pipeline rank, and the order between such ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array
from parplan.planner.host_options.state_locations import NOTHING, BlockLocations
from parplan.planner.layer_options.catalogue import LayerOption
from parplan.planner.stage_columns.stage_prices import (
    end_kinds,
)

Mix = tuple[tuple[LayerOption, int], ...]


@dataclass(frozen=True, slots=True)
class StageColumn:
    """One way to run one rank: how many of its blocks on which option, and the ZeRO stage of its
    embedding and head.

    time_s of one micro-batch; tail_s after the last one; memory_bytes the peak of a device;
    redundant_bytes per device. plain_s, ramp_s: of time_s what there is without recompute, and in
    the ramps of the pipeline (costmodels/schedules/hidden_recompute.py)
    homes: where the states of its blocks lie, of a layout in chunks
    looks_up: whether the host has its token table
    corner: of a bound, whether averages with the other corners of `group` stand for plans, and not
    the column by itself
    """

    mix: Mix
    zero: int
    time_s: float
    tail_s: float
    memory_bytes: float
    redundant_bytes: float
    plain_s: float
    ramp_s: float
    homes: BlockLocations = NOTHING
    looks_up: bool = False
    corner: bool = False

    @property
    def group(self) -> tuple[int, int, bool]:
        """Number of blocks, ZeRO stage of the ends and place of the token table: what no average is
        over.
        """
        return self.num_blocks, self.zero, self.looks_up

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.mix)

    def alone_s(self, num_micro_batches: int) -> float:
        """Seconds of all micro-batches of the rank and of its tail, whatever the other ranks
        take.
        """
        return num_micro_batches * self.time_s + self.tail_s


@dataclass(frozen=True, slots=True)
class RankTimeLimit:
    """What a rank may take in a plan of a layout: `repeats` micro-batches and its tail in `room_s`
    seconds.
    """

    repeats: float
    room_s: float

    def within(self, time_s: Array, tail_s: Array | float) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self.repeats * time_s + tail_s <= self.room_s
        return found


def same_ends(rank: int, layout: ParallelLayout, one: StageColumn, other: StageColumn) -> bool:
    """Whether either column may take the other's place beside tied ends and a token table that is
    where it is.
    """
    return not end_kinds(rank, layout) or (one.zero > 0, one.looks_up) == (
        other.zero > 0,
        other.looks_up,
    )


def unbeaten(found: Sequence[StageColumn]) -> list[StageColumn]:
    """The columns that no other beats or equals in time, in tail and in what counts in the ramps;
    of equals the one with least memory.
    """
    values = np.array(
        [[c.time_s, c.tail_s, c.plain_s, c.ramp_s, c.memory_bytes] for c in found]
    ).reshape(-1, 5)
    return [found[index] for index in unbeaten_rows(values)]


def unbeaten_rows(values: Array) -> list[int]:
    """The rows that no other beats or equals in every column but the last; of rows that are equal
    the one with the least last.
    """
    kept: list[int] = []
    best = np.empty((len(values), values.shape[1] - 1))
    for row in np.lexsort(values.T[::-1]):
        if not (best[: len(kept)] <= values[row, :-1]).all(axis=1).any():
            best[len(kept)] = values[row, :-1]
            kept.append(int(row))
    return kept
