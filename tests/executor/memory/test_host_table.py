"""The token table on the host: values of one process, planned bytes, and traffic.

The values are losses and gradients.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
import torch.distributed as dist

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.run_options import Options
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.spec import Precision
from tests.helpers.cases import mostly_slow
from tests.helpers.executor_plans import GPT, LLAMA, SEQ_LENGTH, make_plan
from tests.helpers.executor_world import (
    BF16_GRADIENT_TOLERANCE,
    BF16_LOSS_TOLERANCE,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    TrainingOutcome,
    run_plans,
    run_reference,
    worst_gradient,
)

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

UNTIED = dataclasses.replace(GPT, name="tiny-untied", tied_embeddings=False)


def looked_up(plan: Plan) -> Plan:
    """With the token table on the host; a tied one is the head's too."""
    holders = ("embedding", "head") if plan.model.tied_embeddings else ("embedding",)
    plans = {
        name: dataclasses.replace(layer_plan, offload=(Offload.LOOKUP,))
        if name.startswith(holders)
        else layer_plan
        for name, layer_plan in plan.layer_plans.items()
    }
    return dataclasses.replace(plan, layer_plans=plans)


PLANS = {
    "one-rank": looked_up(make_plan(UNTIED)),
    "dp2-zero0": looked_up(make_plan(UNTIED, dp=2)),
    "dp2-zero3-llama": looked_up(make_plan(LLAMA, dp=2, zero=(3,), num_micro_batches=4)),
    "pp2": looked_up(make_plan(UNTIED, pp=2)),
    "pp2-interleaved": looked_up(
        make_plan(LLAMA, pp=2, schedule=Schedule.INTERLEAVED, virtual_stages=2)
    ),
    "pp2-zbv": looked_up(
        make_plan(LLAMA, pp=2, schedule=Schedule.ZBV, virtual_stages=2, num_micro_batches=4)
    ),
    "pp2-early-recompute": looked_up(
        make_plan(LLAMA, pp=2, schedule=Schedule.EARLY_RECOMPUTE, recompute="full")
    ),
    "bf16-dp2-zero3-recomputed": looked_up(
        make_plan(
            UNTIED, dp=2, zero=(3,), recompute="full", recompute_ends=True, precision=Precision.BF16
        )
    ),
}
TIED = {
    "tied": looked_up(make_plan()),
    "tied-dp2-zero0": looked_up(make_plan(dp=2)),
    "tied-dp2-zero1": looked_up(make_plan(dp=2, zero=(1,))),
    "tied-dp2-zero2-bf16": looked_up(make_plan(dp=2, zero=(2,), precision=Precision.BF16)),
    "tied-dp2-zero3": looked_up(make_plan(dp=2, zero=(3,), recompute="full")),
    "tied-tp2": looked_up(make_plan(tp=2, sp=True)),
    "tied-dp2-tp2-zero1": looked_up(make_plan(dp=2, tp=2, zero=(1,))),
    "tied-pp2": looked_up(make_plan(pp=2)),
    "tied-pp2-dp2-zero1": looked_up(make_plan(pp=2, dp=2, zero=(1,))),
    "tied-pp2-zbv": looked_up(
        make_plan(pp=2, schedule=Schedule.ZBV, virtual_stages=2, num_micro_batches=4)
    ),
}
PLANS |= TIED
PLAIN = {
    "dp2-zero0": make_plan(UNTIED, dp=2),
    "dp2-zero3-llama": make_plan(LLAMA, dp=2, zero=(3,), num_micro_batches=4),
}


@cache
def outcomes(world: int) -> dict[str, TrainingOutcome]:
    plans = {name: plan for name, plan in PLANS.items() if plan.mesh.num_ranks == world}
    return dict(zip(plans, run_plans(list(plans.values())), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_it_trains_like_one_process(name):
    plan = PLANS[name]
    actual, expected = (
        outcomes(plan.mesh.num_ranks)[name],
        run_reference(dataclasses.replace(plan, mesh=Mesh(pp=1, dp=1, tp=1))),
    )
    exact = plan.training.precision is Precision.FP32

    error, parameter = worst_gradient(actual, expected)

    assert error <= (GRADIENT_TOLERANCE if exact else BF16_GRADIENT_TOLERANCE), parameter
    assert actual.losses == pytest.approx(
        expected.losses, rel=LOSS_TOLERANCE if exact else BF16_LOSS_TOLERANCE
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_ranks_hold_their_columns_of_the_table_and_its_states(name):
    plan = PLANS[name]

    for (_, _, _), (predicted, measured) in outcomes(plan.mesh.num_ranks)[name].states.items():
        assert measured == predicted


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(PLAIN, {"dp2-zero3-llama"}))
def test_rows_and_their_gradients_are_exchanged_and_no_gradient_of_the_table_is_reduced(name):
    outcomes = run_plans([PLANS[name], PLAIN[name]])
    actual, plain = (outcome.collectives for outcome in outcomes)

    assert actual["alltoall_base_"] == 2 * PLANS[name].pipeline.num_micro_batches
    assert (
        actual["_reduce_scatter_base_"] + actual["allreduce_"]
        <= plain["_reduce_scatter_base_"] + plain["allreduce_"]
    )


def test_what_crosses_are_rows_of_the_micro_batches_and_the_table_is_updated_where_it_is(tmp_path):
    plan = PLANS["one-rank"]
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        trainer = build_trainer(plan, Options(steps=1), torch.device("cpu"))
        table = trainer.pipeline.stages[0].body.embedding.tokens
        before = table.weight.to_local().clone()
        list(trainer.run())
    finally:
        dist.destroy_process_group()

    rows = plan.training.global_batch_size * SEQ_LENGTH * UNTIED.hidden_size * 4
    assert (table.copies.back_bytes, table.copies.out_bytes) == (rows, rows)
    assert trainer.copied_bytes == (0, 0)  # of activations
    assert not before.equal(table.weight.to_local())
