"""Requests to `parplan.executor.checking.parity`, equal on all ranks.

They are tighter than those of the command.
"""

from __future__ import annotations

import faulthandler
import math
import os
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

from parplan.executor.checking import parity
from parplan.executor.checking.parity import (
    OPTIONS,
    STEPS,
    CountCollectives,
    TrainingOutcome,
    forward,
    gradient_error,
    reference_layers,
    reference_optimizer,
    run_reference,
    whole_gradients,
)
from parplan.executor.rules.all_rules import validate
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.spec import Precision

__all__ = [
    "BF16_GRADIENT_TOLERANCE",
    "BF16_LOSS_TOLERANCE",
    "GRADIENT_TOLERANCE",
    "LOSS_TOLERANCE",
    "OPTIONS",
    "STEPS",
    "CountCollectives",
    "TrainingOutcome",
    "Worlds",
    "forward",
    "gradient_error",
    "reference_layers",
    "reference_optimizer",
    "require_as_one_process",
    "require_parity",
    "require_same_as_theirs",
    "run_plans",
    "run_reference",
    "whole_gradients",
    "worst_gradient",
]

# of EXECUTOR.md in fp32: max |g - ref| / max(|ref| max, 1e-4) of first-step gradients, relative
# error of losses
GRADIENT_TOLERANCE = 1e-6
LOSS_TOLERANCE = 5e-7
FP32_UNIT = 2.0**-24
NORM_TOLERANCE = 2e-6  # a norm sums the squares of gradients that are equal to GRADIENT_TOLERANCE
# bf16 keeps 8 bits: one rounding is 2^-9 = 0.002, a gradient that sums many is compared with the
# largest entry
BF16_GRADIENT_TOLERANCE = 0.08
BF16_LOSS_TOLERANCE = 1e-3
BF16_NORM_TOLERANCE = 0.02


def run_plans(plans: Sequence[Plan]) -> list[TrainingOutcome]:
    """Train every plan in one world; its ranks must agree."""
    outcomes = parity.run_plans(plans)
    assert all(outcome.agree for outcome in outcomes)
    return outcomes


class Worlds:
    """Plans by name, run in one world for each number of ranks.

    Starting a world costs more than a plan. Slow plans run in another world.
    """

    def __init__(self, plans: Mapping[str, Plan], slow: Collection[str] = ()) -> None:
        self.plans, self.slow = plans, slow
        self._found: dict[str, TrainingOutcome] = {}

    def params(self) -> list[object]:
        """The names, the slow ones marked so."""
        return [
            pytest.param(name, marks=pytest.mark.slow if name in self.slow else ())
            for name in self.plans
        ]

    def outcome(self, name: str) -> TrainingOutcome:
        if name not in self._found:
            ranks, slow = self.plans[name].mesh.num_ranks, name in self.slow
            together = {
                plan_name: plan
                for plan_name, plan in self.plans.items()
                if plan.mesh.num_ranks == ranks and (plan_name in self.slow) is slow
            }
            self._found |= zip(together, run_plans(list(together.values())), strict=True)
        return self._found[name]


def worst_gradient(actual: TrainingOutcome, expected: TrainingOutcome) -> tuple[float, str]:
    """The largest gradient error and its parameter."""
    return max((error, name) for name, error in parity.gradient_errors(actual, expected).items())


def gradient_tolerance(plan: Plan, parameter: str) -> float:
    """The largest error of a gradient in fp32, relative to its largest entry.

    The bias of a router sums one term a token, and the terms cancel. To add n terms pairwise
    costs at most u log2(n) of the sum of their magnitudes (Higham 2002, section 4.2), which is
    about sqrt(n) times the sum where signs are random:

        e = u log2(n) sqrt(n)      u = 2^-24
    """
    if not parameter.endswith("router.bias"):
        return GRADIENT_TOLERANCE
    num_tokens = plan.training.global_batch_size * plan.training.seq_length
    return max(GRADIENT_TOLERANCE, FP32_UNIT * math.log2(num_tokens) * math.sqrt(num_tokens))


def require_parity(plan: Plan, actual: TrainingOutcome, expected: TrainingOutcome) -> None:
    """Requires equal losses and equal gradients of the first step.

    They are equal as far as the precision of `plan` carries.
    """
    exact = plan.training.precision is Precision.FP32
    for parameter, error in parity.gradient_errors(actual, expected).items():
        allowed = gradient_tolerance(plan, parameter) if exact else BF16_GRADIENT_TOLERANCE
        assert error <= allowed, f"{error} in {parameter}"
    assert actual.losses == pytest.approx(
        expected.losses, rel=LOSS_TOLERANCE if exact else BF16_LOSS_TOLERANCE
    )


def require_as_one_process(worlds: Worlds, name: str) -> None:
    """Requires that a legal plan trains as one process does, with the predicted state bytes."""
    plan = worlds.plans[name]
    validate(plan)

    outcome = worlds.outcome(name)

    require_parity(plan, outcome, run_reference(plan))
    assert all(predicted == measured for predicted, measured in outcome.states.values())


def require_same_as_theirs(
    layers: Mapping[str, nn.Module], theirs: nn.Module, ids: torch.Tensor
) -> None:
    """Requires the logits and the gradient of the token table of a transformers' module.

    ids: [batch, sequence], which are the labels too
    """
    ours, expected = forward(layers, ids), theirs(ids).logits
    for logits in (ours, expected):
        functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()

    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        layers["embedding"].tokens.weight.grad,
        theirs.get_input_embeddings().weight.grad,
        rtol=1e-4,
        atol=1e-6,
    )


def _silent_rank(*arguments: object) -> None:
    """A rank that is expected to fail: what torch and gloo say of their end is not said twice."""
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    parity._rank(*arguments)


def attempt(plan: Plan, limit_s: float = 20.0) -> TrainingOutcome | str:
    """Runs `plan` in a new world, whatever comes of it.

    Returns the result, or the traceback of an error, or "hangs".
    """
    world = plan.mesh.num_ranks
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            _silent_rank,
            args=(world, [plan], parity._train, folder, ()),
            nprocs=world,
            start_method="fork",
            join=False,
        )
        deadline = time.monotonic() + limit_s
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    return "hangs"
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            return str(error)
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return parity.joined(
            [
                torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False)[0]
                for rank in range(world)
            ]
        )
