"""The plan of a request among the ties of its fastest plan (planner/plan/ties.py).

Every tie is priced again on machines of which one speed is off. Where a request asks how robust its
plans are, the plan may also be the one of least regret among more plans (planner/search/robust.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.strategy import Strategy
from parplan.planner.objective import Prefer
from parplan.planner.plan.assemble import runner_up
from parplan.planner.plan.corners import SPEEDS, USUAL_SHARE, changes, corners, worst_regrets
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import ErrorBand, Robustness, RunnerUp, TieChoice
from parplan.planner.plan.ratio_band import Shape, ratio_shares, shape_of
from parplan.planner.plan.ties import UNKNOWN, Tie, inside_band, preferred, reason_for
from parplan.planner.search.corner_steps import AS_PRICED, steps_by_corner
from parplan.planner.search.replay import Replayed
from parplan.planner.search.robust import RobustPlans, SearchAt, robust_plans
from parplan.planner.search.search_session import SearchSession
from parplan.profiles.units import gib


@dataclass(frozen=True, slots=True)
class Preference:
    """The choice among plans that are as fast within the error band.

    share       share by which figures may be off where worst cases are asked for, None elsewhere
    search_at   searches for the fastest plan of a corner
    """

    prefer: Prefer
    share: float | None
    search_at: SearchAt


@dataclass(frozen=True, slots=True)
class _Choice:
    """The plan that is preferred, by its place among the entries.

    ties     those of the fastest plan by their place
    robust   the record of the worst cases, None where they were not asked for
    """

    entries: Sequence[Replayed]
    place: int
    reason: str
    ties: Mapping[int, Tie]
    robust: Robustness | None = None


def preferred_plan(
    fastest: Plan, replayed: Sequence[Replayed], preference: Preference, session: SearchSession
) -> Plan:
    """Returns the preferred plan, with the proof of the fastest and its choice recorded.

    replayed: the candidates, that of the fastest plan first
    """
    choice = _among_ties(fastest, replayed, preference, session)
    if preference.share is not None:
        worst = robust_plans(replayed, preference.share, preference.search_at, session)
        choice = _with_worst_cases(choice, worst, preference.prefer)
    solved, strategy, price = choice.entries[choice.place]
    tie = choice.ties.get(choice.place)
    record = replace(
        fastest.search,
        preference=TieChoice(
            prefer=preference.prefer,
            reason=choice.reason,
            slowdown=round(price.step_s / replayed[0][2].step_s - 1, 6),
            worst_loss=tie.worst_loss if tie else None,
        ),
        robust=choice.robust,
        runners_up=tuple(
            _runner_up(entry, choice.ties.get(place))
            for place, entry in enumerate(replayed)
            if place != choice.place
        ),
    )
    if choice.place:
        book = session.book_of(solved.layout, solved.choice)
        fastest = session.prices.assembled(strategy, price, record, book)
    return replace(fastest, search=record)


def _among_ties(
    fastest: Plan, replayed: Sequence[Replayed], preference: Preference, session: SearchSession
) -> _Choice:
    band = fastest.predicted.error_band
    if band is None:
        return _Choice(replayed, 0, UNKNOWN, {})
    share = preference.share or USUAL_SHARE
    ties = _ties(replayed, band, share, session)
    figures = list(ties.values())
    index = preferred(preference.prefer, figures, band.memory.share)
    reason = reason_for(preference.prefer, figures, index, share)
    return _Choice(replayed, list(ties)[index], reason, ties)


def _with_worst_cases(choice: _Choice, worst: RobustPlans, prefer: Prefer) -> _Choice:
    """Returns the choice with its worst cases; the robust plan is that of least regret."""
    least = worst.table.least_regret
    if prefer is Prefer.ROBUST and least is not None:
        choice = replace(choice, place=least, reason=worst.reason())
    return replace(choice, entries=worst.entries, robust=worst.first(choice.place))


def _runner_up(replayed: Replayed, tie: Tie | None) -> RunnerUp:
    _, strategy, price = replayed
    plain = runner_up(strategy, price)
    if tie is None:
        return plain
    return replace(plain, inside_error_band=True, worst_loss=tie.worst_loss)


def _ties(
    replayed: Sequence[Replayed], band: ErrorBand, share: float, session: SearchSession
) -> dict[int, Tie]:
    """Returns the ties by their place among the candidates."""
    shapes = [_shape(strategy) for _, strategy, _ in replayed]
    places = inside_band(
        [price.step_s for _, _, price in replayed], ratio_shares(band, shapes[0], shapes)
    )
    entries = [replayed[place] for place in places]
    cluster = session.price_cache.machine.cluster
    off = [corner for corner in corners(share, SPEEDS) if changes(corner, cluster)]
    by_corner: Iterable[Sequence[float]] = [[1.0]]
    if len(entries) > 1:
        by_corner = steps_by_corner(entries, (AS_PRICED, *off), session)
    return {
        place: Tie(gib(price.peak_bytes), loss)
        for place, (_, _, price), loss in zip(
            places, entries, worst_regrets(by_corner), strict=True
        )
    }


def _shape(strategy: Strategy) -> Shape:
    return shape_of(strategy.layout.mesh, strategy.layout.micro_batch_size)
