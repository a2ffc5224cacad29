"""The leanest plan of a model whose layers are cut anywhere, and its shortfall if nothing fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.host_options.location_costs import host_share_bytes
from parplan.planner.infeasible.shortfall import Shortfall, limit_bytes
from parplan.planner.plan.error_band import memory_margin
from parplan.planner.plan.plan_chunks import smallest_bytes
from parplan.planner.request import PlanRequest
from parplan.planner.search.sequence_prices import SequencePrices
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import gib


def sequence_shortfall(
    request: PlanRequest[Any], prices: SequencePrices, name_of: Callable[[int], str], layers: str
) -> Shortfall:
    """Returns the leanest plan of a request, its fullest stage and its missing bytes.

    name_of    the name of a layer by its number
    layers     the layers in words

    Raises OutOfTimeError.
    """
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
    host = needed_host_bytes(prices, limit)
    return Shortfall(
        need_bytes=memory.total,
        limit_bytes=limit,
        host_bytes=None if host is None else math.ceil(host),
        text=(
            f"{name} does not fit on {cluster.num_gpus} x {cluster.device.name}: the leanest plan "
            f"({strategy.layout.mesh}, zero {run[0].zero}, "
            f"{_recompute_text(run, prices, layers)} recompute, "
            f"micro-batch {strategy.layout.micro_batch_size}"
            f"{_host_text(strategy.layout)}) needs "
            f"{gib(memory.total):.1f} GiB on stage "
            f"{rank} ({name_of(first)} to {name_of(end - 1)}), {gib(limit):.1f} "
            f"usable{margin}: "
            f"{gib(memory.total - limit):.1f} GiB short; the largest part is {largest}, "
            f"{gib(parts[largest]):.1f} GiB"
        ),
    )


def _host_text(layout: ParallelLayout) -> str:
    if layout.states_on_host:
        return ", states on the host"
    return ", states in chunks" if layout.chunked else ""


def least_peak_bytes(prices: SequencePrices) -> float:
    """Bytes of the fullest device of the leanest plan. Raises OutOfTimeError."""
    return _peak_bytes(_leanest(prices)[1])


def some_plan_fits(prices: SequencePrices, limit: float) -> bool:
    """Returns whether the leanest plan of some layout fits the devices and the hosts."""
    return any(
        _peak_bytes(price) <= limit and _host_bytes(price) <= _host_share(prices)
        for _, price in _leanest_of_each(prices)
    )


def needed_host_bytes(prices: SequencePrices, limit: float) -> float | None:
    """Returns the least host bytes of a node with which a plan fits, None where none does."""
    layouts = [layout for layout in _layouts(prices) if layout.states_on_host]
    priced = [_price(leanest_of(prices, layout), prices) for layout in layouts]
    needed = [_host_bytes(price) for price in priced if _peak_bytes(price) <= limit]
    return min(needed) * prices.price_cache.machine.cluster.gpus_per_node if needed else None


def _leanest(prices: SequencePrices) -> tuple[Strategy, StepPrice]:
    """Returns the leanest strategy that fits the hosts, with its price."""
    fit = (each for each in _leanest_of_each(prices) if _host_bytes(each[1]) <= _host_share(prices))
    return min(fit, key=lambda each: _peak_bytes(each[1]))


def _leanest_of_each(prices: SequencePrices) -> Iterator[tuple[Strategy, StepPrice]]:
    """Yields the leanest strategy of each layout of `_layouts`, with its price.

    The leanest bounds come first, and no layout comes whose bound is above the peak of another that
    fits the hosts. Those in chunks are left out where a rank has no layer that chunks can hold.
    """
    least_bytes = math.inf
    bounded = [
        (prices.bounds(layout, math.inf).leanest_bytes, layout) for layout in _layouts(prices)
    ]
    for bound, layout in sorted(bounded, key=lambda each: each[0]):
        if bound > least_bytes:
            return
        strategy = leanest_of(prices, layout)
        ranks = (
            [choice for stage in layout.stages_of(rank) for choice in strategy.stages[stage]]
            for rank in range(layout.mesh.pp)
        )
        if not layout.chunked or all(any(c.kind.in_chunks for c in of_rank) for of_rank in ranks):
            price = _price(strategy, prices)
            yield strategy, price
            if _host_bytes(price) <= _host_share(prices):
                least_bytes = min(least_bytes, _peak_bytes(price))


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


def _recompute_text(run: Sequence[LayerChoice], prices: SequencePrices, layers: str) -> str:
    again = prices.price_cache.recompute_operators
    blocks = [choice for choice in run if choice.kind.role is LayerKind.BLOCK]
    recomputed = [each for each in blocks if again(each.kind, each.recompute)]
    if not recomputed:
        return "no"
    whole = all(
        again(each.kind, each.recompute) == again(each.kind, Recompute.FULL) for each in recomputed
    )
    return (
        "full"
        if whole and len(recomputed) == len(blocks)
        else f"{len(recomputed)} of {len(run)} {layers}"
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
        if known is None or _thirst(layout) < _thirst(known):
            seen[place] = layout
    yield from seen.values()


def _thirst(layout: ParallelLayout) -> tuple[int, int, bool]:
    return layout.micro_batch_size, layout.virtual_stages, not layout.sequence_parallel


def leanest_of(prices: SequencePrices, layout: ParallelLayout) -> Strategy:
    """Returns the leanest strategy of a layout: cuts, ZeRO stages and recompute by memory."""
    bounds = prices.bounds(layout, math.inf)
    cuts = bounds.cuts or bounds.leanest_cuts
    assert cuts is not None, "a candidate has no more stages than layers"
    columns = [
        prices.columns_of(layout, rank, tuple(cuts[stage] for stage in layout.stages_of(rank)))
        for rank in range(layout.mesh.pp)
    ]
    return prices.strategy(layout, [each.smallest(each.num_blocks) for each in columns])
