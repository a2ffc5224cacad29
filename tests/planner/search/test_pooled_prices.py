"""The search over unequal pools equals a full enumeration, and its bounds hold."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import bubble_share, price_step
from parplan.planner.candidates.branch_and_bound import WORTH_REPLAYING
from parplan.planner.master import evaluate
from parplan.planner.objective import Objective
from parplan.planner.plan.plan_file import plan_from_document, plan_to_document
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import ANY_SLOWDOWN, Constraints, SearchOptions
from parplan.planner.search.pooled_prices import PooledPrices
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.planner.stage_columns.chunk_columns import rank_columns
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.unequal_cluster import Join, Pool, unequal_cluster
from parplan.profiles.units import GIB, MIB
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import (
    PINS,
    Instance,
    every_strategy,
    random_instance,
    redundant_bytes,
)
from tests.helpers.planning import find_front, find_plan, request
from tests.helpers.pools import (
    every_price_on_pools,
    fits,
    layouts_on_pools,
    shares_of,
    tight,
    two_pools,
)

SLOWDOWN = 0.2
SCHEDULES = (
    Schedule.ONE_F_ONE_B,
    Schedule.INTERLEAVED,
    Schedule.ZBV,
    Schedule.EARLY_RECOMPUTE,
    Schedule.LAST_NO_RECOMPUTE,
)
SEEDS = mostly_slow((0, 1, 3, 7), {7})


def search(instance, objective=Objective.THROUGHPUT, **options):
    return find_plan(
        instance.model,
        instance.cluster,
        instance.training,
        objective,
        constraints=PINS,
        options=SearchOptions(memory_margin=0.0, **options),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_search_over_two_pools_equals_brute_force_under_both_objectives(seed):
    roomy = two_pools(seed)
    instance = tight(roomy, every_price_on_pools(roomy), shares_of(seed))
    everything = every_price_on_pools(instance, mixed=20)
    fitting = [priced for priced in everything if fits(priced, instance)]
    assert fitting
    assert len(fitting) < len(everything)
    fastest_s = min(price.closed_form_s for _, price in fitting)

    plan = search(instance)

    assert plan.search.status is Status.OPTIMAL
    assert plan.search.fastest_step_time_s <= fastest_s * (1 + 1e-5) + 2e-6
    assert plan.search.bound <= fastest_s * (1 + 1e-5) + 2e-6
    assert plan.search.value <= WORTH_REPLAYING * fastest_s + 1e-6
    assert plan.search.bound <= min(price.step_s for _, price in fitting) + 2e-6
    capacity = {p.name: p.cluster.device.memory_bytes / GIB for p in instance.cluster.pools}
    for stage in plan.stages:
        memory = plan.predicted.memory_gib[stage.rank]
        assert memory.capacity == pytest.approx(capacity[stage.pool], abs=1e-3)
        assert memory.total <= memory.capacity + 1e-3

    slowest_s = fastest_s * (1 + SLOWDOWN)
    lean = search(instance, Objective.MEMORY, max_slowdown=SLOWDOWN)
    most_s = lean.search.fastest_step_time_s * (1 + SLOWDOWN)  # of the simulated step
    in_time = [(s, p) for s, p in fitting if p.closed_form_s <= slowest_s and p.step_s <= most_s]
    leanest = min(redundant_bytes(s, p) for s, p in in_time)

    assert lean.search.status is Status.OPTIMAL
    assert lean.search.value <= leanest / GIB * (1 + 1e-5) + 1e-5
    assert lean.search.value * (1 - lean.search.gap) <= leanest / GIB * (1 + 1e-5) + 1e-5

    peaks = [max(m.total for m in p.memory) for _, p in in_time]
    small = search(instance, Objective.PEAK, max_slowdown=SLOWDOWN)

    assert small.search.status is Status.OPTIMAL
    assert small.search.value <= (min(peaks) + 2 * MIB) / GIB
    assert small.search.bound <= min(peaks) / GIB + 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_never_exceed_the_optimum_of_their_layout(seed):
    instance = two_pools(seed)
    prices = PooledPrices(
        request(instance.model, instance.cluster, instance.training, constraints=PINS)
    )
    best_s, best_bytes = {}, {}
    for strategy, price in every_price_on_pools(instance):
        layout = strategy.layout
        best_s[layout] = min(best_s.get(layout, float("inf")), price.closed_form_s)
        best_bytes[layout] = min(
            best_bytes.get(layout, float("inf")), redundant_bytes(strategy, price)
        )

    assert set(best_s) == set(prices.space.layouts)
    for layout, optimum_s in best_s.items():
        limit = instance.cluster.device.memory_bytes
        assert 0 < prices.step_bound_s(layout, limit) <= optimum_s * (1 + 1e-9)
        least = prices.least_redundant_bytes(layout, float("inf"), limit)
        assert least <= best_bytes[layout] * (1 + 1e-9) + 1


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_over_pools_is_leaner_than_the_bound_within_its_own_step(seed):
    instance = two_pools(seed)
    prices = PooledPrices(
        request(instance.model, instance.cluster, instance.training, constraints=PINS)
    )
    limit = instance.cluster.device.memory_bytes
    everything = every_price_on_pools(instance, mixed=20)
    assert len(everything) > 50
    for strategy, price in everything:
        least = prices.least_redundant_bytes(strategy.layout, price.closed_form_s, limit)
        assert least <= redundant_bytes(strategy, price) * (1 + 1e-9) + 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_random_choice_of_columns_over_pools_is_below_the_bounds_of_its_layout(seed):
    """Deep pipelines, unequal numbers of blocks, and schedules that a tiny case has no room for."""
    draw, instance = random.Random(f"choices {seed}"), two_pools(3)
    cluster = unequal_cluster(
        "four",
        [
            Pool(name=f"p{place}", cluster=with_gpus(load_cluster(kind), 4, 2))
            for place, kind in enumerate(draw.sample(("a100-80gb", "h100-80gb", "h20-96gb"), 2))
        ],
        [Join(name="line", latency_s=1e-5, source="", total_bytes_per_s=1e10)],
    )
    model = replace(instance.model, num_layers=12)
    training = replace(instance.training, global_batch_size=16)
    pins = Constraints(schedule=SCHEDULES, recompute=PINS.recompute)
    prices = PooledPrices(request(model, cluster, training, constraints=pins))
    layouts = [each for each in prices.space.layouts if each.mesh.pp > 1]
    seen = 0
    for layout in draw.sample(layouts, 30):
        ranks = range(layout.mesh.pp)
        columns = [rank_columns(rank, layout, prices.table_of(layout, rank)) for rank in ranks]
        for _ in range(5):
            counts = random_counts(layout, model.num_layers, draw)
            choices = [each.leanest(n, 1e15) for each, n in zip(columns, counts, strict=True)]
            assert all(choices)
            share = bubble_share(layout, prices.price_cache)
            picked = [draw.choice(each) for each in choices]
            choice = evaluate(layout, picked, proven=False, share=share)
            assert prices.step_bound_s(layout, 1e15) <= choice.step_s * (1 + 1e-9)
            least = prices.least_redundant_bytes(layout, choice.step_s, 1e15)
            assert least <= choice.redundant_bytes * (1 + 1e-9) + 1
            seen += 1
    assert seen == 150


def random_counts(layout, num_layers, draw):
    """Returns numbers of blocks that the ranks of a layout may have together."""
    counts = [list(block_counts(rank, layout, num_layers)) for rank in range(layout.mesh.pp)]
    held = [each[0] for each in counts]
    while sum(held) < num_layers:
        held[draw.choice([r for r, each in enumerate(counts) if held[r] < each[-1]])] += 1
    return held


@pytest.mark.slow
def test_an_order_of_pools_is_replayed_whose_closed_form_is_no_shorter():
    shape, kinds = random_instance(242), (("h20-96gb", 2), ("l40s-48gb", 1), ("h100-80gb", 1))
    joins = [
        Join(name=name, latency_s=latency_s, source="", pools=pools, total_bytes_per_s=bytes_per_s)
        for name, latency_s, pools, bytes_per_s in (
            ("far", 1e-2, ("h20-96gb", "l40s-48gb"), 1e15),
            ("slow", 0.0, ("l40s-48gb", "h100-80gb"), 1e8),
            ("near", 1e-5, (), 1e10),
        )
    ]
    pools = [Pool(name=k, cluster=with_gpus(load_cluster(k), gpus, 1)) for k, gpus in kinds]
    instance = Instance(
        replace(shape.model, num_layers=4),
        unequal_cluster("three", pools, joins),
        replace(shape.training, attention="unfused"),
    )
    pins = replace(PINS, pp=(4,), micro_batch_size=(1,), recompute=PINS.recompute[:1])
    cache = instance.price_cache()
    steps_s = [
        price_step(strategy, cache).step_s
        for layout in layouts_on_pools(instance, pins)
        for strategy in every_strategy(layout, 4)
    ]

    plan = find_plan(instance.model, instance.cluster, instance.training, constraints=pins)

    assert plan.predicted.step_time_s.value == pytest.approx(min(steps_s), rel=1e-4)
    assert plan.search.bound <= min(steps_s)


def test_a_plan_over_pools_is_read_back_and_priced_alike():
    plan = search(two_pools(3))

    again = plan_from_document(plan_to_document(plan), "plan.yaml")

    assert again == plan
    assert reprice(again).price.step_s == pytest.approx(plan.predicted.step_time_s.value, rel=1e-5)
    body = plan_to_document(plan)
    body["stages"][0]["pool"] = "p9"
    with pytest.raises(ConfigError, match="p9"):
        plan_from_document(body, "plan.yaml")


def test_what_is_not_searched_over_pools_is_refused():
    pins = replace(PINS, recompute=None, weights_over_data=(True,))
    instance = two_pools(3)
    with pytest.raises(ConfigError, match="weights over data-parallel ranks: not searched over"):
        find_plan(instance.model, instance.cluster, instance.training, constraints=pins)


def test_the_front_over_pools_holds_what_each_objective_finds():
    instance = two_pools(3)
    parts = instance.model, instance.cluster, instance.training
    options = SearchOptions(memory_margin=0.0)
    front = find_front(*parts, num_points=6, constraints=PINS, options=options)

    assert front.stopped is None
    fastest = search(instance)
    assert front.points[0].step_time_s <= fastest.predicted.step_time_s.value * (1 + 1e-6)
    smallest_gib = min(point.peak_memory_gib for point in front.points)
    least = search(instance, Objective.PEAK, max_slowdown=ANY_SLOWDOWN)
    assert smallest_gib <= least.search.value + 2 * MIB / GIB
    assert front.nothing_within_gib < smallest_gib
    for point in front.points:
        limit_gib = point.plan.search.front.memory_limit_gib
        assert limit_gib is None or point.peak_memory_gib <= limit_gib + 1e-3
