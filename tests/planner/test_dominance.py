"""Fronts of two values."""

from __future__ import annotations

import numpy as np
import pytest

from parplan.planner.dominance import hull_prices, lower_hull, new_lows, undominated_rows


def test_a_new_low_is_below_all_before_it():
    assert new_lows(np.array([3.0, 3.0, 2.0, 5.0, 1.0])).tolist() == [
        True,
        False,
        True,
        False,
        True,
    ]


def test_nothing_has_an_empty_front():
    assert new_lows(np.array([])).tolist() == []
    assert undominated_rows(np.array([]), np.array([])).tolist() == []


@pytest.mark.parametrize("seed", range(8))
def test_the_front_is_what_no_other_beats_or_equals_by_increasing_first_value(seed):
    first, second = np.random.default_rng(seed).integers(0, 6, (2, 12)).astype(float)

    rows = [(first[i], second[i]) for i in undominated_rows(first, second)]

    every = set(zip(first, second, strict=True))
    assert rows == sorted(
        a for a in every if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in every)
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_lower_hull_has_the_least_at_every_price(seed):
    seconds, saved = np.random.default_rng(seed).integers(0, 9, (2, 12)).astype(float)

    hull = lower_hull(zip(seconds, saved, range(12), strict=True))

    for price in np.geomspace(0.01, 100.0, 50):
        values = seconds + price * saved
        assert values[hull].min() == pytest.approx(values.min())
    assert np.all(np.diff(seconds[hull]) > 0)
    assert np.all(np.diff(saved[hull]) < 0)


def test_the_prices_of_a_hull_are_the_slopes_of_its_sides():
    # (2, 9) lies above the side from (1, 9) to (3, 5)
    assert hull_prices([1.0, 2.0, 3.0, 8.0], [9.0, 9.0, 5.0, 4.0]) == [0.5, 5.0]
