"""Every division of the model gives the losses, gradients and predicted bytes of one process."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from parplan.costmodels.communication.mesh import Mesh, MeshOrder
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Positions, Precision
from parplan.profiles.stack import AttentionKernel
from tests.helpers.cases import mostly_slow
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import (
    BF16_NORM_TOLERANCE,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    TrainingOutcome,
    Worlds,
    require_parity,
    run_reference,
)

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

NEOX = dataclasses.replace(
    GPT,
    name="tiny-neox",
    positions=Positions.ROTARY,
    rotary_fraction=0.25,
    parallel_residual=True,
    tied_embeddings=False,
)
CHEAP = ("norm1", "activation", "norm2")  # the operators that a selective plan runs again
BF16 = Precision.BF16
INTERLEAVED = {"schedule": Schedule.INTERLEAVED, "virtual_stages": 2, "num_micro_batches": 4}
ZBV = {"schedule": Schedule.ZBV, "virtual_stages": 2, "num_micro_batches": 4}
DUALPIPEV = ZBV | {"schedule": Schedule.DUALPIPEV}


def half_sequence_parallel() -> Plan:
    """Sequence parallelism on the first stage alone.

    The activation changes its placement at the border.
    """
    first = make_plan(LLAMA, pp=2, tp=2, sp=True)
    second = make_plan(LLAMA, pp=2, tp=2, sp=False)
    later = dataclasses.replace(
        second.stages[1],
        layers=tuple(
            dataclasses.replace(run, plan=f"later-{run.plan}") for run in second.stages[1].layers
        ),
    )
    plans = {
        **first.layer_plans,
        **{f"later-{name}": plan for name, plan in second.layer_plans.items()},
    }
    return dataclasses.replace(first, stages=(first.stages[0], later), layer_plans=plans)


def stages_first(plan: Plan) -> Plan:
    """The plan with the stages of a pipeline nearer to one another than the copies of the model."""
    return dataclasses.replace(plan, mesh=dataclasses.replace(plan.mesh, order=MeshOrder.DP_PP_TP))


def zero_by_operator(plan: Plan) -> Plan:
    """The plan with every ZeRO stage among the operators of a block."""
    stages = {"qkv": 0, "attention_out": 2, "norm2": 2, "fc1": 3, "fc2": 3}
    return dataclasses.replace(
        plan,
        layer_plans={
            name: dataclasses.replace(each, zero=1, own_zero=stages)
            if each.layer is LayerKind.BLOCK
            else each
            for name, each in plan.layer_plans.items()
        },
    )


PLANS: dict[str, Plan] = {
    "pp2-gpt-tied-across-stages": make_plan(GPT, pp=2),
    "pp2-llama-uneven-gpipe": make_plan(LLAMA, pp=2, blocks=(1, 3), schedule=Schedule.GPIPE),
    "pp2-llama-interleaved": make_plan(LLAMA, pp=2, **INTERLEAVED),
    "pp2-gpt-tied-zbv": make_plan(GPT, pp=2, **ZBV),
    "pp2-gpt-tied-dualpipev": make_plan(GPT, pp=2, **DUALPIPEV),
    "pp2-llama-zbv-few-micro-batches-recompute": make_plan(
        LLAMA, pp=2, recompute=CHEAP, **(ZBV | {"num_micro_batches": 2})
    ),
    "pp2-llama-own-lists": make_plan(
        LLAMA, pp=2, schedule=Schedule.CUSTOM, actions=("0F0,0F1,0B0,0B1", "1F0,1I0,1F1,1W0,1B1")
    ),
    "dp2-zero0": make_plan(GPT, dp=2, zero=(0,)),
    "dp2-zero1": make_plan(GPT, dp=2, zero=(1,)),
    "dp2-zero1-one-micro-batch": make_plan(GPT, dp=2, zero=(1,), num_micro_batches=1),
    "dp2-zero2": make_plan(GPT, dp=2, zero=(2,)),
    "dp2-zero3": make_plan(GPT, dp=2, zero=(3,)),
    "dp2-llama-a-zero-stage-per-block": make_plan(LLAMA, dp=2, zero=(0, 1, 2, 3)),
    **{
        f"llama-dp2-zero{zero}": make_plan(LLAMA, dp=2, zero=(zero,), num_micro_batches=4)
        for zero in range(4)
    },
    "dp2-gpt-zero-by-operator": zero_by_operator(make_plan(GPT, dp=2)),
    "dp2-llama-zero-by-operator-selective-recompute": zero_by_operator(
        make_plan(LLAMA, dp=2, num_micro_batches=4, recompute=(*CHEAP, "fc1"))
    ),
    "dp2-tp2-sp-gpt-zero-by-operator": zero_by_operator(make_plan(GPT, dp=2, tp=2, sp=True)),
    "bf16-dp2-gpt-zero-by-operator": zero_by_operator(make_plan(GPT, dp=2, precision=BF16)),
    "dp2-gpt-zero-by-operator-full-recompute": zero_by_operator(
        make_plan(GPT, dp=2, recompute="full")
    ),
    "pp2-dp2-llama-zero-by-operator": zero_by_operator(make_plan(LLAMA, pp=2, dp=2)),
    "dp2-zero3-full-recompute": make_plan(
        GPT, dp=2, zero=(3,), recompute="full", recompute_ends=True
    ),
    "dp2-llama-zero3-selective-recompute": make_plan(
        LLAMA, dp=2, zero=(3,), recompute=(*CHEAP, "rotary")
    ),
    "tp2-gpt": make_plan(GPT, tp=2),
    "tp2-llama": make_plan(LLAMA, tp=2),
    "tp2-sp-gpt": make_plan(GPT, tp=2, sp=True),
    "tp2-sp-llama-selective-recompute": make_plan(LLAMA, tp=2, sp=True, recompute=CHEAP),
    "tp2-sp-gpt-unfused-attention-recompute": make_plan(
        GPT, tp=2, sp=True, recompute=("attention",), attention=AttentionKernel.UNFUSED
    ),
    "tp2-sp-neox-parallel-residual": make_plan(NEOX, tp=2, sp=True),
    "dp3-uneven-shards": make_plan(LLAMA, dp=3, zero=(1, 2, 3, 0), global_batch_size=6),
    "pp4-more-micro-batches-than-stages": make_plan(
        GPT, pp=4, num_micro_batches=8, blocks=(0, 1, 2, 1)
    ),
    "pp2-dp2-zero2": make_plan(GPT, pp=2, dp=2, zero=(2,), num_micro_batches=4),
    "pp2-dp2-llama-zero3-interleaved": make_plan(LLAMA, pp=2, dp=2, zero=(3,), **INTERLEAVED),
    "pp2-dp2-gpt-tied-zbv-zero1": make_plan(GPT, pp=2, dp=2, zero=(1,), **ZBV),
    "pp2-tp2-sp-llama-dualpipev": make_plan(LLAMA, pp=2, tp=2, sp=True, **DUALPIPEV),
    "pp2-dp2-llama-zbv-zero-mixed": make_plan(LLAMA, pp=2, dp=2, zero=(0, 2, 1), **ZBV),
    "pp2-tp2-sp-llama-zbv": make_plan(LLAMA, pp=2, tp=2, sp=True, **ZBV),
    "bf16-pp2-dp2-zbv-zero1": make_plan(GPT, pp=2, dp=2, zero=(1,), precision=BF16, **ZBV),
    "pp2-tp2-sp-on-the-first-stage": half_sequence_parallel(),
    "dp2-tp2-sp-zero-mixed": make_plan(LLAMA, dp=2, tp=2, sp=True, zero=(3, 1, 0, 2)),
    "pp2-dp2-tp2-sp-gpt-tied-zero1": make_plan(
        GPT, pp=2, dp=2, tp=2, sp=True, zero=(1,), blocks=(1, 3)
    ),
    "pp2-dp2-tp2-sp-llama-zero3-interleaved": make_plan(
        LLAMA, pp=2, dp=2, tp=2, sp=True, zero=(3,), recompute="full", **INTERLEAVED
    ),
    "stages-first-pp2-dp2-gpt-tied-zero1": stages_first(make_plan(GPT, pp=2, dp=2, zero=(1,))),
    "stages-first-pp2-dp2-tp2-sp-llama-zero-mixed-interleaved": stages_first(
        make_plan(LLAMA, pp=2, dp=2, tp=2, sp=True, zero=(3, 1), **INTERLEAVED)
    ),
    "bf16-one-rank": make_plan(GPT, precision=BF16),
    "bf16-dp2-zero0": make_plan(GPT, dp=2, zero=(0,), precision=BF16),
    "bf16-dp2-zero1": make_plan(GPT, dp=2, zero=(1,), precision=BF16),
    "bf16-dp2-zero2": make_plan(GPT, dp=2, zero=(2,), precision=BF16),
    "bf16-dp2-zero3": make_plan(GPT, dp=2, zero=(3,), precision=BF16),
    "bf16-pp2-dp2-tp2-sp-tied-zero-mixed": make_plan(
        GPT,
        pp=2,
        dp=2,
        tp=2,
        sp=True,
        zero=(1, 3, 2, 0),
        recompute="full",
        precision=BF16,
        num_micro_batches=4,
    ),
}


SLOW = {  # what differs in them from the others is in one of those alone
    "stages-first-pp2-dp2-gpt-tied-zero1",
    "pp2-llama-uneven-gpipe",
    "pp2-llama-own-lists",
    "pp2-llama-zbv-few-micro-batches-recompute",
    "dp2-zero1-one-micro-batch",
    "dp2-zero3-full-recompute",
    "dp2-llama-a-zero-stage-per-block",
    "dp2-llama-zero3-selective-recompute",
    "dp2-gpt-zero-by-operator",
    "llama-dp2-zero0",
    "llama-dp2-zero1",
    "llama-dp2-zero2",
    "llama-dp2-zero3",
    "bf16-dp2-zero3",
    "pp2-gpt-tied-dualpipev",
    "tp2-sp-neox-parallel-residual",
    "tp2-sp-gpt-unfused-attention-recompute",
    "dp2-zero0",
    "dp2-zero1",
    "dp2-zero2",
    "dp2-zero3",
    "tp2-gpt",
    "dp2-gpt-zero-by-operator-full-recompute",
    "bf16-dp2-zero0",
    "bf16-dp2-zero1",
    "bf16-dp2-zero2",
    "tp2-llama",
    "tp2-sp-gpt",
    *(
        name
        for name, plan in PLANS.items()
        if plan.mesh.num_ranks > 2
        and name not in ("pp2-tp2-sp-on-the-first-stage", "stages-first-pp2-dp2-gpt-tied-zero1")
    ),
}
WORLDS = Worlds(PLANS, SLOW)


@cache
def reference(name: str) -> TrainingOutcome:
    return run_reference(dataclasses.replace(PLANS[name], mesh=Mesh(pp=1, dp=1, tp=1)))


@pytest.mark.parametrize("name", WORLDS.params())
def test_a_plan_trains_like_one_process(name):
    plan = PLANS[name]
    training_outcome, expected = WORLDS.outcome(name), reference(name)

    require_parity(plan, training_outcome, expected)
    exact = plan.training.precision is Precision.FP32
    assert training_outcome.norms == pytest.approx(
        expected.norms, rel=NORM_TOLERANCE if exact else BF16_NORM_TOLERANCE
    )


@pytest.mark.parametrize("name", WORLDS.params())
def test_every_rank_holds_exactly_the_predicted_bytes(name):
    plan = PLANS[name]

    states = WORLDS.outcome(name).states

    assert len(states) == plan.mesh.num_ranks
    assert {rank: measured for rank, (_, measured) in states.items()} == {
        rank: predicted for rank, (predicted, _) in states.items()
    }


LAYERS = LLAMA.num_layers + 2
BY_OPERATOR = (  # groups of a block are gathered and reduced as their own stage says
    "dp2-llama-zero-by-operator-selective-recompute",
    LLAMA.num_layers * (1 + 1 + 8),
    LLAMA.num_layers * (1 + 4 + 4),
    1,
)


@pytest.mark.parametrize(
    ("name", "gathers", "reduce_scatters", "all_reduces"),
    mostly_slow(
        [
            ("llama-dp2-zero0", 0, 0, 1),
            ("llama-dp2-zero1", LAYERS, LAYERS, 0),
            ("llama-dp2-zero2", LAYERS, 4 * LAYERS, 0),
            ("llama-dp2-zero3", 8 * LAYERS, 4 * LAYERS, 0),
            BY_OPERATOR,
        ],
        {BY_OPERATOR},
    ),
)
def test_a_step_of_four_micro_batches_communicates_as_its_zero_stage_says(
    name, gathers, reduce_scatters, all_reduces
):
    actual = WORLDS.outcome(name).collectives

    assert actual["_allgather_base_"] == gathers
    assert actual["_reduce_scatter_base_"] == reduce_scatters
    assert actual["allreduce_"] == all_reduces + 1  # one for the loss


def test_training_changes_the_loss():
    losses = reference("dp2-zero0").losses

    assert abs(losses[-1] - losses[0]) > 1000 * LOSS_TOLERANCE
