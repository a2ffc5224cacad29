"""The fastest of a list of strategies that fits, proven: no strategy is dropped by a heuristic.

Strategies are taken in the order of a lower bound of their simulated step
(costmodels/schedules/simulator.py). All that fit and have a bound below the best step are
simulated, so that the answer is the optimum of the price that is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

from parplan.costmodels.joined_pools import passes_join, prices_at
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.memory.rank_memory import rank_memory
from parplan.costmodels.schedules.simulator import least_step_s
from parplan.costmodels.stage_costs import data_parallel, step_costs
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.deadline import NEVER, Deadline, in_time

ROUNDING = 1e-9  # relative, against another order of summation
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Optimum:
    """The fastest strategy that fits and its price, with the number that was simulated."""

    strategy: Strategy
    price: StepPrice
    simulated: int


@dataclass(frozen=True, slots=True)
class Leanest:
    """The strategy whose fullest device needs the least memory, with that pipeline rank."""

    strategy: Strategy
    rank: int
    peak_bytes: float


def fullest_ranks(strategy: Strategy, price_cache: LayerPriceCache) -> Iterator[tuple[int, float]]:
    """Yields the peak bytes of the ranks that can be the fullest.

    Of neighbours with the same layers only the first counts, because a later one holds no more
    micro-batches.
    """
    layout = strategy.layout
    for rank in range(layout.mesh.pp):
        alike = rank > 0 and strategy.chunks(rank) == strategy.chunks(rank - 1)
        if not alike or passes_join(layout, rank - 1, rank):
            yield rank, rank_bytes(strategy, rank, price_cache)


def rank_bytes(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> float:
    """Peak bytes of one rank; strategies of many systems share their ranks."""
    key = "rank bytes", strategy.layout, rank, strategy.chunks(rank)
    prices = prices_at(strategy.layout, rank, price_cache)
    return prices.once(key, lambda: rank_memory(strategy, rank, prices).total)


def fits(strategy: Strategy, price_cache: LayerPriceCache, limit_bytes: float) -> bool:
    """Returns whether every device stays within `limit_bytes`."""
    return all(
        peak <= min(limit_bytes, prices_at(strategy.layout, rank, price_cache).most_bytes)
        for rank, peak in fullest_ranks(strategy, price_cache)
    )


def busiest_s(strategy: Strategy, price_cache: LayerPriceCache) -> float:
    """A cheap bound of the step: all passes of the busiest rank, without transfers and tail."""
    layout = strategy.layout
    choice_s = {
        id(choice): pass_s(choice, layout, price_cache)
        for choice in {id(choice): choice for choice in chain(*strategy.stages)}.values()
    }
    stage_s = {
        id(stage): sum(choice_s[id(choice)] for choice in stage)
        for stage in {id(stage): stage for stage in strategy.stages}.values()
    }
    busiest_s = max(
        sum(stage_s[id(strategy.stages[stage])] for stage in layout.stages_of(rank))
        for rank in range(layout.mesh.pp)
    )
    return layout.num_micro_batches * busiest_s * (1 - ROUNDING)


def pass_s(choice: LayerChoice, layout: ParallelLayout, price_cache: LayerPriceCache) -> float:
    """Seconds of both passes of a layer, with data parallelism of every micro-batch."""
    time = price_cache.layer_time(
        choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
    )
    return time.total_s + data_parallel(choice, layout, price_cache).per_micro_batch_s


def bound_s(strategy: Strategy, price_cache: LayerPriceCache) -> float:
    costs = step_costs(strategy, price_cache)
    return least_step_s(
        strategy.layout.num_micro_batches,
        costs.stages,
        costs.tail_s,
        ahead=strategy.layout.recomputes_ahead,
    )


def fastest(
    candidates: Iterable[Strategy],
    price_cache: LayerPriceCache,
    limit_bytes: float,
    deadline: Deadline = NEVER,
    below_s: float = INFINITY,
) -> Optimum | None:
    """Returns the fitting candidate with the shortest simulated step, None where none is below.

    Raises OutOfTimeError.
    """
    strategies = tuple(candidates)
    # Each entry has a bound, first a cheap one and then, where it fits, that of all costs.
    bounded = [
        (busiest_s(strategy, price_cache), index, False)
        for index, strategy in enumerate(in_time(strategies, deadline))
    ]
    heapify(bounded)
    best: tuple[Strategy, StepPrice] | None = None
    simulated = 0
    while bounded and bounded[0][0] < below_s:
        deadline.check()
        _, index, costed = heappop(bounded)
        strategy = strategies[index]
        if not costed:
            if fits(strategy, price_cache, limit_bytes):
                heappush(bounded, (bound_s(strategy, price_cache), index, True))
            continue
        price = price_step(strategy, price_cache)
        simulated += 1
        if price.step_s < below_s:
            best, below_s = (strategy, price), price.step_s
    return None if best is None else Optimum(*best, simulated=simulated)


def leanest(
    candidates: Sequence[Strategy], price_cache: LayerPriceCache, deadline: Deadline = NEVER
) -> Leanest:
    """Returns the candidate whose fullest device needs least. Raises OutOfTimeError."""

    def fullest(strategy: Strategy) -> Leanest:
        rank, peak = max(fullest_ranks(strategy, price_cache), key=lambda rank_bytes: rank_bytes[1])
        return Leanest(strategy, rank, peak)

    return min(map(fullest, in_time(candidates, deadline)), key=lambda lean: lean.peak_bytes)
