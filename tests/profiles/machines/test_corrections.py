"""Corrections of a fitted form: exact at points, continuous, fading with distance."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.corrections import REACH, corrections_of
from parplan.profiles.machines.curves import MemoryCurve, memory_bound_s
from parplan.profiles.provenance import Kind

BANDWIDTH = 1e9
CURVE = MemoryCurve(launch_s=1e-6, kind=Kind.INTERPOLATED, source="made up", bandwidth_share=0.5)
SIZES = st.tuples(*(st.integers(1, 10_000) for _ in range(3)))


def cube_s(sizes):
    return math.prod(sizes) / 1e9


def corrected(points, sizes):
    return corrections_of(replace(CURVE, points=points), 3, cube_s).factor(sizes)


def of_bytes(points):
    curve = replace(CURVE, points=points)
    return corrections_of(curve, 1, lambda sizes: memory_bound_s(sizes[0], curve, BANDWIDTH))


@given(points=st.dictionaries(SIZES, st.floats(0.1, 1e6), min_size=1, max_size=12))
def test_the_price_at_a_point_is_what_was_measured(points):
    rows = tuple((*sizes, time_us) for sizes, time_us in points.items())

    for sizes, time_us in points.items():
        factor, kind = corrected(rows, sizes)
        assert cube_s(sizes) * factor == pytest.approx(time_us / 1e6, rel=1e-9)
        assert kind is Kind.MEASURED


def test_points_of_equal_sizes_count_as_their_geometric_mean():
    factor, kind = corrected(((10, 10, 10, 1.0), (10, 10, 10, 100.0)), (10, 10, 10))

    assert cube_s((10, 10, 10)) * factor == pytest.approx(10.0 / 1e6, rel=1e-12)
    assert kind is Kind.MEASURED


@pytest.mark.parametrize("seed", range(3))
def test_the_correction_has_no_jump_on_a_way_through_a_point_and_out_of_the_reach_of_all(seed):
    draw = random.Random(seed)
    shapes = {tuple(100 * 2 ** draw.randrange(4) for _ in range(3)) for _ in range(8)}
    rows = tuple((*sizes, draw.uniform(0.3, 3.0) * cube_s(sizes) * 1e6) for sizes in shapes)
    through = rows[0][:3]
    way = [
        corrected(rows, tuple(size * math.exp((i - 1000) / 200) for size in through))[0]
        for i in range(2001)
    ]

    assert way[0] == way[-1] == 1.0 != way[1000]
    assert (
        max(abs(math.log(after / before)) for before, after in itertools.pairwise(way)) < 0.02
    )  # of steps of 0.5 %


@pytest.mark.parametrize("ratio", [3.0, 0.5])
@pytest.mark.parametrize("direction", [(1, 0, 0), (0, -1, 0), (1, 1, 1), (-1, 1, 0.5)])
def test_the_correction_of_a_lone_point_fades_with_distance_until_the_form_is_left_alone(
    ratio, direction
):
    at = (300, 300, 300)
    points = ((*at, ratio * cube_s(at) * 1e6),)
    logs = [
        abs(
            math.log(
                corrected(
                    points,
                    tuple(
                        size * math.exp(share * d)
                        for size, share in zip(at, direction, strict=True)
                    ),
                )[0]
            )
        )
        for d in (0.0, 0.01, 0.1, 0.5, 1.0, 1.5, 2.0, REACH, 3.0, 10.0)
    ]

    assert logs[0] == pytest.approx(abs(math.log(ratio)))
    assert all(before > after for before, after in itertools.pairwise(logs[:8]))
    assert logs[4] == pytest.approx(
        abs(math.log(ratio)) / 2
    )  # a factor e away it counts as much as no correction
    assert logs[7:] == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def test_between_two_points_that_agree_the_correction_is_nearly_theirs_and_never_beyond():
    points = (
        (100, 100, 100, 2 * cube_s((100,) * 3) * 1e6),
        (400, 100, 100, 2 * cube_s((400, 100, 100)) * 1e6),
    )
    factor, kind = corrected(points, (200, 100, 100))

    assert 1.7 < factor < 2.0
    assert kind is Kind.INTERPOLATED


@given(points=st.dictionaries(SIZES, st.floats(0.2, 5.0), min_size=1, max_size=10), sizes=SIZES)
def test_no_correction_is_larger_than_that_of_the_points(points, sizes):
    rows = tuple((*at, ratio * cube_s(at) * 1e6) for at, ratio in points.items())
    factor, _ = corrected(rows, sizes)

    assert (
        min(1.0, *points.values()) * (1 - 1e-9) <= factor <= max(1.0, *points.values()) * (1 + 1e-9)
    )


@pytest.mark.parametrize(
    ("n_bytes", "kind"),
    [
        pytest.param(1000, Kind.MEASURED, id="at-a-point"),
        pytest.param(3000, Kind.INTERPOLATED, id="near-one-inside"),
        pytest.param(900, Kind.ANALYTIC, id="near-one-but-below-all"),
        pytest.param(2_100_000, Kind.ANALYTIC, id="near-one-but-above-all"),
        pytest.param(40_000, Kind.ANALYTIC, id="inside-but-far-from-each"),
        pytest.param(260_000, Kind.INTERPOLATED, id="within-reach-of-the-largest"),
        pytest.param(0, Kind.ANALYTIC, id="nothing"),
    ],
)
def test_kinds_of_a_curve_from_a_kilobyte_to_two_megabytes(n_bytes, kind):
    corrections = of_bytes(((1000, 10.0), (2_000_000, 5000.0)))

    assert corrections.factor((n_bytes,))[1] is kind


def test_far_from_every_point_the_form_stands_alone():
    assert of_bytes(((1000, 10.0), (2_000_000, 5000.0))).factor((40_000,)) == (1.0, Kind.ANALYTIC)


@pytest.mark.parametrize(
    "point", [(10, 10, 5.0), (10, 10, 10, 10, 5.0), (10, 10, 10, 0.0), (0, 10, 10, 5.0)]
)
def test_a_point_of_another_shape_or_without_time_is_an_error(point):
    with pytest.raises(ConfigError, match="needed 3 sizes and microseconds, all above 0"):
        corrected((point,), (10, 10, 10))
