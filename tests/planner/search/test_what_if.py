"""Questions about a plan: each answer is the search of a changed request."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.planner.plan.plan import Plan
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.many_searches import Answer, answer_request
from parplan.planner.search.what_if import (
    BASE,
    Flip,
    PlanQuestion,
    degrees,
    find_flip,
    knob_named,
    questions_about,
    reply_to,
    request_of_plan,
)
from parplan.profiles.machines.off_speed import SpeedFactors, at_speeds, cluster_at
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.report.plans.explanation_document import explanation_document
from parplan.report.plans.explanation_text import explanation


@cache
def small_plan() -> Plan:
    return find_plan(request_of(TargetOptions(model="gpt-1.5b", gpus=4, seq_length=512)))


def step_s(reply: object) -> float:
    assert isinstance(reply, Answer)
    assert reply.plan is not None
    return reply.plan.predicted.step_time_s.value


def test_the_base_is_the_plan_and_pins_and_knobs_change_one_thing() -> None:
    plan = small_plan()
    base_s = step_s(reply_to(plan, PlanQuestion(what=BASE)))
    assert base_s == plan.predicted.step_time_s.value
    pinned = reply_to(plan, PlanQuestion(what="pp", value=2))
    assert isinstance(pinned, Answer)
    assert pinned.plan is not None
    assert pinned.plan.mesh.pp == 2
    assert step_s(pinned) >= base_s
    assert step_s(reply_to(plan, PlanQuestion(what="GPUs", value=2.0))) < base_s
    assert (
        step_s(reply_to(plan, PlanQuestion(what="memory of a GPU", value=1.1))) <= base_s * 1.0005
    )


@pytest.mark.slow
def test_a_flip_is_between_two_factors_whose_best_meshes_differ() -> None:
    plan = small_plan()
    request, knob = request_of_plan(plan), knob_named("memory of a GPU")
    found = find_flip(request, knob, 0.1, plan.mesh)
    assert isinstance(found, Flip)
    assert found.factor < found.last <= 1
    same = answer_request(knob.scale(request, found.last)).plan
    assert same is not None
    assert degrees(same.mesh) == degrees(plan.mesh)
    other = answer_request(knob.scale(request, found.factor)).plan
    assert other is None or degrees(other.mesh) != degrees(plan.mesh)


def test_a_cluster_at_other_speeds_is_priced_as_its_machine() -> None:
    cluster, speeds = small_plan().cluster, SpeedFactors(inside_node=0.5)
    changed = machine_for(cluster_at(cluster, speeds))
    expected = at_speeds(machine_for(cluster), speeds)
    assert asdict(changed.profile) == asdict(expected.profile)
    assert changed.cluster.intra_node == expected.cluster.intra_node


@pytest.mark.slow
def test_every_question_has_a_sentence_and_a_value() -> None:
    plan = small_plan()
    asked = [question for question in questions_about(plan) if not question.flips]
    replies = {question: reply_to(plan, question) for question in asked[:4]}
    flip = PlanQuestion(what="batch", value=4.0, flips=True)
    stays = PlanQuestion(what="batch", value=0.25, flips=True)
    replies |= {flip: Flip(factor=2.0, last=1.4, plan=plan), stays: None}
    parts = {part.title: " ".join(part.sentences) for part in explanation(plan, replies)}
    assert "finds nothing faster" in parts["Why this plan"]
    assert (
        "Between 1.4 and 2 times the batch the best plan becomes" in parts["Where the choice flips"]
    )
    assert "down to 0.25 times the batch" in parts["Where the choice flips"]
    document = explanation_document(plan, replies)
    assert len(document.questions) == len(replies)
    assert document.questions[-2].flips_at == pytest.approx(2.0)
