"""The fastest choice over unequal ranks, against an enumeration of all choices and the program."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.master import Master, evaluate
from parplan.planner.placed_blocks import (
    contents_in_reach,
    fastest_placed,
    in_reach_of,
    joined_by_blocks,
)
from parplan.planner.request import SolverName
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.profiles.errors import OutOfTimeError
from tests.helpers.cases import mostly_slow

SEEDS = mostly_slow(range(12), range(8))
SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.EARLY_RECOMPUTE, Schedule.SCP)


def layout_of(pp, num_micro_batches, schedule=Schedule.ONE_F_ONE_B):
    return ParallelLayout(
        mesh=Mesh(pp=pp, dp=2, tp=2),
        schedule=schedule,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=num_micro_batches,
        sequence_parallel=False,
    )


def random_column(blocks, rng):
    time_s = (blocks + rng.random()) * 1e-2
    return StageColumn(
        mix=((None, blocks),),
        zero=rng.choice([0, 1]),
        time_s=time_s,
        tail_s=rng.choice([0.0, rng.random() * 1e-2]),
        memory_bytes=0.0,
        redundant_bytes=0.0,
        plain_s=time_s * rng.uniform(0.7, 1.0),
        ramp_s=time_s * rng.uniform(0.7, 1.0),
    )


def random_case(seed, schedule):
    rng = random.Random(seed)
    pp = rng.choice([2, 3, 4])
    layout = layout_of(pp, rng.choice([8, 9, 64]), schedule)
    counts = rng.sample(range(1, 7), rng.choice([2, 3]))
    options = [
        [random_column(blocks, rng) for blocks in counts for _ in range(rng.choice([1, 2]))]
        for _ in range(pp)
    ]
    return layout, options, sum(rng.choice(counts) for _ in range(pp))


def least_of_all_s(layout, options, num_blocks, *, tied):
    return min(
        (
            evaluate(layout, columns, proven=True).step_s
            for columns in itertools.product(*options)
            if sum(column.num_blocks for column in columns) == num_blocks
            and not (tied and (columns[0].zero > 0) != (columns[-1].zero > 0))
        ),
        default=math.inf,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_that_places_all_blocks_is_faster(seed, schedule, tied):
    layout, options, num_blocks = random_case(seed, schedule)

    fastest = fastest_placed(layout, options, num_blocks, 1.0, tied=tied)

    least_s = least_of_all_s(layout, options, num_blocks, tied=tied)
    assert joined_by_blocks(layout, options, 1.0)
    assert (math.inf if fastest is None else fastest.step_s) == pytest.approx(least_s, rel=1e-12)
    if fastest is not None:
        assert sum(column.num_blocks for column in fastest.columns) == num_blocks
        assert not tied or (fastest.columns[0].zero > 0) == (fastest.columns[-1].zero > 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_column_of_a_choice_as_fast_is_left_out(seed, schedule):
    layout, options, num_blocks = random_case(seed, schedule)
    least_s = least_of_all_s(layout, options, num_blocks, tied=False)

    for step_s in (least_s, least_s * 1.05) if least_s < math.inf else ():
        kept = in_reach_of(layout, options, num_blocks, 1.0, step_s)
        for columns in itertools.product(*options):
            if sum(column.num_blocks for column in columns) != num_blocks:
                continue
            if evaluate(layout, columns, proven=True, share=1.0).step_s <= step_s:
                assert all(c in of_rank for c, of_rank in zip(columns, kept, strict=True))


def average(first, second, share):
    """Returns a column between two with equally many blocks."""
    names = ("time_s", "tail_s", "plain_s", "ramp_s")
    pairs = {name: (getattr(first, name), getattr(second, name)) for name in names}
    return replace(first, **{name: share * a + (1 - share) * b for name, (a, b) in pairs.items()})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_contents_of_averages_as_fast_are_left_out(seed, schedule):
    layout, options, num_blocks = random_case(seed, schedule)
    least_s = least_of_all_s(layout, options, num_blocks, tied=False)
    rng, left_out = random.Random(seed), 0
    averages = [
        [
            average(a, b, rng.random())
            for a, b in itertools.combinations_with_replacement(columns, 2)
            if a.num_blocks == b.num_blocks
        ]
        for columns in options
    ]

    for step_s in (least_s * 0.9, least_s, least_s * 1.05) if least_s < math.inf else ():
        kept = contents_in_reach(layout, options, num_blocks, 1.0, step_s)
        for columns in itertools.product(*averages):
            if sum(column.num_blocks for column in columns) != num_blocks:
                continue
            inside = all(c.contents in of_rank for c, of_rank in zip(columns, kept, strict=True))
            left_out += not inside
            assert inside or evaluate(layout, columns, proven=True, share=1.0).step_s > step_s
    assert left_out or least_s == math.inf


@pytest.mark.parametrize("solver", list(SolverName))
def test_the_program_has_the_same_optimum(solver):
    rng = random.Random(0)
    layout = layout_of(4, 64)
    options = [[random_column(blocks, rng) for blocks in range(2, 9)] for _ in range(4)]

    fastest = fastest_placed(layout, options, 20, 1.0)

    program = Master(layout, options, 20).fastest(solver)
    assert fastest.step_s == pytest.approx(program.step_s, rel=1e-6)


def test_nothing_is_returned_that_is_not_below_the_cut():
    layout, options, num_blocks = random_case(1, Schedule.ONE_F_ONE_B)
    step_s = fastest_placed(layout, options, num_blocks, 1.0).step_s

    assert fastest_placed(layout, options, num_blocks, 1.0, step_s) is None
    assert fastest_placed(layout, options, num_blocks, 1.0, step_s * 1.01).step_s == step_s


def test_numbers_of_blocks_that_do_not_add_up_have_no_choice():
    layout, options, _ = random_case(2, Schedule.ONE_F_ONE_B)

    assert fastest_placed(layout, options, 1000, 1.0) is None


def test_places_of_unlike_layers_and_corners_are_left_to_the_program():
    layout, options, _ = random_case(3, Schedule.ONE_F_ONE_B)
    corner = [[replace(column, corner=True) for column in columns] for columns in options]
    placed = [[replace(column, layers=(((0, 1),),)) for column in columns] for columns in options]

    assert not joined_by_blocks(layout, corner, 1.0)
    assert not joined_by_blocks(layout, placed, 1.0)


def test_the_end_of_time_stops_it():
    layout, options, num_blocks = random_case(4, Schedule.ONE_F_ONE_B)

    def over():
        raise OutOfTimeError("over")

    with pytest.raises(OutOfTimeError):
        fastest_placed(layout, options, num_blocks, 1.0, check=over)
