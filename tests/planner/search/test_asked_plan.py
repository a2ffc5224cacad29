"""Questions about a plan are asked until a time limit; what is not searched has a bound."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.planner.deadline import NEVER
from parplan.planner.plan.plan import Plan
from parplan.planner.search import asked_plan
from parplan.planner.search.asked_plan import AskedPlan, Bound, Reply, replies_about
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.largest_model import SearchWatch
from parplan.planner.search.what_if import BASE, PlanQuestion, questions_about
from parplan.profiles.errors import OutOfTimeError


@cache
def small_plan() -> Plan:
    return find_plan(
        request_of(TargetOptions(model="gpt-1.5b", gpus=16, seq_length=512, global_batch_size=32))
    )


def base_alone(self: AskedPlan, question: PlanQuestion) -> Reply:
    if question.what != BASE:
        raise OutOfTimeError("the time is over")
    return self._searches.first()


@pytest.mark.slow
def test_what_was_not_searched_has_a_bound_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan()
    monkeypatch.setattr(AskedPlan, "reply_to", base_alone)
    replies = replies_about(plan, NEVER, SearchWatch())
    assert {*replies.each, *replies.untried} == set(questions_about(plan))
    assert not {*replies.each} & {*replies.untried}
    bounds = {each: reply for each, reply in replies.each.items() if each.what != BASE}
    assert bounds
    assert all(isinstance(reply, Bound) for reply in bounds.values())
    assert PlanQuestion(what="pp", value=2 * plan.mesh.pp) in bounds
    assert all(question in replies.untried for question in questions_about(plan) if question.flips)
    assert replies.stopped is not None


def test_the_plan_itself_bounds_what_faster_links_buy() -> None:
    plan = small_plan()
    asked = AskedPlan(plan)
    question = PlanQuestion(what="bandwidth between nodes", value=1.25)
    bound = asked.bound_of(question)
    assert bound is not None
    step_s = plan.predicted.step_time_s.value
    assert step_s / 1.25 <= bound.most_s <= step_s
    assert asked.bound_of(replace(question, flips=True)) is None


def test_many_gpus_have_a_limit_that_follows_their_own_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asked_plan, "MANY_GPUS", 8)
    monkeypatch.setattr(asked_plan, "LEAST_CPU_S", 0.0)
    monkeypatch.setattr(asked_plan, "TIMES_OWN", 0.0)
    replies = replies_about(small_plan(), NEVER, SearchWatch())
    searched = [each for each, reply in replies.each.items() if not isinstance(reply, Bound)]
    assert [each.what for each in searched] == [BASE]
    assert replies.stopped == asked_plan.OWN_TIME
