"""Questions about a plan: each answer is the search of a changed request."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from functools import cache

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.plan import Plan
from parplan.planner.search.asked_plan import AskedPlan, Bound, Replies, Reply
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
    request_of_plan,
)
from parplan.profiles.machines.off_speed import SpeedFactors, at_speeds, cluster_at
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.report.plans.explanation_document import explanation_document
from parplan.report.plans.explanation_text import explanation


@cache
def small_plan() -> Plan:
    return find_plan(request_of(TargetOptions(model="gpt-1.5b", gpus=4, seq_length=512)))


def reply_to(plan: Plan, question: PlanQuestion) -> Reply:
    return AskedPlan(plan).reply_to(question)


def step_s(reply: object) -> float:
    assert isinstance(reply, Answer)
    assert reply.plan is not None
    return reply.plan.predicted.step_time_s.value


@pytest.mark.slow
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

    def best_at(factor: float, _: Collection[Mesh]) -> Plan | None:
        return answer_request(knob.scale(request, factor)).plan

    found = find_flip(best_at, 0.1, plan)
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
    each: dict[PlanQuestion, Reply] = {question: reply_to(plan, question) for question in asked[:4]}
    flip = PlanQuestion(what="batch", value=4.0, flips=True)
    stays = PlanQuestion(what="batch", value=0.25, flips=True)
    each |= {flip: Flip(factor=2.0, last=1.4, plan=plan), stays: None}
    replies = Replies(each=each)
    parts = {part.title: " ".join(part.sentences) for part in explanation(plan, replies)}
    assert "finds nothing faster" in parts["Why this plan"]
    assert (
        "Between 1.4 and 2 times the batch the best plan becomes" in parts["Where the choice flips"]
    )
    assert "down to 0.25 times the batch" in parts["Where the choice flips"]
    document = explanation_document(plan, replies)
    assert len(document.questions) == len(each)
    assert document.questions[-2].flips_at == pytest.approx(2.0)


def test_bounds_are_said_as_bounds_and_what_has_no_answer_is_named() -> None:
    plan = small_plan()
    step_s = plan.predicted.step_time_s.value
    each: dict[PlanQuestion, Reply] = {
        PlanQuestion(what="tp", value=2): Bound(least_s=1.5 * step_s),
        PlanQuestion(what="tp", value=4): Bound(least_s=float("inf")),
        PlanQuestion(what="pp", value=2): Bound(least_s=0.9 * step_s),
        PlanQuestion(what="bandwidth inside a node", value=1.25): Bound(most_s=step_s / 1.1),
    }
    missing = PlanQuestion(what="batch", value=4.0, flips=True)
    replies = Replies(each=each, untried=(missing,), stopped="the time limit")
    parts = {part.title: " ".join(part.sentences) for part in explanation(plan, replies)}
    why = parts["Why this plan"]
    assert "With tp 2 every plan without the host takes at least" in why
    assert "50.0 % more, by bounds" in why
    assert "With tp 4 nothing fits without the host, by bounds" in why
    assert "With pp 2 bounds leave a plan as fast open" in why
    assert "inside a node buys at least 10.0 % more tokens/s" in parts["What more would buy"]
    method = parts["How this was found"]
    assert "left 4 questions with a bound in place of a search" in method
    assert "no answer to the flip up to 4 times the batch" in method
    document = explanation_document(plan, replies)
    assert [each.finished for each in document.questions] == [False] * 4
    assert document.questions[0].at_least_s == pytest.approx(1.5 * step_s)
    assert document.questions[1].at_least_s is None
    assert document.untried == ("the flip up to 4 times the batch",)
