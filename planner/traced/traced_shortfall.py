"""The error when no plan of a traced module fits: the leanest plan, its shortfall, and a hint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.infeasible.shortfall import MOST_TIMES_LARGER
from parplan.planner.plan.error_band import memory_margin
from parplan.planner.traced.shard_columns import StageTable
from parplan.planner.traced.shard_master import path
from parplan.planner.traced.stage_rules import StageRuleKind
from parplan.planner.traced.traced_candidates import enumerate_traced_candidates
from parplan.planner.traced.traced_search import TracedSearch, strategy_of_shards
from parplan.profiles.errors import InfeasibleError, OutOfTimeError
from parplan.profiles.units import gib


def infeasible_traced_error(search: TracedSearch) -> InfeasibleError:
    """Returns the error with the shortfall of the leanest plan and a hint, if there is time."""
    try:
        return _explained(search)
    except OutOfTimeError:
        cluster = search.price_cache.machine.cluster
        return InfeasibleError(
            f"{search.sharded.model.name} does not fit on {cluster.num_gpus} x "
            f"{cluster.device.name}; how much it is short was not "
            "searched, the time was over",
            hint="use more GPUs, or give it a longer --time-limit",
        )


def _explained(search: TracedSearch) -> InfeasibleError:
    price_cache, training = search.price_cache, search.price_cache.training
    cluster, name = price_cache.machine.cluster, search.sharded.model.name
    priced = (
        (made, price_step(made, search.price_cache))
        for made in (leanest_traced(search, layout) for layout in _layouts(search))
    )
    strategy, price = min(
        priced,
        key=lambda strategy_and_price: max(memory.total for memory in strategy_and_price[1].memory),
    )
    rank = max(range(strategy.layout.mesh.pp), key=lambda index: price.memory[index].total)
    memory, limit = price.memory[rank], search.limit_bytes
    parts = {
        "states (parameters, gradients, optimizer)": memory.states.total,
        "activations": memory.activations,
        "temporaries": memory.temporaries,
        "reserve (context, communicators, allocator)": memory.reserve,
    }
    largest = max(parts, key=lambda part: parts[part])
    margin = (
        ""
        if search.options.memory_limit_bytes is not None
        else (f" with --memory-margin {memory_margin(training.stack, search.options):g}")
    )
    largest_stage = max(
        strategy.layout.stages_of(rank), key=lambda stage: len(strategy.stages[stage])
    )
    run = strategy.stages[largest_stage]
    first, end = strategy.layers_of(largest_stage)
    shards = search.sharded.shards
    return InfeasibleError(
        f"{name} does not fit on {cluster.num_gpus} x {cluster.device.name}: the leanest plan "
        f"({strategy.layout.mesh}, zero {run[0].zero}, "
        f"{_recompute_text(run)} recompute, micro-batch {strategy.layout.micro_batch_size}) needs "
        f"{gib(memory.total):.1f} GiB on stage "
        f"{rank} ({shards[first].name} to {shards[end - 1].name}), {gib(limit):.1f} "
        f"usable{margin}: "
        f"{gib(memory.total - limit):.1f} GiB short; the largest part is {largest}, "
        f"{gib(parts[largest]):.1f} GiB",
        hint=_hint(search),
    )


def _recompute_text(run: Sequence[LayerChoice]) -> str:
    recomputed = sum(choice.recompute is Recompute.FULL for choice in run)
    if not recomputed:
        return "no"
    return "full" if recomputed == len(run) else f"{recomputed} of {len(run)} shards"


def _layouts(search: TracedSearch) -> Iterator[ParallelLayout]:
    """Yields for each mesh the layout with the smallest micro-batch and the fewest virtual stages.

    The leanest layout is among them.
    """
    seen: dict[object, ParallelLayout] = {}
    for layout in search.space.layouts:
        known = seen.get(layout.mesh)
        if known is None or (layout.micro_batch_size, layout.virtual_stages) < (
            known.micro_batch_size,
            known.virtual_stages,
        ):
            seen[layout.mesh] = layout
    yield from seen.values()


def _hint(search: TracedSearch) -> str:
    """Returns --stages ilp if cuts are given, else a number of GPUs that is enough, if any is."""
    cluster = search.price_cache.machine.cluster
    if search.rule.rule is not StageRuleKind.ILP:
        return "--stages ilp also looks for other cuts"
    pins = replace(search.pins, pp=None, dp=None)
    nodes = cluster.nodes
    while (nodes := 2 * nodes) <= MOST_TIMES_LARGER * cluster.nodes:
        more = replace(search.request, cluster=replace(cluster, nodes=nodes), constraints=pins)
        num_shards = len(search.sharded.shards)
        if not enumerate_traced_candidates(num_shards, more, search.rule.counts).layouts:
            continue
        larger = TracedSearch(search.sharded, more, search.rule)
        for layout in _layouts(larger):
            price = price_step(leanest_traced(larger, layout), larger.price_cache)
            if max(memory.total for memory in price.memory) <= larger.limit_bytes:
                return (
                    f"{larger.price_cache.machine.cluster.num_gpus} GPUs are enough (--gpus "
                    f"{larger.price_cache.machine.cluster.num_gpus})"
                )
    shorter = (
        ""
        if search.price_cache.training.seq_length == 1
        else ", or shorter sequences (--seq-length)"
    )
    return f"use a larger device{shorter}"


def leanest_ranges(layout: ParallelLayout, stages: list[StageTable]) -> tuple[tuple[int, int], ...]:
    """Returns the ranges whose fullest stage holds least."""
    held = []
    for table in stages:
        least = table.least_bytes()
        held.append(np.where(np.isfinite(table.base_s), least, np.inf))
    return tuple(path(held))


def leanest_traced(search: TracedSearch, layout: ParallelLayout) -> Strategy:
    """Returns the leanest strategy of a layout: cuts, ZeRO stages and recompute by memory."""
    stages = search.stages(layout)
    cuts = search.cut_ranges(layout, stages) or leanest_ranges(layout, stages)
    columns = [table.leanest(*cut) for table, cut in zip(stages, cuts, strict=True)]
    return strategy_of_shards(layout, columns, search.price_cache)
