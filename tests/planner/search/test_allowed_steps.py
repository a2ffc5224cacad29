"""The slowdown of memory and peak limits the simulated step against the fastest plan's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.objective import Objective
from parplan.planner.request import Constraints
from parplan.planner.search.find_plan import find_plan
from tests.helpers.cases import named

SLOWDOWN = 0.02
ROUNDED = 1 + 1e-5  # a plan says its step with six digits
# closed forms of zero-bubble V are far from the simulated step
CASES = {
    "one-layer-more": (9, 8, Constraints(pp=(4,), tp=(1, 2))),
    "two-pipelines": (10, 16, Constraints(pp=(2, 4), tp=(2,))),
}


@pytest.mark.parametrize("objective", [Objective.MEMORY, Objective.PEAK])
@pytest.mark.parametrize(("num_layers", "batch", "pins"), named(CASES, {"one-layer-more"}))
def test_no_plan_is_slower_than_its_slowdown_allows(num_layers, batch, pins, objective):
    request = request_of(
        TargetOptions(
            model="qwen3-8b",
            gpus=8,
            gpu="l40s-48gb",
            stack="torchtitan",
            global_batch_size=batch,
            seq_length=2048,
        )
    )
    request = replace(
        request,
        model=replace(request.model, num_layers=num_layers),
        constraints=replace(pins, schedule=(Schedule.ZBV,)),
    )
    fastest_s = find_plan(request).predicted.step_time_s.value
    options = replace(request.options, max_slowdown=SLOWDOWN)

    plan = find_plan(replace(request, objective=objective, options=options))

    assert plan.search.fastest_step_time_s <= fastest_s * ROUNDED
    assert plan.predicted.step_time_s.value <= (1 + SLOWDOWN) * fastest_s * ROUNDED
    assert plan.search.bound <= plan.search.value
