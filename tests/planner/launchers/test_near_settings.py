"""Searches of a launcher's settings near another one find the settings of their own search."""

from __future__ import annotations

from functools import cache

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.planner.deadline import NEVER
from parplan.planner.export.best_settings import best_settings
from parplan.planner.export.targets import target_named
from parplan.planner.launchers.near_settings import NearSettings, near_settings
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Request
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.many_searches import Answer
from parplan.planner.search.near_requests import Near, Way
from parplan.planner.search.what_if import knob_named, request_of_plan, with_degree

MEGATRON = target_named("megatron")


@cache
def request_() -> Request:
    options = TargetOptions(model="gpt-8.3b", gpus=16, seq_length=512, global_batch_size=64)
    return request_of_plan(best_settings(request_of(options), MEGATRON))


@cache
def searched() -> NearSettings:
    searches = NearSettings(request_(), MEGATRON)
    assert searches.first().plan is not None
    return searches


def step_s(answer: Answer) -> float:
    assert answer.plan is not None
    return answer.plan.predicted.step_time_s.value


@pytest.mark.parametrize(
    ("axis", "degree"), [pytest.param("tp", 4, marks=pytest.mark.slow), ("pp", 2)]
)
def test_a_pinned_degree_has_the_settings_of_its_own_search(axis: str, degree: int) -> None:
    pinned = with_degree(request_(), axis, degree)
    near = searched().answer(pinned, NEVER, Way(Near.PRICES))
    own = best_settings(pinned, MEGATRON)
    assert step_s(near) == pytest.approx(own.predicted.step_time_s.value, rel=1e-6)
    bound_s = searched().least_with(axis, degree)
    assert bound_s is not None
    assert 0 < bound_s <= step_s(near) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("what", "factor"),
    [
        pytest.param("memory of a GPU", 0.5, marks=pytest.mark.slow),
        pytest.param("bandwidth between nodes", 0.25, marks=pytest.mark.slow),
    ],
)
def test_a_changed_quantity_has_the_settings_of_its_own_search(what: str, factor: float) -> None:
    knob = knob_named(what)
    changed = knob.scale(request_(), factor)
    near = searched().answer(changed, NEVER, Way(knob.near, factor))
    own = best_settings(changed, MEGATRON)
    assert step_s(near) == pytest.approx(own.predicted.step_time_s.value, rel=1e-6)


@pytest.mark.slow
def test_a_plan_is_explained_among_those_of_its_launcher() -> None:
    plan = best_settings(request_(), MEGATRON)
    assert isinstance(near_settings(plan, request_()), NearSettings)
    free: Plan = find_plan(request_())
    assert near_settings(free, request_()) is None
