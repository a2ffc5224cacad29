"""Plans with context parallelism train like one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.spec import ModelSpec, Precision
from parplan.profiles.stack import ContextForm
from tests.helpers import executor_plans
from tests.helpers.executor_plans import MIXTRAL, make_plan
from tests.helpers.executor_world import (
    TrainingOutcome,
    Worlds,
    require_parity,
    run_reference,
)

RING, GATHER = ContextForm.RING, ContextForm.ALL_GATHER
EXCHANGE, TWO_LEVEL = ContextForm.ALL_TO_ALL, ContextForm.TWO_LEVEL
ALL = "full"
GPT, LLAMA = (replace(each, num_layers=2) for each in (executor_plans.GPT, executor_plans.LLAMA))


def offloaded(plan: Plan, what: Offload, *, kind: str) -> Plan:
    """The plan with states of one kind of layer on the host."""
    layer_plans = {
        name: replace(each, offload=(what,)) if name.startswith(kind) else each
        for name, each in plan.layer_plans.items()
    }
    return replace(plan, layer_plans=layer_plans)


def hybrid(plan: Plan) -> Plan:
    """The plan with two neighbours for each copy of the states."""
    layer_plans = {name: replace(each, zero_ranks=2) for name, each in plan.layer_plans.items()}
    return replace(plan, layer_plans=layer_plans)


PLANS: dict[str, Plan] = {
    "cp2-ring": make_plan(LLAMA, cp=2, form=RING, zero=(2,)),
    "cp2-gather": make_plan(GPT, cp=2, form=GATHER, zero=(0,)),
    "cp2-exchange": make_plan(LLAMA, cp=2, form=EXCHANGE, zero=(3,)),
    "cp2-ring-full-recompute": make_plan(GPT, cp=2, form=RING, zero=(3,), recompute=ALL),
    "cp2-ring-attention-recompute": make_plan(LLAMA, cp=2, form=RING, recompute=("attention",)),
    "cp2-exchange-rotary-recompute": make_plan(
        LLAMA, cp=2, form=EXCHANGE, recompute=("norm1", "qkv", "rotary")
    ),
    "cp2-gather-bf16": make_plan(LLAMA, cp=2, form=GATHER, zero=(1,), precision=Precision.BF16),
    "cp2-ring-states-on-host": offloaded(
        make_plan(LLAMA, cp=2, form=RING, zero=(2,)), Offload.STATES, kind="block"
    ),
    "cp2-gather-table-on-host": offloaded(
        make_plan(LLAMA, cp=2, form=GATHER, zero=(1,)), Offload.LOOKUP, kind="embedding"
    ),
    "cp2-ring-experts": make_plan(MIXTRAL, cp=2, form=RING, zero=(2,)),
    "cp2-exchange-ep2": make_plan(MIXTRAL, cp=2, ep=2, form=EXCHANGE, zero=(1,)),
    "cp4-ring": make_plan(GPT, cp=4, form=RING, zero=(1,)),
    "cp4-gather": make_plan(LLAMA, cp=4, form=GATHER, zero=(3,), recompute=ALL),
    "cp4-exchange": make_plan(LLAMA, cp=4, form=EXCHANGE, zero=(0,)),
    "cp4-two-level": make_plan(LLAMA, cp=4, form=TWO_LEVEL, zero=(2,)),
    "dp2-cp2-ring-zero3": make_plan(LLAMA, dp=2, cp=2, form=RING, zero=(3, 0)),
    "dp2-cp2-gather-hybrid": hybrid(make_plan(GPT, dp=2, cp=2, form=GATHER, zero=(2,))),
    "cp2-gather-tp2-sp": make_plan(LLAMA, cp=2, form=GATHER, tp=2, sp=True, zero=(1,)),
    "cp2-ring-tp2": make_plan(GPT, cp=2, form=RING, tp=2, zero=(2,), recompute=("attention",)),
    "cp2-exchange-tp2-sp": make_plan(
        GPT, cp=2, form=EXCHANGE, tp=2, sp=True, zero=(3,), recompute=ALL
    ),
    "pp2-cp2-ring": make_plan(GPT, pp=2, cp=2, form=RING, zero=(1,)),
    "pp2-cp2-gather-ahead": make_plan(
        LLAMA,
        pp=2,
        cp=2,
        form=GATHER,
        zero=(2,),
        recompute=ALL,
        schedule=Schedule.EARLY_RECOMPUTE,
        num_micro_batches=4,
    ),
    "pp2-cp2-ring-zbv": make_plan(
        executor_plans.LLAMA,
        pp=2,
        cp=2,
        form=RING,
        zero=(1,),
        schedule=Schedule.ZBV,
        virtual_stages=2,
        num_micro_batches=4,
    ),
}
QUICK = {  # every form, one on the host, experts, and the other axes
    "cp2-gather-table-on-host",
    "cp2-exchange-ep2",
    "cp4-two-level",
}
WORLDS = Worlds(PLANS, slow=PLANS.keys() - QUICK)


@cache
def reference(model: ModelSpec) -> TrainingOutcome:
    return run_reference(make_plan(model))


@pytest.mark.parametrize("name", WORLDS.params())
@pytest.mark.multiproc
def test_a_plan_with_context_parallelism_trains_like_one_process(name):
    plan = PLANS[name]
    training_outcome = WORLDS.outcome(name)

    require_parity(plan, training_outcome, reference(plan.model))


@pytest.mark.parametrize("name", WORLDS.params())
@pytest.mark.multiproc
def test_context_parallel_ranks_hold_the_predicted_states(name):
    states = WORLDS.outcome(name).states

    assert len(states) == PLANS[name].mesh.num_ranks
    assert all(predicted == measured for predicted, measured in states.values())
