"""One configuration by hand is refused or priced, and its price agrees with the search."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.derived import blocks_of as planned_blocks
from parplan.planner.plan.prediction import Status
from parplan.planner.request import Constraints
from parplan.planner.search.estimate import UniformChoices, even_split
from parplan.planner.search.estimate import estimate_plan as plan_by_hand
from parplan.planner.stage_recompute import RecomputeRule
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB, MIB
from tests.helpers.cases import mostly_slow
from tests.helpers.planning import estimate_plan, find_plan

A100 = load_cluster("a100-80gb")
TINY = replace(load_model("gpt-tiny").spec, num_layers=8)
TRAINING = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)


def frame_of(
    pp=2, dp=2, tp=2, schedule=Schedule.ONE_F_ONE_B, v=1, b=1, m=4, sequence_parallel=False
):
    return ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp),
        schedule=schedule,
        virtual_stages=v,
        micro_batch_size=b,
        num_micro_batches=m,
        sequence_parallel=sequence_parallel,
    )


def estimate(layout=None, num_gpus=8, model=TINY, **choices):
    return estimate_plan(
        model, with_gpus(A100, num_gpus), TRAINING, layout or frame_of(), **choices
    )


def blocks_of(plan):
    return [
        [(blocks[0], blocks[-1]) for run in stage.layers if (blocks := planned_blocks(plan, run))]
        for stage in plan.stages
    ]


@pytest.mark.parametrize(
    ("num_layers", "pp", "expected"),
    [
        pytest.param(8, 2, (4, 4), id="even"),
        pytest.param(8, 3, (3, 3, 2), id="the-first-take-what-is-left"),
        pytest.param(5, 5, (1,) * 5, id="one-each"),
    ],
)
def test_an_even_split_by_hand(num_layers, pp, expected):
    assert even_split(num_layers, pp) == expected


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        pytest.param(None, [[(0, 3)], [(4, 7)]], id="even"),
        pytest.param((3, 5), [[(0, 2)], [(3, 7)]], id="uneven"),
    ],
)
def test_the_stages_hold_the_blocks_that_were_asked_for(blocks, expected):
    assert blocks_of(estimate(blocks=blocks)) == expected


def test_virtual_stages_take_turns():
    plan = estimate(frame_of(schedule=Schedule.INTERLEAVED, v=2), blocks=(6, 2))

    assert blocks_of(plan) == [[(0, 2)], [(3, 3)], [(4, 6)], [(7, 7)]]
    assert [stage.rank for stage in plan.stages] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("layout", "choices", "message"),
    [
        pytest.param(
            frame_of(dp=1),
            {},
            "pp 2 x dp 1 x tp 2 is 4 GPUs, the cluster has 8",
            id="mesh-is-not-the-cluster",
        ),
        pytest.param(
            frame_of(pp=1, dp=1, tp=8, m=8),
            {},
            "tp 8 does not divide the 4 attention heads",
            id="tensor-parallel",
        ),
        pytest.param(
            frame_of(m=3),
            {},
            "the global batch of 8 is not micro-batch 1 x dp 2 x a whole number",
            id="batch",
        ),
        pytest.param(
            None, {"blocks": (4, 3)}, "the stages hold 4, 3 blocks", id="blocks-do-not-add-up"
        ),
        pytest.param(None, {"blocks": (8,)}, "the stages hold 8 blocks", id="too-few-stages"),
        pytest.param(None, {"blocks": (8, 0)}, "the stages hold 8, 0 blocks", id="an-empty-stage"),
        pytest.param(
            frame_of(schedule=Schedule.INTERLEAVED, v=2),
            {"blocks": (5, 3)},
            "the ranks hold 5, 3 blocks, not multiples of the 2 virtual stages",
            id="chunks-are-equal",
        ),
        pytest.param(None, {"zero": 4}, "--zero is 4", id="zero-stage"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(layout, choices, message):
    with pytest.raises(ConfigError, match=message):
        estimate(layout, **choices)


def test_a_plan_that_does_not_fit_is_priced_all_the_same():
    entry = load_model("gpt-175b")
    training = TrainingSpec(global_batch_size=8, seq_length=2048, stack=NEUTRAL)

    plan = estimate_plan(entry.spec, with_gpus(A100, 8), training, frame_of(pp=1, dp=1, tp=8, m=8))

    (memory,) = plan.predicted.memory_gib
    assert memory.total > 3 * memory.capacity
    assert plan.predicted.step_time_s.value > 0
    assert plan.search.status is Status.ESTIMATE


@pytest.mark.parametrize(
    ("recompute", "zero", "layout", "num_gpus"),
    [
        pytest.param(Recompute.NONE, 1, frame_of(), 8, id="zero-1"),
        pytest.param(Recompute.FULL, 3, frame_of(pp=1, dp=4, m=2), 8, id="zero-3-full-recompute"),
        pytest.param(
            Recompute.SELECTIVE,
            0,
            frame_of(dp=1, m=8, schedule=Schedule.INTERLEAVED, v=4),
            4,
            id="interleaved",
        ),
    ],
)
def test_the_search_pinned_to_one_configuration_says_the_same(recompute, zero, layout, num_gpus):
    """Everything but the split of the blocks is pinned; the estimate has the search's split."""
    cluster, mesh = with_gpus(A100, num_gpus), layout.mesh
    pins = Constraints(
        pp=(mesh.pp,),
        dp=(mesh.dp,),
        tp=(mesh.tp,),
        micro_batch_size=(layout.micro_batch_size,),
        virtual_stages=(layout.virtual_stages,),
        schedule=(layout.schedule,),
        sequence_parallel=(layout.sequence_parallel,),
        recompute=(recompute,),
        zero=(zero,),
        megatron_sharding=True,
    )

    plan = find_plan(TINY, cluster, TRAINING, constraints=pins)
    counts = [sum(last - first + 1 for first, last in chunks) for chunks in blocks_of(plan)]
    per_rank = tuple(sum(counts[rank :: mesh.pp]) for rank in range(mesh.pp))
    by_hand = estimate_plan(
        TINY, cluster, TRAINING, layout, recompute=recompute, zero=zero, blocks=per_rank
    )

    assert by_hand.predicted == plan.predicted
    assert by_hand.layer_plans == plan.layer_plans
    assert by_hand.stages == plan.stages
    assert by_hand.search.value == plan.search.value


@pytest.mark.parametrize(
    "name", mostly_slow(["gemma-3-12b", "llama4-scout", "whisper-large-v3"], ["whisper-large-v3"])
)
def test_models_with_a_tower_recompute_by_memory_too(name):
    request = request_of(
        TargetOptions(model=name, gpus=64, gpu="b200-180gb", global_batch_size=128)
    )
    choices = UniformChoices(zero=3, recompute_first_stage=RecomputeRule())

    plan = plan_by_hand(request, frame_of(pp=1, dp=64, tp=1, b=2, m=1), choices)

    most = limit_bytes(request.cluster, request.training.stack, request.options)
    assert plan.predicted.memory_gib[0].total * GIB <= most + MIB
