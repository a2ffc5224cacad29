"""The master for given cuts with several virtual stages a rank: exact without an integer program.

A rank's stages are combined to columns of the rank; columns that do not fit or are dominated in
time and tail are dropped. Ranks depend on each other only by the slowest time Z and the longest
tail E, so that for each pair (Z, E) every rank takes its fastest column.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import undominated_rows
from parplan.planner.traced.shard_columns import ShardColumn, StageTable
from parplan.planner.traced.shard_flow import Array
from parplan.planner.traced.shard_master import ShardChoice, evaluate

# the columns of a rank's stages, with their seconds and their tail
Combined = list[tuple[tuple[ShardColumn, ...], float, float]]


def solve_ranks(
    layout: ParallelLayout, options: Sequence[Sequence[ShardColumn]], stages: Sequence[StageTable]
) -> ShardChoice | None:
    """Returns the fastest choice of one column for each virtual stage, None if none fits.

    All columns have the same cuts.
    """
    classes = (
        (False, True)
        if any(column.shares for columns in options for column in columns)
        else (None,)
    )
    choices = [
        choice
        for parted in classes
        if (choice := _of_class(layout, options, stages, parted)) is not None
    ]
    return min(choices, key=lambda choice: choice.step_s, default=None)


def _of_class(
    layout: ParallelLayout,
    options: Sequence[Sequence[ShardColumn]],
    stages: Sequence[StageTable],
    parted: bool | None,
) -> ShardChoice | None:
    """Solves for stages with shared parameters that all have ZeRO > 0 (`parted`), or none."""
    ranks = []
    for rank in range(layout.mesh.pp):
        by_stage = [
            [
                column
                for column in options[stage]
                if parted is None or not column.shares or (column.zero > 0) is parted
            ]
            for stage in layout.stages_of(rank)
        ]
        ranks.append(
            _combined(
                by_stage,
                stages[layout.stages_of(rank)[0]].stashes,
                stages[layout.stages_of(rank)[0]].usable_bytes,
            )
        )
    if not all(ranks):
        return None
    picked = _fastest(ranks, layout.num_micro_batches, 1 / layout.virtual_stages)
    columns = {
        stage: column
        for rank, by_stage in enumerate(picked)
        for stage, column in zip(layout.stages_of(rank), by_stage, strict=True)
    }
    return evaluate(
        layout, [columns[stage] for stage in range(layout.num_virtual_stages)], proven=True
    )


def _combined(
    columns_of_stages: Sequence[Sequence[ShardColumn]],
    most: int,
    usable: float,
) -> Combined:
    """Returns the undominated combinations of columns of one rank's stages that fit."""
    if not all(columns_of_stages):
        return []
    indices = np.array(list(product(*(range(len(columns)) for columns in columns_of_stages))))

    def each(name: str) -> list[Array]:
        return [
            np.array([getattr(column, name) for column in columns])[indices[:, chunk]]
            for chunk, columns in enumerate(columns_of_stages)
        ]

    time_s = np.sum(each("time_s"), axis=0)
    tail_s = np.sum(each("tail_s"), axis=0)
    stashes = most * np.max(each("kept_bytes"), axis=0)
    fits = np.flatnonzero(
        np.sum(each("fixed_bytes"), axis=0) + stashes + np.max(each("peak_bytes"), axis=0) <= usable
    )
    rows = fits[undominated_rows(time_s[fits], tail_s[fits])]
    return [
        (
            tuple(
                columns[index]
                for columns, index in zip(columns_of_stages, indices[row], strict=True)
            ),
            float(time_s[row]),
            float(tail_s[row]),
        )
        for row in rows
    ]


def _fastest(
    ranks: Sequence[Combined], num_micro_batches: int, share: float
) -> list[tuple[ShardColumn, ...]]:
    """Returns each rank's fastest columns within the best pair of slowest time and longest tail.

    On a rank's front, less time means more tail.
    """
    tails = np.unique([tail for rank in ranks for _, _, tail in rank])
    tails = tails[tails >= max(min(tail for _, _, tail in rank) for rank in ranks)]
    # Within a tail, a rank takes its first column of at most that tail. It is the fastest, so that
    # the slowest time is least.
    first = [np.argmax(_tails(rank)[None, :] <= tails[:, None], axis=1) for rank in ranks]
    seconds = np.array(
        [
            np.array([time for _, time, _ in rank])[index]
            for rank, index in zip(ranks, first, strict=True)
        ]
    )
    step_s = (num_micro_batches - share) * seconds.max(axis=0) + share * seconds.sum(axis=0) + tails
    best = int(np.argmin(step_s))
    return [rank[int(index[best])][0] for rank, index in zip(ranks, first, strict=True)]


def _tails(rank: Combined) -> npt.NDArray[np.float64]:
    return np.array([tail for _, _, tail in rank])
