"""The error when no plan of a traced module fits: the leanest plan, its shortfall, and a hint."""

from __future__ import annotations

from dataclasses import replace

from parplan.planner.infeasible.shortfall import MOST_TIMES_LARGER, Shortfall, limit_bytes
from parplan.planner.request import TracedRequest
from parplan.planner.search.sequence_prices import SequencePrices
from parplan.planner.search.sequence_shortfall import sequence_shortfall, some_plan_fits
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import Sharded
from parplan.planner.traced.stage_rules import StageRule, StageRuleKind
from parplan.planner.traced.traced_prices import traced_prices
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError
from parplan.profiles.units import gib


def infeasible_traced_error(
    request: TracedRequest, prices: SequencePrices, rule: StageRule
) -> InfeasibleError:
    """Returns the error with the shortfall of the leanest plan and a hint, if there is time."""
    shards = _sharded(prices).shards
    try:
        short = sequence_shortfall(request, prices, lambda layer: shards[layer].name, "shards")
        return InfeasibleError(short.text, hint=_hint(request, prices, rule, short))
    except OutOfTimeError:
        cluster = request.cluster
        return InfeasibleError(
            f"{request.model.name} does not fit on {cluster.num_gpus} x "
            f"{cluster.device.name}; how much it is short was not "
            "searched, the time was over",
            hint="use more GPUs, or give it a longer --time-limit",
        )


def _sharded(prices: SequencePrices) -> Sharded:
    assert isinstance(prices.price_cache, ShardPriceCache)
    return prices.price_cache.sharded


def _hint(request: TracedRequest, prices: SequencePrices, rule: StageRule, short: Shortfall) -> str:
    """Returns --stages ilp if cuts are given, else a number of GPUs that is enough, if any is."""
    cluster = request.cluster
    if short.host_bytes is not None:
        return f"{gib(short.host_bytes):,.1f} GiB of host memory a node are enough (--host-memory)"
    if rule.rule is not StageRuleKind.ILP:
        return "--stages ilp also looks for other cuts"
    pins = replace(request.constraints, pp=None, dp=None)
    nodes = cluster.nodes
    while (nodes := 2 * nodes) <= MOST_TIMES_LARGER * cluster.nodes:
        more = replace(request, cluster=replace(cluster, nodes=nodes), constraints=pins)
        limit = limit_bytes(more.cluster, more.training.stack, more.options)
        try:
            larger = traced_prices(more, _sharded(prices), rule)
        except ConfigError:
            continue
        if some_plan_fits(larger, limit):
            num_gpus = more.cluster.num_gpus
            return f"{num_gpus} GPUs are enough (--gpus {num_gpus})"
    shorter = "" if request.training.seq_length == 1 else ", or shorter sequences (--seq-length)"
    return f"use a larger device{shorter}"
