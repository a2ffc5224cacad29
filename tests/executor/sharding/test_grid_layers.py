"""Plans whose tensor-parallel ranks are a grid train as one process does, and send T7's bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.executor.rules.all_rules import validate
from parplan.executor.rules.rule import with_training
from parplan.profiles.models.documents import Documents
from parplan.profiles.models.spec import Precision
from tests.executor.models.test_family_runs import GEMMA
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import Worlds, require_parity, run_reference

GRID = {"tp": 4, "tp_rows": 2}
LISTED = ("qkv", "norm2", "activation", "fc2")
PLANS = {
    "gpt": make_plan(replace(GPT, num_layers=2), **GRID),
    "llama": make_plan(replace(LLAMA, num_layers=2), **GRID),
    "recompute": make_plan(LLAMA, recompute="full", recompute_ends=True, **GRID),
    "lists": make_plan(GPT, recompute=("norm2", "fc1", "activation", "attention"), **GRID),
    "gemma": make_plan(GEMMA, **GRID),
    "documents": with_training(make_plan(GPT, **GRID), documents=Documents(mean=4)),
    "unequal-shares": make_plan(LLAMA, dp=2, zero=(3,), shares=(3, 1), **GRID),
    "bf16": make_plan(GPT, precision=Precision.BF16, **GRID),
    "zero1": make_plan(GPT, dp=2, zero=(1,), **GRID),
    "zero3": make_plan(GPT, dp=2, zero=(3,), **GRID),
    "pp": make_plan(GPT, pp=2, **GRID),
    "pp-lists": make_plan(LLAMA, pp=2, recompute=LISTED, **GRID),
    "zero0-lists": make_plan(GPT, dp=2, recompute=LISTED, **GRID),
    "zero2-lists": make_plan(LLAMA, dp=2, zero=(2,), recompute=LISTED, **GRID),
    "zero3-lists": make_plan(GPT, dp=2, zero=(3,), recompute=LISTED, **GRID),
}
WORLDS = Worlds(PLANS, set(PLANS) - {"gpt"})

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]


@pytest.mark.multiproc
@pytest.mark.parametrize("name", WORLDS.params())
def test_losses_and_gradients_are_those_of_one_process(name):
    plan = PLANS[name]
    validate(plan)
    require_parity(plan, WORLDS.outcome(name), run_reference(plan))
