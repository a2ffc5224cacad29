"""The prices of a search over a traced module: its shards as layers, its candidates, its cuts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from parplan.costmodels.layers.chunked_layer import Chunking
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import no_candidate_error
from parplan.planner.candidates.meshes import OUTSIDE_PINS
from parplan.planner.request import TracedRequest
from parplan.planner.search.sequence_prices import SequencePrices
from parplan.planner.stage_columns.stage_contents import Range
from parplan.planner.traced.assemble_traced import assembled
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import Sharded
from parplan.planner.traced.stage_rules import StageRule, ranges
from parplan.planner.traced.traced_candidates import enumerate_traced_candidates, require_known
from parplan.profiles.machines.shipped_profiles import machine_for


def traced_prices(request: TracedRequest, sharded: Sharded, rule: StageRule) -> SequencePrices:
    """Returns the prices of a search over the shards of a module.

    Raises ConfigError for pins that it cannot have, and when no mesh is legal.
    """
    pins, training = request.constraints, request.training
    require_known(pins)
    machine = machine_for(request.cluster)
    price_cache = ShardPriceCache(sharded, training, machine, zero_ranks=pins.zero_ranks).within(
        Chunking(communication=pins.chunk_communication)
    )
    illegal_tp = cache(price_cache.illegal_tp)
    space = enumerate_traced_candidates(len(sharded.shards), request, illegal_tp, rule.counts)

    def given(layout: ParallelLayout) -> tuple[Range, ...] | None:
        return ranges(rule, sharded, layout.num_virtual_stages)

    prices = SequencePrices(
        space,
        price_cache,
        pins.resolved(training.stack),
        request.options.deadline,
        given,
        partial(assembled, price_cache=price_cache),
    )
    if not prices.space.layouts:
        pruned = prices.space.pruned
        within = tuple(each for each in pruned if not each.reason.startswith(OUTSIDE_PINS))
        told = replace(prices.space, pruned=within or pruned)
        raise no_candidate_error(told, request.cluster)
    return prices
