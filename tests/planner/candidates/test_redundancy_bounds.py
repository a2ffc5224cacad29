"""The bound of redundant bytes in time is never above a strategy, and exact where it can be."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from math import inf

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import bubble_share, price_step
from parplan.planner.candidates.lower_bounds import time_bound
from parplan.planner.candidates.redundancy_bounds import RedundancyBound
from parplan.planner.master import evaluate
from parplan.planner.request import Constraints
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.planner.stage_columns.chunk_columns import rank_columns
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_prices import end_kinds
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import (
    every_price,
    random_instance,
    redundant_bytes,
    with_other_ends,
)
from tests.helpers.planning import enumerate_candidates

SPLIT_OR_AHEAD = (
    Schedule.INTERLEAVED,
    Schedule.ZBV,
    Schedule.SCP,
    Schedule.EARLY_RECOMPUTE,
    Schedule.LAST_NO_RECOMPUTE,
)


def ends_zero(strategy):
    """Returns the ZeRO stage of the embedding."""
    return strategy.stages[0][0].zero


def bound_of(layout, table):
    tables = [table] * layout.mesh.pp
    return RedundancyBound(layout, tables, bubble_share(layout, table.price_cache))


def ends_alike(strategy):
    """True if embedding and head of each rank have one ZeRO stage, as in every column."""
    return all(
        len(
            {
                choice.zero
                for chunk in strategy.chunks(rank)
                for choice in chunk
                if choice.kind in end_kinds(rank, strategy.layout)
            }
        )
        <= 1
        for rank in range(strategy.layout.mesh.pp)
    )


@cache
def prices(seed):
    return every_price(random_instance(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_slow((0, 1, 2, 9), {9}))
def test_no_strategy_is_leaner_than_the_bound_within_its_own_step(seed):
    table = MixTable(random_instance(seed).price_cache(), Constraints())
    bounds = {}
    seen = 0
    for strategy, price in prices(seed):
        if not ends_alike(strategy):
            continue
        layout = strategy.layout
        if layout not in bounds:
            bounds[layout] = bound_of(layout, table)
        least = bounds[layout].least_bytes(price.closed_form_s, None)
        assert least <= redundant_bytes(strategy, price) * (1 + 1e-9) + 1
        seen += 1
    assert seen > 100


@pytest.mark.parametrize("schedule", SPLIT_OR_AHEAD)
def test_no_choice_of_columns_is_leaner_than_the_bound_within_its_own_step(schedule):
    instance = random_instance(1)
    instance = replace(instance, model=replace(instance.model, num_layers=4))
    price_cache = instance.price_cache()
    table = MixTable(price_cache, Constraints())
    space = enumerate_candidates(
        instance.model, instance.cluster, instance.training, Constraints(schedule=(schedule,))
    )
    layouts = [layout for layout in space.layouts if layout.mesh.pp == 2]
    assert layouts
    for layout in layouts[:3]:
        bound, share = bound_of(layout, table), bubble_share(layout, price_cache)
        ranks = [
            [
                column
                for count in block_counts(rank, layout, 4)
                for column in rank_columns(rank, layout, table).leanest(count, 1e15)
            ]
            for rank in range(2)
        ]
        choices = [
            evaluate(layout, pair, proven=False, share=share)
            for pair in itertools.product(*ranks)
            if sum(column.num_blocks for column in pair) == 4
        ]
        assert choices
        for choice in choices:
            least = bound.least_bytes(choice.step_s, None)
            assert least <= choice.redundant_bytes * (1 + 1e-9) + 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_slow((0, 1, 5, 9), {5, 9}))
def test_a_longer_step_never_raises_the_bound_and_no_time_leaves_nothing(seed):
    table = MixTable(random_instance(seed).price_cache(), Constraints())
    for layout in {strategy.layout for strategy, _ in prices(seed)}:
        bound, step_s = bound_of(layout, table), time_bound(layout, table).step_s
        least = [bound.least_bytes(share * step_s, None) for share in (0.5, 1.0, 1.1, 2.0, 100.0)]
        assert least == sorted(least, reverse=True)
        assert least[0] == inf
        assert least[-1] < inf


@pytest.mark.parametrize("seed", mostly_slow((0, 1, 5, 9), {5, 9}))
def test_without_a_pipeline_the_bound_of_any_step_is_nearly_the_leanest_strategy(seed):
    """Embedding and head may have another ZeRO stage than the blocks, as in every column."""
    price_cache = random_instance(seed).price_cache()
    table = MixTable(price_cache, Constraints(megatron_sharding=True))
    leanest = {}  # by layout and ZeRO stage of all layers
    for strategy, price in prices(seed):
        if strategy.layout.mesh.pp == 1:
            held, place = redundant_bytes(strategy, price), (strategy.layout, ends_zero(strategy))
            if held < leanest.get(place, (inf, None))[0]:
                leanest[place] = held, strategy
    assert leanest
    for layout in {layout for layout, _ in leanest}:
        alike = [strategy for (own, _), (_, strategy) in leanest.items() if own == layout]
        held = min(
            redundant_bytes(strategy, price_step(strategy, price_cache))
            for strategy in with_other_ends(alike)
        )
        least = bound_of(layout, table).least_bytes(1e9, None)
        assert least == pytest.approx(held, rel=1e-3, abs=1)
