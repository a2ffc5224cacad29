"""Steps of priced strategies where figures of the machine are off (planner/plan/corners.py).

A simulation of every strategy in every corner could take as long as the search. So where the
simulated step is close to its lower bound (`least_step_s` in costmodels/schedules/simulator.py), as
in long pipelines of equal stages, it is scaled as that bound changes; other steps are simulated
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.schedules.simulator import least_step_s
from parplan.costmodels.stage_costs import StepCosts, step_costs
from parplan.costmodels.step import StepPrice, simulated_step_s
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.search.replay import Replayed
from parplan.planner.search.search_session import SearchSession
from parplan.profiles.machines.off_speed import SpeedFactors, at_speeds

CLOSE = 1.001  # simulated step over its bound, up to which scaling was within 0.05 %
AS_PRICED = SpeedFactors()


def steps_by_corner(
    entries: Sequence[Replayed], corners: Sequence[SpeedFactors], session: SearchSession
) -> Iterator[list[float]]:
    """Yields the steps of the strategies in each corner. The memory of a device changes none."""
    books = [session.book_of(solved.layout, solved.choice) for solved, _, _ in entries]
    scalings = [
        _scaling(strategy, price, book)
        for (_, strategy, price), book in zip(entries, books, strict=True)
    ]
    for corner in corners:
        speeds = replace(corner, memory=1.0)
        if speeds == AS_PRICED:
            yield [price.step_s for _, _, price in entries]
            continue
        off = {book: book.on(at_speeds(book.machine, speeds)) for book in books}
        yield [
            _step_s(strategy, off[book], scaling)
            for (_, strategy, _), book, scaling in zip(entries, books, scalings, strict=True)
        ]


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
