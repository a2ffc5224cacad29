"""Least regret equals the enumeration of whole prices, and each corner has its best plan."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.objective import Objective, Prefer
from parplan.planner.plan.corners import corners
from parplan.planner.plan.plan_file import plan_from_document, plan_to_document
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.price_factory import DescribedFactory
from parplan.profiles.errors import ConfigError, OutOfTimeError
from parplan.profiles.machines.off_speed import SpeedFactors, at_speeds, cluster_at
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.units import gib
from parplan.report.plans.memory_table import fullest
from tests.helpers import planning
from tests.helpers.pools import two_pools

SHARE = 0.4
CLOSE = 1e-3  # of a regret, because steps of equal stages are scaled as their bound changes
# The best plans of the corners differ: links are slow, and memory is filled.
TARGET = TargetOptions(
    model="llama3-8b", gpus=16, gpu="a100-80gb", gpus_per_node=2, global_batch_size=32
)
PINS = PinOptions(
    virtual_stages=(1,),
    schedule=("1f1b",),
    zero=(1,),
    pp=(1,),
    tp=(2, 4),
    micro_batch_size=(1, 2),
)
CORNERS = (SpeedFactors(), *corners(SHARE))
FEW = Constraints(
    tp=(1,), virtual_stages=(1,), schedule=(Schedule.ONE_F_ONE_B,), megatron_sharding=True
)


def request(**flags):
    return request_of(TARGET, PINS, SearchFlags(**flags))


@pytest.fixture(scope="module")
def plan():
    return find_plan(request(robust=SHARE))


def at(corner, **flags):
    """Returns the fastest plan of a corner, by a search without this question."""
    plain = request(**flags)
    return find_plan(replace(plain, cluster=cluster_at(plain.cluster, corner)))


def limit_gib_of(plain):
    return gib(limit_bytes(plain.cluster, plain.training.stack, plain.options))


def whole_prices(plan):
    """Yields the step of a plan in each corner by a simulation, None where it does not fit."""
    prices = prices_of_plan(plan)
    strategy, cluster = strategy_of(plan, prices), request().cluster
    limit_gib = limit_gib_of(request())
    for corner in CORNERS:
        off = at_speeds(machine_for(cluster), replace(corner, memory=1.0))
        fits = fullest(plan).total <= limit_gib * corner.memory
        yield price_step(strategy, prices.on(off)).step_s if fits else None


def enumerated(matrix):
    """Returns the worst regret of each row of steps, and the row with the least."""
    worst = []
    for steps_s in matrix:
        columns = zip(*matrix, strict=True)
        fitting = [[step_s for step_s in column if step_s is not None] for column in columns]
        regrets = [
            inf if step_s is None else step_s / min(steps) - 1
            for step_s, steps in zip(steps_s, fitting, strict=True)
            if steps  # a corner where nothing fits tells nothing apart
        ]
        worst.append(max(regrets))
    return worst, worst.index(min(worst))


@pytest.mark.slow
def test_least_regret_equals_enumeration(plan):
    robust = plan.search.robust
    worst, least = enumerated([each.steps_s for each in robust.plans])

    assert robust.least_regret == least > 0
    assert [inf if each.regret is None else each.regret for each in robust.plans] == [
        pytest.approx(regret, abs=2e-6) for regret in worst
    ]


@pytest.mark.slow
def test_least_regret_equals_enumeration_of_whole_prices_and_separate_searches(plan):
    """The plans are searched one by one, and simulated in every corner."""
    robust = plan.search.robust
    entries = [at(corner) for corner in CORNERS]
    for each in robust.plans:
        layout = each.plan
        if each.steps_s[0] is None:  # only the search of its own corner finds it
            continue
        pins = replace(
            PINS,
            tp=(layout.mesh.tp,),
            micro_batch_size=(layout.pipeline.micro_batch_size,),
            sequence_parallel=layout.sequence_parallel if layout.mesh.tp > 1 else None,
        )
        entries.append(find_plan(request_of(TARGET, pins, SearchFlags())))
    matrix = [tuple(whole_prices(each)) for each in entries]
    worst, least = enumerated(matrix)

    found = robust.plans[robust.least_regret]
    assert worst[least] == pytest.approx(found.regret, abs=CLOSE)
    assert fullest(entries[least]).total == pytest.approx(found.plan.peak_memory_gib, abs=0.01)
    for record, column in zip(robust.corners, list(zip(*matrix, strict=True))[1:], strict=True):
        best_s = min(step_s for step_s in column if step_s is not None)
        assert record.proven
        assert record.best_step_time_s == pytest.approx(best_s, rel=CLOSE)


def test_the_plan_stands_first_with_its_runners_up_and_the_best_of_the_corners(plan):
    first, *others = plan.search.robust.plans

    assert first.plan.mesh == plan.mesh
    assert first.steps_s[0] == plan.predicted.step_time_s.value
    assert [each.plan.step_time_s for each in others[: len(plan.search.runners_up)]] == [
        each.step_time_s for each in plan.search.runners_up
    ]
    assert len(others) > len(plan.search.runners_up)
    assert first.worst_step_s == max(step_s for step_s in first.steps_s if step_s is not None)


def test_a_plan_that_fills_the_memory_does_not_fit_where_there_is_less(plan):
    robust = plan.search.robust
    less = 1 + next(i for i, each in enumerate(robust.corners) if each.what == "memory")
    limit_gib = limit_gib_of(request()) * (1 - SHARE)

    for each in robust.plans:
        assert (each.steps_s[less] is None) == (each.plan.peak_memory_gib > limit_gib)
        assert each.steps_s[less] in (None, each.steps_s[0])
    assert robust.plans[0].regret is None
    assert robust.plans[0].speed_regret is not None


def test_the_worst_cases_are_written_and_read(plan):
    assert plan_from_document(plan_to_document(plan), "plan.yaml") == plan


@pytest.mark.slow
def test_the_robust_plan_is_that_of_least_regret(plan):
    robust = find_plan(request(robust=SHARE, prefer=Prefer.ROBUST))
    least = plan.search.robust.plans[plan.search.robust.least_regret]

    assert robust.search.robust.least_regret == 0
    assert robust.search.robust.plans[0] == least
    assert fullest(robust).total == pytest.approx(least.plan.peak_memory_gib, abs=1e-3)
    assert "loses at most" in robust.search.preference.reason
    assert robust.search.value == plan.search.value  # the proof is that of the fastest


@pytest.mark.slow
def test_without_time_for_the_corners_the_table_says_that_they_are_not_searched(monkeypatch):
    def out_of_time(*_):
        raise OutOfTimeError("the time limit came")

    monkeypatch.setattr(DescribedFactory, "at", out_of_time)
    robust = find_plan(request(robust=SHARE)).search.robust

    assert not any(corner.proven for corner in robust.corners)
    assert robust.least_regret == enumerated([each.steps_s for each in robust.plans])[1]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.2])
def test_a_share_is_between_nothing_and_all(share):
    with pytest.raises(ConfigError, match=r"--robust is .* must be above 0 and below 1"):
        request(robust=share)


@pytest.mark.parametrize("objective", [Objective.MEMORY, Objective.PEAK])
def test_other_objectives_have_no_worst_cases(objective):
    with pytest.raises(ConfigError, match=rf"--robust is for .*the objective is {objective}"):
        request(robust=SHARE, objective=objective)


@pytest.mark.slow
def test_worst_cases_over_pools_are_prices_on_pools_that_are_off():
    instance = two_pools(3)
    parts = instance.model, instance.cluster, instance.training
    options = SearchOptions(robust=SHARE, prefer=Prefer.ROBUST)
    plan = planning.find_plan(*parts, options=options, constraints=FEW)
    robust = plan.search.robust
    prices = prices_of_plan(plan)
    strategy = strategy_of(plan, prices)

    assert len(robust.corners) == len(CORNERS) - 1
    worst, least = enumerated([each.steps_s for each in robust.plans])
    assert worst[0] == pytest.approx(worst[least], abs=2e-6)
    for corner, step_s in zip(CORNERS, robust.plans[0].steps_s, strict=True):
        cluster = cluster_at(instance.cluster, replace(corner, memory=1.0))
        off = price_step(strategy, prices.on(machine_for(cluster)))
        assert step_s == pytest.approx(off.step_s, rel=CLOSE)
    there = cluster_at(instance.cluster, CORNERS[-1])
    best = planning.find_plan(instance.model, there, instance.training, constraints=FEW)
    least_s = robust.corners[-1].best_step_time_s
    assert least_s <= best.predicted.step_time_s.value * (1 + CLOSE)
