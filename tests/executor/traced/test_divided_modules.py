"""Traced modules whose operators are divided over tensor-parallel ranks train as in one process."""

from __future__ import annotations

import pytest

from parplan.executor.checking.parity import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    gradient_errors,
    loss_errors,
)
from parplan.executor.traced.traced_parity import run_traced_plans, run_traced_reference
from parplan.planner.plan.traced_plan import TracedPlan
from tests.helpers.traced_modules import HUGGING_FACE
from tests.helpers.traced_plans import hand_plan

MODULES = "tests.helpers.divided_modules"


def check(plan: TracedPlan) -> None:
    (actual,), expected = run_traced_plans([plan]), run_traced_reference(plan, by_micro_batch=True)

    assert actual.agree
    assert max(loss_errors(actual, expected)) <= LOSS_TOLERANCE
    assert max(gradient_errors(actual, expected).values()) <= GRADIENT_TOLERANCE
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
    assert all(predicted == measured for predicted, measured in actual.states.values())
