"""The master program equals an enumeration of columns, keeps its bounds and avoids solver traps."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import closed_form_s
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.master import (
    Master,
    evaluate,
    fastest_apart,
    lower_bound_s,
    redundancy_bound_bytes,
    separable,
)
from parplan.planner.request import SolverName
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.planner.stage_columns.stage_prices import tied_ends
from parplan.profiles.units import MIB
from tests.helpers.cases import mostly_slow

SEEDS = mostly_slow(range(5), range(4))
SCALES = [pytest.param(1e-6, id="microseconds"), pytest.param(1e-1, id="tenths-of-seconds")]


def frame_of(pp, v=1, m=8, dp=2, tp=2):
    return ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp),
        schedule=Schedule.INTERLEAVED if v > 1 else Schedule.ONE_F_ONE_B,
        virtual_stages=v,
        micro_batch_size=1,
        num_micro_batches=m,
        sequence_parallel=False,
    )


def column(blocks, time_s, tail_s=0.0, redundant=0.0, zero=0):
    return StageColumn(((None, blocks),), zero, time_s, tail_s, 0.0, redundant, time_s, time_s)


def random_case(seed, scale_s):
    """Returns 2 to 4 ranks with up to 6 columns each, of 1 to 10 `scale_s` and some redundancy."""
    draw = random.Random(seed)
    pp, v = draw.choice(((2, 1), (3, 1), (4, 1), (2, 2), (3, 3)))
    num_layers = pp * v * draw.choice((1, 2))
    options = []
    for _ in range(pp):
        counts = (
            [num_layers // pp] * draw.randint(1, 6)
            if v > 1
            else [draw.randint(1, num_layers) for _ in range(6)]
        )
        options.append(
            [
                column(
                    n,
                    n * draw.uniform(1, 10) * scale_s,
                    draw.uniform(0, 5) * scale_s,
                    n * draw.uniform(1, 100) * MIB,
                    zero,
                )
                for zero, n in enumerate(counts)
            ]
        )
    return frame_of(pp, v, m=pp * draw.choice((1, 4))), options, num_layers


def every_choice(layout, options, num_layers):
    for columns in itertools.product(*options):
        if layout.virtual_stages > 1 or sum(c.num_blocks for c in columns) == num_layers:
            yield evaluate(layout, columns, proven=True)


@pytest.mark.parametrize("solver", list(SolverName))
@pytest.mark.parametrize("scale_s", SCALES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_fastest_choice_is_that_of_brute_force(seed, scale_s, solver):
    layout, options, num_layers = random_case(seed, scale_s)
    best_s = min(
        (choice.step_s for choice in every_choice(layout, options, num_layers)), default=None
    )

    fastest = Master(layout, options, num_layers).fastest(solver)

    if best_s is None:
        assert fastest is None
    else:
        assert fastest.proven
        assert fastest.step_s == pytest.approx(best_s, rel=1e-7)
        assert sum(c.num_blocks for c in fastest.columns) == num_layers
        assert all(
            column in columns for column, columns in zip(fastest.columns, options, strict=True)
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scale_s", SCALES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_fastest_choice_of_ranks_apart_is_that_of_brute_force(seed, scale_s, tied):
    layout, options, _ = random_case(seed, scale_s)
    layout = replace(layout, schedule=Schedule.INTERLEAVED, virtual_stages=2)
    ends = tied_ends(layout) if tied else ()
    allowed = [
        choice
        for choice in every_choice(layout, options, 0)
        if len({choice.columns[rank].zero > 0 for rank in ends}) <= 1
    ]

    fastest = fastest_apart(layout, options, tied=tied)

    assert separable(layout, options)
    if not allowed:
        assert fastest is None
    else:
        best_s = min(choice.step_s for choice in allowed)
        assert fastest.step_s == pytest.approx(best_s, rel=1e-12)
        assert len({fastest.columns[rank].zero > 0 for rank in ends}) <= 1


@pytest.mark.parametrize("solver", list(SolverName))
@pytest.mark.parametrize("slowdown", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_leanest_choice_within_a_slowdown_is_that_of_brute_force(seed, slowdown, solver):
    layout, options, num_layers = random_case(seed, 1e-3)
    choices = list(every_choice(layout, options, num_layers))
    slowest_s = min((choice.step_s for choice in choices), default=1.0) * (1 + slowdown)
    allowed = [choice for choice in choices if choice.step_s <= slowest_s]

    leanest = Master(layout, options, num_layers).leanest(slowest_s, solver)

    if not allowed:
        assert leanest is None
    else:
        least = min(choice.redundant_bytes for choice in allowed)
        assert leanest.redundant_bytes == pytest.approx(least, rel=1e-5)
        assert leanest.step_s <= slowest_s * (1 + 1e-7)
        assert leanest.step_s <= min(
            c.step_s for c in allowed if c.redundant_bytes <= least * (1 + 1e-9)
        ) * (1 + 1e-7)


@pytest.mark.parametrize("scale_s", SCALES)
@pytest.mark.parametrize("seed", mostly_slow(range(12), range(10)))
def test_the_lower_bounds_never_exceed_the_optimum_and_see_what_is_infeasible(seed, scale_s):
    layout, options, num_layers = random_case(seed, scale_s)
    choices = list(every_choice(layout, options, num_layers))

    least_s, least_bytes = (
        lower_bound_s(layout, options, num_layers),
        redundancy_bound_bytes(layout, options, num_layers),
    )

    if choices:
        assert least_s <= min(choice.step_s for choice in choices) * (1 + 1e-12)
        assert least_bytes <= min(choice.redundant_bytes for choice in choices) * (1 + 1e-12)
    if sum(max(c.num_blocks for c in columns) for columns in options) < num_layers:
        assert least_s is None


def test_the_lower_bound_is_the_optimum_where_one_column_is_left():
    layout = frame_of(2)
    options = [[column(3, 3e-3, 1e-3)], [column(5, 4e-3, 2e-3)]]

    assert lower_bound_s(layout, options, 8) == pytest.approx(
        closed_form_s([3e-3, 4e-3], [1e-3, 2e-3], 8, 1)
    )


def test_the_price_of_a_choice_by_hand():
    choice = evaluate(
        frame_of(2, m=5), (column(1, 2.0, 0.5, 100.0), column(2, 3.0, 0.25, 10.0)), proven=True
    )

    assert choice.step_s == 4 * 3.0 + (2.0 + 3.0) + 0.5
    assert choice.redundant_bytes == 4 * 110.0  # dp 2 x tp 2 devices a rank


@pytest.mark.parametrize("solver", list(SolverName))
def test_blocks_that_cannot_be_placed_are_infeasible(solver):
    options = [[column(2, 1e-3), column(4, 2e-3)], [column(2, 1e-3)]]

    assert Master(frame_of(2), options, 5).fastest(solver) is None
    assert Master(frame_of(2), options, 5).leanest(1.0, solver) is None
    assert Master(frame_of(2), options, 6).fastest(solver) is not None


def test_a_rank_without_columns_is_infeasible():
    assert lower_bound_s(frame_of(2), [[column(2, 1e-3)], []], 4) is None
    assert redundancy_bound_bytes(frame_of(2), [[column(2, 1e-3)], []], 4) is None


@pytest.mark.parametrize("solver", list(SolverName))
def test_a_slowdown_that_no_choice_meets_is_infeasible(solver):
    options = [[column(2, 1e-3, 0.0, 5.0 * MIB)], [column(2, 1e-3, 0.0, 5.0 * MIB)]]
    step_s = evaluate(frame_of(2), (options[0][0], options[1][0]), proven=True).step_s

    assert Master(frame_of(2), options, 4).leanest(0.99 * step_s, solver) is None
    assert Master(frame_of(2), options, 4).leanest(1.01 * step_s, solver).step_s == pytest.approx(
        step_s
    )
