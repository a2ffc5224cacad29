"""The integer program that certifies the plan of a search (EQUATIONS I4).

Bounds and closed forms find the choice of most layouts (planner/search/one_candidate.py). The
master of the plan's layout, solved by CBC or HiGHS over the columns of its ranks, must find no
better one. The columns are those that may take less than slightly more than the closed form of the
plan's choice, so that this choice is among them. The columns of a single rank need not fit its
device: the program has its memory as a row.

Where the program finds a better choice, a closed form is wrong or stopped near its bound. The plan
then becomes that choice if its simulated step is shorter, and the record states the gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.limit_boxes import longer_never_pays, repeats_of
from parplan.planner.master import Master, MasterChoice, apart, smallest_pace_s
from parplan.planner.objective import Objective
from parplan.planner.paths_of_layers import on_paths, one_range_a_rank
from parplan.planner.placed_blocks import in_reach_of, joined_by_blocks
from parplan.planner.plan.certificate_record import Certificate, Certified, CertifyingProgram
from parplan.planner.plan.prediction import SearchRecord, Status
from parplan.planner.search.column_names import ColumnNames
from parplan.planner.search.replay import Replayed, replayed_price
from parplan.planner.search.search_session import (
    INFINITY,
    ROUNDING,
    SearchSession,
    SolvedCandidate,
)
from parplan.planner.solver import ProgramCount, Unsolved
from parplan.planner.stage_columns.chunk_columns import Columns
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.embedding_columns import AnyEnds
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.profiles.errors import OutOfTimeError, SolverError
from parplan.profiles.units import US_PER_S

AGREES = 1e-6  # share by which the optimum of a solver and a closed form may differ
MOST_SOLVE_S = 10.0  # programs take milliseconds, and few with hundreds of columns a second
BESIDE = 1e-4  # share above the plan's closed form up to which columns enter the program

Options = list[list[StageColumn]]


@dataclass(frozen=True, slots=True)
class _Found:
    """The optimum of a certifying program, with the program's record."""

    choice: MasterChoice
    program: CertifyingProgram


def certified(
    replayed: Sequence[Replayed], record: SearchRecord, session: SearchSession
) -> tuple[Sequence[Replayed], SearchRecord]:
    """Returns the replayed choices and the record of a finished search with its certificate.

    A better choice of the program comes first if its simulated step is shorter. The objective peak
    and a search that stopped early have no certifying program.
    """
    best = replayed[0][0]
    finished = record.status is Status.OPTIMAL and not session.deadline.is_over
    if not finished or record.objective is not Objective.THROUGHPUT:
        return replayed, with_program(record, None, session)
    try:
        found = _certify(best, session)
    except (Unsolved, SolverError, OutOfTimeError):  # the plan stands without its certificate
        found = None
    if found is None:
        return replayed, with_program(record, None, session)
    if found.program.gap > 0:
        replayed, record = _with_better(replayed, record, found.choice, session)
    return replayed, with_program(record, found.program, session)


def with_program(
    record: SearchRecord, program: CertifyingProgram | None, session: SearchSession
) -> SearchRecord:
    """Returns the record with a certificate, whose programs `with_counts` counts."""
    layouts, counts = len(session.prices.space.layouts), record.candidates
    certificate = Certificate(
        solver=session.options.solver,
        programs=0,
        variables=0,
        rows=0,
        layouts=layouts,
        closed=layouts - counts.solved - counts.left,
        plan=program,
    )
    return replace(record, certificate=certificate)


def with_counts(record: SearchRecord, count: ProgramCount) -> SearchRecord:
    """Returns the record with the programs that ran in its search."""
    if record.certificate is None:
        return record
    certificate = replace(
        record.certificate, programs=count.programs, variables=count.variables, rows=count.rows
    )
    return replace(record, certificate=certificate)


def _certify(best: SolvedCandidate, session: SearchSession) -> _Found | None:
    """Returns the optimum of the master of a layout, None where it has no proven one."""
    master = certifying_master(best.layout, best.choice, session)
    if master is None:
        return None
    limit_s = min(MOST_SOLVE_S, session.solver_limit_s())
    choice = master.fastest(session.options.solver, limit_s)
    if choice is None or not choice.proven:
        return None
    gap = 1 - choice.step_s / best.choice.step_s
    variables, rows = master.problem.size
    program = CertifyingProgram(
        over=Certified.COLUMNS,
        variables=variables,
        rows=rows,
        optimum_s=round(choice.step_s, 6),
        gap=round(gap, 6) if abs(gap) > AGREES else 0.0,
    )
    if session.options.on_program is not None:
        session.options.on_program(program, master.problem)
    return _Found(choice, program)


def certifying_master(
    layout: ParallelLayout, choice: MasterChoice, session: SearchSession
) -> Master | None:
    """Returns the master of a layout over all columns in reach of a choice.

    None where the layout has no columns in reach.
    """
    cut_s = choice.step_s * (1 + BESIDE)
    free = _is_free(layout, session)
    options = _columns(layout, cut_s, session, free=free)
    if options is None:
        return None
    for columns, chosen in zip(options, choice.columns, strict=True):
        if chosen not in columns:
            columns.append(chosen)
    num_layers = session.num_blocks
    share = bubble_share(layout, session.price_cache)
    if one_range_a_rank(layout, options):
        options = [list(each) for each in on_paths(layout, options, share, cut_s).options]
    elif joined_by_blocks(layout, options, share):
        options = in_reach_of(layout, options, num_layers, share, cut_s)
    elif not free and apart(layout, options) and longer_never_pays(layout, share):
        options = _in_reach_apart(layout, options, share, cut_s)
    master = Master(
        layout,
        options,
        num_layers,
        tied=session.price_cache.tied,
        share=share,
        limit_bytes=min(session.limit_bytes, session.price_cache.most_bytes) if free else None,
        name=ColumnNames(),
    )
    least_s = _least_pace_s(layout, options, num_layers)
    if least_s > 0:
        master.problem.require(master.pace >= least_s * US_PER_S * (1 - ROUNDING), "C11_least_pace")
    return master


def _in_reach_apart(
    layout: ParallelLayout, options: Options, share: float, cut_s: float
) -> Options:
    """Returns the columns of ranks with their own blocks that some choice below the cut may have.

    All other ranks take their least seconds of each kind, whatever column that is.
    """
    repeats = repeats_of(layout, share)
    seconds = [
        np.array([[c.time_s, c.tail_s, c.plain_s, c.ramp_s] for c in columns]).T
        for columns in options
    ]
    least_s = np.array([each.min(axis=1) for each in seconds])
    slowest_s, ramps_s = least_s[:, :3].max(axis=0), least_s[:, 3].sum()
    kept = []
    for columns, of_rank, own_s in zip(options, seconds, least_s, strict=True):
        bound_s = repeats @ np.maximum(of_rank[:3], slowest_s[:, None])
        bound_s += share * (of_rank[3] + ramps_s - own_s[3])
        within = bound_s <= cut_s
        kept.append([c for c, holds in zip(columns, within, strict=True) if holds])
    return kept


def _least_pace_s(layout: ParallelLayout, options: Options, num_blocks: int) -> float:
    """Returns seconds that the slowest rank takes at least, zero where no bound is easy.

    Averages of columns have a shorter pace, so that the solver would have to branch for long.
    """
    if apart(layout, options):
        return max(min(column.time_s for column in columns) for columns in options)
    if not one_range_a_rank(layout, options):
        placed = not any(column.layers for columns in options for column in columns)
        pace_s = smallest_pace_s(options, num_blocks, lambda c: c.time_s) if placed else None
        return pace_s or 0.0
    reached_s = {0: 0.0}
    for columns in options:
        further_s: dict[int, float] = {}
        for column in columns:
            for first, end in column.layers[0]:
                if first in reached_s:
                    slowest_s = max(reached_s[first], column.time_s)
                    further_s[end] = min(further_s.get(end, INFINITY), slowest_s)
        reached_s = further_s
    return reached_s[max(reached_s)] if reached_s else 0.0


def _columns(
    layout: ParallelLayout, cut_s: float, session: SearchSession, *, free: bool
) -> Options | None:
    """Returns the columns of each rank below a cut, within its memory unless they are `free`."""

    def make(rank: Columns, count: int) -> list[StageColumn]:
        if free:
            return [column for way in _ways(rank) for column in way.beyond_memory(count, cut_s)]
        return rank.fastest(count, session.limit_bytes)

    return session.columns(layout, make, cut_s)


def _ways(rank: Columns) -> list[RankColumns]:
    """Returns the makers of all mixes of a rank, none where its columns are chosen otherwise."""
    ways = rank.ways if isinstance(rank, AnyEnds) else (rank,)
    mixed = [way for way in ways if isinstance(way, RankColumns)]
    ruled = any(way.table.stage_recompute is not None for way in mixed)
    return [] if ruled or len(mixed) < len(ways) else mixed


def _is_free(layout: ParallelLayout, session: SearchSession) -> bool:
    """Returns whether the program has the memory of a layout as a row.

    It has that of a single rank, whose program would else have hardly any choice.
    """
    if layout.mesh.pp > 1:
        return False
    makers = session.prices.makers(layout, 0, INFINITY, session.limit_bytes)
    return all(_ways(each.columns) for each in makers)


def _with_better(
    replayed: Sequence[Replayed],
    record: SearchRecord,
    choice: MasterChoice,
    session: SearchSession,
) -> tuple[Sequence[Replayed], SearchRecord]:
    """Returns the replayed choices with that of the program, and a gap that includes it."""
    best, _, price = replayed[0]
    share = min(1.0, price.step_s / price.closed_form_s)
    bound_s = min(record.bound, choice.step_s * share)
    strategy: Strategy = session.prices.strategy(best.layout, choice.columns)
    better = replace(best, choice=choice, value=choice.step_s, bound=min(best.bound, choice.step_s))
    step = replayed_price(strategy, session.book_of(best.layout, choice))
    value_s = price.step_s
    if step is not None and step.step_s < price.step_s:
        replayed, value_s = [(better, strategy, step), *replayed], step.step_s
    return replayed, replace(
        record,
        value=round(value_s, 6),
        bound=round(min(bound_s, value_s), 6),
        gap=round(max(0.0, 1 - bound_s / value_s), 6),
    )
