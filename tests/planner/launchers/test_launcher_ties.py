"""Launchers whose plans the prices cannot tell apart, and the choice among them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parplan.planner.launchers.launcher_ties import preferred_place, ratio_band, tied
from parplan.planner.objective import Prefer
from parplan.planner.plan.ratio_band import plan_shape, ratio_share
from parplan.planner.request import PlanRequest
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision, TrainingSpec


def plan_of(stack_name):
    stack = load_stack(stack_name)
    training = TrainingSpec(
        global_batch_size=16,
        seq_length=64,
        precision=Precision.BF16,
        overlap_grad_reduce=stack.overlap_grad_reduce,
        stack=stack,
    )
    cluster = with_gpus(load_cluster("a100-80gb"), 2, None)
    return find_plan(
        PlanRequest(model=load_model("gpt-tiny").spec, cluster=cluster, training=training)
    )


@pytest.fixture(scope="module")
def plans():
    """Plans of two stacks."""
    return plan_of("megatron-core"), plan_of("torchtitan")


def slower(plan, factor):
    """The plan with another predicted step."""
    step = plan.predicted.step_time_s
    predicted = replace(plan.predicted, step_time_s=replace(step, value=step.value * factor))
    return replace(plan, predicted=predicted)


def leaner(plan, factor):
    """The plan with another peak on every stage."""
    stages = tuple(replace(each, total=each.total * factor) for each in plan.predicted.memory_gib)
    return replace(plan, predicted=replace(plan.predicted, memory_gib=stages))


@pytest.mark.slow
def test_the_errors_of_two_stacks_are_independent(plans):
    one, other = plans

    bands = (one.predicted.error_band, other.predicted.error_band)

    assert ratio_band(one, other) == pytest.approx(math.hypot(*(b.time.share for b in bands)))
    assert ratio_band(one, other) > max(b.time.share for b in bands)


def test_the_ratio_of_plans_of_one_stack_has_its_measured_band(plans):
    one, _ = plans

    band = one.predicted.error_band

    assert ratio_band(one, slower(one, 2)) == ratio_share(band, plan_shape(one), plan_shape(one))


def test_plans_beyond_the_band_of_the_ratio_are_told_apart(plans):
    one, _ = plans
    share = ratio_band(one, one)

    near, far = slower(one, 1 + 0.9 * share), slower(one, 1 + 1.1 * share)

    assert tied([one, near, far]) == [0, 1]


def test_a_plan_without_an_error_band_is_tied_with_none(plans):
    one, _ = plans
    unknown = replace(one, predicted=replace(one.predicted, error_band=None))

    assert ratio_band(unknown, one) == 0.0
    assert tied([unknown, slower(unknown, 1.01)]) == [0]
    assert preferred_place([unknown, slower(unknown, 1.01)], Prefer.LEANEST) == 0


def test_the_leanest_of_the_ties_is_preferred_and_no_slower_plan(plans):
    one, _ = plans
    share = ratio_band(one, one)
    near = leaner(slower(one, 1 + 0.5 * share), 0.5)
    far = leaner(slower(one, 1 + 2 * share), 0.1)

    assert preferred_place([one, near, far], Prefer.LEANEST) == 1
    assert preferred_place([one, near, far], Prefer.FASTEST) == 0


def test_the_robust_of_equal_plans_is_the_first(plans):
    one, _ = plans

    assert preferred_place([one, one], Prefer.ROBUST) == 0
