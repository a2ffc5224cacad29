"""With --zero-by-operator a search equals an enumeration of the stages of a block's operators."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parplan.costmodels.step import price_step
from parplan.planner.layer_options.zero_ways import zero_ways
from parplan.planner.objective import Objective
from parplan.planner.plan.plan_file import plan_from_document, plan_to_document
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.plan.prediction import Status
from parplan.planner.request import SearchOptions
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import GIB
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import (
    PINS,
    every_strategy,
    peak_bytes,
    random_instance,
    redundant_bytes,
    same_sharding,
)
from tests.helpers.planning import enumerate_candidates, estimate_plan, find_plan

BY_OPERATOR = replace(PINS, zero_by_operator=True)
DRAWN = 40  # strategies of each layout with a drawn way for every block
SLOWDOWN = 0.2
SEEDS = mostly_slow(range(5), {4})


def with_ways(strategy, ways, draw):
    """The strategy with a drawn way for every block."""

    def drawn(choice):
        if choice.kind is not LayerKind.BLOCK:
            return choice
        zero, own_zero = draw.choice(ways)
        return replace(choice, zero=zero, own_zero=own_zero)

    return replace(strategy, stages=tuple(tuple(map(drawn, stage)) for stage in strategy.stages))


def every_price(instance, seed, step=1):
    """Strategies with one stage for a rank, with one way for all blocks, and with drawn ways.

    Of every `step` strategies of a layout one is priced.
    """
    price_cache, draw = instance.price_cache(), random.Random(seed)
    layers = instance.model.num_layers
    space = enumerate_candidates(instance.model, instance.cluster, instance.training, PINS)
    priced = []
    for layout in space.layouts:
        alike = list(every_strategy(layout, layers))
        ways = [(zero, ()) for zero in range(4)] if layout.mesh.dp > 1 else [(0, ())]
        stages = tuple(zero for zero, _ in ways)
        ways += zero_ways(layout, stages, price_cache)
        first = draw.sample(alike, min(len(alike), 6))
        strategies = [
            *alike,
            *(with_ways(strategy, [way], draw) for strategy in first for way in ways),
            *(with_ways(draw.choice(alike), ways, draw) for _ in range(DRAWN)),
        ]
        priced += [
            (strategy, price_step(strategy, price_cache))
            for strategy in strategies[::step]
            if not price_cache.tied or same_sharding(strategy)
        ]
    return priced


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_no_enumerated_strategy_beats_the_search_or_its_bound(seed):
    instance = random_instance(seed)
    everything = every_price(instance, seed)
    peaks = sorted(peak_bytes(price) for _, price in everything)
    limit = int(peaks[len(peaks) // 10])  # nine in ten strategies do not fit
    fitting = [(s, p) for s, p in everything if peak_bytes(p) <= limit]
    fastest_s = min(p.closed_form_s for _, p in fitting)

    def search(objective, **options):
        return find_plan(
            instance.model,
            instance.cluster,
            instance.training,
            objective,
            constraints=BY_OPERATOR,
            options=SearchOptions(memory_limit_bytes=limit, **options),
        )

    plan = search(Objective.THROUGHPUT)

    assert plan.search.status is Status.OPTIMAL
    assert plan.search.bound <= fastest_s * (1 + 1e-5) + 2e-6
    assert plan.search.fastest_step_time_s <= fastest_s * (1 + 1e-5) + 2e-6

    slowest_s = fastest_s * (1 + SLOWDOWN)
    leanest = min(redundant_bytes(s, p) for s, p in fitting if p.closed_form_s <= slowest_s) / GIB
    lean = search(Objective.MEMORY, max_slowdown=SLOWDOWN)

    assert lean.search.value <= leanest * (1 + 1e-5) + 1e-5
    assert lean.search.value * (1 - lean.search.gap) <= leanest * (1 + 1e-5) + 1e-5


@pytest.fixture(scope="module")
def tight():
    """Plans of one instance within one memory limit, without the option and with it."""
    instance = random_instance(11)
    peaks = sorted(peak_bytes(price) for _, price in every_price(instance, 11, step=3))
    options = SearchOptions(memory_limit_bytes=int(peaks[len(peaks) // 5]))
    return tuple(
        find_plan(
            instance.model, instance.cluster, instance.training, constraints=pins, options=options
        )
        for pins in (PINS, BY_OPERATOR)
    )


@pytest.mark.slow
def test_where_memory_falls_between_stages_two_of_them_are_faster(tight):
    alike, by_operator = tight

    assert all(not layer_plan.own_zero for layer_plan in alike.layer_plans.values())
    assert any(layer_plan.own_zero for layer_plan in by_operator.layer_plans.values())
    assert by_operator.search.value < 0.98 * alike.search.value
    assert by_operator.search.gap < 0.01


@pytest.mark.slow
def test_a_plan_file_with_stages_by_operator_has_the_price_of_its_search(tight):
    document = plan_to_document(tight[1])
    plan = plan_from_document(document, "plan.yaml")

    price_cache = prices_of_plan(plan)
    price = price_step(strategy_of(plan, price_cache), price_cache)

    assert plan == tight[1]
    assert price.step_s == pytest.approx(plan.predicted.step_time_s.value, rel=1e-5)
    for rank, stage in enumerate(plan.predicted.memory_gib):
        assert price.memory[rank].total / GIB == pytest.approx(stage.total, abs=1e-3)
    assert all(
        "own_zero" not in each for each in plan_to_document(tight[0])["layer_plans"].values()
    )


def test_one_stage_for_all_is_what_no_stage_by_operator_is():
    instance = random_instance(11)
    price_cache = instance.price_cache()
    space = enumerate_candidates(instance.model, instance.cluster, instance.training, PINS)
    layout = next(each for each in space.layouts if each.mesh.dp > 1)
    args = LayerKind.BLOCK, layout.micro_batch_size, layout.mesh, layout.sharding
    names = [operator.name for operator in price_cache.layer(LayerKind.BLOCK, 1).operators]
    for zero in range(4):
        own_zero = tuple((name, zero) for name in names)
        assert price_cache.data_parallel(*args, 0, own_zero) == price_cache.data_parallel(
            *args, zero
        )
        assert price_cache.states(args[0], *args[2:], 0, own_zero) == price_cache.states(
            args[0], *args[2:], zero
        )


def estimated(**choices):
    instance = random_instance(11)
    space = enumerate_candidates(instance.model, instance.cluster, instance.training, PINS)
    layout = next(each for each in space.layouts if each.mesh.dp == 4)
    return estimate_plan(instance.model, instance.cluster, instance.training, layout, **choices)


def test_an_estimate_prices_stages_by_hand_between_those_of_all_operators():
    lean, mixed, whole = (
        estimated(zero=zero, own_zero=own_zero)
        for zero, own_zero in ((3, ()), (1, (("fc1", 3), ("fc2", 3))), (1, ()))
    )

    (layer_plan,) = (each for each in mixed.layer_plans.values() if each.own_zero)
    assert (layer_plan.zero, dict(layer_plan.own_zero)) == (1, {"fc1": 3, "fc2": 3})
    states = [
        memory.parameters + memory.gradients + memory.optimizer
        for memory in (plan.predicted.memory_gib[0] for plan in (lean, mixed, whole))
    ]
    assert states == sorted(states)
    assert states[0] < states[1] < states[2]


def test_an_estimate_refuses_an_operator_without_parameters():
    with pytest.raises(ConfigError, match="unknown operator 'activation'"):
        estimated(zero=1, own_zero=(("activation", 3),))
