"""A shrunk plan has the structure of the large one, is small, and runs in the executor."""

from __future__ import annotations

import dataclasses
import random

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.executor.checking.shrunk_plan import MOST_VIRTUAL_STAGES, shrunk, shrunk_pools
from parplan.executor.placed_layers import layer_operators
from parplan.executor.rules.all_rules import validate
from parplan.planner.plan.plan import Plan
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.cases import mostly_slow, named
from tests.helpers.executor_plans import (
    BATCH_FEED_FORWARD,
    GPT,
    HIDDEN_STREAM,
    LLAMA,
    MEGATRON,
    MEGATRON_SEQUENCE,
    PATCHWORK,
    SEQUENCE,
    TOKEN_FEED_FORWARD,
    make_plan,
    with_divisions,
)
from tests.helpers.executor_world import require_parity, run_plans, run_reference
from tests.helpers.planning import estimate_plan

DIVISIONS = (
    BATCH_FEED_FORWARD,
    HIDDEN_STREAM,
    MEGATRON,
    MEGATRON_SEQUENCE,
    PATCHWORK,
    SEQUENCE,
    TOKEN_FEED_FORWARD,
)
RECOMPUTE = ((), "full", ("norm2", "fc1", "activation"), ("attention",))


def random_plan(seed: int) -> Plan:
    """Returns a legal plan of many blocks.

    Mesh, schedule, mixture of ZeRO stages, divisions and recompute lists are random.
    """
    draw = random.Random(seed)
    pp = draw.choice((1, 2, 4))
    dp = draw.choice((1, 2, 4, 8))
    tp = draw.choice((1, 2, 4))
    schedule = draw.choice(list(Schedule)[:3]) if pp > 1 else Schedule.ONE_F_ONE_B
    chunks = draw.choice((2, 6)) if schedule is Schedule.INTERLEAVED else 1
    count, size = pp * draw.choice((1, 2, 8)), tp * draw.choice((1, 2))
    model = dataclasses.replace(
        draw.choice((GPT, LLAMA)),
        num_layers=pp * chunks * draw.choice((1, 3)),
        num_heads=16,
        num_kv_heads=8,
        hidden_size=128,
    )
    zero = (draw.randrange(4),) if draw.random() < 0.5 else (2, 1, 3)
    plan = make_plan(
        model,
        pp=pp,
        dp=dp,
        tp=tp,
        sp=tp > 1 and draw.random() < 0.5,
        zero=zero,
        recompute=draw.choice(RECOMPUTE),
        schedule=schedule,
        virtual_stages=chunks,
        num_micro_batches=count,
        global_batch_size=dp * size * count,
        precision=draw.choice((Precision.FP32, Precision.BF16)),
    )
    return with_divisions(plan, *draw.sample(DIVISIONS, 2)) if tp > 1 else plan


def used(plan: Plan) -> set[str]:
    return {run.plan for stage in plan.stages for run in stage.layers}


@pytest.mark.parametrize("seed", mostly_slow(range(40), range(30)))
def test_a_shrunk_plan_keeps_the_structure_and_is_legal(seed):
    plan = random_plan(seed)
    validate(plan)

    small = shrunk(plan)

    validate(small)
    for axis in ("pp", "dp", "tp"):
        assert getattr(small.mesh, axis) == min(getattr(plan.mesh, axis), 2)
    assert small.pipeline.schedule is plan.pipeline.schedule
    assert small.pipeline.virtual_stages == min(plan.pipeline.virtual_stages, MOST_VIRTUAL_STAGES)
    assert (small.pipeline.num_micro_batches > 1) == (plan.pipeline.num_micro_batches > 1)
    assert used(small) == used(plan)
    assert small.layer_plans == plan.layer_plans
    assert small.model.num_layers <= plan.model.num_layers
    assert small.training.precision is Precision.FP32
    for field in (
        "norm",
        "positions",
        "gated_ffn",
        "tied_embeddings",
        "parallel_residual",
        "linear_bias",
        "qkv_bias",
    ):
        assert getattr(small.model, field) == getattr(plan.model, field)
    assert (small.model.num_kv_heads < small.model.num_heads) == (
        plan.model.num_kv_heads < plan.model.num_heads
    )
    order = [run.plan for stage in plan.stages for run in stage.layers]
    assert list(dict.fromkeys(run.plan for stage in small.stages for run in stage.layers)) == list(
        dict.fromkeys(order)
    )


def test_unequal_shares_stay_unequal():
    plan = make_plan(GPT, pp=2, dp=4, shares=(9, 3, 3, 1), global_batch_size=16)
    small = shrunk(plan)
    validate(small)
    assert small.mesh.dp == 2
    assert small.pipeline.micro_batches_of_replicas == (4, 1)
    assert small.training.global_batch_size == 5


def test_a_grid_stays_a_grid():
    plan = make_plan(LLAMA, dp=2, tp=4, tp_rows=2, zero=(3,), global_batch_size=16)
    small = shrunk(plan)
    validate(small)
    assert (small.mesh.tp, small.mesh.tp_rows) == (4, 2)
    assert small.layer_plans == plan.layer_plans


def test_pools_of_unlike_stages_have_one_small_model():
    turns = dataclasses.replace(LLAMA, num_layers=8, blocks=(BlockRun(window=6), BlockRun()))
    plans = make_plan(turns, pp=2, blocks=(1, 7)), make_plan(turns, dp=2, zero=(3, 3, 3, 1))

    small = shrunk_pools(plans)

    assert small[0].model == small[1].model
    assert small[0].model.num_layers < turns.num_layers
    for plan, of_pool in zip(plans, small, strict=True):
        validate(of_pool)
        assert used(of_pool) == used(plan)


@pytest.mark.parametrize("model", ["gpt-20b", "llama3-70b", "gpt-175b"])
def test_a_model_of_billions_becomes_one_of_thousands(model):
    entry, cluster = load_model(model), with_gpus(load_cluster("h100-80gb"), 64)
    layout = ParallelLayout(
        mesh=Mesh(pp=4, dp=2, tp=8),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=64,
        sequence_parallel=True,
    )
    training = TrainingSpec(global_batch_size=128, seq_length=entry.seq_length, stack=NEUTRAL)

    small = shrunk(estimate_plan(entry.spec, cluster, training, layout, zero=1))

    validate(small)
    assert small.mesh.num_ranks == 8
    assert small.model.hidden_size < 100
    assert small.model.num_layers < 8


def operators_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Returns the operators of the layers of each layer plan."""
    return {name: layer_operators(plan, each) for name, each in plan.layer_plans.items()}


UNLIKE = {
    "latent-attention-and-further-tokens": ("deepseek-v3", None),
    "state-spaces": ("nemotron-h-8b", None),
    "windows": ("gemma-2-27b", None),
    "frozen-blocks": (
        "llama3-8b",
        FineTuning(lora_rank=8, lora_targets=("qkv",), freeze=("blocks:0-15",), base_bits=8),
    ),
}


def unlike_blocks(model: str, tuning: FineTuning | None) -> Plan:
    """Returns a plan of 64 GPUs for a model whose blocks differ."""
    entry = load_model(model)
    ep = 2 if entry.spec.num_experts else 1
    layout = ParallelLayout(
        mesh=Mesh(pp=4, dp=8, tp=2, ep=ep),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=8,
        sequence_parallel=True,
    )
    training = TrainingSpec(
        global_batch_size=64, seq_length=entry.seq_length, fine_tuning=tuning, stack=NEUTRAL
    )
    cluster = with_gpus(load_cluster("h100-80gb"), 64)
    return estimate_plan(entry.spec, cluster, training, layout, zero=1)


@pytest.mark.parametrize(("model", "tuning"), named(UNLIKE, UNLIKE))
def test_unlike_blocks_stay_what_they_are(model, tuning):
    plan = unlike_blocks(model, tuning)

    small = shrunk(plan)

    validate(small)
    assert operators_of(small) == operators_of(plan)


@pytest.mark.parametrize(("model", "tuning"), named(UNLIKE, {"frozen-blocks"}))
@pytest.mark.multiproc
def test_unlike_blocks_train_like_one_process(model, tuning):
    small = shrunk(unlike_blocks(model, tuning))

    require_parity(small, *run_plans([small]), run_reference(small))
