"""One deadline ends each step of a command with the best plan so far or one error."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.deadline import GRACE_S, NEVER, Deadline, deadline_after
from parplan.planner.infeasible import shortfall
from parplan.planner.launchers.compare_described import compare
from parplan.planner.objective import Objective
from parplan.planner.plan.prediction import Status
from parplan.planner.request import SEARCHED_OFFLOAD, Constraints, SearchOptions
from parplan.planner.search.largest_model import find_largest, members
from parplan.profiles.divisors import divisors
from parplan.profiles.documents.ranges import range_of
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB, MIB
from parplan.report.searches.infeasible_text import explained_error
from tests.helpers.cases import mostly_slow
from tests.helpers.planning import (
    find_front,
    find_plan,
    least_peak_bytes,
    request,
    smallest_cluster,
)

MODEL, CLUSTER = load_model("gpt-tiny").spec, with_gpus(load_cluster("a100-80gb"), 4)
TRAINING = TrainingSpec(global_batch_size=8, seq_length=64, stack=NEUTRAL)
PINS = Constraints(
    micro_batch_size=(1,), tp=(1,), pp=(1, 2), recompute=(Recompute.NONE,), zero=(0, 1)
)
ASKED = MODEL, CLUSTER, TRAINING
NEVER_FITS = SearchOptions(memory_limit_bytes=MIB)


class Clock:
    """A clock that goes on by a second at every look."""

    def __init__(self) -> None:
        self.now_s = 0

    def __call__(self) -> float:
        self.now_s += 1
        return float(self.now_s)


def within(looks: int, options: SearchOptions = SearchOptions()) -> SearchOptions:  # noqa: B008 - it is frozen
    """Returns the options with a deadline that ends after `looks` looks at the clock."""
    return replace(options, deadline=Deadline(stops_s=looks, ends_s=looks, clock=Clock()))


def looks_of(run) -> int:
    """Counts how often `run` looks at the clock when it is never over."""
    clock = Clock()
    run(SearchOptions(deadline=Deadline(stops_s=math.inf, ends_s=1e12, clock=clock)))
    return clock.now_s


def throughput(options: SearchOptions):
    return find_plan(*ASKED, constraints=PINS, options=options)


def lean(options: SearchOptions):
    return find_plan(
        *ASKED,
        Objective.MEMORY,
        constraints=replace(PINS, offload=SEARCHED_OFFLOAD),
        options=options,
    )


def front(options: SearchOptions):
    points = find_front(*ASKED, constraints=PINS, options=options, num_points=3)
    return points.points[0].plan


def largest(options: SearchOptions):
    entries = [
        replace(
            load_model("gpt-tiny"), spec=replace(MODEL, name=f"tiny-{layers}", num_layers=layers)
        )
        for layers in (2, 4)
    ]
    request_ = request(entries[0].spec, CLUSTER, TRAINING, constraints=PINS, options=options)
    rows = find_largest(members(entries), request_)
    return next(row.plan for row in rows if row.plan)


@pytest.mark.parametrize("run", mostly_slow([throughput, lean, front, largest], {throughput}))
def test_wherever_the_end_comes_there_is_a_plan_or_one_error(run):
    """Ends the search at several looks at the clock: early ends give an error, late ones a plan."""
    total, outcomes = looks_of(run), []
    for looks in (*range(1, total, max(1, total // 5)), total + 1):
        try:
            plan = run(within(looks))
        except OutOfTimeError:
            outcomes.append(False)
        else:
            assert 0 < plan.predicted.step_time_s.value < math.inf
            assert plan.search.bound <= plan.search.value * (1 + 1e-6)
            outcomes.append(True)

    assert outcomes == sorted(outcomes), "more time never loses a plan"
    assert not outcomes[0]
    assert outcomes[-1]


@pytest.mark.parametrize("run", [throughput, pytest.param(front, marks=pytest.mark.slow)])
def test_a_deadline_that_does_not_come_changes_nothing(run):
    assert run(SearchOptions(deadline=deadline_after(1e6))) == run(SearchOptions())


def test_a_search_that_is_over_from_the_beginning_ends_with_its_first_plan():
    plan = throughput(SearchOptions(deadline=NEVER.first_plan()))

    assert plan.search.status is Status.FEASIBLE
    assert plan.search.candidates.solved == 1


@pytest.mark.parametrize("looks", [1, 20, 150, 400])
def test_what_does_not_fit_is_said_however_little_time_is_left_for_why(looks):
    error = explained_error(request(*ASKED, constraints=PINS, options=within(looks, NEVER_FITS)))

    assert isinstance(error, InfeasibleError)
    assert error.message.startswith("gpt-tiny does not fit on 4 x a100-80gb")
    assert error.hint


def test_the_explanation_says_which_ways_out_there_was_no_time_for():
    error = explained_error(request(*ASKED, constraints=PINS, options=within(1, NEVER_FITS)))

    assert "not searched" in error.message + error.hint


def test_an_interrupt_of_the_explanation_still_gives_the_error(monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shortfall, "_leanest", interrupt)

    assert (
        "does not fit"
        in explained_error(request(*ASKED, constraints=PINS, options=NEVER_FITS)).message
    )


def test_the_search_for_enough_gpus_ends():
    with pytest.raises(OutOfTimeError):
        smallest_cluster(*ASKED, Constraints(), float(GIB), within(9).deadline)


def test_the_least_peak_is_found_in_few_steps_however_large_a_model_is():
    """A float has no half way between neighbours: halving down to 1 MiB would not end."""
    hidden = int(range_of("hidden_size", whole=True).high)
    inner = int(range_of("expert_ffn_hidden_size", whole=True).high)
    experts = int(range_of("num_experts", whole=True).high)
    vast = replace(
        MODEL,
        num_layers=2,
        hidden_size=hidden,
        num_heads=4,
        num_kv_heads=4,
        head_dim=hidden // 4,
        ffn_hidden_size=0,
        expert_ffn_hidden_size=inner,
        num_experts=experts,
        experts_per_token=1,
        linear_bias=False,
    )
    deadline = within(20_000).deadline

    assert (
        least_peak_bytes(
            vast, CLUSTER, TRAINING, Constraints(pp=(1,), tp=(1,), micro_batch_size=(1,)), deadline
        )
        > 2.0**70
    )


def test_divisors_of_a_large_number_are_found_by_its_root():
    assert divisors(10**12)[:4] == (1, 2, 4, 5)
    assert divisors(10**12)[-1] == 10**12
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)


def test_a_comparison_says_what_it_did_not_come_to():
    comparison = compare(throughput(SearchOptions()), ("zero-1", "zero-3"), within(2))

    assert [row.baseline.name for row in comparison.rows] + list(comparison.unpriced) == [
        "zero-1",
        "zero-3",
    ]
    assert comparison.unpriced


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_time_limit_is_positive(seconds):
    with pytest.raises(ConfigError, match="--time-limit"):
        deadline_after(seconds)


def test_a_part_ends_with_the_whole():
    clock = Clock()
    whole = Deadline(stops_s=100, ends_s=100 + GRACE_S, clock=clock)

    assert whole.share(2).stops_s == pytest.approx(51, abs=2)
    assert whole.within(1000) is whole
    assert NEVER.share(3) is NEVER
    assert 0 <= Deadline(stops_s=0, ends_s=0, clock=clock).solver_limit_s(1.0, 60.0) == 0
    assert NEVER.solver_limit_s(1.0, 60.0) == 60.0


def test_the_memory_objective_keeps_the_fastest_plan_if_time_ends_before_leaner_ones(
    monkeypatch,
):
    def over(*_: object) -> float:
        raise OutOfTimeError("the end")

    monkeypatch.setattr("parplan.planner.search.search_session.RedundancyBound", over)
    plan = find_plan(*ASKED, Objective.MEMORY, constraints=PINS)

    assert plan.search.status is Status.FEASIBLE
    fastest_s = throughput(SearchOptions()).predicted.step_time_s.value
    assert plan.predicted.step_time_s.value == pytest.approx(
        fastest_s, rel=0.01
    )  # the closed form chose the plan
