"""The least cluster of a deadline against all numbers of GPUs, and what it reports without one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.usage.goodput import Failures
from parplan.planner.request import Request
from parplan.planner.search.cluster_size import (
    DAY_S,
    SizeProbes,
    least_cluster,
    numbers_of_gpus,
)

NUMBERS = numbers_of_gpus(8, most=16)
TOKENS = 1e9
FAILURES = Failures(
    mtbf_s=1000 * 3600.0, restart_s=600, storage_bytes_per_s=1e9, repair_s=DAY_S, spare_nodes=0
)


LONG_S = 1e12  # a deadline that every number of GPUs meets


@cache
def request_on(gpus: int) -> Request:
    return request_of(
        TargetOptions(model="gpt-1.5b", gpu="a100-80gb", gpus=gpus, stack="megatron-lm-2021")
    )


def probes_of(seconds: float, failures: Failures | None = FAILURES) -> SizeProbes:
    return SizeProbes(
        kind="a100-80gb",
        request_of=request_on,
        failures_of=lambda _: failures,
        tokens=TOKENS,
        seconds=seconds,
    )


def test_numbers_fill_whole_nodes() -> None:
    assert NUMBERS == (1, 2, 3, 4, 6, 8, 16)


@pytest.mark.slow
def test_it_is_the_least_of_all_numbers_that_meet_the_deadline() -> None:
    every = probes_of(LONG_S)
    assert all(map(every.meets, NUMBERS))
    seconds = {number: run.seconds for number, run in every.runs.items()}
    for deadline_s in (seconds[4] * 1.01, seconds[8] * 0.99, seconds[1] * 2):
        found = least_cluster(replace(every, seconds=deadline_s), NUMBERS)
        least = min(number for number, each in seconds.items() if each <= deadline_s)
        assert found.run is not None
        assert found.run.plan.cluster.num_gpus == least
        assert found.run.seconds <= deadline_s


@pytest.mark.slow
def test_without_any_that_meets_it_the_fastest_is_named() -> None:
    searched = probes_of(LONG_S)
    assert searched.meets(8)
    found = least_cluster(probes_of(0.999 * searched.runs[8].seconds), (1, 8))
    assert found.run is None
    assert found.nearest is not None
    assert found.nearest.plan.cluster.num_gpus == 8


def test_a_deadline_below_every_lower_bound_is_told_by_the_bound_without_a_search() -> None:
    found = least_cluster(probes_of(4_000.0), (1, 8))
    assert found.tried == ()
    assert found.error is not None
    assert "on 8 GPUs no plan takes less than" in found.error.message


@pytest.mark.slow
def test_a_number_whose_lower_bound_misses_is_not_searched_and_has_no_plan_in_time() -> None:
    probes = probes_of(4_000.0)

    assert not probes.meets(2)
    assert probes.least_s[2] > 4_000.0
    assert probes.runs == {}
    searched = probes_of(LONG_S)
    assert searched.meets(2)
    assert searched.runs[2].seconds >= probes.least_s[2]


def test_a_deadline_beyond_the_peak_of_all_is_not_searched() -> None:
    found = least_cluster(probes_of(1.0), (1, 8))
    assert found.tried == ()
    assert found.error is not None
    assert "even at its peak the deadline needs" in found.error.message


@pytest.mark.slow
def test_time_cost_and_energy_count_failures_and_spares() -> None:
    probes = probes_of(30 * DAY_S, replace(FAILURES, spare_nodes=2))
    probes.meets(8)
    run = probes.runs[8]
    assert run.goodput is not None
    assert run.seconds == pytest.approx(TOKENS / run.tokens_per_s / run.goodput.share)
    assert run.gpus == 8 + 2 * 8
    assert run.gpu_hours == pytest.approx(24 * run.seconds / 3600)
    assert run.energy_j == pytest.approx(400 * 24 * run.seconds)
    assert run.failures == pytest.approx(run.seconds / (FAILURES.mtbf_s / 8))
