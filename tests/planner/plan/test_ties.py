"""The choice among ties equals hand calculation."""

from __future__ import annotations

import pytest

from parplan.planner.objective import Prefer
from parplan.planner.plan.ties import (
    ALONE,
    Tie,
    inside_band,
    preferred,
    reason_for,
)

# The fastest is full and fragile, the second is robust, the third lean, the fourth a bit leaner.
TIES = (Tie(70.0, 0.06), Tie(69.5, 0.01), Tie(41.0, 0.03), Tie(40.0, 0.05))


def test_steps_at_the_end_of_the_band_are_inside():
    assert inside_band([10.0, 10.5, 11.0, 11.1], [0.1] * 4) == [0, 1, 2]
    assert inside_band([10.0, 10.5, 10.5], [0.1, 0.01, 0.06]) == [0, 2]
    assert inside_band([10.0, 9.9], [0.0] * 2) == [0, 1]


@pytest.mark.parametrize(
    ("prefer", "memory_share", "chosen"),
    [
        (Prefer.FASTEST, 0.05, 0),
        (Prefer.ROBUST, 0.05, 1),
        (Prefer.LEANEST, 0.05, 2),  # 41 GiB are within 5 % of 40, and that plan is faster
        (Prefer.LEANEST, 0.02, 3),
        (Prefer.LEANEST, 0.5, 0),  # such memory prices tell no plan apart
    ],
)
def test_each_preference_takes_its_tie_and_the_fastest_of_equals(prefer, memory_share, chosen):
    assert preferred(prefer, TIES, memory_share) == chosen
    assert preferred(prefer, TIES[:1], memory_share) == 0


def test_equal_losses_leave_the_fastest():
    assert preferred(Prefer.ROBUST, [Tie(70.0, 0.01), Tie(40.0, 0.01)], 0.05) == 0


@pytest.mark.parametrize(
    ("prefer", "chosen", "reason"),
    [
        (Prefer.FASTEST, 0, "it is the fastest of 4 ties"),
        (Prefer.LEANEST, 3, "its fullest device holds 40.0 GiB, that of the fastest 70.0"),
        (Prefer.LEANEST, 0, "no tie is leaner by more than the error band of the memory"),
        (
            Prefer.ROBUST,
            1,
            "it loses at most 1.0 % where a speed is 20 % off, the fastest 6.0 %",
        ),
        (Prefer.ROBUST, 0, "it loses at most 6.0 % where a speed is 20 % off"),
    ],
)
def test_the_reason_has_the_figures_of_the_choice(prefer, chosen, reason):
    assert reason_for(prefer, TIES, chosen) == reason
    assert reason_for(prefer, TIES[:1], 0) == ALONE
