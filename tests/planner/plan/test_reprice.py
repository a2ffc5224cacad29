"""A plan file gives back the strategy it was made of, at the same price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.plan.plan_file import read_plan, write_plan
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import find_plan


def searched(model: str, gpus: int, pins: Constraints, objective: str = "throughput"):
    entry = load_model(model)
    training = TrainingSpec(global_batch_size=64, seq_length=entry.seq_length, stack=NEUTRAL)
    return find_plan(
        entry.spec,
        with_gpus(load_cluster("a100-80gb"), gpus),
        training,
        objective,
        constraints=pins,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pins", "objective"),
    [
        pytest.param("llama2-7b", Constraints(), "throughput", id="layers-that-differ"),
        pytest.param(
            "gpt-2.5b", Constraints(pp=(2,), virtual_stages=(3,)), "throughput", id="interleaved"
        ),
        pytest.param(
            "gpt-2.5b", Constraints(pp=(4,), virtual_stages=(1,)), "throughput", id="unequal-stages"
        ),
        pytest.param(
            "llama2-7b",
            Constraints(tp=(4,), sequence_parallel=(True,), zero=(2,)),
            "throughput",
            id="sequence-parallel",
        ),
        pytest.param("gpt-2.5b", Constraints(tp=(2,), pp=(2,)), "memory", id="least-redundant"),
    ],
)
def test_a_plan_file_is_priced_as_the_search_priced_it(model, pins, objective, tmp_path):
    plan = searched(model, 8, pins, objective)
    write_plan(plan, tmp_path / "plan.yaml")

    priced = reprice(read_plan(tmp_path / "plan.yaml")).plan

    assert priced == plan


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param(
            {"recompute": ("norm2", "gelu")},
            r"layer_plans\.A: recompute names gelu, the layer has norm1, ",
            id="unknown-operator",
        ),
        pytest.param(
            {"operators": {}},
            r"layer_plans\.A\.operators\.norm1: its placements are none that tp 2 can give it",
            id="none",
        ),
    ],
)
def test_a_layer_plan_that_cannot_be_is_refused(changed, message):
    plan = searched("gpt-2.5b", 2, Constraints(tp=(2,)))
    odd = {
        name: replace(p, **changed) if name == "A" else p for name, p in plan.layer_plans.items()
    }

    with pytest.raises(ConfigError, match=message):
        reprice(replace(plan, layer_plans=odd))


def test_a_plan_without_all_of_its_blocks_is_refused():
    plan = searched("gpt-2.5b", 2, Constraints(pp=(2,)))

    with pytest.raises(ConfigError, match="blocks on 1 stages, not 54 on"):
        reprice(replace(plan, stages=plan.stages[:1]))
