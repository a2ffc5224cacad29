"""Mixtures of experts: every mesh trains like one process, the block is that of transformers, and what cannot run is refused."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from costmodels.mesh import Mesh
from planner.plan import Plan
from profiles.spec import Precision
from tests.executor_plans import MIXTRAL, make_plan
from tests.executor_world import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    Outcome,
    run_plans,
    run_reference,
    worst_gradient,
)

BF16 = Precision.BF16
FP32_PLANS: dict[str, Plan] = {
    "one-rank": make_plan(MIXTRAL),
    "dp2": make_plan(MIXTRAL, dp=2, zero=(2,)),
    "ep2-zero0": make_plan(MIXTRAL, dp=2, ep=2),
    "ep2-zero1": make_plan(MIXTRAL, dp=2, ep=2, zero=(1,)),
    "ep2-zero3": make_plan(MIXTRAL, dp=2, ep=2, zero=(3, 2), recompute="full"),
    "ep2-selective-recompute": make_plan(MIXTRAL, dp=2, ep=2, zero=(2,), recompute=("norm1", "norm2", "activation")),
    "tp2": make_plan(MIXTRAL, tp=2),
    "tp2-sp": make_plan(MIXTRAL, tp=2, sp=True),
    "dp4-ep2-zero-mixed": make_plan(MIXTRAL, dp=4, ep=2, zero=(0, 1)),
    "dp4-ep2-zero3": make_plan(MIXTRAL, dp=4, ep=2, zero=(3, 2)),
    "dp2-tp2-sp-ep2-zero1": make_plan(MIXTRAL, dp=2, tp=2, ep=2, sp=True, zero=(1,)),
    "dp2-tp2-sp-zero3": make_plan(MIXTRAL, dp=2, tp=2, sp=True, zero=(3, 0), recompute="full"),
    "pp2-dp2-ep2": make_plan(MIXTRAL, pp=2, dp=2, ep=2, zero=(1,)),
    "pp2-dp2-tp2-sp-ep2-zero3": make_plan(MIXTRAL, pp=2, dp=2, tp=2, ep=2, sp=True, zero=(3,), recompute="full"),
}


@cache
def outcomes(world: int) -> dict[str, Outcome]:
    """All plans of `world` ranks, run in one world."""
    plans = {name: plan for name, plan in FP32_PLANS.items() if plan.mesh.num_ranks == world}
    return dict(zip(plans, run_plans(list(plans.values())), strict=True))


@cache
def reference() -> Outcome:
    return run_reference(dataclasses.replace(FP32_PLANS["one-rank"], mesh=Mesh(pp=1, dp=1, tp=1)))


@pytest.mark.parametrize("name", FP32_PLANS)
@pytest.mark.multiproc
def test_a_plan_with_experts_trains_like_one_process(name):
    found = outcomes(FP32_PLANS[name].mesh.num_ranks)[name]

    error, parameter = worst_gradient(found, reference())

    assert error <= GRADIENT_TOLERANCE, parameter
    assert found.losses == pytest.approx(reference().losses, rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("name", FP32_PLANS)
@pytest.mark.multiproc
def test_every_rank_holds_exactly_the_predicted_bytes(name):
    plan = FP32_PLANS[name]

    states = outcomes(plan.mesh.num_ranks)[name].states

    assert len(states) == plan.mesh.num_ranks
    assert {rank: measured for rank, (_, measured) in states.items()} == {rank: predicted for rank, (predicted, _) in states.items()}
