"""The activations of a timeline peak where the simulator's do, and none is left at the end."""

from __future__ import annotations

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.stage_costs import step_costs
from parplan.costmodels.step import simulated_step
from parplan.planner.plan.reprice import reprice
from parplan.planner.runs.held_activations import held_activations
from parplan.planner.runs.timelines import predicted_timeline
from tests.helpers.synthetic_runs import estimated

CASES = {
    "data parallel": estimated,
    "1f1b": lambda: estimated(pp=4),
    "interleaved": lambda: estimated(pp=2, virtual_stages=2),
    "zero bubble": lambda: estimated(pp=2, virtual_stages=2, schedule=Schedule.ZBV),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_peak_is_the_simulators_and_the_step_ends_with_nothing_held(make):
    today = reprice(make())
    timeline = predicted_timeline(today.strategy, today.price_cache)

    held = held_activations(today.strategy, today.price_cache, timeline)

    costs = step_costs(today.strategy, today.price_cache)
    ranks = simulated_step(today.strategy, costs).ranks
    assert [max(n_bytes for _, n_bytes in moments) for moments in held] == pytest.approx(
        [rank.peak_stash_bytes for rank in ranks]
    )
    assert [moments[-1][1] for moments in held] == pytest.approx([0.0] * len(ranks), abs=1.0)
