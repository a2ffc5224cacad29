"""No printed plan of a request beats its table of launchers, over seeded requests.

The others are each launcher's alone, the export of each plan to each launcher that loses nothing,
and those of tighter pins. Each may be faster than its launcher's plan by the stated gap at most.
"""

from __future__ import annotations

import random

import pytest

from parplan.planner.launchers.known_launchers import EXECUTOR, LAUNCHERS
from tests.helpers.drawn_requests import (
    PINS,
    beaten_by,
    beaten_by_exports,
    best_of_each,
    drawn_request,
    words_of,
)

REQUESTS = 100
OTHERS = tuple(name for name in LAUNCHERS if name != EXECUTOR)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(REQUESTS))
def test_no_plan_beats_the_table(seed):
    target = drawn_request(seed)
    plans = best_of_each(target, tuple(LAUNCHERS))

    broken = list(beaten_by_exports(plans))
    for name in OTHERS:  # the own executor shares no prices with others
        broken += beaten_by(best_of_each(target, (name,)), plans, "alone")
    pinned_for_the_executor = random.Random(seed).choice(list(PINS))
    for pin, pins in PINS.items():
        names = tuple(LAUNCHERS) if pin == pinned_for_the_executor else OTHERS
        broken += beaten_by(best_of_each(target, names, pins), plans, f"with {pin}")

    assert plans, words_of(target)
    assert not broken, f"{words_of(target)}: {broken}"
