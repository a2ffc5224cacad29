"""Prices one configuration of a traced module by hand, with the prices and the plan of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.host.state_location import OFFLOAD_OF, StateLocation
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.host_options.state_locations import illegal_chunks
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.request import Constraints, TracedRequest, require_host_contents
from parplan.planner.search.estimate import ChunkRequest, require_host, with_homes
from parplan.planner.search.sequence_prices import SequencePrices
from parplan.planner.stage_columns.stage_contents import Range
from parplan.planner.stage_recompute import RecomputeRule, stage_too_large_error
from parplan.planner.traced.plan_traced import TracedFactory
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import Cutting
from parplan.planner.traced.stage_rules import StageRule
from parplan.planner.traced.traced_strategy import every_block, priced_module, strategy_on
from parplan.profiles.errors import ConfigError


def estimate_traced_plan(
    request: TracedRequest,
    rule: StageRule | None = None,
    cutting: Cutting | None = None,
    chunks: ChunkRequest | None = None,
) -> TracedPlan:
    """Returns the plan of one configuration, without a search.

    With `chunks` the states of shards lie in chunks, and ZeRO 3 shards the others where dp > 1. The
    constraints of the request pin all of its choices. Without a rule the stages are cut at even
    times. A plan that does not fit the devices is priced all the same. Raises ConfigError for a
    configuration that no search allows, with the reason, and InfeasibleError where the hosts cannot
    hold its states.
    """
    factory = TracedFactory(request, rule, cutting)
    pins = factory.request.constraints
    prices = factory.prices(pins.offload or ())
    price_cache = module_prices(prices)
    if chunks is not None:
        require_host_contents(OFFLOAD_OF[StateLocation.HOST], request.training.optimizer)
        stack = request.training.stack
        price_cache = price_cache.within(chunks.chunking(request.cluster, stack))
        pins = _in_chunks(prices, pins)
    limit = limit_bytes(request.cluster, request.training.stack, request.options)
    (strategy,) = uniform_strategies(prices, pins, limit)
    if chunks is not None:
        strategy = with_homes(strategy, chunks)
    unpriced = SearchRecord.of_estimate(0.0, 0.0)
    priced = priced_module(strategy, price_cache, unpriced)
    price = priced.price
    require_host(price, request.cluster, chunked=chunks is not None)
    record = SearchRecord.of_estimate(price.step_s, price.closed_form_s)
    return replace(priced.plan, search=record)


def _in_chunks(prices: SequencePrices, pins: Constraints) -> Constraints:
    """Returns the pins with the ZeRO stage of layers outside chunks.

    Raises ConfigError where chunks cannot hold the states of the pinned layout.
    """
    (layout,) = prices.space.layouts
    zeros = tuple(zero for zero in pins.zero or () if zero) or None
    reason = illegal_chunks(layout, zeros)
    if reason:
        raise ConfigError(
            reason, hint="change that option, or drop optimizer and parameters of --offload"
        )
    return replace(pins, zero=(3 if layout.mesh.dp > 1 else 0,))


def uniform_strategies(
    prices: SequencePrices, pins: Constraints, limit: float = math.inf
) -> Iterator[Strategy]:
    """Yields each layout with each pinned ZeRO stage and recompute level, the same for all shards.

    The stages have the cuts of the user, or the cuts at which their times are even. The states are
    on the hosts if the pins name them. Recompute by memory is within `limit` bytes a device. Raises
    InfeasibleError where a stage does not fit them.
    """
    on_host = bool(pins.offload)
    for layout in (each for each in prices.space.layouts if each.states_on_host == on_host):
        for zero in pins.zero or (0,):
            if pins.recompute_first_stage is not None:
                yield _as_the_rule(layout, pins.recompute_first_stage, prices, limit)
                continue
            for level in pins.recompute or (Recompute.NONE,):
                yield _uniform(layout, zero, level, prices)


def _uniform(
    layout: ParallelLayout, zero: int, level: Recompute, prices: SequencePrices
) -> Strategy:
    price_cache = module_prices(prices)
    cuts = _cuts(layout, prices)
    kept = {
        shard
        for stage, (first, end) in enumerate(cuts)
        if level is Recompute.NONE or layout.keeps_all(layout.rank_of(stage))
        for shard in range(first, end)
    }
    recomputed = dict.fromkeys(every_block(price_cache) - kept, Recompute.FULL)
    return strategy_on(layout, cuts, [zero] * len(cuts), recomputed, price_cache)


def _cuts(layout: ParallelLayout, prices: SequencePrices) -> tuple[Range, ...]:
    bounds = prices.bounds(layout, math.inf)
    cuts = bounds.cuts or bounds.even_cuts
    assert cuts is not None, "a candidate has no more stages than layers"
    return cuts


def _as_the_rule(
    layout: ParallelLayout, rule: RecomputeRule, prices: SequencePrices, limit: float
) -> Strategy:
    """The strategy with the recompute of a rule, at the one ZeRO stage of the prices."""
    chosen = []
    for rank, layers in enumerate(_cuts(layout, prices)):
        columns = prices.columns_of(layout, rank, (layers,))
        fits = columns.fastest(columns.num_blocks, limit if rule.by_memory else math.inf)
        if not fits:
            raise stage_too_large_error(rank, limit)
        chosen.append(fits[0])
    return prices.strategy(layout, chosen)


def module_prices(prices: SequencePrices) -> ShardPriceCache:
    """Returns the prices of the shards."""
    assert isinstance(prices.price_cache, ShardPriceCache), "the module is traced"
    return prices.price_cache
