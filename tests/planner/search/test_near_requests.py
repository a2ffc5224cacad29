"""Searches near another one find the plans of searches of their own, over its prices and bounds."""

from __future__ import annotations

from functools import cache

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.planner.deadline import NEVER
from parplan.planner.request import Request
from parplan.planner.search.many_searches import Answer, answer_request
from parplan.planner.search.near_requests import Near, NearRequests, Way
from parplan.planner.search.what_if import knob_named, with_degree
from tests.helpers.cases import mostly_slow


@cache
def request_() -> Request:
    return request_of(
        TargetOptions(model="gpt-8.3b", gpus=16, seq_length=512, global_batch_size=64)
    )


@cache
def searched() -> NearRequests:
    searches = NearRequests(request_())
    assert searches.first().plan is not None
    return searches


def step_s(answer: Answer) -> float:
    assert answer.plan is not None
    return answer.plan.predicted.step_time_s.value


@pytest.mark.parametrize(("axis", "degree"), mostly_slow([("pp", 4), ("tp", 4)], ()))
def test_a_pinned_degree_has_the_plan_of_its_own_search(axis: str, degree: int) -> None:
    pinned = with_degree(request_(), axis, degree)
    near = searched().answer(pinned, NEVER, Way(Near.PRICES))
    assert near.plan is not None
    assert getattr(near.plan.mesh, axis) == degree
    assert step_s(near) == pytest.approx(step_s(answer_request(pinned)), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "factor"),
    [
        ("memory of a GPU", 0.5),
        pytest.param("bandwidth between nodes", 0.25, marks=pytest.mark.slow),
        pytest.param("bandwidth inside a node", 1.25, marks=pytest.mark.slow),
        pytest.param("batch", 2.0, marks=pytest.mark.slow),
    ],
)
def test_a_changed_quantity_has_the_plan_of_its_own_search(what: str, factor: float) -> None:
    knob = knob_named(what)
    changed = knob.scale(request_(), factor)
    near = searched().answer(changed, NEVER, Way(knob.near, factor))
    assert step_s(near) == pytest.approx(step_s(answer_request(changed)), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("degree", mostly_slow([2, 4], {2}))
def test_no_plan_with_a_degree_is_below_its_bound(degree: int) -> None:
    bound_s = searched().least_with("tp", degree)
    assert bound_s is not None
    near = searched().answer(with_degree(request_(), "tp", degree), NEVER, Way(Near.PRICES))
    assert 0 < bound_s <= step_s(near)


def test_a_degree_without_a_mesh_has_no_bound() -> None:
    assert searched().least_with("tp", 5) is None
    assert NearRequests(request_()).least_with("tp", 4) is None
