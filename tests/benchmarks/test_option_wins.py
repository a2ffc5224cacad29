"""An option's gain is the share by which the best step without it is longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.search.option_wins import OPTIONS, best_plan, gain_text
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.target_options import TargetOptions
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import InfeasibleError
from tests.helpers.laid_out_plans import laid_out


def of_step(step_s: float) -> Plan:
    plan = laid_out("gpt-1.5b", dp=2)
    time = replace(plan.predicted.step_time_s, value=step_s)
    return replace(plan, predicted=replace(plan.predicted, step_time_s=time))


@pytest.mark.parametrize(
    ("name", "base_s", "other_s", "gain"),
    [
        pytest.param("lists", 2.0, 2.1, "+5.0 %", id="closed"),
        pytest.param("lists", 2.0, 1.9, "-5.0 %", id="closed-and-faster"),
        pytest.param("rows", 2.1, 2.0, "+5.0 %", id="opened"),
        pytest.param("rows", 2.0, 2.0, "0", id="the-same"),
    ],
)
def test_the_gain_is_of_the_step_without_the_option_over_that_with_it(name, base_s, other_s, gain):
    assert gain_text(OPTIONS[name], of_step(base_s), of_step(other_s)) == gain


def test_a_search_without_a_plan_has_no_gain():
    none = InfeasibleError("nothing fits", hint="see the other launchers")

    assert gain_text(OPTIONS["lists"], of_step(1.0), none) == "no plan in time"


@pytest.mark.slow
def test_pins_narrow_the_search_of_the_own_executor():
    target = TargetOptions(model="gpt-1.5b", gpus=2, gpu="v100-32gb", global_batch_size=4)
    whole = best_plan(target, PinOptions(), 60)
    narrow = best_plan(target, PinOptions(pp=(2,), schedule=("1f1b",)), 60)

    assert isinstance(whole, Plan)
    assert isinstance(narrow, Plan)
    assert whole.search.launcher == narrow.search.launcher == "parplan"
    assert (narrow.mesh.pp, narrow.pipeline.schedule.value) == (2, "1f1b")
    least_s = whole.predicted.step_time_s.value * (1 - whole.search.gap)
    assert narrow.predicted.step_time_s.value >= least_s
