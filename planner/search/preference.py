"""The plan of a request among the ties of its fastest plan (planner/plan/ties.py).

Every tie is priced again on machines of which one speed is 20 % off. A simulation of all of them
could take as long as the search. So where the simulated step is close to its lower bound
(`least_step_s` in costmodels/schedules/simulator.py), as in long pipelines of equal stages, it is
scaled as that bound changes; other steps are simulated again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.schedules.simulator import least_step_s
from parplan.costmodels.stage_costs import StepCosts, step_costs
from parplan.costmodels.step import StepPrice, simulated_step_s
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.objective import Prefer
from parplan.planner.plan.assemble import runner_up
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import ErrorBand, RunnerUp, TieChoice
from parplan.planner.plan.ratio_band import Shape, ratio_shares, shape_of
from parplan.planner.plan.ties import (
    SCENARIOS,
    UNKNOWN,
    Tie,
    inside_band,
    preferred,
    reason_for,
    worst_losses,
)
from parplan.planner.search.replay import Replayed
from parplan.planner.search.search_session import SearchSession
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.off_speed import SpeedFactors, at_speeds
from parplan.profiles.units import gib

CLOSE = 1.001  # simulated step over its bound, up to which scaling was within 0.05 %


def preferred_plan(
    fastest: Plan, replayed: Sequence[Replayed], prefer: Prefer, session: SearchSession
) -> Plan:
    """Returns the preferred plan, with the proof of the fastest and its choice recorded.

    replayed: the candidates, that of the fastest plan first
    """
    band = fastest.predicted.error_band
    if band is None:
        return _with_choice(fastest, TieChoice(prefer=prefer, reason=UNKNOWN))
    ties = _ties(replayed, band, session)
    places = list(ties)
    figures = list(ties.values())
    index = preferred(prefer, figures, band.memory.share)
    chosen = places[index]
    solved, strategy, price = replayed[chosen]
    choice = TieChoice(
        prefer=prefer,
        reason=reason_for(prefer, figures, index),
        slowdown=round(price.step_s / replayed[0][2].step_s - 1, 6),
        worst_loss=ties[chosen].worst_loss,
    )
    record = replace(
        fastest.search,
        preference=choice,
        runners_up=tuple(
            _runner_up(entry, ties.get(place))
            for place, entry in enumerate(replayed)
            if place != chosen
        ),
    )
    if chosen:
        fastest = session.prices.assembled(
            strategy, price, record, session.book_of(solved.layout, solved.choice)
        )
    return replace(fastest, search=record)


def _with_choice(plan: Plan, choice: TieChoice) -> Plan:
    return replace(plan, search=replace(plan.search, preference=choice))


def _runner_up(replayed: Replayed, tie: Tie | None) -> RunnerUp:
    _, strategy, price = replayed
    plain = runner_up(strategy, price)
    if tie is None:
        return plain
    return replace(plain, inside_error_band=True, worst_loss=tie.worst_loss)


def _ties(replayed: Sequence[Replayed], band: ErrorBand, session: SearchSession) -> dict[int, Tie]:
    """Returns the ties by their place among the candidates."""
    shapes = [_shape(strategy) for _, strategy, _ in replayed]
    places = inside_band(
        [price.step_s for _, _, price in replayed], ratio_shares(band, shapes[0], shapes)
    )
    entries = [replayed[place] for place in places]
    scenarios = _steps_by_scenario(entries, session) if len(entries) > 1 else [[1.0]]
    return {
        place: Tie(gib(max(memory.total for memory in price.memory)), loss)
        for place, (_, _, price), loss in zip(places, entries, worst_losses(scenarios), strict=True)
    }


def _shape(strategy: Strategy) -> Shape:
    return shape_of(strategy.layout.mesh, strategy.layout.micro_batch_size)


def _steps_by_scenario(
    entries: Sequence[Replayed], session: SearchSession
) -> Iterator[list[float]]:
    """Yields the steps of the candidates as they are priced, then in each scenario."""
    yield [price.step_s for _, _, price in entries]
    books = [session.book_of(solved.layout, solved.choice) for solved, _, _ in entries]
    scalings = [
        _scaling(strategy, price, book)
        for (_, strategy, price), book in zip(entries, books, strict=True)
    ]
    for speeds in _scenarios_of(session.price_cache.machine.cluster):
        off = {book: book.on(at_speeds(book.machine, speeds)) for book in books}
        yield [
            _step_s(strategy, off[book], scaling)
            for (_, strategy, _), book, scaling in zip(entries, books, scalings, strict=True)
        ]


def _scenarios_of(cluster: Cluster) -> Iterator[SpeedFactors]:
    """Yields the scenarios that change a price on the cluster."""
    for speeds in SCENARIOS:
        inside = speeds.inside_node != 1.0 and cluster.gpus_per_node == 1
        across = speeds.across_nodes != 1.0 and cluster.nodes == 1
        if not inside and not across:
            yield speeds


def _scaling(strategy: Strategy, price: StepPrice, price_cache: LayerPriceCache) -> float | None:
    """Returns the simulated step over its lower bound, None where the two are apart."""
    ratio = price.step_s / _bound_s(strategy.layout, step_costs(strategy, price_cache))
    return ratio if ratio <= CLOSE else None


def _step_s(strategy: Strategy, price_cache: LayerPriceCache, scaling: float | None) -> float:
    """Returns the step at other prices: the scaled lower bound, or the simulated step."""
    costs = step_costs(strategy, price_cache)
    if scaling is None:
        return simulated_step_s(strategy, costs)
    return scaling * _bound_s(strategy.layout, costs)


def _bound_s(layout: ParallelLayout, costs: StepCosts) -> float:
    return least_step_s(
        layout.num_micro_batches, costs.stages, costs.tail_s, ahead=layout.recomputes_ahead
    )
