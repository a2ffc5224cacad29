"""The peak objective finds the least peak, and breaks the ties of the memory objective."""

from __future__ import annotations

import json

import pytest

from parplan.planner.deadline import NEVER
from parplan.planner.objective import Objective
from parplan.planner.plan.plan_file import read_plan
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Progress, SearchOptions
from parplan.planner.search.memory_descent import halve_in
from parplan.profiles.units import GIB, MIB
from tests.helpers.command_runs import fail, succeed
from tests.helpers.instances import (
    PINS,
    Instance,
    every_price,
    peak_bytes,
    random_instance,
    redundant_bytes,
)
from tests.helpers.planning import find_plan

TINY = ("--model", "gpt-tiny", "--gpu", "cpu", "--gpus", "4", "--objective", "peak")
TO = 1.001  # peaks are found to that, or to 1 MiB


def search(instance: Instance, objective: Objective, **options: object):
    return find_plan(
        instance.model,
        instance.cluster,
        instance.training,
        objective,
        constraints=PINS,
        options=SearchOptions(**options),
    )


def peak_of(plan) -> float:
    return max(stage.total for stage in plan.predicted.memory_gib) * GIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "slowdown"),
    [
        (7, 0.1),
        pytest.param(5, 0.1, marks=pytest.mark.slow),
        pytest.param(1, 2.0, marks=pytest.mark.slow),
    ],
)
def test_no_strategy_of_the_enumeration_that_is_in_time_peaks_lower(seed, slowdown):
    instance = random_instance(seed)
    lean = search(instance, Objective.MEMORY, max_slowdown=slowdown)
    low = search(instance, Objective.PEAK, max_slowdown=slowdown)
    slowest_s = low.search.fastest_step_time_s * (1 + slowdown) * (1 + 1e-6)
    in_time = [
        (strategy, price)
        for strategy, price in every_price(instance, mixed=50)
        if price.closed_form_s <= slowest_s
    ]
    as_lean = [
        peak_bytes(price)
        for strategy, price in in_time
        if redundant_bytes(strategy, price) <= lean.search.value * GIB * (1 + 2e-6)
    ]
    least = min(peak_bytes(price) for _, price in in_time)

    assert peak_of(low) <= max(least * TO, least + MIB)
    assert low.search.bound * GIB <= least
    assert low.search.value * GIB == pytest.approx(peak_of(low), rel=1e-3)
    assert low.search.gap == pytest.approx(1 - low.search.bound / low.search.value, abs=1e-5)
    assert low.search.status is Status.OPTIMAL
    assert low.predicted.step_time_s.value <= slowest_s * 1.02  # simulated against closed form
    assert not as_lean or peak_of(lean) <= max(min(as_lean) * TO, min(as_lean) + MIB)


@pytest.mark.parametrize(
    ("seed", "slowdown", "before_gib"),
    [pytest.param(6, 0.5, 1.3197, marks=pytest.mark.slow), (4, 0.5, 0.9425), (5, 0.1, 1.1277)],
)
def test_of_equally_redundant_plans_the_one_with_the_least_peak_is_chosen(
    seed, slowdown, before_gib
):
    plan = search(random_instance(seed), Objective.MEMORY, max_slowdown=slowdown)

    assert peak_of(plan) / GIB < before_gib - 0.002
    assert plan.search.status is Status.OPTIMAL
    assert plan.search.gap == 0.0


def test_no_slowdown_leaves_the_fastest_step():
    instance = random_instance(7)
    fastest, low = (
        search(instance, Objective.THROUGHPUT),
        search(instance, Objective.PEAK, max_slowdown=0.0),
    )

    assert low.predicted.step_time_s.value == pytest.approx(fastest.predicted.step_time_s.value)
    assert peak_of(low) <= peak_of(fastest)


def test_at_the_end_of_the_time_the_best_so_far_is_feasible_and_nothing_is_claimed():
    plan = search(random_instance(7), Objective.PEAK, deadline=NEVER.first_plan())

    assert plan.search.status is Status.FEASIBLE
    assert (plan.search.bound, plan.search.gap) == (0.0, 1.0)


@pytest.mark.parametrize("objective", [Objective.PEAK, Objective.MEMORY])
def test_ctrl_c_keeps_the_lowest_peak_so_far(objective):
    def interrupt(progress: Progress) -> None:
        if progress.objective is Objective.PEAK:
            raise KeyboardInterrupt

    instance = random_instance(7)
    fastest = search(instance, Objective.THROUGHPUT)
    plan = find_plan(
        instance.model,
        instance.cluster,
        instance.training,
        objective,
        constraints=PINS,
        on_progress=interrupt,
    )

    assert plan.search.status is Status.FEASIBLE
    assert peak_of(plan) < peak_of(fastest)


@pytest.mark.slow
def test_the_plan_file_of_the_least_peak_is_read_again_priced_again_and_shown(tmp_path):
    path = tmp_path / "plan.yaml"
    body = json.loads(succeed(*TINY, "--json", "-o", str(path)).stdout)
    plan = read_plan(path)

    assert body.get("plan", body)["search"]["objective"] == "peak"
    assert plan.search.objective is Objective.PEAK
    assert reprice(plan).plan.predicted == plan.predicted
    assert "of the fullest GPU's peak" in " ".join(succeed("show", str(path)).stdout.split())


@pytest.mark.slow
def test_nothing_fits_is_said_as_for_every_objective(tmp_path):
    assert "does not fit" in fail(
        3, *TINY, "--memory-limit", "1MiB", "-o", str(tmp_path / "plan.yaml")
    )


def test_halving_in_ends_at_the_least_that_is_found_and_at_the_most_that_is_not():
    tried = list[float]()

    def probe(limit: float) -> float | None:
        tried.append(limit)
        return limit - 1 if limit > 40 * MIB else None

    low, high = halve_in(0, 100 * MIB, probe, (99 * MIB, 39 * MIB))

    assert tried[:2] == [99 * MIB, 39 * MIB]
    assert low <= 40 * MIB < high
    assert high - low <= MIB
