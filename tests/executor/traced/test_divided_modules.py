"""Traced modules whose operators are divided over tensor-parallel ranks train as in one process."""

from __future__ import annotations

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    gradient_errors,
    loss_errors,
)
from parplan.executor.traced.traced_parity import run_traced_plans, run_traced_reference
from parplan.planner.plan.traced_plan import TracedPlan
from tests.helpers.builtin_modules import CONFIGS
from tests.helpers.divided_modules import OPT
from tests.helpers.traced_modules import HUGGING_FACE
from tests.helpers.traced_plans import hand_plan

MODULES = "tests.helpers.divided_modules"


def check(plan: TracedPlan) -> None:
    (actual,), expected = run_traced_plans([plan]), run_traced_reference(plan, by_micro_batch=True)

    assert actual.agree
    # Adam makes a whole step of the rounding of a gradient that is zero, as of biases of keys
    first, *later = loss_errors(actual, expected)
    assert first <= LOSS_TOLERANCE
    assert max(later) <= GRADIENT_TOLERANCE
    assert max(gradient_errors(actual, expected).values()) <= GRADIENT_TOLERANCE
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
    assert all(predicted == measured for predicted, measured in actual.states.values())


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("module", "divided"),
    [
        pytest.param(f"{MODULES}:gpt", 17, id="gpt"),
        pytest.param(f"{MODULES}:timed_unet", 22, id="linear-layers-of-a-unet"),
    ],
)
def test_divided_modules_train_as_in_one_process(module, divided):
    plan = hand_plan(module, tp=2, num_micro_batches=2)

    assert sum(map(len, plan.shardings.values())) == divided
    check(plan)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("module", "options"),
    [
        pytest.param(HUGGING_FACE["vit"], {}, id="vit"),
        pytest.param(HUGGING_FACE["bert"], {"dp": 2, "zero": 3}, id="bert-zero-3"),
        pytest.param(HUGGING_FACE["t5"], {"pp": 2, "recompute": True}, id="t5-recompute"),
        pytest.param(OPT, {"dp": 2, "zero": 1}, id="opt-zero-1"),
        pytest.param(CONFIGS["gpt2"], {"pp": 2, "micro_batch_size": 2}, id="gpt2-tied"),
        pytest.param(CONFIGS["llama"], {}, id="llama-groups"),
        pytest.param(f"{MODULES}:gpt", {"pp": 2, "dp": 2}, id="gpt-three-axes"),
        pytest.param(
            "tests.helpers.traced_modules:shares",
            {"pp": 2, "virtual_stages": 2, "schedule": Schedule.INTERLEAVED},
            id="one-block-on-virtual-stages",
        ),
        pytest.param("tests.helpers.traced_modules:translator", {"pp": 2}, id="translator"),
    ],
)
def test_divided_modules_train_with_other_axes_as_in_one_process(module, options):
    check(hand_plan(module, tp=2, num_micro_batches=2, **options))
