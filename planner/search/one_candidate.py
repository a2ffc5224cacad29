"""One layout within one memory limit: its fastest choice and its lower bounds."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.solver_faults import can_place
from parplan.planner.limit_boxes import longer_never_pays
from parplan.planner.master import (
    Master,
    MasterChoice,
    fastest_apart,
    joined_by_cuts,
    lower_bound_s,
    separable,
)
from parplan.planner.paths_of_layers import fastest_path, on_paths, one_range_a_rank
from parplan.planner.placed_blocks import (
    contents_in_reach,
    fastest_placed,
    in_reach_of,
    joined_by_blocks,
)
from parplan.planner.search.search_session import INFINITY, SearchSession
from parplan.planner.solver import Unsolved
from parplan.planner.stage_columns.stage_column import StageColumn, alike_ends
from parplan.planner.stage_columns.stage_prices import tied_ends
from parplan.profiles.errors import SolverError

SOLVED_TO = 1e-7  # the solver's relative tolerance on an optimum
# columns, or their places, in reach of an optimum; a program with more has many equal choices and
# takes minutes
MOST_IN_REACH = 150
Options = Sequence[Sequence[StageColumn]]


def relaxed_bound_s(
    layout: ParallelLayout, relaxed: Options | None, cut_s: float, session: SearchSession
) -> float:
    """Seconds that no choice of `layout` is below, infinite where columns cannot place blocks.

    Where the relaxed columns below the cut are not all, it is the bound without them.
    """
    if not session.prices.covers(layout, cut_s, session.limit_bytes):
        return session.prices.least_s(layout, session.limit_bytes)
    share = bubble_share(layout, session.price_cache)
    least_s = lower_bound_s(layout, relaxed, session.num_blocks, share) if relaxed else None
    if relaxed is None or least_s is None:
        return INFINITY
    if one_range_a_rank(layout, relaxed):
        return max(least_s, on_paths(layout, relaxed, share).bound_s)
    return least_s


def nearly_equal_s(
    layout: ParallelLayout, session: SearchSession, cut_s: float = INFINITY
) -> float:
    """Seconds of a choice below `cut_s` of unequal ranks whose numbers of blocks hardly differ.

    They are a first cut, without which a rank may hold any number of blocks. Infinite where there
    is none, or where layers are not alike.
    """
    if not session.prices.ascending:
        return INFINITY
    num_blocks, pp = session.num_blocks, layout.mesh.pp
    share = bubble_share(layout, session.price_cache)
    counts = [range(max(1, num_blocks // pp - 1), num_blocks // pp + 3)] * pp
    options = session.columns(
        layout, lambda rank, count: session.fastest(rank, count, layout, cut_s), cut_s, counts
    )
    if options is None or not joined_by_blocks(layout, options, share):
        return INFINITY
    tied, check = session.price_cache.tied, session.deadline.check
    choice = fastest_placed(layout, options, num_blocks, share, cut_s, tied=tied, check=check)
    return choice.step_s * (1 + SOLVED_TO) if choice else INFINITY


def fastest_choice(
    layout: ParallelLayout, relaxed: Options, cut_s: float, session: SearchSession
) -> MasterChoice | None:
    """The fastest choice of `layout`, None where none is below `cut_s`.

    Each rank holds a number of blocks that its relaxed columns have. Raises SolverError, and
    Unsolved where the solver's time is over.
    """
    num_layers = session.num_blocks
    share = bubble_share(layout, session.price_cache)
    counts = contents_in_reach(layout, relaxed, num_layers, share, cut_s)
    if not all(counts):
        return None
    options = session.columns(
        layout, lambda rank, count: session.fastest(rank, count, layout, cut_s), cut_s, counts
    )
    least_s = lower_bound_s(layout, options, num_layers, share) if options else None
    if options is None or least_s is None or least_s >= cut_s:
        return None
    tied, check = session.price_cache.tied, session.deadline.check
    if one_range_a_rank(layout, options):
        options = on_paths(layout, options, share, cut_s).options
        if not all(options):
            return None
        if longer_never_pays(layout, share):
            known = fastest_path(layout, options, share, cut_s, tied=tied, check=check)
            if known is None:
                return None
            options = on_paths(layout, options, share, known.step_s).options
            if sum(len(c.layers[0]) for columns in options for c in columns) > MOST_IN_REACH:
                return known
    if separable(layout, options):
        return fastest_apart(layout, options, tied=tied, share=share)
    if joined_by_blocks(layout, options, share):
        known = fastest_placed(layout, options, num_layers, share, cut_s, tied=tied, check=check)
        if known is None:
            return None
        options = in_reach_of(layout, options, num_layers, share, known.step_s)
        if sum(map(len, options)) > MOST_IN_REACH:
            return known
    master = Master(layout, options, num_layers, tied=tied, share=share)
    choice = master.fastest(session.options.solver, session.solver_limit_s())
    several = layout.virtual_stages > 1 and joined_by_cuts(layout, options)
    if choice is None and not several:  # their contents may have no path, whatever they add up to
        _require_infeasible(layout, options, session)
    return choice


def _require_infeasible(layout: ParallelLayout, options: Options, session: SearchSession) -> None:
    """Raises SolverError when the solver calls a solvable problem infeasible."""
    ends = tied_ends(layout) if session.price_cache.tied else ()
    if one_range_a_rank(layout, options):
        alike = alike_ends(options, ends)
        solvable = any(on_paths(layout, each, share=1.0).bound_s < INFINITY for each in alike)
    else:
        solvable = can_place(options, session.num_blocks, tied=bool(ends))
    if solvable:
        raise SolverError(
            f"{session.options.solver} calls a problem infeasible that is not",
            hint="use the other --solver",
        )


def certify(layout: ParallelLayout, best_s: float, session: SearchSession) -> None:
    """Raises the bound of a layout, up to `best_s`, to the master over relaxed columns.

    Its optimum is below every per-layer choice of options and ZeRO stages that is below `best_s`.
    """
    if session.left_s() > 0:
        session.prices.raise_bound(
            layout, session.limit_bytes, min(best_s, proven_s(layout, best_s, session))
        )


def proven_s(layout: ParallelLayout, best_s: float, session: SearchSession) -> float:
    """Seconds that no choice of `layout` is below.

    About `best_s` where none is below that, zero where the solver gives no proof. A schedule that
    recomputes ahead of the gradient has a second bound: the same without any recompute.
    """
    try:
        least_s = _averages_s(layout, best_s, session, plain=False)
        if layout.recomputes_ahead:
            least_s = max(least_s, _averages_s(layout, best_s, session, plain=True))
    except (Unsolved, SolverError):
        return 0.0
    return least_s * (1 - SOLVED_TO)


def _averages_s(
    layout: ParallelLayout, best: float, session: SearchSession, *, plain: bool
) -> float:
    """Least seconds of `layout` over averages of its relaxed columns.

    `best` where none is below it, zero where nothing is proven.
    """
    if not session.prices.covers(layout, best, session.limit_bytes):
        return session.prices.least_s(layout, session.limit_bytes)
    relaxed = session.relaxed(layout, best, plain=plain)
    share, tied = bubble_share(layout, session.price_cache), session.price_cache.tied
    num_layers = session.num_blocks
    if relaxed is not None and one_range_a_rank(layout, relaxed):
        relaxed = on_paths(layout, relaxed, share, best).options
        if longer_never_pays(layout, share):
            check = session.deadline.check
            fastest = fastest_path(layout, relaxed, share, best, tied=tied, check=check)
            if fastest is None:
                return best
            if not any(column.corner for columns in relaxed for column in columns):
                return fastest.step_s
    if relaxed is None:
        return best
    contents = contents_in_reach(layout, relaxed, num_layers, share, best)
    relaxed = [
        [column for column in columns if column.contents in some]
        for columns, some in zip(relaxed, contents, strict=True)
    ]
    if lower_bound_s(layout, relaxed, num_layers, share) is None:
        return best
    master = Master(layout, relaxed, num_layers, tied=tied, share=share)
    return master.bound_s(session.options.solver, session.solver_limit_s()) or 0.0
