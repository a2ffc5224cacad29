"""The flags of a baseline are those with which its system runs the strategy."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.first_blocks import with_first_blocks
from parplan.planner.baselines.uniform_strategies import equal_stages
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import ContextForm
from parplan.report.searches.baseline_flags import flags_text
from tests.helpers.planning import find_plan


@cache
def plan_of(model: str) -> Plan:
    stack = load_stack("megatron-core")
    return find_plan(
        load_model(model).spec,
        with_gpus(load_cluster("a100-80gb"), 8),
        TrainingSpec(global_batch_size=16, seq_length=128, stack=stack),
        constraints=Constraints(dp=(8,), micro_batch_size=(1,), recompute=(Recompute.NONE,)),
    )


def strategy_of(
    mesh: Mesh, zero: int, level: Recompute, ends: tuple[int, int] = (0, 0), **layout: Any
) -> Strategy:
    plain = {
        "schedule": Schedule.ONE_F_ONE_B,
        "virtual_stages": 1,
        "micro_batch_size": 1,
        "num_micro_batches": 16 // mesh.dp,
        "sequence_parallel": mesh.tp > 1,
    }
    return equal_stages(ParallelLayout(mesh=mesh, **(plain | layout)), 4, zero, level, ends)


@pytest.mark.parametrize(
    ("name", "model", "strategy", "flags"),
    [
        pytest.param(
            "megatron",
            "qwen3-moe-tiny",
            strategy_of(Mesh(pp=1, dp=2, tp=2, ep=4), 1, Recompute.FULL),
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
            "--expert-tensor-parallel-size 1 --sequence-parallel --use-distributed-optimizer "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
            "--micro-batch-size 1 --global-batch-size 16",
            id="megatron-experts",
        ),
        pytest.param(
            "megatron",
            "qwen3-moe-tiny",
            strategy_of(
                Mesh(pp=2, dp=1, cp=4, tp=1, context_form=ContextForm.TWO_LEVEL),
                0,
                Recompute.SELECTIVE,
                (1, 1),
            ),
            "--pipeline-model-parallel-size 2 --context-parallel-size 4 --cp-comm-type a2a+p2p "
            "--hierarchical-context-parallel-sizes 2 2 --recompute-granularity selective "
            "--micro-batch-size 1 --global-batch-size 16",
            id="megatron-two-levels",
        ),
        pytest.param(
            "megatron",
            "gpt-tiny",
            strategy_of(
                Mesh(pp=3, dp=1, tp=1),
                0,
                Recompute.NONE,
                (1, 1),
            ),
            "--pipeline-model-parallel-size 3 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split --micro-batch-size 1 --global-batch-size 16",
            id="megatron-counted-ends",
        ),
        pytest.param(
            "megatron-1f1b",
            "gpt-tiny",
            with_first_blocks(strategy_of(Mesh(pp=2, dp=1, tp=1), 0, Recompute.NONE), 1),
            "--pipeline-model-parallel-size 2 --recompute-granularity full "
            "--recompute-method block --recompute-num-layers 1 "
            "--micro-batch-size 1 --global-batch-size 16",
            id="megatron-some-blocks",
        ),
        pytest.param(
            "deepspeed-3d",
            "qwen3-moe-tiny",
            strategy_of(Mesh(pp=1, dp=4, tp=1, ep=4), 2, Recompute.FULL),
            "--no-pipeline-parallel --moe-expert-parallel-size 4 --zero-stage 2 "
            "--deepspeed-activation-checkpointing --micro-batch-size 1 --global-batch-size 16",
            id="deepspeed-experts",
        ),
        pytest.param(
            "deepspeed-3d",
            "gpt-tiny",
            strategy_of(
                Mesh(pp=1, dp=2, cp=2, tp=1, context_form=ContextForm.ALL_TO_ALL),
                3,
                Recompute.NONE,
            ),
            "--no-pipeline-parallel --ds-sequence-parallel-size 2 --zero-stage 3 "
            "--micro-batch-size 1 --global-batch-size 16",
            id="deepspeed-sequences",
        ),
        pytest.param(
            "torchtitan",
            "qwen3-moe-tiny",
            strategy_of(
                Mesh(pp=2, dp=2, cp=2, tp=2, ep=4, etp=2, context_form=ContextForm.RING),
                2,
                Recompute.NONE,
                schedule=Schedule.ZBV,
                virtual_stages=2,
            ),
            "--parallelism.data_parallel_shard_degree 2 --parallelism.context_parallel_degree 2 "
            "--parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree 2 "
            "--parallelism.expert_parallel_degree 4 --parallelism.expert_tensor_parallel_degree 2 "
            "--parallelism.context_parallel_rotate_method alltoall "
            "--parallelism.pipeline_parallel_schedule ZBVZeroBubble "
            "--parallelism.pipeline_parallel_microbatch_size 1 "
            "--parallelism.fsdp_reshard_after_forward never --activation_checkpoint.mode none "
            "--training.local_batch_size 8 --training.global_batch_size 16",
            id="torchtitan-all-axes",
        ),
        pytest.param(
            "zero-1",
            "gpt-tiny",
            strategy_of(Mesh(pp=1, dp=2, tp=1), 1, Recompute.NONE),
            "",
            id="no-system",
        ),
    ],
)
def test_the_flags_name_every_degree_beyond_one(name, model, strategy, flags):
    assert flags_text(name, strategy, plan_of(model)) == flags
