"""Only ranks whose stages need a batch read one, and they train all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import OPTIONS, run_ranks
from parplan.executor.traced.traced_trainer import build_traced_trainer
from parplan.executor.training.train import Trainer, build_trainer
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.traced_plan import TracedPlan
from tests.helpers.cases import mostly_slow
from tests.helpers.executor_plans import GPT, make_plan
from tests.helpers.traced_modules import HUGGING_FACE
from tests.helpers.traced_plans import hand_plan

pytestmark = pytest.mark.multiproc

MODULES = "tests.helpers.traced_modules"
DEEP = replace(GPT, num_layers=8)


DEVICE = torch.device("cpu")
PLANS: dict[str, tuple[Callable[[], Plan | TracedPlan], set[int]]] = {
    "1f1b": (lambda: make_plan(GPT, pp=4, num_micro_batches=4), {0, 3}),
    "zbv": (
        lambda: make_plan(DEEP, pp=4, schedule=Schedule.ZBV, virtual_stages=2, num_micro_batches=8),
        {0},
    ),
    "interleaved": (
        lambda: make_plan(
            DEEP, pp=4, schedule=Schedule.INTERLEAVED, virtual_stages=2, num_micro_batches=4
        ),
        {0, 3},
    ),
    "two-stages": (lambda: make_plan(GPT, pp=2, dp=2), {0, 1, 2, 3}),
    "traced": (lambda: hand_plan(f"{MODULES}:unet", pp=4), {0, 3}),
    "traced-bert": (lambda: hand_plan(HUGGING_FACE["bert"], pp=4), {0, 3}),
}


def reads_of(plan: Plan | TracedPlan) -> list[int]:
    """The steps whose batches this rank reads."""
    if isinstance(plan, TracedPlan):
        trainer: Trainer = build_traced_trainer(plan, OPTIONS, DEVICE)
    else:
        trainer = build_trainer(plan, OPTIONS, DEVICE)
    read: list[int] = []

    def counted(batches: Callable[[int], Any]) -> Callable[[int], Any]:
        def batch(step: int) -> Any:
            read.append(step)
            return batches(step)

        return batch

    list(replace(trainer, batches=counted(trainer.batches)).run())
    return read


PLAIN = {"1f1b", "two-stages", "traced"}


@cache
def read_by_plan(*, plain: bool) -> dict[str, list[list[int]]]:
    plans = {name: plan() for name, (plan, _) in PLANS.items() if (name in PLAIN) is plain}
    return dict(zip(plans, run_ranks(list(plans.values()), reads_of), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(PLANS, PLAIN))
def test_middle_stages_read_nothing(name):
    _, readers = PLANS[name]
    steps = list(range(OPTIONS.steps))

    assert steps
    assert read_by_plan(plain=name in PLAIN)[name] == [
        steps if rank in readers else [] for rank in range(4)
    ]
