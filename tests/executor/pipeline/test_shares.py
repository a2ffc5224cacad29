"""Data-parallel ranks with unequal shares of the batch train as one process does."""

from __future__ import annotations

import pytest
import torch

from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.pipeline.shares import rank_share
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import Worlds, require_parity, run_reference

PIPED = {"pp": 2, "dp": 2, "blocks": (1, 3), "shares": (3, 1)}
PLANS = {
    "pp2-zero1": make_plan(GPT, zero=(1,), **PIPED),
    "pp2-zero3": make_plan(GPT, zero=(3,), **PIPED),
    "dp4-zero0": make_plan(LLAMA, dp=4, zero=(0,), shares=(3, 1, 2, 2)),
    "dp4-zero3": make_plan(LLAMA, dp=4, zero=(3,), shares=(3, 1, 2, 2)),
    "dp4-zero2": make_plan(LLAMA, dp=4, zero=(2, 0, 1), shares=(1, 1, 5, 1)),
    "tp2-zero3": make_plan(LLAMA, dp=2, tp=2, sp=True, zero=(3,), shares=(1, 3)),
    "gpipe-zero2": make_plan(LLAMA, zero=(2,), schedule=Schedule.GPIPE, **PIPED),
    "zbv-zero2": make_plan(
        LLAMA,
        pp=2,
        dp=2,
        zero=(2, 1),
        shares=(1, 3),
        schedule=Schedule.ZBV,
        virtual_stages=2,
    ),
    "recompute-zero3": make_plan(GPT, zero=(3,), recompute="full", **PIPED),
    "early-zero3": make_plan(
        GPT, zero=(3,), recompute="full", schedule=Schedule.EARLY_RECOMPUTE, **PIPED
    ),
}
SLOW = set(PLANS) - {"pp2-zero3", "dp4-zero0"}
WORLDS = Worlds(PLANS, SLOW)

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]


@pytest.mark.multiproc
@pytest.mark.parametrize("name", WORLDS.params())
def test_losses_and_gradients_are_those_of_one_process(name):
    plan = PLANS[name]
    require_parity(plan, WORLDS.outcome(name), run_reference(plan))


@pytest.mark.parametrize(
    ("zero", "listed"), [((0, 1), 1), ((1, 2), 3), ((3,), 3)], ids=["step", "mixed", "gathers"]
)
def test_a_rank_with_fewer_micro_batches_has_empty_ones_where_layers_meet(zero, listed):
    plan = make_plan(GPT, zero=zero, **PIPED)
    share = rank_share(plan, 1)
    assert (share.own, share.listed) == (1, listed)
    rows = [len(each) for each in share.split(torch.arange(2))]
    assert rows == [2, *[0] * (listed - 1)]
