"""The worst case of each plan where compute, links or memory are off, and the least regret.

The plans are the candidates that the search replayed, and the best plan of each corner
(planner/plan/corners.py), which a search of its own finds on the machine of that corner. Regret is
least among these plans; another plan that is the best in no corner could have less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.joined_pools import prices_at
from parplan.planner.plan.assemble import rounded_figures, runner_up
from parplan.planner.plan.corners import (
    REGRET_DIGITS,
    changes,
    corners,
    figure_of,
    regrets,
)
from parplan.planner.plan.prediction import Corner, Robustness, RobustPlan, Status
from parplan.planner.search.corner_steps import AS_PRICED, steps_by_corner
from parplan.planner.search.replay import Replayed, replayed_price
from parplan.planner.search.search_results import SearchResult
from parplan.planner.search.search_session import ROUNDING, SearchSession
from parplan.profiles.errors import OutOfTimeError, SolverError
from parplan.profiles.machines.off_speed import SpeedFactors

SearchAt = Callable[[SpeedFactors], SearchResult | None]
FACTOR_DIGITS = 6  # decimals
Steps = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class _CornerSearch:
    """The best plan of a corner; None where nothing fits or its search found nothing in time."""

    corner: SpeedFactors
    result: SearchResult | None = None
    proven: bool = False


@dataclass(frozen=True, slots=True)
class RobustPlans:
    """The priced plans, those of the search first, with their worst cases.

    least_regret   index of the plan with the least regret, None where each fails in a corner
    """

    entries: tuple[Replayed, ...]
    table: Robustness

    def first(self, chosen: int) -> Robustness:
        """Returns the record with the chosen plan before the others."""
        order = [chosen, *(place for place in range(len(self.entries)) if place != chosen)]
        least = self.table.least_regret
        return replace(
            self.table,
            plans=tuple(self.table.plans[place] for place in order),
            least_regret=None if least is None else order.index(least),
        )

    def reason(self) -> str:
        """Returns the reason for the plan of least regret, for the plan file and the summary."""
        share, least = self.table.share, self.table.least_regret
        assert least is not None, "a plan has the least regret"
        regret, fastest = self.table.plans[least].regret, self.table.plans[0].regret
        assert regret is not None, "the least regret is finite"
        off = f"it loses at most {100 * regret:.1f} % where a figure is {100 * share:g} % off"
        if least == 0:
            return off
        other = "does not fit in each case" if fastest is None else f"{100 * fastest:.1f} %"
        return f"{off}, the fastest {other}"


def robust_plans(
    replayed: Sequence[Replayed], share: float, search_at: SearchAt, session: SearchSession
) -> RobustPlans:
    """Returns the worst cases of the replayed plans and of the best plan of each corner.

    Ctrl-C and the deadline end the searches of the corners, not the prices. Raises
    KeyboardInterrupt while plans are priced.
    """
    cluster = session.price_cache.machine.cluster
    off = [corner for corner in corners(share) if changes(corner, cluster)]
    searched = list(_searches(off, search_at))
    entries = [*replayed]
    for each in searched:
        entries += _new_entries(each, entries, session)
    every = (AS_PRICED, *off)
    by_corner = [
        [
            step_s if _fits(entry, corner, session) else None
            for entry, step_s in zip(entries, steps_s, strict=True)
        ]
        for corner, steps_s in zip(every, steps_by_corner(entries, every, session), strict=True)
    ]
    return RobustPlans(tuple(entries), _table(entries, share, by_corner, searched))


def _searches(off: Sequence[SpeedFactors], search_at: SearchAt) -> Iterator[_CornerSearch]:
    over = False
    for corner in off:
        found = _CornerSearch(corner)
        if not over:
            try:
                result = search_at(corner)
                proven = result is None or result.plan.search.status is Status.OPTIMAL
                found = _CornerSearch(corner, result, proven)
                over = result is not None and result.interrupted
            except (KeyboardInterrupt, OutOfTimeError):
                over = True
            except SolverError:  # the record says that the best of the corner is unproven
                found = _CornerSearch(corner)
        yield found


def _new_entries(
    found: _CornerSearch, entries: Sequence[Replayed], session: SearchSession
) -> Iterator[Replayed]:
    """Yields the plan of a corner as it is priced without the corner, unless it is known."""
    result = found.result
    if result is None or any(result.strategy == strategy for _, strategy, _ in entries):
        return
    price = replayed_price(result.strategy, session.book_of(result.best.layout, result.best.choice))
    if price is not None:
        yield result.best, result.strategy, price


def _fits(entry: Replayed, corner: SpeedFactors, session: SearchSession) -> bool:
    limit_bytes = session.limit_bytes / (1 - session.slack)
    _, strategy, price = entry
    rooms = (
        min(limit_bytes, prices_at(strategy.layout, rank, session.price_cache).most_bytes)
        for rank in range(strategy.layout.mesh.pp)
    )
    return all(
        memory.total <= room * corner.memory * (1 + ROUNDING)
        for memory, room in zip(price.memory, rooms, strict=True)
    )


def _table(
    entries: Sequence[Replayed],
    share: float,
    by_corner: Sequence[Steps],
    searched: Sequence[_CornerSearch],
) -> Robustness:
    """Returns the record; `by_corner` has the machine as it is priced first."""
    by_regret = list(zip(*map(regrets, by_corner), strict=True))
    plans = tuple(
        _robust_plan(entry, steps_s, of_plan, searched)
        for entry, steps_s, of_plan in zip(
            entries, zip(*by_corner, strict=True), by_regret, strict=True
        )
    )
    worst = [math.inf if plan.regret is None else plan.regret for plan in plans]
    least = worst.index(min(worst))
    return Robustness(
        share=share,
        corners=tuple(
            _corner(each, steps_s) for each, steps_s in zip(searched, by_corner[1:], strict=True)
        ),
        plans=plans,
        least_regret=None if math.isinf(worst[least]) else least,
    )


def _corner(searched: _CornerSearch, steps_s: Steps) -> Corner:
    what, factor = figure_of(searched.corner)
    best_s = min((step_s for step_s in steps_s if step_s is not None), default=None)
    return Corner(
        what=what,
        factor=round(factor, FACTOR_DIGITS),
        best_step_time_s=_rounded(best_s),
        proven=searched.proven,
    )


def _robust_plan(
    entry: Replayed, steps_s: Steps, of_plan: Sequence[float], searched: Sequence[_CornerSearch]
) -> RobustPlan:
    _, strategy, price = entry
    worst = max(of_plan)
    of_speeds = (
        regret
        for regret, corner in zip(
            of_plan, (AS_PRICED, *(each.corner for each in searched)), strict=True
        )
        if corner.memory == 1.0
    )
    place = of_plan.index(worst)
    return RobustPlan(
        plan=runner_up(strategy, price),
        steps_s=tuple(map(_rounded, steps_s)),
        worst_step_s=max(rounded_figures(step_s) for step_s in steps_s if step_s is not None),
        speed_regret=_finite(max(of_speeds)),
        regret=_finite(worst),
        worst_corner=place - 1 if place else None,
    )


def _finite(regret: float) -> float | None:
    return None if math.isinf(regret) else round(regret, REGRET_DIGITS)


def _rounded(step_s: float | None) -> float | None:
    return None if step_s is None else rounded_figures(step_s)
