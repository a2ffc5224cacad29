"""Adapters and frozen parameters on several ranks train as in one process, with predicted bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.models import initial_values
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.spec import Precision
from tests.helpers.executor_plans import GPT, LLAMA, MIXTRAL, make_plan
from tests.helpers.executor_world import Worlds, require_parity, run_reference

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

# whole blocks of 64 elements in the part of a row that one of two ranks has
WIDE = replace(
    LLAMA, name="tiny-wide", num_layers=2, hidden_size=128, head_dim=32, ffn_hidden_size=128
)
QLORA = FineTuning(lora_rank=2, lora_targets=("qkv", "proj", "fc1", "fc2"), base_bits=8)
LORA = FineTuning(lora_rank=2, lora_targets=("qkv", "proj", "fc1", "fc2"))
ROUTED = FineTuning(lora_rank=2, lora_targets=("all-linear",))
SOME = FineTuning(lora_rank=4, lora_targets=("q_proj",))
FIRST = FineTuning(freeze=("embedding", "blocks:0-1"))
BEHIND = FineTuning(lora_rank=2, lora_targets=("qkv", "down_proj"), freeze=("blocks:0-2",))
NORMS = FineTuning(freeze=("embedding", "norms"))
PLANS: dict[str, Plan] = {
    "lora-one-rank": make_plan(LLAMA, fine_tuning=LORA),
    "lora-tp2-sp": make_plan(LLAMA, tp=2, sp=True, fine_tuning=LORA),
    "lora-dp2-tp2": make_plan(LLAMA, dp=2, tp=2, fine_tuning=LORA),
    "lora-dp2-tp2-sp": make_plan(LLAMA, dp=2, tp=2, sp=True, fine_tuning=LORA),
    "lora-dp2-tp2-sp-recompute": make_plan(
        GPT, dp=2, tp=2, sp=True, recompute="full", fine_tuning=SOME
    ),
    "lora-pp2-tp2": make_plan(GPT, pp=2, tp=2, fine_tuning=LORA),
    **{
        f"lora-dp2-zero{zero}": make_plan(LLAMA, dp=2, zero=(zero,), fine_tuning=LORA)
        for zero in (1, 2, 3)
    },
    "lora-dp2-zero3-recompute": make_plan(GPT, dp=2, zero=(3,), recompute="full", fine_tuning=LORA),
    "lora-dp2-tp2-zero3-bf16": make_plan(
        LLAMA, dp=2, tp=2, zero=(3,), precision=Precision.BF16, fine_tuning=LORA
    ),
    "lora-dp2-zero1-bf16": make_plan(
        GPT, dp=2, zero=(1,), precision=Precision.BF16, fine_tuning=LORA
    ),
    "lora-dp2-bf16": make_plan(LLAMA, dp=2, precision=Precision.BF16, fine_tuning=LORA),
    "frozen-first-stage-pp2": make_plan(LLAMA, pp=2, fine_tuning=FIRST),
    "frozen-first-stage-pp2-zero-bubble": make_plan(
        LLAMA, pp=2, schedule=Schedule.ZBV, virtual_stages=2, num_micro_batches=4, fine_tuning=FIRST
    ),
    "lora-behind-frozen-pp2-dp2": make_plan(GPT, pp=2, dp=2, zero=(3,), fine_tuning=BEHIND),
    "frozen-first-tp2-recompute": make_plan(LLAMA, tp=2, recompute="full", fine_tuning=FIRST),
    "norms-frozen-dp2-tp2": make_plan(GPT, dp=2, tp=2, zero=(2,), fine_tuning=NORMS),
    "norms-frozen-pp2": make_plan(LLAMA, pp=2, fine_tuning=NORMS),
    "experts-dp2-ep2": make_plan(MIXTRAL, dp=2, ep=2, zero=(1,), fine_tuning=ROUTED),
    "experts-tp2-ep2-recompute": make_plan(
        MIXTRAL, tp=2, ep=2, sp=True, recompute=("activation", "norm2"), fine_tuning=ROUTED
    ),
    "experts-dp2-tp2-ep2-zero3": make_plan(
        MIXTRAL, dp=2, tp=2, ep=2, sp=True, zero=(3,), recompute="full", fine_tuning=ROUTED
    ),
    "experts-pp2-dp2-ep2-eight-bits": make_plan(
        MIXTRAL, pp=2, dp=2, ep=2, zero=(1,), fine_tuning=replace(ROUTED, base_bits=8)
    ),
    "experts-tp2-etp2": make_plan(MIXTRAL, tp=2, etp=2, sp=True, fine_tuning=ROUTED),
    "experts-dp2-tp2-ep2-etp2-zero1": make_plan(
        MIXTRAL, dp=2, tp=2, ep=2, etp=2, sp=True, zero=(1,), fine_tuning=ROUTED
    ),
    "experts-dp2-tp2-etp2-zero3-recompute": make_plan(
        MIXTRAL, dp=2, tp=2, etp=2, sp=True, zero=(3,), recompute="full", fine_tuning=ROUTED
    ),
    "experts-dp2-tp2-etp2-fc2": make_plan(
        MIXTRAL,
        dp=2,
        tp=2,
        etp=2,
        sp=True,
        zero=(2,),
        recompute=("activation",),
        fine_tuning=FineTuning(lora_rank=2, lora_targets=("fc2",)),
    ),
    "attention-beside-experts-dp2-ep2-zero3": make_plan(
        MIXTRAL, dp=2, ep=2, zero=(3,), fine_tuning=SOME
    ),
    "eight-bits-tp2": make_plan(WIDE, tp=2, fine_tuning=QLORA),
    "eight-bits-dp2-tp2-sp": make_plan(WIDE, dp=2, tp=2, sp=True, zero=(2,), fine_tuning=QLORA),
    "eight-bits-dp2-tp2-recompute": make_plan(
        WIDE, dp=2, tp=2, zero=(1,), recompute="full", fine_tuning=QLORA
    ),
    "eight-bits-pp2-dp2": make_plan(
        GPT, pp=2, dp=2, fine_tuning=replace(SOME, base_bits=8, freeze=("blocks:0-1",))
    ),
    "eight-bits-dp2-tp2-bf16": make_plan(
        WIDE, dp=2, tp=2, zero=(1,), precision=Precision.BF16, fine_tuning=QLORA
    ),
}
QUICK = {
    "lora-tp2-sp",
    "frozen-first-stage-pp2",
    "experts-dp2-ep2",
}
WORLDS = Worlds(PLANS, slow=PLANS.keys() - QUICK)


@pytest.fixture(autouse=True)
def _adapters_that_count(monkeypatch):
    """Lets B start with values, so that A has gradients in the first step."""
    monkeypatch.setattr(initial_values, "ZERO_AT_START", "no parameter")


@pytest.mark.parametrize("name", WORLDS.params())
def test_fine_tuning_is_that_of_one_process(name):
    plan = PLANS[name]

    outcome, reference = WORLDS.outcome(name), run_reference(plan)

    require_parity(plan, outcome, reference)
    assert any(gradient.abs().max() > 0 for gradient in reference.gradients.values())


@pytest.mark.parametrize("name", WORLDS.params())
def test_predicted_bytes_of_trained_and_frozen_parameters_are_exact(name):
    for predicted, measured in WORLDS.outcome(name).states.values():
        assert predicted == measured
