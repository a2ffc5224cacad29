"""A plan of a traced module trains as one process does, to 1e-6 in fp32."""

from __future__ import annotations

import math

import pytest
import torch

from parplan.executor.checking.parity import TrainingOutcome, loss_errors
from parplan.executor.traced.traced_parity import run_traced_plans, run_traced_reference
from parplan.planner.plan.traced_plan import TracedPlan

TOLERANCE = 1e-6


def check_to_1e_6(plan: TracedPlan) -> None:
    """The losses of all steps agree, and the first gradient relative to its norm.

    The norm is over all parameters, because some have a gradient that is zero but for rounding, for
    example biases of keys.
    """
    (actual,), expected = run_traced_plans([plan]), run_traced_reference(plan, by_micro_batch=True)

    assert actual.agree
    assert max(loss_errors(actual, expected)) <= TOLERANCE
    assert _gradient_error(actual, expected) <= TOLERANCE
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
    assert all(predicted == measured for predicted, measured in actual.states.values())


def _gradient_error(actual: TrainingOutcome, expected: TrainingOutcome) -> float:
    assert actual.gradients.keys() == expected.gradients.keys()
    differences = [actual.gradients[name] - value for name, value in expected.gradients.items()]
    return _norm(differences) / _norm(list(expected.gradients.values()))


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.hypot(*(torch.linalg.vector_norm(each.double()).item() for each in tensors))
