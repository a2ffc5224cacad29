"""Layouts whose tensor-parallel ranks divide the tokens of an image."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.candidates.enumeration import CandidateSpace
from parplan.planner.candidates.tower_divisions import with_tower_divisions
from parplan.planner.request import Constraints
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import enumerate_candidates

CLUSTER = with_gpus(load_cluster("a100-80gb"), 8, 8)
TRAINING = TrainingSpec(global_batch_size=32, seq_length=4096, stack=NEUTRAL)


@pytest.mark.parametrize(
    ("name", "stack", "divides_sequences"),
    [
        pytest.param("qwen2-vl-7b", "parplan", True, id="5120-patches"),
        pytest.param("mistral-small-3.1-24b", "parplan", False, id="3025-tokens"),
        pytest.param("mistral-small-3.1-24b", "megatron-core", True, id="padded"),
    ],
)
def test_a_stack_of_equal_parts_divides_no_sequences_beside_an_odd_number_of_tokens(
    name, stack, divides_sequences
):
    model, training = load_model(name).spec, replace(TRAINING, stack=load_stack(stack))
    space: CandidateSpace = enumerate_candidates(model, CLUSTER, training, Constraints(tp=(2,)))

    layouts = with_tower_divisions(space, model, training.stack).layouts

    assert {each.sequence_parallel for each in layouts} == {False, divides_sequences}
