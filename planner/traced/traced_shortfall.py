"""The error when no plan of a traced module fits: the leanest plan, its shortfall, and a hint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.host_options.location_costs import host_share_bytes
from parplan.planner.infeasible.shortfall import MOST_TIMES_LARGER, limit_bytes
from parplan.planner.plan.error_band import memory_margin
from parplan.planner.plan.plan_chunks import smallest_bytes
from parplan.planner.request import TracedRequest
from parplan.planner.search.sequence_prices import SequencePrices
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
    try:
        return _explained(request, prices, rule)
    except OutOfTimeError:
        cluster = request.cluster
        return InfeasibleError(
            f"{request.model.name} does not fit on {cluster.num_gpus} x "
            f"{cluster.device.name}; how much it is short was not "
            "searched, the time was over",
            hint="use more GPUs, or give it a longer --time-limit",
        )


def _explained(request: TracedRequest, prices: SequencePrices, rule: StageRule) -> InfeasibleError:
    cluster, name = request.cluster, request.model.name
    strategy, price = _leanest(prices)
    rank = max(range(strategy.layout.mesh.pp), key=lambda index: price.memory[index].total)
    memory = price.memory[rank]
    limit = limit_bytes(cluster, request.training.stack, request.options)
    parts = {
        "states (parameters, gradients, optimizer)": memory.states.total,
        "activations": memory.activations,
        "temporaries": memory.temporaries,
        "reserve (context, communicators, allocator)": memory.reserve,
    }
    largest = max(parts, key=lambda part: parts[part])
    margin = (
        ""
        if request.options.memory_limit_bytes is not None
        else (f" with --memory-margin {memory_margin(request.training.stack, request.options):g}")
    )
    largest_stage = max(
        strategy.layout.stages_of(rank), key=lambda stage: len(strategy.stages[stage])
    )
    run = strategy.stages[largest_stage]
    first, end = strategy.layers_of(largest_stage)
    shards = _sharded(prices).shards
    return InfeasibleError(
        f"{name} does not fit on {cluster.num_gpus} x {cluster.device.name}: the leanest plan "
        f"({strategy.layout.mesh}, zero {run[0].zero}, "
        f"{_recompute_text(run)} recompute, micro-batch {strategy.layout.micro_batch_size}"
        f"{_host_text(strategy.layout)}) needs "
        f"{gib(memory.total):.1f} GiB on stage "
        f"{rank} ({shards[first].name} to {shards[end - 1].name}), {gib(limit):.1f} "
        f"usable{margin}: "
        f"{gib(memory.total - limit):.1f} GiB short; the largest part is {largest}, "
        f"{gib(parts[largest]):.1f} GiB",
        hint=_hint(request, prices, rule),
    )


def _host_text(layout: ParallelLayout) -> str:
    if layout.states_on_host:
        return ", states on the host"
    return ", states in chunks" if layout.chunked else ""


def least_traced_peak_bytes(prices: SequencePrices) -> float:
    """Bytes of the fullest device of the leanest plan. Raises OutOfTimeError."""
    return _peak_bytes(_leanest(prices)[1])


def _leanest(prices: SequencePrices) -> tuple[Strategy, StepPrice]:
    """Returns the leanest strategy that fits the hosts, with its price."""
    priced = [(strategy, _price(strategy, prices)) for strategy in _leanest_of_each(prices)]
    fit = [each for each in priced if _host_bytes(each[1]) <= _host_share(prices)]
    return min(fit, key=lambda each: _peak_bytes(each[1]))


def _leanest_of_each(prices: SequencePrices) -> Iterator[Strategy]:
    """Yields the leanest strategy of each layout of `_layouts`.

    Those in chunks are left out where a rank has no layer that chunks can hold.
    """
    for layout in _layouts(prices):
        strategy = leanest_traced(prices, layout)
        ranks = (
            [choice for stage in layout.stages_of(rank) for choice in strategy.stages[stage]]
            for rank in range(layout.mesh.pp)
        )
        if not layout.chunked or all(any(c.kind.in_chunks for c in of_rank) for of_rank in ranks):
            yield strategy


def _price(strategy: Strategy, prices: SequencePrices) -> StepPrice:
    price_cache = prices.price_cache.with_states(on_host=strategy.layout.states_on_host)
    if strategy.layout.chunked:
        least = smallest_bytes(strategy, price_cache)
        price_cache = price_cache.within(replace(price_cache.chunking, device_bytes=least))
    return price_step(strategy, price_cache)


def _peak_bytes(price: StepPrice) -> float:
    return max(memory.total for memory in price.memory)


def _host_bytes(price: StepPrice) -> float:
    return max(memory.host for memory in price.memory)


def _host_share(prices: SequencePrices) -> float:
    return host_share_bytes(prices.price_cache.machine.cluster)


def _recompute_text(run: Sequence[LayerChoice]) -> str:
    recomputed = [choice.recompute for choice in run if choice.recompute is not Recompute.NONE]
    if not recomputed:
        return "no"
    whole = all(level is Recompute.FULL for level in recomputed)
    return (
        "full"
        if whole and len(recomputed) == len(run)
        else f"{len(recomputed)} of {len(run)} shards"
    )


def _layouts(prices: SequencePrices) -> Iterator[ParallelLayout]:
    """Yields for each mesh the layout with the smallest micro-batch and the fewest virtual stages.

    It does so with states on the devices and, where allowed, on the hosts. The leanest layout is
    among them.
    """
    seen: dict[object, ParallelLayout] = {}
    for layout in prices.space.layouts:
        place = layout.mesh, layout.states_on_host, layout.chunked
        known = seen.get(place)
        if known is None or (layout.micro_batch_size, layout.virtual_stages) < (
            known.micro_batch_size,
            known.virtual_stages,
        ):
            seen[place] = layout
    yield from seen.values()


def _sharded(prices: SequencePrices) -> Sharded:
    assert isinstance(prices.price_cache, ShardPriceCache)
    return prices.price_cache.sharded


def _needed_host_bytes(request: TracedRequest, prices: SequencePrices) -> float | None:
    """Returns the least host bytes of a node with which a plan fits, None where none does."""
    limit = limit_bytes(request.cluster, request.training.stack, request.options)
    layouts = (layout for layout in _layouts(prices) if layout.states_on_host)
    priced = [_price(leanest_traced(prices, layout), prices) for layout in layouts]
    needed = [_host_bytes(price) for price in priced if _peak_bytes(price) <= limit]
    return min(needed) * request.cluster.gpus_per_node if needed else None


def _hint(request: TracedRequest, prices: SequencePrices, rule: StageRule) -> str:
    """Returns --stages ilp if cuts are given, else a number of GPUs that is enough, if any is."""
    cluster = request.cluster
    needed = _needed_host_bytes(request, prices)
    if needed is not None:
        return f"{gib(needed):,.1f} GiB of host memory a node are enough (--host-memory)"
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
        for strategy in _leanest_of_each(larger):
            price = _price(strategy, larger)
            if _peak_bytes(price) <= limit and _host_bytes(price) <= _host_share(larger):
                num_gpus = more.cluster.num_gpus
                return f"{num_gpus} GPUs are enough (--gpus {num_gpus})"
    shorter = "" if request.training.seq_length == 1 else ", or shorter sequences (--seq-length)"
    return f"use a larger device{shorter}"


def leanest_traced(prices: SequencePrices, layout: ParallelLayout) -> Strategy:
    """Returns the leanest strategy of a layout: cuts, ZeRO stages and recompute by memory."""
    bounds = prices.bounds(layout, math.inf)
    cuts = bounds.cuts or bounds.leanest_cuts
    assert cuts is not None, "a candidate has no more stages than layers"
    columns = [
        prices.columns_of(layout, rank, tuple(cuts[stage] for stage in layout.stages_of(rank)))
        for rank in range(layout.mesh.pp)
    ]
    return prices.strategy(layout, [each.smallest(each.num_blocks) for each in columns])
