"""The master where cuts are given and several virtual stages share a rank: exact without an integer
program.

A rank's stages are combined to columns of the rank, of which those stay that fit and that no other
beats in time and tail. What is left joins the ranks in the slowest time Z and the longest tail E
alone, so that for each pair of them every rank takes its fastest.
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
from parplan.planner.traced.shard_strategy import held_stashes

Combined = list[
    tuple[tuple[ShardColumn, ...], float, float]
]  # the columns of a rank's stages, their seconds, their tail


def solve_ranks(
    layout: ParallelLayout, options: Sequence[Sequence[ShardColumn]], stages: Sequence[StageTable]
) -> ShardChoice | None:
    """The fastest choice of one column for each virtual stage, None where no rank's fit together.
    The cuts of all columns are the same.
    """
    classes = (
        (False, True)
        if any(column.shares for columns in options for column in columns)
        else (None,)
    )
    found = [
        choice
        for parted in classes
        if (choice := _of_class(layout, options, stages, parted)) is not None
    ]
    return min(found, key=lambda choice: choice.step_s, default=None)


def _of_class(
    layout: ParallelLayout,
    options: Sequence[Sequence[ShardColumn]],
    stages: Sequence[StageTable],
    parted: bool | None,
) -> ShardChoice | None:
    """With stages that share a parameter all of ZeRO > 0, or none."""
    ranks = []
    for rank in range(layout.mesh.pp):
        own = [
            [
                column
                for column in options[stage]
                if parted is None or not column.shares or (column.zero > 0) is parted
            ]
            for stage in layout.stages_of(rank)
        ]
        ranks.append(
            _combined(
                own, held_stashes(layout, rank), stages[layout.stages_of(rank)[0]].usable_bytes
            )
        )
    if not all(ranks):
        return None
    picked = _fastest(ranks, layout.num_micro_batches, 1 / layout.virtual_stages)
    columns = {
        stage: column
        for rank, own in enumerate(picked)
        for stage, column in zip(layout.stages_of(rank), own, strict=True)
    }
    return evaluate(
        layout, [columns[stage] for stage in range(layout.num_virtual_stages)], proven=True
    )


def _combined(
    own: Sequence[Sequence[ShardColumn]], moments: Sequence[tuple[int, ...]], usable: float
) -> Combined:
    """What the stages of one rank may be together, without what another beats."""
    if not all(own):
        return []
    indices = np.array(list(product(*(range(len(columns)) for columns in own))))

    def each(name: str) -> list[Array]:
        return [
            np.array([getattr(column, name) for column in columns])[indices[:, chunk]]
            for chunk, columns in enumerate(own)
        ]

    kept, time_s, tail_s = (
        each("kept_bytes"),
        np.sum(each("time_s"), axis=0),
        np.sum(each("tail_s"), axis=0),
    )
    stashes = np.max(np.array(moments) @ np.array(kept), axis=0)
    fits = np.flatnonzero(
        np.sum(each("fixed_bytes"), axis=0) + stashes + np.max(each("peak_bytes"), axis=0) <= usable
    )
    rows = fits[undominated_rows(time_s[fits], tail_s[fits])]
    return [
        (
            tuple(columns[index] for columns, index in zip(own, indices[row], strict=True)),
            float(time_s[row]),
            float(tail_s[row]),
        )
        for row in rows
    ]


def _fastest(
    ranks: Sequence[Combined], num_micro_batches: int, share: float
) -> list[tuple[ShardColumn, ...]]:
    """Of each rank the fastest within the best pair of slowest time and longest tail. On a rank's
    front less time is more tail.
    """
    tails = np.unique([tail for rank in ranks for _, _, tail in rank])
    tails = tails[tails >= max(min(tail for _, _, tail in rank) for rank in ranks)]
    # within a tail a rank takes its first column of at most that tail: the fastest, which also
    # keeps the slowest time least
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
