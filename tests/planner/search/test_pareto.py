"""The front equals a full enumeration in its ends, its order and its proof; it may end early."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.deadline import NEVER
from parplan.planner.master import Master
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import plan_to_yaml, read_plan, write_plan
from parplan.planner.plan.plan_strategy import strategy_of
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.ratio_band import plan_shape, ratio_share
from parplan.planner.request import SearchOptions
from parplan.planner.search.find_plan import search
from parplan.planner.search.pareto import (
    SLOWDOWNS,
    ParetoFront,
    ParetoPoint,
    plan_paths,
    undominated,
)
from parplan.planner.search.search_session import DescribedPrices
from parplan.profiles.errors import ConfigError, InfeasibleError, SolverError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import GIB, MIB
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import (
    PINS,
    every_price,
    every_strategy,
    peak_bytes,
    random_instance,
    redundant_bytes,
    same_sharding,
    same_zero_of_ends,
)
from tests.helpers.planning import enumerate_candidates, find_front, find_plan, request

SEEDS = mostly_slow((0, 1, 2, 5), {5})
ROUNDED = 2e-5  # relative: six digits of seconds, four of GiB
DIGIT_GIB = 1e-4
# strategies of each layout whose layers have ZeRO stages of their own, besides all with one for
# each rank
MIXED = 50


@cache
def front_of(seed: int, num_points: int = 16) -> ParetoFront:
    instance = random_instance(seed)
    return find_front(
        instance.model, instance.cluster, instance.training, constraints=PINS, num_points=num_points
    )


@cache
def every_value(seed: int) -> tuple[tuple[float, float, float, float], ...]:
    """Returns the four values of each strategy that fits; ends on one rank are alike.

    They are closed-form seconds, simulated seconds, GiB of peak and GiB of redundancy.
    """
    every = (
        (p.closed_form_s, p.step_s, peak_bytes(p) / GIB, redundant_bytes(s, p) / GIB)
        for s, p in every_price(random_instance(seed), mixed=MIXED)
        if s.layout.mesh.pp > 1 or same_zero_of_ends(s)
    )
    return tuple(values for values in every if values[2] <= front_of(seed).usable_gib)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_every_point_is_a_strategy_of_the_enumeration_with_levels_and_zero_stages_of_its_own(seed):
    """The enumeration has each point's layout and split, and each layer's level and ZeRO stage."""
    instance = random_instance(seed)
    price_cache, usable_gib = instance.price_cache(), front_of(seed).usable_gib
    levels = {
        (kind, price_cache.recompute_operators(kind, level))
        for kind in LayerKind
        for level in PINS.recompute
    }
    layouts = enumerate_candidates(
        instance.model, instance.cluster, instance.training, PINS
    ).layouts
    for point in front_of(seed).points:
        strategy = strategy_of(point.plan, price_cache)
        price, zeros = (
            price_step(strategy, price_cache),
            range(4) if strategy.layout.mesh.dp > 1 else (0,),
        )

        assert strategy.layout in layouts
        assert shape(strategy) in map(
            shape, every_strategy(strategy.layout, instance.model.num_layers)
        )
        assert not price_cache.tied or same_sharding(strategy)
        assert all(
            (choice.kind, choice.recompute) in levels and choice.zero in zeros
            for stage in strategy.stages
            for choice in stage
        )
        assert point.step_time_s == pytest.approx(price.step_s, rel=ROUNDED)
        assert point.peak_memory_gib == pytest.approx(peak_bytes(price) / GIB, abs=DIGIT_GIB)
        assert point.peak_memory_gib <= usable_gib + DIGIT_GIB
        assert point.redundancy_gib == pytest.approx(
            redundant_bytes(strategy, price) / GIB, abs=DIGIT_GIB
        )


def shape(strategy: Strategy) -> tuple[tuple[LayerKind, ...], ...]:
    return tuple(tuple(choice.kind for choice in stage) for stage in strategy.stages)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_point_dominates_another_and_they_go_from_fast_to_slow(seed):
    points = front_of(seed).points

    assert not any(first.dominates(second) for first in points for second in points)
    assert [point.step_time_s for point in points] == sorted(point.step_time_s for point in points)
    assert len({point.values for point in points}) == len(points)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ends_equal_brute_force(seed):
    front, every = front_of(seed), every_value(seed)
    fastest_s = min(step_s for _, step_s, _, _ in every)

    assert front.stopped is None
    assert (
        front.points[0].step_time_s <= 1.05 * fastest_s
    )  # the search minimises the closed form and replays the best
    assert front.points[0].plan.search.fastest_step_time_s == pytest.approx(
        min(closed_s for closed_s, *_ in every), rel=ROUNDED, abs=2e-6
    )
    least_gib = min(peak for _, _, peak, _ in every)
    assert min(point.peak_memory_gib for point in front.points) == pytest.approx(
        least_gib, abs=1.1 * MIB / GIB
    )
    assert least_gib - 1.1 * MIB / GIB <= front.nothing_within_gib <= least_gib
    assert min(point.redundancy_gib for point in front.points) == pytest.approx(
        min(redundant for *_, redundant in every), rel=ROUNDED, abs=10 * DIGIT_GIB
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_no_strategy_beats_a_point_at_its_own_limit_beyond_its_gap(seed):
    front, every = front_of(seed), every_value(seed)
    fastest_s = min(closed_s for closed_s, *_ in every)

    for point in front.points:
        record, limit = point.plan.search, point.plan.search.front
        least = record.value * (1 - record.gap)
        if record.objective is Objective.THROUGHPUT:
            within_gib = limit.memory_limit_gib or front.usable_gib
            assert point.peak_memory_gib <= within_gib + DIGIT_GIB
            fitting = [closed_s for closed_s, _, peak, _ in every if peak <= within_gib - DIGIT_GIB]
            assert min(fitting, default=least) >= least * (1 - ROUNDED) - 2e-6
        else:
            slowest_s = fastest_s * (
                1 + (SLOWDOWNS[-1] if limit.max_slowdown is None else limit.max_slowdown)
            )
            assert (
                min(redundant for closed_s, _, _, redundant in every if closed_s <= slowest_s)
                >= least * (1 - ROUNDED) - DIGIT_GIB
            )


@pytest.mark.parametrize("seed", SEEDS)
def test_less_memory_is_never_faster_than_what_was_found_within_more(seed):
    records = [
        point.plan.search
        for point in front_of(seed).points
        if point.plan.search.objective is Objective.THROUGHPUT
    ]
    within = sorted(records, key=lambda record: record.front.memory_limit_gib or float("inf"))
    bounds = [record.bound for record in within]

    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.slow
def test_the_same_request_gives_the_same_front():
    first, second = front_of(3), front_of.__wrapped__(3)

    assert [plan_to_yaml(point.plan) for point in first.points] == [
        plan_to_yaml(point.plan) for point in second.points
    ]


def test_each_plan_says_its_place_and_its_limit_and_is_read_back(tmp_path):
    front = front_of(5)
    for number, point in enumerate(front.points, 1):
        write_plan(point.plan, tmp_path / "plan.yaml")
        place = read_plan(tmp_path / "plan.yaml").search.front

        assert place == point.plan.search.front
        assert (place.number, place.points, place.complete) == (number, len(front.points), True)
        assert place.memory_limit_gib is None or place.max_slowdown is None


@pytest.mark.slow
@pytest.mark.parametrize("num_points", mostly_slow([3, 4, 8], {3, 4}))
def test_fewer_points_keep_the_three_ends(num_points):
    few, many = front_of(1, num_points), front_of(1)

    assert len(few.points) <= num_points
    assert few.num_searches < many.num_searches
    assert few.points[0].step_time_s == many.points[0].step_time_s
    for value in ("peak_memory_gib", "redundancy_gib"):
        least = min(getattr(point, value) for point in many.points)
        assert min(getattr(point, value) for point in few.points) == pytest.approx(
            least, abs=MIB / GIB
        )


@pytest.mark.slow
def test_a_memory_limit_bounds_all_points():
    instance = random_instance(2)
    peaks = sorted(point.peak_memory_gib for point in front_of(2).points)
    limit_gib = (peaks[0] + peaks[-1]) / 2

    options = SearchOptions(memory_limit_bytes=int(limit_gib * GIB))
    front = find_front(
        instance.model, instance.cluster, instance.training, constraints=PINS, options=options
    )

    assert front.usable_gib == pytest.approx(limit_gib)
    assert max(point.peak_memory_gib for point in front.points) <= limit_gib + DIGIT_GIB


def front_with(seed: int = 1, **options: object) -> ParetoFront:
    instance = random_instance(seed)
    return find_front(
        instance.model,
        instance.cluster,
        instance.training,
        constraints=PINS,
        options=SearchOptions(**options),
    )


def test_an_interrupt_keeps_the_points_so_far_and_says_that_the_front_is_incomplete(monkeypatch):
    calls = []
    solve = Master.leanest

    def interrupt(self, *arguments):
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return solve(self, *arguments)

    monkeypatch.setattr(Master, "leanest", interrupt)
    front = front_with()

    assert front.stopped == "Ctrl-C"
    assert front.num_searches < front_of(1).num_searches
    assert front.points
    assert not any(point.plan.search.front.complete for point in front.points)


def test_an_interrupt_between_searches_keeps_the_points(monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parplan.planner.search.price_factory.least_peak_bytes", interrupt)

    assert front_with().stopped == "Ctrl-C"


def test_an_interrupt_before_the_first_plan_is_raised(monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parplan.planner.search.fastest_layouts.fastest_choice", interrupt)

    with pytest.raises(KeyboardInterrupt):
        front_with()


def test_a_time_limit_is_that_of_all_searches_and_leaves_an_honest_point():
    front = front_with(deadline=NEVER.first_plan())

    assert front.stopped == "the time limit"
    assert front.num_searches == 1
    (point,) = front.points
    assert (
        point.plan.search.bound
        <= front_of(1).points[0].plan.search.bound
        <= point.plan.search.value
    )
    assert point.plan.search.status is Status.FEASIBLE or point.plan.search.gap == 0


def test_a_solver_that_fails_after_the_first_point_does_not_lose_it(monkeypatch):
    def fail(*_: object) -> None:
        raise SolverError("cbc failed: no licence")

    monkeypatch.setattr(Master, "leanest", fail)

    assert front_with().stopped.endswith("cbc failed: no licence")


@pytest.mark.slow
def test_a_wrong_guess_of_the_least_peak_costs_searches_but_not_the_end(monkeypatch):
    least_gib = min(point.peak_memory_gib for point in front_of(4).points)
    for guess in (0.5, 0.98, 1.02):
        monkeypatch.setattr(
            "parplan.planner.search.price_factory.least_peak_bytes",
            lambda *_, guess=guess: guess * least_gib * GIB,
        )
        front = front_with(4)

        assert min(point.peak_memory_gib for point in front.points) == pytest.approx(
            least_gib, abs=1.1 * MIB / GIB
        )
        assert front.nothing_within_gib == pytest.approx(least_gib, abs=2.2 * MIB / GIB)


@pytest.mark.slow
def test_searches_are_told_of_before_they_start():
    told = []
    instance = random_instance(0)
    front = find_front(
        instance.model,
        instance.cluster,
        instance.training,
        constraints=PINS,
        on_search=lambda *news: told.append(news),
    )

    assert [done for _, done, _ in told] == list(range(front.num_searches))
    assert told[0][0] == "fastest"
    assert all(done < planned for _, done, planned in told)


@pytest.mark.slow
def test_what_one_search_learned_does_not_change_what_another_finds():
    instance = random_instance(6)
    shared = DescribedPrices(
        request(instance.model, instance.cluster, instance.training, constraints=PINS)
    )
    peaks = sorted({round(peak * GIB) + 1 for _, _, peak, _ in every_value(6)})
    for limit in (
        peaks[-1],
        peaks[len(peaks) // 2],
        peaks[0],
        peaks[len(peaks) // 3],
        peaks[-1],
    ):  # tighter, looser, tighter
        options = SearchOptions(memory_limit_bytes=limit)
        alone = find_plan(
            instance.model, instance.cluster, instance.training, constraints=PINS, options=options
        )
        result = search(shared, Objective.THROUGHPUT, options)

        assert result.plan.search.bound == pytest.approx(alone.search.bound, rel=ROUNDED, abs=2e-6)
        assert result.plan.search.value <= 1.1 * alone.search.bound + 1e-6


@pytest.mark.slow
def test_nothing_fits_is_the_same_error_as_that_of_a_plan():
    with pytest.raises(InfeasibleError, match="does not fit"):
        front_with(memory_limit_bytes=MIB)


def test_less_than_three_points_is_an_error():
    with pytest.raises(ConfigError, match="--points is 2, it must be at least 3"):
        front_of(0, 2)


@pytest.mark.slow
def test_of_equal_plans_the_first_stays_and_dominated_ones_go():
    plan = front_of(0).points[0].plan
    slower = with_values(plan, step_s=2.0, redundant_gib=9.0)
    first, same = (
        with_values(plan, step_s=1.0, redundant_gib=9.0),
        with_values(plan, step_s=1.0, redundant_gib=9.0),
    )
    lean = with_values(plan, step_s=3.0, redundant_gib=1.0)

    points = undominated([slower, first, lean, same])

    assert [point.plan for point in points] == [first, lean]
    assert points[0].plan is first


def with_values(plan: Plan, *, step_s: float, redundant_gib: float) -> Plan:
    predicted = plan.predicted
    return replace(
        plan,
        predicted=replace(
            predicted,
            step_time_s=replace(predicted.step_time_s, value=step_s),
            redundancy_gib=replace(predicted.redundancy_gib, total=redundant_gib),
        ),
    )


def test_a_tie_is_with_the_leanest_point_inside_the_error_band_that_needs_no_more_memory():
    plan = front_of(0).points[0].plan
    share = ratio_share(plan.predicted.error_band, plan_shape(plan), plan_shape(plan))
    steps = (1.0, 1 + 0.5 * share, 1 + 0.9 * share, 1 + 2.5 * share)
    points = tuple(
        ParetoPoint(with_values(plan, step_s=step, redundant_gib=9.0 - index))
        for index, step in enumerate(steps)
    )
    front = ParetoFront(
        points=points, stopped=None, usable_gib=76.0, nothing_within_gib=None, num_searches=4
    )

    assert [front.leaner_tie(point) for point in points] == [3, 3, None, None]


def test_files_are_numbered_with_as_many_digits_as_they_need():
    assert plan_paths(Path("a/plan.yaml"), 3) == (
        Path("a/plan-01.yaml"),
        Path("a/plan-02.yaml"),
        Path("a/plan-03.yaml"),
    )
    assert plan_paths(Path("front"), 1) == (Path("front-01"),)
    assert plan_paths(Path("plan.yaml"), 100)[-1] == Path("plan-100.yaml")
