"""The share of a step that a tower takes equals the prices of its layers."""

from __future__ import annotations

import pytest

from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.plan.plan_strategy import prices_of_plan
from parplan.planner.plan.tower_cost import tower_cost
from parplan.planner.request import Constraints
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec, text_alone
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import find_plan

SEEN = load_model("gemma-3-4b").spec
TRAINING = TrainingSpec(global_batch_size=8, seq_length=2048, stack=NEUTRAL)
CLUSTER = with_gpus(load_cluster("h100-80gb"), 4, 4)
PINS = Constraints(pp=(4,), tp=(1,), micro_batch_size=(1,), virtual_stages=(1,))


@pytest.fixture(scope="module")
def plan():
    return find_plan(SEEN, CLUSTER, TRAINING, constraints=PINS)


@pytest.mark.slow
def test_seconds_and_bytes_are_those_of_the_layers_of_the_tower(plan):
    cost, prices = tower_cost(plan), prices_of_plan(plan)
    keys = prices.keys(0, prices.num_layers)
    assert not any(each.recompute for each in plan.layer_plans.values())  # all of it fits
    times = [prices.layer_time(key, 1, Sharding()).total_s for key in keys]

    assert cost.passes_s == pytest.approx(8 * sum(times[1:30]))  # 27 blocks between two layers
    assert cost.share == pytest.approx(sum(times[1:30]) / sum(times))
    assert (cost.ranks[0], cost.rank) == (0, 0)


def test_the_bytes_of_its_fullest_stage_are_a_part_of_that_stage(plan):
    cost = tower_cost(plan)
    stage = plan.predicted.memory_gib[cost.rank]

    assert 0 < cost.states_bytes < (stage.parameters + stage.gradients + stage.optimizer) * 2**30
    assert 0 < cost.saved_bytes <= (stage.activations + 1e-4) * 2**30  # rounded in a plan


def test_a_model_without_a_tower_has_no_such_cost():
    plan = find_plan(text_alone(SEEN), CLUSTER, TRAINING, constraints=PINS)

    assert tower_cost(plan) is None
