"""The search over pools for models of several block classes equals a full enumeration."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.planner.objective import Objective
from parplan.planner.plan.plan_file import plan_from_document, plan_to_document
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.search.pooled_class_prices import PooledClassPrices
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.units import GIB, MIB
from tests.helpers.cases import mostly_slow
from tests.helpers.class_strategies import every_strategy, random_strategy, tied_alike
from tests.helpers.instances import PINS, Instance, redundant_bytes
from tests.helpers.planning import find_plan, request
from tests.helpers.pools import Priced, fits, layouts_on_pools, shares_of, tight, two_pools

SLOWDOWN = 0.2
LEVELS = replace(PINS, recompute=PINS.recompute[::2], zero=(0, 2))
PLAIN = replace(LEVELS, schedule=(Schedule.ONE_F_ONE_B,))
SEEDS = mostly_slow(range(4), {3})


def two_classes(seed: int) -> Instance:
    """A tiny model with a dense block before those with experts, or with unlike attention."""
    instance = two_pools(seed)
    changes = {"num_layers": 4, "blocks": (BlockRun(window=32), BlockRun())}
    if seed % 3 != 2:
        rest = instance.model.num_layers - 1
        changes = {
            "blocks": (BlockRun(experts=False), BlockRun(num_blocks=rest)),
            "num_experts": 4,
            "experts_per_token": 2,
            "expert_ffn_hidden_size": 2 * instance.model.hidden_size,
        }
    return replace(
        instance, model=replace(instance.model, linear_bias=False, dropout=0.0, **changes)
    )


def prices_of(instance: Instance, pins: Constraints) -> PooledClassPrices:
    parts = instance.model, instance.cluster, instance.training
    return PooledClassPrices(request(*parts, constraints=pins))


def every_price(instance: Instance, pins: Constraints) -> list[Priced]:
    prices = prices_of(instance, pins)
    layouts = [*layouts_on_pools(instance, pins)]
    assert set(layouts) == set(prices.space.layouts)
    return [
        (strategy, price_step(strategy, prices.price_cache))
        for strategy in every_strategy(layouts, pins, prices)
        if tied_alike(strategy, tied=prices.price_cache.tied)
    ]


def search(instance, pins, objective=Objective.THROUGHPUT, **options):
    parts = instance.model, instance.cluster, instance.training
    options = SearchOptions(memory_margin=0.0, **options)
    return find_plan(*parts, objective, constraints=pins, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_search_equals_brute_force_under_both_objectives(seed):
    pins = PLAIN if seed % 2 else LEVELS
    roomy = two_classes(seed)
    instance = tight(roomy, every_price(roomy, pins), shares_of(seed))
    everything = every_price(instance, pins)
    fitting = [priced for priced in everything if fits(priced, instance)]
    assert 0 < len(fitting) < len(everything)
    fastest_s = min(price.closed_form_s for _, price in fitting)

    plan = search(instance, pins)

    assert plan.search.status is Status.OPTIMAL
    assert plan.search.fastest_step_time_s == pytest.approx(fastest_s, rel=1e-6, abs=2e-6)
    assert plan.search.bound <= min(price.step_s for _, price in fitting) + 2e-6

    slowest_s = fastest_s * (1 + SLOWDOWN)
    leanest = min(redundant_bytes(s, p) for s, p in fitting if p.closed_form_s <= slowest_s)
    lean = search(instance, pins, Objective.MEMORY, max_slowdown=SLOWDOWN)

    assert lean.search.status is Status.OPTIMAL
    assert lean.search.value == pytest.approx(leanest / GIB, rel=1e-5, abs=2e-6)

    peaks = [max(m.total for m in p.memory) for _, p in fitting if p.closed_form_s <= slowest_s]
    small = search(instance, pins, Objective.PEAK, max_slowdown=SLOWDOWN)

    assert small.search.status is Status.OPTIMAL
    assert small.search.value == pytest.approx(min(peaks) / GIB, abs=2 * MIB / GIB)
    assert small.search.bound <= min(peaks) / GIB + 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_never_exceed_the_optimum_of_their_layout(seed):
    instance = two_classes(seed)
    prices, least_s, least_bytes = prices_of(instance, LEVELS), {}, {}
    for strategy, price in every_price(instance, LEVELS):
        layout = strategy.layout
        least_s[layout] = min(least_s.get(layout, float("inf")), price.closed_form_s)
        redundant = redundant_bytes(strategy, price)
        least_bytes[layout] = min(least_bytes.get(layout, float("inf")), redundant)

    limit = instance.cluster.device.memory_bytes
    for layout, optimum_s in least_s.items():
        first_s = prices.step_bound_s(layout, limit)
        (closer_s,) = prices.closer_bounds_s(layout, limit)
        assert 0 < first_s <= optimum_s * (1 + 1e-9)
        assert first_s * (1 - 1e-9) <= closer_s <= optimum_s * (1 + 1e-9)
        least = prices.least_redundant_bytes(layout, float("inf"), limit)
        assert least <= least_bytes[layout] * (1 + 1e-9) + 1


@pytest.mark.parametrize("seed", SEEDS)
def test_no_random_plan_is_below_the_bound_and_the_file_gives_the_same_price(seed):
    instance, rng = two_classes(seed), random.Random(seed)
    pins = Constraints()
    plan, prices = search(instance, pins), prices_of(instance, pins)
    layouts = [each for each in prices.space.layouts if not each.recomputes_ahead]

    for layout in rng.choices(layouts, k=100):
        strategy = random_strategy(prices, layout, rng)
        if tied_alike(strategy, tied=prices.price_cache.tied):
            price = price_step(strategy, prices.price_cache)
            assert price.step_s >= plan.search.bound * (1 - 1e-6)

    again = plan_from_document(plan_to_document(plan), "plan.yaml")
    assert again == plan
    assert reprice(again).price.step_s == pytest.approx(plan.predicted.step_time_s.value, rel=1e-5)
