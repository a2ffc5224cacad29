"""Every search method on tiny seeded spaces, beside all points of the space."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from parplan.commands.options.option_values import SEARCH_METHODS
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.step import price_step
from parplan.planner.deadline import cpu_s
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints
from parplan.planner.search_methods.exhaustive import every_point
from parplan.planner.search_methods.ledger import Ledger
from parplan.planner.search_methods.method_plan import find_by_method
from parplan.planner.search_methods.method_space import MethodSpace
from parplan.planner.search_methods.methods import METHODS, run_method
from parplan.profiles.errors import ConfigError, OutOfTimeError
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.units import GIB
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import peak_bytes, random_instance
from tests.helpers.planning import request
from tests.helpers.pools import two_pools

BUDGET_S = 0.5
NEAR = 1.5  # of the optimum, which any method reaches on so small a space


def tiny(seed: int):
    instance = random_instance(seed)
    return request(instance.model, instance.cluster, instance.training)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(METHODS, ["ours", "mcmc"]))
def test_a_method_finds_a_legal_strategy_at_the_price_of_every_plan(name):
    asked = tiny(4)
    space = MethodSpace(asked)
    reference = run_method("ours", asked, math.inf)

    found = run_method(name, asked, BUDGET_S)

    price = price_step(found.strategy, space.price_cache)
    assert found.strategy.layout in space.layouts
    assert sum(map(len, found.strategy.stages)) == asked.model.num_layers + 2
    assert peak_bytes(price) <= space.limit_bytes
    assert found.step_s == pytest.approx(price.step_s, rel=1e-12)
    assert found.step_s >= reference.bound_s - 1e-6
    assert found.step_s <= NEAR * reference.step_s
    assert [each.step_s for each in found.trace] == sorted(
        (each.step_s for each in found.trace), reverse=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (22, 24))]
)
def test_exhaustive_search_ends_with_the_proven_optimum(seed):
    reference = run_method("ours", tiny(seed), math.inf)

    found = run_method("exhaustive", tiny(seed), math.inf)

    assert found.ended
    assert found.step_s == pytest.approx(reference.step_s, rel=1e-6)


def on_pools(seed: int):
    instance = two_pools(seed)
    return request(instance.model, instance.cluster, instance.training)


@pytest.mark.slow
def test_exhaustive_search_over_pools_ends_with_the_proven_optimum():
    reference = run_method("ours", on_pools(3), math.inf)

    found = run_method("exhaustive", on_pools(3), math.inf)

    assert found.ended
    assert found.step_s >= reference.bound_s - 1e-6  # as a plan states it
    assert found.step_s <= reference.step_s * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(METHODS, ["policy-gradient"]))
def test_a_method_finds_a_plan_over_pools(name):
    asked = on_pools(3)
    plan = find_by_method(asked, name, 4 * BUDGET_S)  # also on a busy machine

    capacity_gib = {
        pool.name: pool.cluster.device.memory_bytes / GIB for pool in asked.cluster.pools
    }
    assert {stage.pool for stage in plan.stages} == set(capacity_gib)
    for stage, memory in zip(plan.stages, plan.predicted.memory_gib, strict=True):
        assert memory.total <= capacity_gib[stage.pool]
    assert reprice(plan).price.step_s == pytest.approx(plan.search.value, rel=1e-4)


def test_random_points_and_their_changes_lie_in_the_space():
    space, draw = MethodSpace(tiny(4)), Random(0)
    every = {point for layout in space.layouts for point in every_point(space, layout)}

    for _ in range(20):
        point = space.random_point(draw)

        assert point in every
        assert every.issuperset(space.changes(point))
        assert space.random_change(point, draw) in every


def test_a_point_that_does_not_fit_has_no_step():
    space = MethodSpace(tiny(4))
    ledger = Ledger(space, cpu_s(), math.inf)
    point = space.random_point(Random(0))
    space.limit_bytes = 1.0

    assert ledger.point_s(point) == math.inf
    assert ledger.best is None


def test_a_run_ends_with_its_budget_and_repeats_with_its_seed():
    first = run_method("random", tiny(4), 0.2, seed=3)
    again = run_method("random", tiny(4), 0.2, seed=3)

    assert not first.ended
    assert 0.2 <= first.cpu_s < 1.0
    assert first.trace[0].step_s == again.trace[0].step_s


def test_an_unknown_method_is_an_error_that_names_the_known_ones():
    with pytest.raises(ConfigError, match="'annealing' is unknown"):
        run_method("annealing", tiny(4), 0.1)


def test_a_model_whose_blocks_are_not_alike_is_an_error():
    entry, asked = load_model("deepseek-tiny"), tiny(4)

    with pytest.raises(ConfigError, match="blocks of deepseek-tiny are not alike"):
        MethodSpace(request(entry.spec, asked.cluster, asked.training))


def test_a_plan_of_a_method_says_which_one_and_that_nothing_is_proven():
    plan = find_by_method(tiny(4), "greedy", BUDGET_S)

    assert plan.search.method == "greedy"
    assert (plan.search.bound, plan.search.gap) == (0.0, 1.0)
    assert plan.search.value == pytest.approx(plan.predicted.step_time_s.value, abs=1e-6)


def test_the_option_names_every_method():
    assert tuple(METHODS) == SEARCH_METHODS


def test_pins_limit_the_points_and_others_are_refused():
    asked = tiny(4)
    pinned = replace(asked, constraints=Constraints(zero=(1,), recompute=(Recompute.FULL,)))
    space = MethodSpace(pinned)

    assert {way for each in space.layouts for way in space.ways(each)} <= {
        (Recompute.FULL, 0),
        (Recompute.FULL, 1),
    }
    with pytest.raises(ConfigError, match="--cp asks for a choice that the search methods do not"):
        MethodSpace(replace(asked, constraints=Constraints(cp=(2,))))


def test_a_method_without_time_has_no_plan():
    with pytest.raises(OutOfTimeError, match="the search method random found no plan"):
        find_by_method(tiny(4), "random", 0.0)
