"""Models with towers train like one process on every mesh, and hold the predicted bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.functions import Activations
from parplan.profiles.models.spec import ModelSpec, Optimizer
from parplan.profiles.models.towers import Projection, Tower, TowerFunctions
from parplan.profiles.stack import AttentionKernel, TowerDivision
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import (
    Worlds,
    require_as_one_process,
    run_plans,
    run_reference,
)

SHAPE = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_heads": 4,
    "ffn_hidden_size": 64,
    "patches": 16,
    "patch_features": 48,
    "merged": 4,
}
QWEN2_VL = Tower(
    **SHAPE,
    images=2,
    rotary=True,
    projector_norm=True,
    projector=(Projection(width=192, bias=True, activated=True), Projection(width=32, bias=True)),
    functions=TowerFunctions(activation=Activations.QUICK_GELU),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    rms_norm=True,
    gated_ffn=True,
    blocks=(BlockRun(window=4), BlockRun()),
    projector_norm=False,
    projector_rms_norm=True,
    functions=TowerFunctions(),
)
GEMMA3 = Tower(
    **SHAPE,
    images=2,
    patch_bias=True,
    position_table=True,
    norm_last=True,
    pooled=True,
    projector_rms_norm=True,
    projector=(Projection(width=32),),
)
LLAMA4 = Tower(
    **SHAPE,
    images=2,
    class_token=True,
    position_table=True,
    norm_first=True,
    norm_last=True,
    rotary=True,
    projector=(
        Projection(width=40, activated=True),
        Projection(width=40, activated=True),
        Projection(width=32),
    ),
    functions=TowerFunctions(activation=Activations.GELU, norm_epsilon=1e-5),
)
MISTRAL3 = Tower(
    **SHAPE,
    images=2,
    norm_first=True,
    rms_norm=True,
    gated_ffn=True,
    linear_bias=False,
    qkv_bias=False,
    rotary=True,
    projector_rms_norm=True,
    projector=(Projection(width=256), Projection(width=256, activated=True), Projection(width=32)),
    functions=TowerFunctions(norm_epsilon=1e-5, columns_between=True),
)


WHISPER = replace(
    GPT,
    name="tiny-whisper",
    num_layers=2,
    key_bias=False,
    tower=Tower(
        name="audio",
        attended=True,
        num_layers=2,
        hidden_size=GPT.hidden_size,
        num_heads=4,
        ffn_hidden_size=64,
        patches=12,
        fixed_patches=True,
        patch_features=3 * GPT.hidden_size,
        frame_features=10,
        patch_bias=True,
        position_table=True,
        fixed_positions=True,
        key_bias=False,
        norm_last=True,
        functions=TowerFunctions(activation=Activations.GELU, norm_epsilon=1e-5),
    ),
)


def seeing(tower: Tower) -> ModelSpec:
    """A model with a tower in front of two blocks; the tower has four layers."""
    return replace(LLAMA, name="tiny-seeing", num_layers=2, tower=tower)


FROZEN = FineTuning(freeze=("tower",))
IMAGES, REPEATED = TowerDivision.IMAGES, TowerDivision.REPEATED
PLANS: dict[str, Plan] = {
    "dp2": make_plan(seeing(QWEN2_VL), dp=2, zero=(1,)),
    "dp2-zero3-full": make_plan(seeing(GEMMA3), dp=2, zero=(3,), recompute="full"),
    "dp2-recompute": make_plan(
        seeing(LLAMA4), dp=2, zero=(2,), recompute=("norm1", "qkv", "rotary", "attention")
    ),
    "tp2": make_plan(seeing(LLAMA4), tp=2),
    "tp2-sp": make_plan(seeing(GEMMA3), tp=2, sp=True, recompute=("norm1", "activation")),
    "tp2-sp-windows": make_plan(seeing(QWEN2_5_VL), tp=2, sp=True),
    "tp2-images": make_plan(seeing(MISTRAL3), tp=2, tower=IMAGES),
    "tp2-sp-images": make_plan(seeing(LLAMA4), tp=2, tower=IMAGES, recompute="full"),
    "tp2-repeated": make_plan(seeing(MISTRAL3), tp=2, tower=REPEATED),
    "pp2-behind": make_plan(seeing(LLAMA4), pp=2, blocks=(4, 2)),
    "pp2-inside": make_plan(seeing(QWEN2_5_VL), pp=2, blocks=(2, 4), recompute="full"),
    "pp2-before": make_plan(seeing(GEMMA3), pp=2, blocks=(0, 6)),
    "pp2-tp2-images": make_plan(seeing(QWEN2_VL), pp=2, tp=2, tower=IMAGES, blocks=(2, 4)),
    "pp2-tp2-sp-repeated": make_plan(
        seeing(QWEN2_5_VL), pp=2, tp=2, sp=True, tower=REPEATED, blocks=(3, 3)
    ),
    "pp2-dp2-tp2-zero1": make_plan(seeing(MISTRAL3), pp=2, dp=2, tp=2, zero=(1,), blocks=(2, 4)),
    "pp2-interleaved": make_plan(
        seeing(LLAMA4), pp=2, schedule=Schedule.INTERLEAVED, virtual_stages=2, blocks=(1, 2, 2, 1)
    ),
    "frozen-tp2-sp-images": make_plan(
        seeing(QWEN2_VL), tp=2, sp=True, tower=IMAGES, fine_tuning=FROZEN
    ),
    "frozen-dp2-zero3": make_plan(
        seeing(LLAMA4), dp=2, zero=(3,), recompute="full", fine_tuning=FROZEN
    ),
    "frozen-pp2-inside": make_plan(seeing(QWEN2_VL), pp=2, blocks=(2, 4), fine_tuning=FROZEN),
    "frozen-with-embedding-pp2-inside": make_plan(
        seeing(QWEN2_VL),
        pp=2,
        blocks=(2, 4),
        fine_tuning=FineTuning(freeze=("tower", "projector", "embedding")),
    ),
    "adapters-pp2": make_plan(
        seeing(GEMMA3),
        pp=2,
        blocks=(3, 3),
        fine_tuning=FineTuning(lora_rank=4, lora_targets=("qkv", "fc1")),
    ),
    "pp2-early-recompute": make_plan(
        seeing(LLAMA4),
        pp=2,
        blocks=(3, 3),
        schedule=Schedule.EARLY_RECOMPUTE,
        recompute=("norm1", "attention", "activation"),
    ),
    "tp2-unfused": make_plan(
        seeing(QWEN2_5_VL), tp=2, attention=AttentionKernel.UNFUSED, recompute=("attention",)
    ),
    "whisper-tp2-sp": make_plan(WHISPER, tp=2, sp=True, recompute=("cross_kv", "cross_norm")),
    "whisper-dp2-zero3": make_plan(WHISPER, dp=2, zero=(3,), recompute="full"),
    "whisper-dp2-frozen": make_plan(WHISPER, dp=2, zero=(1,), fine_tuning=FROZEN),
    "whisper-pp2-tower-on-two": make_plan(WHISPER, pp=2, blocks=(2, 4)),
    "whisper-pp2-blocks-on-two": make_plan(WHISPER, pp=2, blocks=(5, 1)),
    "whisper-pp2-dp2-tp2": make_plan(WHISPER, pp=2, dp=2, tp=2, zero=(2,), blocks=(5, 1)),
    "whisper-pp2-v-schedule": make_plan(
        WHISPER,
        pp=2,
        schedule=Schedule.ZBV,
        virtual_stages=2,
        blocks=(2, 2, 1, 1),
        num_micro_batches=4,
    ),
    "pp2-v-schedule": make_plan(
        seeing(QWEN2_VL),
        pp=2,
        schedule=Schedule.ZBV,
        virtual_stages=2,
        blocks=(1, 2, 2, 1),
        num_micro_batches=4,
    ),
}
QUICK = ("tp2-sp", "whisper-pp2-blocks-on-two")
WORLDS = Worlds(PLANS, slow=[name for name in PLANS if name not in QUICK])


@pytest.mark.multiproc
@pytest.mark.parametrize("name", WORLDS.params())
def test_a_model_with_a_tower_trains_as_one_process_with_the_predicted_bytes(name):
    require_as_one_process(WORLDS, name)


@pytest.mark.slow
@pytest.mark.multiproc
def test_positions_of_patches_are_a_table_to_muon():
    plan = make_plan(seeing(LLAMA4), dp=2, zero=(1,))
    plan = replace(plan, training=replace(plan.training, optimizer=Optimizer.MUON))

    (outcome,) = run_plans([plan])

    assert all(predicted == measured for predicted, measured in outcome.states.values())
    assert outcome.losses == pytest.approx(run_reference(plan).losses, rel=1e-5)
