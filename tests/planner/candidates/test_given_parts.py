"""Bounds of given parts hold for every plan of them, and are held for few layouts at a time."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from parplan.planner.candidates.part_bounds import PartBounds
from parplan.planner.candidates.range_bounds import RangeBounds
from parplan.planner.candidates.range_tables import RangeTables
from parplan.planner.objective import Objective
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.search.block_class_prices import BlockClassPrices
from parplan.planner.search.find_plan import search
from parplan.profiles.models.blocks import BlockRun
from tests.helpers.cases import mostly_slow
from tests.planner.search.test_block_class_prices import (
    PREFIX,
    SPACES,
    every_point,
    prices_of,
    request_of,
    training_of,
)


@pytest.mark.parametrize(
    "space",
    mostly_slow(("interleaved", "zero-bubble-v", "tower-interleaved"), ("interleaved",)),
)
def test_the_bound_of_given_parts_is_below_every_plan_and_above_that_of_any_parts(space):
    model, pins = SPACES[space]
    points = every_point(request_of(model, pins, None, training_of(space)))
    peaks = sorted(point.peak for point in points)

    for limit in (peaks[0], peaks[len(peaks) // 2], peaks[-1]):
        prices = prices_of(space, int(limit) + 1)
        (layout,) = prices.space.layouts
        bound_s = prices.part_bounds(layout, limit).least_s
        any_parts = prices._bounds(PartBounds, layout, limit)
        fastest_s = min(point.step_s for point in points if point.peak <= limit)
        assert any_parts.least_s * (1 - 1e-9) <= bound_s <= fastest_s * (1 + 1e-9)


@pytest.mark.slow
def test_a_search_holds_the_bounds_of_few_layouts(monkeypatch):
    """The bounds by range of all layouts took gigabytes where experts hardly fit."""
    most = 4
    monkeypatch.setattr("parplan.planner.search.sequence_prices.MOST_BOUNDS", most)
    monkeypatch.setattr("parplan.planner.candidates.range_tables.MOST_TABLES", most)
    model = replace(PREFIX, num_layers=8, blocks=(BlockRun(experts=False), BlockRun(num_blocks=7)))
    prices = BlockClassPrices(request_of(model, Constraints(pp=(1, 2, 4), tp=(1,))))
    tables = {each for nodes in prices._machines.values() for each in nodes._ranges.values()}
    made: list[RangeTables] = []
    make = RangeBounds.__init__

    def counted(self, layout, of, *some):
        made.append(of)
        make(self, layout, of, *some)

    monkeypatch.setattr(RangeBounds, "__init__", counted)

    search(prices, Objective.THROUGHPUT, SearchOptions())

    gc.collect()
    bounds = [each for each in gc.get_objects() if issubclass(type(each), RangeBounds)]
    assert len([each for each in made if each in tables]) > 2 * most
    assert len([each for each in bounds if each.tables in tables]) <= most
    assert all(len(each._recent) <= most for each in tables)
