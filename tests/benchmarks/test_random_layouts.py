"""No random legal layout of a small request is better than its plan by more than the stated gap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.search.attacks import random_layouts
from benchmarks.search.attacks.random_layouts import LAYOUTS, compared, small_request
from benchmarks.search.attacks.rounds import searched
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.request import Constraints
from tests.helpers.cases import mostly_slow

REQUESTS = 40
QUICK = (8,)  # about half a second each


@pytest.mark.parametrize("seed", mostly_slow(range(REQUESTS), QUICK))
def test_no_random_layout_is_better_than_the_plan_by_more_than_its_gap(seed, tmp_path):
    comparison = compared(small_request(seed, tmp_path), seed)

    assert comparison.better == "", str(comparison.request)


@pytest.mark.slow
def test_a_plan_that_a_layout_beats_is_reported(tmp_path, monkeypatch):
    request = small_request(1, tmp_path)
    plan = searched(replace(request, pins=Constraints(recompute=(Recompute.FULL,), pp=(2,))))
    monkeypatch.setattr(random_layouts, "searched", lambda _: plan)

    comparison = compared(request, 1)

    assert comparison.layouts == LAYOUTS
    assert comparison.better


def test_a_seed_gives_the_same_request_again(tmp_path):
    first, again = (small_request(3, tmp_path) for _ in range(2))

    assert first == again
