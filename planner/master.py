"""The master integer program: one column per pipeline rank (EQUATIONS I4, I7, R3).

    throughput   min  (M - a - e) Z + e N + a sum_s u_s + E        a = 1/v (costmodels/step.py,
                 `bubble_share`)
    memory       min  sum_s D T rho_s,   then the same time with the redundancy fixed at its minimum

    (C1) sum_c z_sc = 1                    for each rank s: one column
    (C2) sum_s sum_c n_c z_sc = L          all blocks are placed (only where ranks may differ)
    (C3) sum_c t_c z_sc <= Z               for each rank s: the slowest rank sets the pace
    (C4) sum_c tail_c z_sc <= E            for each rank s: work after the last backward pass
    (C5) time <= slowest allowed           memory objective
    (C6) sum_s D T rho_s <= (1 + eps) R*   second phase of the memory objective
    (C7) sharded_first = sharded_last      a tied embedding: the gradients of both copies are whole,
                                           or both are sharded (ZeRO > 0), and one division over
                                           tensor-parallel ranks cuts both tables
    (C8) sum_c n_c z_sc <= N               for each rank s: the pass without recompute, where e > 0
    (C9) sum_c z_sc = sum_p w_kp           where layers differ: for each content of a virtual stage
         sum of w that end at a cut        k, its places; what ends at a cut on stage k begins there
         = sum of w that begin there       on stage k + 1
    (C10) sum_c m_c z_sc <= limit          for each rank s: memory, where columns need not fit
    (C11) Z >= least pace                  that places all blocks (planner/search/certificate.py)

Schedules that recompute ahead of the gradient have e and n
(costmodels/schedules/hidden_recompute.py); without recompute ahead e = 0 and u = t. Memory is
inside the columns: each fits its device. Few rows join ranks of equal numbers of blocks, so their
fastest choice needs no program (`fastest_apart`). For unequal numbers of equal blocks,
planner/placed_blocks.py leaves out the columns of no fast choice. Times are in microseconds and
bytes in MiB, because the tolerances of CBC are absolute: problems priced in seconds are answered
wrongly and called optimal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from parplan.costmodels.schedules.hidden_recompute import HiddenRecompute, hidden_passes
from parplan.costmodels.step import closed_form_s
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, distinct
from parplan.planner.request import SolverName
from parplan.planner.solver import Problem, Unsolved, chosen, weighted
from parplan.planner.stage_columns.stage_column import StageColumn, alike_ends
from parplan.planner.stage_columns.stage_prices import tied_ends
from parplan.profiles.units import MIB, US_PER_S

Places = tuple[tuple[int, int], ...]  # the ranges of layers that a chunk may be
Name = Callable[[int, StageColumn], str]  # of the variable of a column of a rank
TOLERANCE = 1e-6  # relative slack of (C6), as large as the feasibility tolerance of CBC


@dataclass(frozen=True, slots=True)
class MasterChoice:
    """A column for each rank, with its closed-form price.

    step_s            closed-form time of a step
    redundant_bytes   of the cluster
    proven            whether the choice is proven to be the best
    """

    columns: tuple[StageColumn, ...]
    step_s: float
    redundant_bytes: float
    proven: bool


def evaluate(
    layout: ParallelLayout,
    columns: Sequence[StageColumn],
    *,
    proven: bool,
    share: float | None = None,
) -> MasterChoice:
    """Prices one column for each rank; `share` as in `Master`."""
    share = 1 / layout.virtual_stages if share is None else share
    ahead = HiddenRecompute(
        hidden_passes(layout.schedule), [c.plain_s for c in columns], [c.ramp_s for c in columns]
    )
    step_s = closed_form_s(
        [c.time_s for c in columns],
        [c.tail_s for c in columns],
        layout.num_micro_batches,
        share,
        ahead,
    )
    return MasterChoice(
        tuple(columns),
        step_s,
        layout.mesh.ranks_per_stage * sum(c.redundant_bytes for c in columns),
        proven,
    )


class Master:
    """The program of one layout, over the columns `options[s]` of each rank s.

    `share` is the bubble share, 1/v unless given. Columns that are corners of a bound
    (`RankColumns.relaxed`) are averaged over one group: z is a share, and its sum over a group is 0
    or 1.

    limit_bytes   what each rank may fill, where columns need not fit (C10); None where all do
    name          the name of the variable of a column of a rank, for a program that people read
    """

    def __init__(
        self,
        layout: ParallelLayout,
        options: Sequence[Sequence[StageColumn]],
        num_layers: int,
        *,
        tied: bool = False,
        share: float | None = None,
        limit_bytes: float | None = None,
        name: Name | None = None,
    ) -> None:
        self.layout = layout
        self.share = 1 / layout.virtual_stages if share is None else share
        self.problem = Problem("master")
        self.picks = [self._variables(s, columns, name) for s, columns in enumerate(options)]
        self.pace = self.problem.continuous("pace_us")
        self.tail = self.problem.continuous("tail_us")
        self.hidden = hidden_passes(layout.schedule)
        self.plain = self.problem.continuous("plain_us") if self.hidden else None
        for s, picks in enumerate(self.picks):
            if limit_bytes is not None:
                held = weighted((z, c.memory_bytes / MIB) for c, z in picks.items())
                self.problem.require(held <= limit_bytes / MIB, f"C10_memory_rank{s}")
            self.problem.require(weighted((z, 1.0) for z in picks.values()) == 1, f"C1_one_rank{s}")
            self.problem.require(
                weighted((z, c.time_s * US_PER_S) for c, z in picks.items()) <= self.pace,
                f"C3_pace_rank{s}",
            )
            self.problem.require(
                weighted((z, c.tail_s * US_PER_S) for c, z in picks.items()) <= self.tail,
                f"C4_tail_rank{s}",
            )
            if self.plain is not None:
                self.problem.require(
                    weighted((z, c.plain_s * US_PER_S) for c, z in picks.items()) <= self.plain,
                    f"C8_plain_rank{s}",
                )
        if joined_by_cuts(layout, self.picks):
            self._require_path()
            if any(column.shares for picks in self.picks for column in picks):
                self._require_alike()
        elif not layout.equal_ranks and layout.mesh.pp > 1:
            blocks = [(z, float(c.num_blocks)) for picks in self.picks for c, z in picks.items()]
            self.problem.require(weighted(blocks) == num_layers, "C2_blocks")
        if tied and tied_ends(layout):
            first, last = tied_ends(layout)
            values = {c.tied_as for rank in (first, last) for c in self.picks[rank]}
            for n, value in enumerate(sorted(values, key=str)[1:]):
                alike = self._tied_as(first, value) == self._tied_as(last, value)
                self.problem.require(alike, f"C7_tied_{n}")

    def _variables(
        self, s: int, columns: Sequence[StageColumn], name: Name | None
    ) -> dict[StageColumn, Any]:
        """Returns the z of every column of rank s: binary, or a share of a corner."""
        variable = {True: self.problem.continuous, False: self.problem.binary}
        picks = {
            column: variable[column.corner](name(s, column) if name else f"z_rank{s}_{c}")
            for c, column in enumerate(columns)
        }
        groups: dict[Hashable, list[tuple[Any, float]]] = {}
        for column, z in picks.items():
            if column.corner:
                groups.setdefault(column.group, []).append((z, 1.0))
        for g, group in enumerate(groups.values()):
            self.problem.require(
                weighted([*group, (self.problem.binary(f"y_rank{s}_{g}"), -1.0)]) == 0,
                f"C1_group_rank{s}_{g}",
            )
        return picks

    def _require_alike(self) -> None:
        """Adds (C7) for ranks that share parameters: all shard their states, or none does."""
        sharded = self.problem.binary("sharded")
        for s, picks in enumerate(self.picks):
            for is_whole in (False, True):
                terms = [
                    (z, 1.0)
                    for column, z in picks.items()
                    if column.shares and (column.zero == 0) is is_whole
                ]
                if terms:
                    term = (sharded, 1.0 if is_whole else -1.0)
                    self.problem.require(
                        weighted([*terms, term]) <= float(is_whole), f"C7_alike_rank{s}_{is_whole}"
                    )

    def _require_path(self) -> None:
        """Adds (C9): the places of the stages follow one another from the first layer to the last.

        The share of each place of a stage is a variable; it needs not be binary, because the shares
        of one path are 0 or 1 in every corner of what the rows leave.
        """
        before: dict[int, list[tuple[Any, float]]] = {}
        for k in range(self.layout.num_virtual_stages):
            rank = self.layout.rank_of(k)
            chunk = self.layout.stages_of(rank).index(k)
            taken: dict[Places, list[Any]] = {}
            for column, z in self.picks[rank].items():
                taken.setdefault(column.layers[chunk], []).append(z)
            flow: dict[int, list[tuple[Any, float]]] = {}
            begins: dict[int, list[tuple[Any, float]]] = {}
            for g, (places, variables) in enumerate(taken.items()):
                shares = [
                    (self.problem.continuous(f"w_stage{k}_{g}_layers{place[0]}to{place[1]}"), place)
                    for place in places
                ]
                self.problem.require(
                    weighted([*((w, 1.0) for w, _ in shares), *((z, -1.0) for z in variables)])
                    == 0,
                    f"C9_places_stage{k}_{g}",
                )
                for w, (first, end) in shares:
                    begins.setdefault(first, []).append((w, 1.0))
                    flow.setdefault(end, []).append((w, -1.0))
            for cut in sorted({*begins, *before}):
                row = [*begins.get(cut, []), *before.get(cut, [])]
                self.problem.require(
                    weighted(row) == (0.0 if k or cut else 1.0), f"C9_cut_stage{k}_layer{cut}"
                )
            before = flow

    def _tied_as(self, rank: int, value: Hashable) -> Any:
        return weighted((z, 1.0) for c, z in self.picks[rank].items() if c.tied_as == value)

    @property
    def time_us(self) -> Any:
        share = self.share
        ramps = [(z, share * c.ramp_s * US_PER_S) for picks in self.picks for c, z in picks.items()]
        plain = [] if self.plain is None else [(self.plain, float(self.hidden))]
        return weighted(
            [
                (self.pace, self.layout.num_micro_batches - share - self.hidden),
                *plain,
                *ramps,
                (self.tail, 1.0),
            ]
        )

    @property
    def redundant_mib(self) -> Any:
        devices = self.layout.mesh.ranks_per_stage
        return weighted(
            (z, devices * c.redundant_bytes / MIB) for picks in self.picks for c, z in picks.items()
        )

    def _solve(self, solver: SolverName, time_limit_s: float | None) -> MasterChoice | None:
        solution = self.problem.solve(solver, time_limit_s)
        if solution is None:
            return None
        picked = tuple(chosen(picks) for picks in self.picks)
        return evaluate(self.layout, picked, proven=solution.proven, share=self.share)

    def fastest(self, solver: SolverName, time_limit_s: float | None = None) -> MasterChoice | None:
        """Returns the fastest choice, or None when the columns cannot place all blocks."""
        self.problem.minimize(self.time_us)
        return self._solve(solver, time_limit_s)

    def bound_s(self, solver: SolverName, time_limit_s: float | None = None) -> float | None:
        """Returns the least seconds of a step over averages of columns.

        It is None when they are not proven to be the least, or when no averages place all blocks.
        """
        self.problem.minimize(self.time_us)
        solution = self.problem.solve(solver, time_limit_s)
        return solution.objective / US_PER_S if solution is not None and solution.proven else None

    def leanest(
        self, slowest_s: float, solver: SolverName, time_limit_s: float | None = None
    ) -> MasterChoice | None:
        """Returns the fastest choice among those with the least redundant bytes, or None.

        All of them take at most `slowest_s`.
        """
        self.problem.require(self.time_us <= slowest_s * US_PER_S, "C5_time")
        self.problem.minimize(self.redundant_mib)
        least = self._solve(solver, time_limit_s)
        if least is None:
            return None
        try:
            best = self.fastest_of_redundancy(least.redundant_bytes, solver, time_limit_s)
        except Unsolved:
            best = None
        # After a timeout, or by the solver's tolerance on (C5) and (C6), the first answer stands.
        if best is None:
            return replace(least, proven=False)
        return MasterChoice(
            best.columns, best.step_s, best.redundant_bytes, proven=least.proven and best.proven
        )

    def fastest_of_redundancy(
        self, redundant_bytes: float, solver: SolverName, time_limit_s: float | None = None
    ) -> MasterChoice | None:
        """Returns the fastest choice with at most these redundant bytes, or None."""
        self.problem.require(
            self.redundant_mib <= slackened(redundant_bytes) / MIB, "C6_redundancy"
        )
        self.problem.minimize(self.time_us)
        return self._solve(solver, time_limit_s)


def joined_by_cuts(layout: ParallelLayout, options: Iterable[Iterable[StageColumn]]) -> bool:
    """Returns whether the columns have ranges of layers that must follow one another (C9)."""
    return layout.mesh.pp > 1 and any(column.layers for columns in options for column in columns)


def apart(layout: ParallelLayout, options: Sequence[Sequence[StageColumn]]) -> bool:
    """Returns whether the layers of a rank do not depend on those of the other ranks."""
    return layout.mesh.pp == 1 or (layout.equal_ranks and not joined_by_cuts(layout, options))


def separable(layout: ParallelLayout, options: Sequence[Sequence[StageColumn]]) -> bool:
    """Returns whether no row joins the ranks but the pace, the tail and the tied embedding.

    They are ranks of equal numbers of blocks, of which every second counts in pace and ramp alike.
    """
    alike = all(c.ramp_s == c.time_s for columns in options for c in columns)
    return alike and apart(layout, options)


def fastest_apart(
    layout: ParallelLayout,
    options: Sequence[Sequence[StageColumn]],
    *,
    tied: bool = False,
    share: float | None = None,
) -> MasterChoice | None:
    """Returns the optimum of `Master.fastest` of `separable` ranks without a solve, or None.

    With a longest tail E, the fastest column of each rank with at most that tail has the least
    pace and the least ramp. So the optimum is the best over all E, which are the tails of columns;
    where an embedding is tied, the best over all ways in which its copies are alike (C7).
    """
    ends = tied_ends(layout) if tied else ()
    choices = [_fastest_by_tail(layout, alike, share) for alike in alike_ends(options, ends)]
    return min(filter(None, choices), key=lambda choice: choice.step_s, default=None)


def _fastest_by_tail(
    layout: ParallelLayout, options: Sequence[Sequence[StageColumn]], share: float | None
) -> MasterChoice | None:
    if not all(options):
        return None
    share = 1 / layout.virtual_stages if share is None else share
    tails_s = distinct([column.tail_s for columns in options for column in columns])
    ordered = [sorted(columns, key=lambda c: (c.tail_s, c.time_s)) for columns in options]
    time_s = np.empty((len(options), len(tails_s)))  # the shortest of each rank, by longest tail
    for rank, columns in enumerate(ordered):
        within = np.searchsorted([column.tail_s for column in columns], tails_s, side="right")
        shortest_s = np.minimum.accumulate([math.inf, *(column.time_s for column in columns)])
        time_s[rank] = shortest_s[within]
    steps_s = (layout.num_micro_batches - share) * time_s.max(axis=0) + tails_s
    tail_s = tails_s[(steps_s + share * time_s.sum(axis=0)).argmin()]
    picked = [
        min((c for c in columns if c.tail_s <= tail_s), key=lambda c: c.time_s)
        for columns in ordered
    ]
    return evaluate(layout, picked, proven=True, share=share)


def slackened(redundant_bytes: float) -> float:
    """Redundant bytes that count as equal to `redundant_bytes` (C6)."""
    return redundant_bytes + TOLERANCE * max(MIB, abs(redundant_bytes))


def lower_bound_s(
    layout: ParallelLayout,
    options: Sequence[Sequence[StageColumn]],
    num_layers: int,
    share: float | None = None,
) -> float | None:
    """Returns a lower bound of the throughput master without a solve.

    It is None when the master is infeasible. The pace is at least the smallest Z at which all ranks
    together can hold all blocks. The sum of the ramps is at least its Lagrangian bound, or that of
    the cheapest column of each rank where all ranks hold equally many blocks. The tail is at least
    the largest of the smallest tails of the ranks. One rank alone takes at least its own passes and
    its own tail. All of this also holds for averages of columns.
    """
    if any(not columns for columns in options):
        return None
    share = 1 / layout.virtual_stages if share is None else share
    tail_s = max(min(column.tail_s for column in columns) for columns in options)
    repeats = layout.num_micro_batches - share

    def whole_s(column: StageColumn) -> float:
        """Seconds of one rank with its own tail, since a shorter pace may need a longer tail."""
        return repeats * column.time_s + column.tail_s

    if apart(layout, options):  # no schedule with recompute ahead
        fastest = [min(column.time_s for column in columns) for columns in options]
        slowest_s = max(min(map(whole_s, columns)) for columns in options)
        ramps_s = sum(min(column.ramp_s for column in columns) for columns in options)
        return (
            max(slowest_s, (layout.num_micro_batches - share) * max(fastest) + tail_s)
            + share * ramps_s
        )
    hidden = hidden_passes(layout.schedule)
    pace_s = smallest_pace_s(options, num_layers, lambda column: column.time_s)
    if pace_s is None:
        return None
    plain_s = 0.0
    if hidden:
        plain_s = smallest_pace_s(options, num_layers, lambda column: column.plain_s) or 0.0
    ramp_s = 0.0
    slowest_s = 0.0
    if not layout.recomputes_ahead:
        ramp_s = smallest_pace_s(options, num_layers, lambda column: column.ramp_s) or 0.0
        slowest_s = smallest_pace_s(options, num_layers, whole_s) or 0.0
    at_least = max(_sum_bound(options, lambda column: column.ramp_s, num_layers), ramp_s)
    return (
        max(
            slowest_s,
            (layout.num_micro_batches - share - hidden) * pace_s + hidden * plain_s + tail_s,
        )
        + share * at_least
    )


def smallest_pace_s(
    options: Sequence[Sequence[StageColumn]], num_layers: int, value: Callable[[StageColumn], float]
) -> float | None:
    """Returns the least Z at which columns of `value` <= Z hold `num_layers` blocks, or None."""
    counts, values_s = _counts_and_values(options, value)
    paces = distinct(np.concatenate(values_s)).tolist()

    def most_blocks(pace_s: float) -> int:
        within = [count[value_s <= pace_s] for count, value_s in zip(counts, values_s, strict=True)]
        return sum(int(held.max()) for held in within) if all(map(len, within)) else -1

    low, high = 0, len(paces)
    while low < high:
        middle = (low + high) // 2
        if most_blocks(paces[middle]) >= num_layers:
            high = middle
        else:
            low = middle + 1
    return paces[low] if low < len(paces) else None


def redundancy_bound_bytes(
    layout: ParallelLayout, options: Sequence[Sequence[StageColumn]], num_layers: int
) -> float | None:
    """Returns a lower bound of the memory master at any time, or None when it is infeasible."""
    if any(not columns for columns in options):
        return None
    return layout.mesh.ranks_per_stage * _sum_bound(
        options, lambda column: column.redundant_bytes, num_layers
    )


def _sum_bound(
    options: Sequence[Sequence[StageColumn]], value: Callable[[StageColumn], float], num_layers: int
) -> float:
    """Returns the best of a few Lagrangian bounds of the sum of `value` over the ranks.

    sum_s value_s >= lambda L + sum_s min_c (value_c - lambda n_c)    for any lambda
    """
    counts, values = _counts_and_values(options, value)
    every = np.concatenate(values) / np.maximum(1, np.concatenate(counts))
    slopes: list[float] = distinct(every).tolist()
    tried = (0.0, *slopes[:: max(1, len(slopes) // 8)])
    return max(
        slope * num_layers
        + sum(
            float((rank_values - slope * count).min())
            for count, rank_values in zip(counts, values, strict=True)
        )
        for slope in tried
    )


def _counts_and_values(
    options: Sequence[Sequence[StageColumn]], value: Callable[[StageColumn], float]
) -> tuple[list[npt.NDArray[np.int64]], list[Array]]:
    """Returns by rank the numbers of blocks of its columns, and their values."""
    return (
        [np.array([column.num_blocks for column in columns]) for columns in options],
        [np.array([value(column) for column in columns]) for columns in options],
    )
