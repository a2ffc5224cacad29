"""The search over a traced module: shards, bounds, columns, integer program, simulation.

It works like that of described models (planner/search/find_plan.py). Candidates are solved in the
order of a valid lower bound, until the next bound is above the worst candidate worth replaying. The
best are replayed in the event simulator, and the fastest becomes the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import AHEAD, Schedule
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.candidates.branch_and_bound import (
    BranchOutcome,
    BranchWatch,
    branch_and_bound,
    worth_replaying,
)
from parplan.planner.candidates.enumeration import CandidateSpace, no_candidate_error
from parplan.planner.deadline import Deadline
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.objective import Objective
from parplan.planner.request import ZERO_STAGES, OnProgress, TracedRequest
from parplan.planner.solver import Unsolved
from parplan.planner.traced.range_tables import RangeTables
from parplan.planner.traced.recompute_labels import LabelTable
from parplan.planner.traced.shard_columns import Allowed, ShardColumn, StageTable
from parplan.planner.traced.shard_flow import Array
from parplan.planner.traced.shard_master import (
    RangeBounds,
    ShardChoice,
    are_alike,
    evaluate,
    path,
    solve,
)
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import Sharded
from parplan.planner.traced.shared_rank_master import solve_ranks
from parplan.planner.traced.stage_rules import StageRule, ranges
from parplan.planner.traced.traced_candidates import enumerate_traced_candidates, require_known
from parplan.profiles.machines.shipped_profiles import machine_for

# seconds of one program; a layout that needs longer has its bound in the gap
LEAST_SOLVE_S = 1.0
MOST_SOLVE_S = 2.0
# relative distance of a bound to the best plan below which no program is solved, as in
# planner/search/find_plan.py
WORTH_PROVING = 0.0005
REPLAY_SOLVE_S = 1.0  # seconds for a layout that is only worth replaying
ROUNDING = 1e-9  # relative
WORTH_SOLVING = 0.01  # least relative gain for which a layout worth replaying alone is solved
WIDENED = (1.05, 1.3, 2.0, np.inf)  # factors on the least pace, tried in turn for a first plan


@dataclass(frozen=True, slots=True)
class ShardSolved:
    """The best choice of one layout, and a proven lower bound of its closed form."""

    layout: ParallelLayout
    choice: ShardChoice
    bound: float

    @property
    def value(self) -> float:
        return self.choice.step_s


class TracedSearch:
    """One search over the shards of a traced model."""

    def __init__(self, sharded: Sharded, request: TracedRequest, rule: StageRule) -> None:
        pins, stack = request.constraints, request.training.stack
        require_known(pins)
        self.sharded = sharded
        self.request, self.rule = request, rule
        self.options, self.pins = request.options, pins.resolved(stack)
        machine = machine_for(request.cluster)
        self.price_cache = ShardPriceCache(
            sharded, request.training, machine, zero_ranks=pins.zero_ranks
        )
        self.tables = RangeTables(self.price_cache)
        self.limit_bytes = limit_bytes(request.cluster, stack, request.options)
        self.space: CandidateSpace = enumerate_traced_candidates(
            len(sharded.shards), request, rule.counts
        )
        if not self.space.layouts:
            raise no_candidate_error(self.space, request.cluster)
        self.most_solve_s = MOST_SOLVE_S
        self.also_1f1b = any(
            layout.mesh.pp > 1 and layout.schedule is Schedule.ONE_F_ONE_B
            for layout in self.space.layouts
        )
        self.deadline = request.options.deadline
        self._labels: dict[tuple[int, tuple[int, ...]], LabelTable] = {}

    def allowed(self, layout: ParallelLayout) -> Allowed:
        """Returns the choices of each stage under the pins."""
        zeros = self.pins.zero or ZERO_STAGES
        levels = {Recompute.NONE: 0, Recompute.FULL: 1}
        chosen = [level for level in self.pins.recompute or levels if level in levels]
        return Allowed(
            zeros=zeros if layout.mesh.dp > 1 else (0,),
            levels=tuple(sorted(levels[level] for level in chosen)),
        )

    def labels(self, micro_batch_size: int, levels: tuple[int, ...]) -> LabelTable:
        """Returns the labels of ranges of shards at levels saved (0) and recomputed (1)."""
        key = micro_batch_size, levels
        if key not in self._labels:
            self._labels[key] = LabelTable(self.tables.passes(micro_batch_size).by_shard, levels)
        return self._labels[key]

    def stages(self, layout: ParallelLayout) -> list[StageTable]:
        """Returns the tables of every virtual stage of a layout."""
        allowed = self.allowed(layout)
        self.deadline.check()
        return [
            StageTable(k, layout, self.tables, allowed, self.labels, self.limit_bytes)
            for k in range(layout.num_virtual_stages)
        ]

    def cut_ranges(
        self, layout: ParallelLayout, stages: Sequence[StageTable]
    ) -> tuple[tuple[int, int], ...] | None:
        """Returns the ranges that --stages gives, None if the search decides.

        With several virtual stages a rank they are even, as for described models: the time of the
        slowest is least.
        """
        fixed = ranges(self.rule, self.sharded, layout.num_virtual_stages)
        return (
            tuple(path([table.least_s for table in stages]))
            if fixed is None and layout.virtual_stages > 1
            else fixed
        )

    def least_times(self, layout: ParallelLayout, stages: Sequence[StageTable]) -> list[Array]:
        """Least seconds of a micro-batch by stage and range, infinite if a range cannot be used."""
        times, fixed = [], self.cut_ranges(layout, stages)
        for stage, table in enumerate(stages):
            least = np.where(table.least_bytes() <= table.usable_bytes, table.least_s, np.inf)
            if fixed is not None:
                only = np.full_like(least, np.inf)
                only[fixed[stage]] = least[fixed[stage]]
                least = only
            times.append(least)
        return times

    def bound_s(self, layout: ParallelLayout) -> float:
        """Returns a lower bound of the layout's closed form, infinite if nothing fits."""
        stages = self.stages(layout)
        times = self.least_times(layout, stages)
        return RangeBounds(layout, times, times, [table.least_tail_s for table in stages]).least_s

    def solve(
        self, layout: ParallelLayout, bound_s: float, cut_s: float, best_s: float
    ) -> ShardSolved | None:
        """Returns the best choice of a layout that takes less than `cut_s`, None if there is none.

        A layout that may beat `best_s` only in the simulator gets little of the solver's time.
        Raises Unsolved, SolverError.
        """
        self.most_solve_s = (
            MOST_SOLVE_S if bound_s < best_s * (1 - WORTH_PROVING) else REPLAY_SOLVE_S
        )
        stages = self.stages(layout)
        times = self.least_times(layout, stages)
        finder = Finder(layout, stages, times, self.deadline)
        known, among = self._first(finder, cut_s)
        if known is None:
            return None
        # with several virtual stages a rank the cuts are given, and all columns were considered
        if layout.virtual_stages > 1 and known.proven:
            return self._worthwhile(layout, known, bound_s)
        options, least_s = finder.tightened(
            finder.below(min(cut_s, known.step_s)), min(cut_s, known.step_s)
        )
        bound_s = max(bound_s, min(least_s, known.step_s) * (1 - ROUNDING))
        near, self.most_solve_s = (
            (ROUNDING, MOST_SOLVE_S)
            if bound_s < best_s * (1 - WORTH_PROVING)
            else (WORTH_SOLVING, REPLAY_SOLVE_S)
        )
        if known.step_s <= least_s * (1 + near):
            return self._worthwhile(
                layout,
                evaluate(layout, known.columns, proven=known.step_s <= least_s * (1 + ROUNDING)),
                bound_s,
            )
        if known.proven and all(
            set(columns) <= set(known_columns)
            for columns, known_columns in zip(options, among, strict=True)
        ):
            best: ShardChoice | None = known
        else:
            try:
                best = self._solved(finder, options)
            except Unsolved:
                best = None
        if best is None or best.step_s > known.step_s:
            best = evaluate(layout, known.columns, proven=best is not None and best.proven)
        return self._worthwhile(layout, best, bound_s)

    def _worthwhile(
        self, layout: ParallelLayout, choice: ShardChoice, bound_s: float
    ) -> ShardSolved | None:
        """Returns a choice with its bound.

        It is None for a schedule with recompute ahead but without recompute, which is 1F1B.
        """
        if (
            layout.schedule in AHEAD
            and self.also_1f1b
            and not any(column.recomputed for column in choice.columns)
        ):
            return None
        return ShardSolved(
            layout, choice, choice.step_s * (1 - ROUNDING) if choice.proven else bound_s
        )

    def _first(
        self, finder: Finder, cut_s: float
    ) -> tuple[ShardChoice | None, list[list[ShardColumn]]]:
        """Returns a first choice and its columns, None if none fits or takes less than `cut_s`."""
        if finder.bounds.least_s >= cut_s:
            return None, []
        for factor in WIDENED:
            options = finder.near(finder.bounds.least_pace_s * factor, cut_s)
            known = finder.even(options) if finder.layout.virtual_stages == 1 else None
            if known is None and finder.coupled and all(options):
                known = self._solved(finder, options)
            if known is not None:
                return known, options
        return None, []

    def _solved(
        self, finder: Finder, options: Sequence[Sequence[ShardColumn]]
    ) -> ShardChoice | None:
        if not all(options):
            return None
        if finder.layout.virtual_stages > 1:
            return solve_ranks(finder.layout, options, finder.stages)
        return solve(finder.layout, options, self.options.solver, self.solver_limit_s())

    def left_s(self) -> float:
        return self.deadline.left_s

    def solver_limit_s(self) -> float:
        return self.deadline.solver_limit_s(LEAST_SOLVE_S, self.most_solve_s)

    def run(self, on_progress: OnProgress | None) -> BranchOutcome[ShardSolved]:
        """Solves layouts as long as one may be among the best.

        Raises KeyboardInterrupt before the first plan, SolverError.
        """
        bounded = (
            (bound, layout)
            for layout in self.space.layouts
            if np.isfinite(bound := self.bound_s(layout))
        )
        return branch_and_bound(
            bounded,
            self.solve,
            worth_replaying,
            BranchWatch(
                objective=Objective.THROUGHPUT, left_s=self.left_s, on_progress=on_progress
            ),
        )

    def replayed(
        self, outcome: BranchOutcome[ShardSolved]
    ) -> list[tuple[ShardSolved, Strategy, StepPrice]]:
        """Prices the best solved layouts in full, and returns the fastest first."""
        priced = list[tuple[ShardSolved, Strategy, StepPrice]]()
        for solved in outcome.to_replay:
            if priced and self.deadline.has_ended:
                break
            made = strategy_of_shards(solved.layout, solved.choice.columns, self.price_cache)
            priced.append((solved, made, price_step(made, self.price_cache)))
        return sorted(priced, key=lambda priced_layout: priced_layout[2].step_s)


class Finder:
    """The columns of one layout, made on demand; `coupled` means that stages share constraints."""

    def __init__(
        self,
        layout: ParallelLayout,
        stages: Sequence[StageTable],
        times: Sequence[Array],
        deadline: Deadline,
    ) -> None:
        self.layout = layout
        self.stages = stages
        self.times = times
        self.check = deadline.check
        walks = (
            times
            if layout.schedule not in AHEAD
            else [
                np.where(
                    np.isfinite(least), np.minimum(least, table.base_s + _least_data(table)), np.inf
                )
                for least, table in zip(times, stages, strict=True)
            ]
        )
        self.bounds = RangeBounds(layout, times, walks, [table.least_tail_s for table in stages])
        self.coupled = layout.virtual_stages > 1 or bool(
            stages[0].tables.price_cache.sharded.shared
        )
        self._made: dict[tuple[int, int, int], list[ShardColumn]] = {}

    def columns(self, stage: int, first: int, end: int) -> list[ShardColumn]:
        """Returns the columns of a range on a stage."""
        key = stage, first, end
        if key not in self._made:
            self.check()
            self._made[key] = self.stages[stage].columns(first, end)
        return self._made[key]

    def near(self, pace_s: float, cut_s: float) -> list[list[ShardColumn]]:
        """Returns by stage the columns of ranges within `pace_s`, in plans of less than `cut_s`."""
        return [
            [
                column
                for first, end in np.argwhere(
                    (self.times[stage] <= pace_s) & (self.bounds.least(stage) < cut_s)
                )
                for column in self.columns(stage, int(first), int(end))
            ]
            for stage in range(len(self.stages))
        ]

    def even(self, options: Sequence[Sequence[ShardColumn]]) -> ShardChoice | None:
        """Returns the ranges whose slowest is fastest, each with its fastest column.

        It is None if there are none, or if they violate (C5).
        """
        exact = [np.full_like(times, np.inf) for times in self.times]
        for stage, columns in enumerate(options):
            for column in columns:
                exact[stage][column.first, column.end] = min(
                    column.time_s, exact[stage][column.first, column.end]
                )
        try:
            cuts = list(path(exact))
        except ValueError:
            return None
        chosen = [
            min(self.columns(stage, *cut), key=lambda column: (column.time_s, column.tail_s))
            for stage, cut in enumerate(cuts)
        ]
        return evaluate(self.layout, chosen, proven=False) if are_alike(chosen) else None

    def below(self, cut_s: float) -> list[list[ShardColumn]]:
        """Returns by stage every column that a plan of at most `cut_s` may have."""
        options = []
        for stage in range(len(self.stages)):
            near = np.argwhere(self.bounds.least(stage) <= cut_s)
            affordable = [
                column
                for first, end in near
                for column in self.columns(stage, int(first), int(end))
            ]
            options.append(
                [
                    column
                    for column in affordable
                    if self.bounds.least_of(stage, column) <= cut_s * (1 + ROUNDING)
                ]
            )
        return options

    def tightened(
        self, options: Sequence[Sequence[ShardColumn]], cut_s: float
    ) -> tuple[list[list[ShardColumn]], float]:
        """Drops columns that exceed `cut_s` by bounds from `options`; returns a lower bound too."""
        listed = [list(columns) for columns in options]
        least_s, before = np.inf, -1
        while all(listed) and sum(map(len, listed)) != before:
            before = sum(map(len, listed))
            arrays = [
                [
                    _least_of(columns, name, times)
                    for columns, times in zip(listed, self.times, strict=True)
                ]
                for name in _SECONDS
            ]
            bounds = RangeBounds(self.layout, *arrays)
            least_s = bounds.least_s
            listed = [
                [
                    column
                    for column in columns
                    if bounds.least_of(stage, column) <= cut_s * (1 + ROUNDING)
                ]
                for stage, columns in enumerate(listed)
            ]
        return listed, min(least_s, cut_s)


_SECONDS = ("time_s", "walk_s", "tail_s")


def _least_of(columns: Sequence[ShardColumn], name: str, like: Array) -> Array:
    """Returns by range the least of a value of its columns, infinite without columns."""
    least = np.full_like(like, np.inf)
    for column in columns:
        least[column.first, column.end] = min(
            getattr(column, name), least[column.first, column.end]
        )
    return least


def _least_data(table: StageTable) -> Array:
    return np.asarray(np.minimum.reduce([held.per_micro_batch_s for held in table.held.values()]))


def strategy_of_shards(
    layout: ParallelLayout, columns: Sequence[ShardColumn], price_cache: ShardPriceCache
) -> Strategy:
    """Returns the strategy of one column for each virtual stage."""
    return Strategy(
        layout=layout,
        stages=tuple(
            tuple(
                LayerChoice(
                    price_cache.key(shard, column.first),
                    Recompute.FULL if shard in column.recomputed else Recompute.NONE,
                    column.zero,
                )
                for shard in range(column.first, column.end)
            )
            for column in columns
        ),
    )
