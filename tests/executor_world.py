"""What the tests ask of `executor.parity`: the same on all ranks, and tighter than the command does."""

from __future__ import annotations

from collections.abc import Sequence

from executor import parity
from executor.parity import (
    OPTIONS,
    STEPS,
    CountCollectives,
    Outcome,
    forward,
    gradient_error,
    reference_layers,
    run_reference,
    whole_gradients,
)
from planner.plan import Plan

__all__ = [
    "BF16_GRADIENT_TOLERANCE", "BF16_LOSS_TOLERANCE", "GRADIENT_TOLERANCE", "LOSS_TOLERANCE", "OPTIONS", "STEPS", "CountCollectives",
    "Outcome", "forward", "gradient_error", "reference_layers", "run_plans", "run_reference", "whole_gradients", "worst_gradient"]

# of EXECUTOR.md in fp32: max |g - ref| / max(|ref| max, 1e-4) of first-step gradients, relative error of losses
GRADIENT_TOLERANCE = 1e-6
LOSS_TOLERANCE = 5e-7
# bf16 keeps 8 bits: one rounding is 2^-9 = 0.002, a gradient that sums many is compared with the largest entry
BF16_GRADIENT_TOLERANCE = 0.08
BF16_LOSS_TOLERANCE = 1e-3


def run_plans(plans: Sequence[Plan]) -> list[Outcome]:
    """Train every plan in one world; its ranks must agree."""
    found = parity.run_plans(plans)
    assert all(outcome.agree for outcome in found)
    return found


def worst_gradient(found: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest gradient error and its parameter."""
    return max((error, name) for name, error in parity.gradient_errors(found, expected).items())
