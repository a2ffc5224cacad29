"""Redistribution: each rank ends with the block it needs, by hand and by moving real blocks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import place_axis
from parplan.costmodels.communication.redistribution import RedistributionStep, moves, redistribute
from parplan.costmodels.operators.sharding import PARTIAL, placed_parts
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from tests.helpers.cases import named

MACHINE = machine_for(with_gpus(load_cluster("a100-80gb"), 16))
MESHES = ((4,), (2, 2), (2, 4), (2, 2, 2))
DIMS = ("batch", "sequence", "hidden")
SOURCES = (None, PARTIAL, *DIMS)
TARGETS = (None, *DIMS)
GATHER = Collective.ALL_GATHER
REDUCE = Collective.ALL_REDUCE
SCATTER = Collective.REDUCE_SCATTER
EXCHANGE = Collective.ALL_TO_ALL


def pairs(num_axes):
    return itertools.product(
        itertools.product(SOURCES, repeat=num_axes), itertools.product(TARGETS, repeat=num_axes)
    )


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        pytest.param((None,), (None,), [], id="nothing-to-do"),
        pytest.param((None,), ("sequence",), [], id="a-slice-sends-nothing"),
        pytest.param(("sequence",), (None,), [(GATHER, 0, 1024)], id="gather-to-the-whole"),
        pytest.param(
            ("sequence",), ("hidden",), [(EXCHANGE, 0, 512)], id="exchange-what-a-rank-has"
        ),
        pytest.param((PARTIAL,), (None,), [(REDUCE, 0, 1024)], id="all-reduce"),
        pytest.param((PARTIAL,), ("batch",), [(SCATTER, 0, 1024)], id="reduce-scatter"),
        pytest.param(
            (PARTIAL, PARTIAL),
            ("batch", None),
            [(SCATTER, 0, 1024), (REDUCE, 1, 512)],
            id="a-cut-before-a-whole-sum",
        ),
        pytest.param(
            (PARTIAL, PARTIAL),
            ("batch", "sequence"),
            [(SCATTER, 1, 1024), (SCATTER, 0, 512)],
            id="the-inner-axis-reduces-first",
        ),
        pytest.param(
            (PARTIAL, "batch"),
            (None, None),
            [(REDUCE, 0, 512), (GATHER, 1, 1024)],
            id="a-sum-before-a-gather",
        ),
        pytest.param(
            ("batch", "batch"),
            (None, "batch"),
            [(GATHER, 1, 512), (GATHER, 0, 1024)],
            id="the-inner-cut-goes-first",
        ),
        pytest.param(
            (None, "batch"),
            ("batch", "batch"),
            [(GATHER, 1, 1024)],
            id="and-is-made-again-inside-the-outer",
        ),
        pytest.param(
            ("sequence", "hidden"),
            (None, None),
            [(GATHER, 0, 512), (GATHER, 1, 1024)],
            id="the-outer-axis-gathers-first",
        ),
    ],
)
def test_the_moves_by_hand_on_axes_of_two_ranks(source, target, expected):
    moved = moves(1024, source, target, (2,) * len(source))

    assert [(move.collective, move.axis, move.num_bytes) for move in moved] == expected


@pytest.mark.parametrize(
    "degrees", named({str(each): (each,) for each in MESHES}, {"(4,)", "(2, 4)"})
)
def test_nothing_is_sent_only_where_every_rank_holds_what_it_wants(degrees):
    for source, target in pairs(len(degrees)):
        sent = list(moves(2**20, source, target, degrees))

        assert (not sent) == bool(
            all(
                block <= have
                for block, have in zip(held(target, degrees), held(source, degrees), strict=True)
            )
        )


def held(place, degrees):
    """By rank the indices of an 8 x 8 x 8 tensor that it holds; a summand is not the value."""
    tensor = np.arange(8**3).reshape(8, 8, 8)
    for rank in itertools.product(*map(range, degrees)):
        part = tensor
        for axis, (dim, index) in enumerate(zip(place, rank, strict=True)):
            if dim == PARTIAL:
                part = part[:0]
            elif dim is not None:
                part = (
                    np.split(part, degrees[axis], axis=DIMS.index(dim))[index]
                    if len(part)
                    else part
                )
        yield frozenset(part.ravel().tolist())


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_no_axis_is_communicated_over_more_than_twice_and_what_is_left_is_the_target(degrees):
    whole = 2**20
    for source, target in pairs(len(degrees)):
        collected = list(moves(whole, source, target, degrees))

        assert (
            max(
                (sum(move.axis == axis for move in collected) for axis in range(len(degrees))),
                default=0,
            )
            <= 2
        )
        if collected and collected[-1].collective is not GATHER:
            assert collected[-1].left_bytes >= whole // placed_parts(target, degrees)
        assert all(move.left_bytes <= whole for move in collected)
        for axis, (start, goal) in enumerate(
            zip(source, target, strict=True)
        ):  # partial sums are always added up
            if start == PARTIAL:
                expected = {SCATTER, REDUCE} if goal else {REDUCE}
                assert expected & {move.collective for move in collected if move.axis == axis}


def test_an_axis_of_one_rank_takes_nothing():
    for source, target in pairs(1):
        assert list(moves(1024, source, target, (1,))) == []


def test_time_and_temporaries_are_those_of_the_moves():
    redistribution = redistribute(2**20, ("batch", "batch"), (None, None), (2, 4), MACHINE)

    inner, outer = redistribution.moves
    assert inner == RedistributionStep(GATHER, 1, 2**19, 2**19)
    assert outer == RedistributionStep(GATHER, 0, 2**20, 2**20)
    assert redistribution.temporary_bytes == 2**20
    inner_s = collective_time(GATHER, 2**19, place_axis(4, 1, 8, 8), MACHINE).value_s
    outer_s = collective_time(GATHER, 2**20, place_axis(2, 4, 8, 8), MACHINE).value_s
    assert redistribution.time.value_s == pytest.approx(inner_s + outer_s)


def test_an_axis_that_crosses_nodes_costs_more():
    inside = redistribute(2**26, (PARTIAL,), (None,), (8,), MACHINE).time.value_s
    across = redistribute(2**26, (PARTIAL,), (None,), (16,), MACHINE).time.value_s

    assert across > inside


def test_more_bytes_never_take_less_time():
    for source, target in pairs(2):
        times = [
            redistribute(2**n, source, target, (2, 2), MACHINE).time.value_s for n in (16, 20, 24)
        ]
        assert times == sorted(times)
        assert math.isfinite(times[-1])
