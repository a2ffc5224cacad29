from __future__ import annotations

import pytest

from parplan.profiles.provenance import ZERO, Kind, Seconds, weakest_kind


def test_a_sum_is_as_good_as_its_weakest_part_that_matters():
    measured = Seconds(1.0, Kind.MEASURED)
    interpolated = Seconds(1.0, Kind.INTERPOLATED)
    analytic = Seconds(1.0, Kind.ANALYTIC)

    assert (measured + measured).kind is Kind.MEASURED
    assert (measured + interpolated).kind is Kind.INTERPOLATED
    assert (interpolated + analytic).kind is Kind.ANALYTIC
    assert (interpolated + analytic.scaled(0.05)).kind is Kind.INTERPOLATED  # 4.8 % of the sum
    assert (interpolated + analytic.scaled(0.06)).kind is Kind.ANALYTIC  # 5.7 %


def test_many_small_parts_of_one_kind_add_up():
    total = Seconds(1.0, Kind.INTERPOLATED)
    for _ in range(10):
        total = total + Seconds(0.01, Kind.ANALYTIC)

    assert total.value_s == pytest.approx(1.1)
    assert total.kind is Kind.ANALYTIC


def test_zero_changes_nothing_and_is_certain():
    analytic = Seconds(2.0, Kind.ANALYTIC)

    assert ZERO.kind is Kind.MEASURED
    assert ZERO + analytic == analytic
    assert weakest_kind([]) is Kind.MEASURED


def test_seconds_cannot_be_changed():
    with pytest.raises(AttributeError):
        ZERO.parts_s = (1.0, 0.0, 0.0)
