"""Context parallelism in the search: which degrees and forms are tried, and which are dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.price_cache import PriceCache
from parplan.planner.candidates.context_forms import without_beaten_forms
from parplan.planner.candidates.enumeration import CandidateSpace, layout_text
from parplan.planner.candidates.meshes import LONG_SEQUENCE
from parplan.planner.deadline import NEVER
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.documents import Documents
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import ContextForm
from tests.helpers.cases import named
from tests.helpers.planning import enumerate_candidates, find_plan

MODEL = replace(load_model("llama3-8b").spec, num_layers=4)
CLUSTER = with_gpus(load_cluster("a100-80gb"), 16, 8)
STACK = load_stack("megatron-core")
LONG = TrainingSpec(global_batch_size=16, seq_length=LONG_SEQUENCE, stack=STACK)


def layouts(training=LONG, **pins):
    return enumerate_candidates(MODEL, CLUSTER, training, Constraints(**pins)).layouts


@pytest.mark.parametrize(
    ("change", "degrees"),
    [
        pytest.param({}, {1, 2, 4, 8, 16}, id="long"),
        pytest.param({"seq_length": LONG_SEQUENCE // 2}, {1}, id="short"),
        pytest.param(
            {"seq_length": 4096, "global_batch_size": 8}, {1, 2, 4, 8, 16}, id="few-sequences"
        ),
        pytest.param({"seq_length": LONG_SEQUENCE + 4}, {1, 2}, id="pieces-that-divide"),
        pytest.param({"stack": load_stack("nanotron")}, {1}, id="the-stack-has-none"),
    ],
)
def test_sequences_are_divided_where_they_are_long_or_few(change, degrees):
    assert {each.mesh.cp for each in layouts(replace(LONG, **change), pp=(1,))} == degrees


def test_pins_ask_for_degrees_and_forms():
    pinned = layouts(replace(LONG, seq_length=1024), cp=(4,), context_form=(ContextForm.RING,))

    assert {(each.mesh.cp, each.mesh.context_form) for each in pinned} == {(4, ContextForm.RING)}
    with pytest.raises(ConfigError, match="the stack nanotron does not run it"):
        layouts(replace(LONG, stack=load_stack("nanotron")), context_form=(ContextForm.RING,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "documents", named({"whole": None, "documents": Documents(mean=2000)}, {"documents"})
)
def test_a_form_that_waits_longer_is_dropped_and_no_plan_is_lost(documents):
    stack = replace(STACK, divides_documents=documents is None)
    training = replace(LONG, documents=documents, stack=stack)
    prices = PriceCache(MODEL, training, machine_for(CLUSTER))
    every = layouts(training, cp=(2, 4), pp=(1,), tp=(1,))

    space = without_beaten_forms(CandidateSpace(every, ()), prices, NEVER)

    assert {*space.layouts} < {*every}
    assert space.considered == len(every)
    assert {each.candidate for each in space.pruned} <= {*map(layout_text, every)}
    assert all("attention waits less in the form" in pruned.reason for pruned in space.pruned)
    forms = {each.mesh.context_form for each in every}
    each_alone = [
        find_plan(
            MODEL,
            CLUSTER,
            training,
            constraints=Constraints(cp=(4,), pp=(1,), context_form=(form,)),
        ).predicted.step_time_s.value
        for form in sorted(forms)
    ]
    best = find_plan(MODEL, CLUSTER, training, constraints=Constraints(cp=(4,), pp=(1,)))
    assert best.predicted.step_time_s.value == pytest.approx(min(each_alone))
