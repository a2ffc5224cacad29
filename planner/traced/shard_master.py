"""The master integer program over contiguous ranges of shards (EQUATIONS I7), a stage a rank.

    min  (M - 1) Z + sum_k walk_k + E

    (C1) sum over columns of stage k that end at shard j
         = sum over columns of stage k + 1 that begin there        for k < P - 1
    (C2) sum over columns of stage 0 = 1          and so for every stage; the last ends at the end
    (C3) time of stage k <= Z                     for each stage: the slowest sets the pace
    (C4) tail of stage k <= E                     for each stage
    (C5) stages that share a parameter all shard their states (ZeRO > 0), or none does

Memory is inside the columns: each fits its device. Before the program is built, columns are dropped
that cannot be part of a plan faster than a known one. `RangeBounds.least` is the closed form with
the least pace, sum and tail of the stages before a range and behind it, by dynamic programming over
the cuts. Several virtual stages a rank are in planner/traced/shared_rank_master.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from parplan.costmodels.step import closed_form_s
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.request import SolverName
from parplan.planner.solver import Problem, chosen, weighted
from parplan.planner.traced.shard_columns import ShardColumn
from parplan.planner.traced.shard_flow import Array
from parplan.profiles.units import US_PER_S


@dataclass(frozen=True, slots=True)
class ShardChoice:
    """A column for each virtual stage, its closed form, and true if it is proven best."""

    columns: tuple[ShardColumn, ...]
    step_s: float
    proven: bool


def evaluate(
    layout: ParallelLayout, columns: Sequence[ShardColumn], *, proven: bool
) -> ShardChoice:
    """Returns the choice of one column for each virtual stage, with its closed form."""
    share = 1 / layout.virtual_stages
    by_rank = [layout.stages_of(rank) for rank in range(layout.mesh.pp)]
    pace = [sum(columns[stage].time_s for stage in stages) for stages in by_rank]
    walk = [sum(columns[stage].walk_s for stage in stages) for stages in by_rank]
    tails = [sum(columns[stage].tail_s for stage in stages) for stages in by_rank]
    step_s = closed_form_s(pace, tails, layout.num_micro_batches, share) + share * (
        sum(walk) - sum(pace)
    )
    return ShardChoice(tuple(columns), step_s, proven)


class RangeBounds:
    """Lower bounds of the closed form over all cuts, by stage and range.

    `time_s`, `walk_s` and `tail_s` are the least of each stage.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        time_s: Sequence[Array],
        walk_s: Sequence[Array],
        tail_s: Sequence[Array],
    ) -> None:
        self.layout = layout
        self.time_s = time_s
        self.walk_s = walk_s
        self.tail_s = tail_s
        self.pace = _from_both_ends(time_s, np.maximum)
        self.walk = _from_both_ends(walk_s, np.add)
        size = time_s[0].shape[0]
        self.least_pace_s = float(self.pace[0][-1][size])
        self.least_walk_s = float(self.walk[0][-1][size])

    @property
    def least_s(self) -> float:
        """Lower bound of every plan of the layout, infinity if there is none."""
        if not np.isfinite(self.least_pace_s):
            return np.inf
        layout, share = self.layout, 1 / self.layout.virtual_stages
        pace_s = max(self.least_pace_s, self.least_walk_s / layout.mesh.pp)
        tail_s = max(
            float(np.min(tail[np.isfinite(time)]))
            for tail, time in zip(self.tail_s, self.time_s, strict=True)
        )
        return (layout.num_micro_batches - share) * pace_s + share * self.least_walk_s + tail_s

    def least(self, stage: int) -> Array:
        """Returns by range a lower bound of plans whose virtual stage `stage` has it."""
        share, m = 1 / self.layout.virtual_stages, self.layout.num_micro_batches
        before, behind = self.pace[0][stage][:-1, None], self.pace[1][stage + 1][None, :]
        pace = np.maximum(np.maximum(before, behind), self.time_s[stage])
        walk = (
            self.walk[0][stage][:-1, None] + self.walk_s[stage] + self.walk[1][stage + 1][None, :]
        )
        pace = np.maximum(pace, walk / self.layout.mesh.pp)
        paced = (m - share) * pace if m > share else 0.0  # not 0 times infinity
        return np.asarray(paced + share * walk + self.tail_s[stage])

    def least_of(self, stage: int, column: ShardColumn) -> float:
        """Returns a lower bound of plans with a column of virtual stage `stage`."""
        share, m = 1 / self.layout.virtual_stages, self.layout.num_micro_batches
        walk_s = (
            float(self.walk[0][stage][column.first] + self.walk[1][stage + 1][column.end])
            + column.walk_s
        )
        pace_s = max(
            float(self.pace[0][stage][column.first]),
            float(self.pace[1][stage + 1][column.end]),
            column.time_s,
            walk_s / self.layout.mesh.pp,
        )
        return (m - share) * pace_s + share * walk_s + column.tail_s


def are_alike(columns: Sequence[ShardColumn]) -> bool:
    """True if one column for each stage satisfies (C5)."""
    return len({column.zero > 0 for column in columns if column.shares}) <= 1


def _from_both_ends(values: Sequence[Array], joined: Any) -> tuple[list[Array], list[Array]]:
    """Returns the least of stages before stage k that end at each cut, and of stages from k on."""
    size, count = values[0].shape[0], len(values)
    start, stop = np.full(size + 1, np.inf), np.full(size + 1, np.inf)
    start[0] = stop[size] = 0.0
    before, behind = [start], [stop]
    for value in values:
        before.append(np.min(joined(before[-1][:size, None], value), axis=0))
    for value in reversed(values):
        behind.append(
            np.concatenate((np.min(joined(value, behind[-1][None, :]), axis=1), [np.inf]))
        )
    assert len(before) == len(behind) == count + 1
    return before, behind[::-1]


def solve(
    layout: ParallelLayout,
    options: Sequence[Sequence[ShardColumn]],
    solver: SolverName,
    limit_s: float | None,
) -> ShardChoice | None:
    """Returns the fastest choice of one column for each virtual stage, None if there is none.

    Raises SolverError, Unsolved.
    """
    problem = Problem("shards")
    picks = [
        {column: problem.binary(f"x_{k}_{c}") for c, column in enumerate(columns)}
        for k, columns in enumerate(options)
    ]
    _require_path(problem, picks)
    pace, tail = problem.continuous("Z"), problem.continuous("E")
    by_rank = [[picks[stage] for stage in layout.stages_of(rank)] for rank in range(layout.mesh.pp)]
    for rank, parts in enumerate(by_rank):
        columns = [(z, column) for part in parts for column, z in part.items()]
        problem.require(
            weighted((z, column.time_s * US_PER_S) for z, column in columns) <= pace,
            f"C3_pace_{rank}",
        )
        problem.require(
            weighted((z, column.tail_s * US_PER_S) for z, column in columns) <= tail,
            f"C4_tail_{rank}",
        )
    _require_alike(problem, picks)
    share = 1 / layout.virtual_stages
    walk = [(z, share * column.walk_s * US_PER_S) for part in picks for column, z in part.items()]
    problem.minimize(weighted([(pace, layout.num_micro_batches - share), *walk, (tail, 1.0)]))
    solution = problem.solve(solver, limit_s)
    return (
        None
        if solution is None
        else evaluate(layout, [chosen(part) for part in picks], proven=solution.proven)
    )


def _require_path(problem: Problem, picks: Sequence[dict[ShardColumn, Any]]) -> None:
    problem.require(weighted((z, 1.0) for z in picks[0].values()) == 1, "C2_begin")
    for stage, (part, following) in enumerate(pairwise(picks)):
        ends = {column.end for column in part} | {column.first for column in following}
        for cut in sorted(ends):
            flow = [(z, 1.0) for column, z in part.items() if column.end == cut]
            flow += [(z, -1.0) for column, z in following.items() if column.first == cut]
            problem.require(weighted(flow) == 0, f"C1_{stage}_{cut}")


def _require_alike(problem: Problem, picks: Sequence[dict[ShardColumn, Any]]) -> None:
    sharing = [
        (stage, [(z, column.zero) for column, z in part.items() if column.shares])
        for stage, part in enumerate(picks)
    ]
    if not any(stage_picks for _, stage_picks in sharing):
        return
    divided = problem.binary("Y")
    for stage, stage_picks in sharing:
        whole = [(z, 1.0) for z, zero in stage_picks if zero == 0]
        parted = [(z, 1.0) for z, zero in stage_picks if zero > 0]
        if parted:
            problem.require(weighted(parted) <= divided, f"C5_divided_{stage}")
        if whole:
            problem.require(weighted([*whole, (divided, 1.0)]) <= 1, f"C5_whole_{stage}")


def path(time_s: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """Yields the ranges, by stage, whose slowest is fastest; raises ValueError without cuts."""
    (before, behind), first = _from_both_ends(time_s, np.maximum), 0
    if not np.isfinite(before[-1][-1]):
        raise ValueError("no way to cut")
    for stage, value in enumerate(time_s):
        end = int(np.argmin(np.maximum(value[first], behind[stage + 1])))
        yield first, end
        first = end
