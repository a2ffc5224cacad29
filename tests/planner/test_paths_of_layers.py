"""The columns on paths of layers, against an enumeration of all paths."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.master import Master, evaluate
from parplan.planner.paths_of_layers import fastest_path, on_paths, one_range_a_rank
from parplan.planner.request import SolverName
from tests.helpers.cases import mostly_slow
from tests.planner.test_placed_blocks import SCHEDULES, layout_of, random_column

SEEDS = mostly_slow(range(12), range(8))
NUM_LAYERS = 6


def random_paths(seed, schedule):
    """Returns a layout of two to four ranks, with columns of one or two ranges for each rank."""
    rng = random.Random(seed)
    pp = rng.choice([2, 3, 4])
    layout = layout_of(pp, rng.choice([8, 64]), schedule)
    options = []
    for rank in range(pp):
        ranges = [
            (first, end)
            for first, end in itertools.combinations(range(NUM_LAYERS + 1), 2)
            if (first == 0) == (rank == 0) and (end == NUM_LAYERS) == (rank == pp - 1)
        ]
        options.append(
            [
                replace(
                    random_column(rng.choice([1, 2]), rng),
                    layers=(tuple(rng.sample(ranges, min(len(ranges), rng.choice([1, 2])))),),
                    shares=rng.random() < 0.3,
                )
                for _ in range(4)
            ]
        )
    return layout, options


def has_path(columns):
    """Returns whether the columns of all ranks follow one another and shard shared states alike."""
    if len({column.zero > 0 for column in columns if column.shares}) > 1:
        return False
    cuts = {0}
    for column in columns:
        cuts = {end for first, end in column.layers[0] if first in cuts}
    return NUM_LAYERS in cuts


def steps_of(layout, options):
    paths = (columns for columns in itertools.product(*options) if has_path(columns))
    return {columns: evaluate(layout, columns, proven=True).step_s for columns in paths}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_path_below_the_cut_keeps_its_columns(seed, schedule):
    layout, options = random_paths(seed, schedule)
    steps = steps_of(layout, options)
    cut_s = sorted(steps.values())[len(steps) // 2] if steps else math.inf
    assert one_range_a_rank(layout, options)

    found = on_paths(layout, options, 1.0, cut_s)

    for columns, step_s in steps.items():
        assert found.bound_s <= step_s * (1 + 1e-9)
        if step_s <= cut_s:
            assert all(c in kept for c, kept in zip(columns, found.options, strict=True))
    assert (found.bound_s == math.inf) == (not steps)
    if steps:
        choice = Master(layout, found.options, 0).fastest(SolverName.CBC)
        assert choice.step_s == pytest.approx(min(steps.values()), rel=1e-6)
    else:
        assert not all(found.options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_fastest_path_is_the_fastest_of_all(seed, schedule):
    layout, options = random_paths(seed, schedule)
    least_s = min(steps_of(layout, options).values(), default=math.inf)

    fastest = fastest_path(layout, options, 1.0)

    assert (math.inf if fastest is None else fastest.step_s) == pytest.approx(least_s, rel=1e-12)
    if fastest is not None:
        assert has_path(fastest.columns)
        assert fastest_path(layout, options, 1.0, least_s * (1 - 1e-9)) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_no_average_of_corners_is_faster_than_the_fastest_path_of_groups(seed):
    layout, options = random_paths(seed, Schedule.ONE_F_ONE_B)
    rng = random.Random(seed)
    corners = [
        [
            replace(each, corner=True, time_s=each.time_s * rng.uniform(0.8, 1.25))
            for column in columns
            for each in (column, column)
        ]
        for columns in options
    ]
    least_s = Master(layout, corners, 0).bound_s(SolverName.CBC)

    fastest = fastest_path(layout, corners, 1.0)

    assert (least_s is None) == (fastest is None)
    if fastest is not None:
        assert fastest.step_s <= least_s * (1 + 1e-6)


def test_columns_that_no_path_joins_are_dropped():
    """Blocks that add up to those of the model may still have no place to begin."""
    layout, rng = layout_of(2, 8, Schedule.ONE_F_ONE_B), random.Random(0)
    first = replace(random_column(2, rng), layers=(((0, 3),),))
    last = replace(random_column(2, rng), layers=(((2, 6),),))

    assert on_paths(layout, [[first], [last]], 1.0).bound_s == math.inf
    assert on_paths(layout, [[first], [last]], 1.0).options == [[], []]
    assert fastest_path(layout, [[first], [last]], 1.0) is None
    assert Master(layout, [[first], [last]], 4).fastest(SolverName.CBC) is None
