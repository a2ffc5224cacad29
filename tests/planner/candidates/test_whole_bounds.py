"""Bounds from sums over all blocks are below every plan, and close the layouts that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.search.block_class_prices import BlockClassPrices
from parplan.planner.search.fastest_layouts import search_fastest
from parplan.planner.search.search_session import SearchSession
from parplan.profiles.units import MIB
from tests.helpers.cases import named
from tests.helpers.planning import request
from tests.planner.search.test_block_class_prices import (
    ALTERNATING,
    CLUSTER,
    LEVELS,
    PREFIX,
    TRAINING,
)

SIX = replace(ALTERNATING, name="six", num_layers=6)
LAYOUTS = Constraints(
    pp=(1, 2, 3, 4), tp=(1, 2), sequence_parallel=(True,), micro_batch_size=(1, 2), recompute=LEVELS
)


def prices_of(model, limit_mib, constraints=LAYOUTS):
    options = SearchOptions(memory_limit_bytes=limit_mib * MIB)
    asked = request(model, CLUSTER, TRAINING, options=options, constraints=constraints)
    return BlockClassPrices(asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "limit_mib"),
    named(
        {
            f"{limit_mib}-{model.name}": (model, limit_mib)
            for limit_mib in (900, 1200, 2000, 80000)
            for model in (ALTERNATING, PREFIX, SIX)
        },
        {"2000-alternating", "1200-prefix", "900-six"},
    ),
)
def test_no_plan_of_a_layout_is_below_its_bounds(model, limit_mib):
    prices = prices_of(model, limit_mib)
    session = SearchSession(prices, SearchOptions(memory_limit_bytes=limit_mib * MIB), None)
    found = 0
    for layout in prices.space.layouts:
        whole = prices._whole(layout)
        outcome, _ = search_fastest([layout], session)
        if not outcome.solved:
            continue
        found += 1
        best_s = outcome.solved[0].value
        assert whole.may_fit(layout, session.limit_bytes)
        assert whole.passes_s(layout) <= best_s * (1 + 1e-9)
        for hidden in (True, False):
            least_s = whole.within_s(layout, session.limit_bytes, hidden=hidden)
            assert least_s <= best_s * (1 + 1e-9)
    assert found or limit_mib == 900


def test_less_memory_raises_the_bound_up_to_no_plan_at_all():
    prices = prices_of(PREFIX, 80000)
    layout = next(each for each in prices.space.layouts if each.mesh.pp == 4)
    whole = prices._whole(layout)
    bounds_s = [whole.within_s(layout, limit * MIB) for limit in (80000, 800, 650, 560, 100)]

    assert bounds_s == sorted(bounds_s)
    assert bounds_s[0] < bounds_s[-2]
    assert bounds_s[-1] == float("inf")
