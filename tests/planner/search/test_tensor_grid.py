"""Tensor parallelism over a grid of ranks as a choice of the search, and in plan files."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.step import price_step
from parplan.planner.layer_options.catalogue import Catalogue
from parplan.planner.layer_options.layer_problem import may_recompute
from parplan.planner.objective import Objective
from parplan.planner.plan.plan_file import plan_to_yaml, read_plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.plan.prediction import Status
from parplan.planner.request import SearchOptions
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import (
    PINS,
    every_price,
    peak_bytes,
    random_instance,
    redundant_bytes,
    same_sharding,
)
from tests.helpers.planning import enumerate_candidates, find_plan

GRIDS = replace(PINS, tp_rows=(2,))
FOUR_GPUS = [seed for seed in range(12) if random_instance(seed).cluster.num_gpus == 4]
SLOWDOWN = 0.2


def instance_of(seed):
    """A tiny model on one node, so that four tensor-parallel ranks may be a grid."""
    given = random_instance(seed)
    return replace(given, cluster=replace(given.cluster, nodes=1, gpus_per_node=4))


def search(instance, pins=GRIDS, objective=Objective.THROUGHPUT, **options):
    parts = instance.model, instance.cluster, instance.training, objective
    return find_plan(*parts, constraints=pins, options=SearchOptions(**options))


@pytest.mark.parametrize("seed", mostly_slow(FOUR_GPUS, {FOUR_GPUS[0]}))
def test_search_over_grids_equals_brute_force_with_memory_binding(seed):
    instance = instance_of(seed)
    everything = every_price(instance, mixed=20, pins=GRIDS)
    assert {strategy.layout.mesh.tp_rows for strategy, _ in everything} == {2}
    peaks = sorted(peak_bytes(price) for _, price in everything)
    limit = int(peaks[len(peaks) // 5])
    fitting = [(s, p) for s, p in everything if peak_bytes(p) <= limit]
    fastest_s = min(p.closed_form_s for _, p in fitting)

    plan = search(instance, memory_limit_bytes=limit)

    assert plan.mesh.tp_rows == 2
    assert plan.search.status is Status.OPTIMAL
    assert plan.search.bound <= fastest_s * (1 + 1e-5) + 2e-6
    assert plan.search.fastest_step_time_s <= fastest_s * (1 + 1e-5) + 2e-6

    in_time = [(s, p) for s, p in fitting if p.closed_form_s <= fastest_s * (1 + SLOWDOWN)]
    leanest = min(redundant_bytes(s, p) for s, p in in_time)
    lean = search(
        instance, GRIDS, Objective.MEMORY, memory_limit_bytes=limit, max_slowdown=SLOWDOWN
    )

    assert lean.search.value <= leanest / GIB * (1 + 1e-5) + 1e-5


def mixed(strategy, lists, draw):
    """The strategy with one of some lists of operators and a random ZeRO stage for each layer."""
    zeros = range(4) if strategy.layout.mesh.dp > 1 else (0,)

    def redrawn(choice):
        names = draw.choice(lists) if choice.kind is LayerKind.BLOCK else ()
        return replace(choice, zero=draw.choice(zeros), recompute=names)

    return replace(strategy, stages=tuple(tuple(map(redrawn, each)) for each in strategy.stages))


def every_list(price_cache):
    """All lists of operators that a block can recompute."""
    operators = [op.name for op in price_cache.graph(1).block.operators if may_recompute(op)]
    subsets = (itertools.combinations(operators, count) for count in range(len(operators) + 1))
    return list(itertools.chain.from_iterable(subsets))


@pytest.mark.parametrize("seed", mostly_slow(FOUR_GPUS, {FOUR_GPUS[0]}))
def test_no_mix_of_recompute_lists_and_zero_stages_beats_the_search_over_grids(seed):
    instance, pins = instance_of(seed), replace(GRIDS, recompute=None)
    price_cache, draw = instance.price_cache(), random.Random(seed)
    catalogue = Catalogue(price_cache)
    levels = [strategy for strategy, _ in every_price(instance, pins=GRIDS)]
    lists, of_catalogue = every_list(price_cache), []
    for strategy in draw.choices(levels, k=300):
        layout = strategy.layout
        options = catalogue.options(layout.micro_batch_size, layout.sharding)
        of_catalogue.append(mixed(strategy, [option.recompute for option in options], draw))

    def priced(strategies):
        every = [s for s in strategies if not price_cache.tied or same_sharding(s)]
        return [(strategy, price_step(strategy, price_cache)) for strategy in every]

    known = priced((*levels, *of_catalogue))
    others = priced(mixed(strategy, lists, draw) for strategy in draw.choices(levels, k=300))
    peaks, recomputed = sorted(peak_bytes(price) for _, price in known), set()
    for limit in (int(peaks[len(peaks) // 10]), int(peaks[len(peaks) // 3])):
        fastest_s = min(p.closed_form_s for _, p in (*known, *others) if peak_bytes(p) <= limit)

        plan = search(instance, pins, memory_limit_bytes=limit)

        assert plan.search.status is Status.OPTIMAL
        assert plan.search.bound <= fastest_s * (1 + 1e-5) + 2e-6
        assert plan.search.fastest_step_time_s <= fastest_s * (1 + 1e-5) + 2e-6

        recomputed |= {tuple(layer.recompute) for layer in plan.layer_plans.values()}
        slowest_s = plan.search.fastest_step_time_s * (1 + SLOWDOWN)
        fitting = [(s, p) for s, p in known if peak_bytes(p) <= limit]
        leanest = min(redundant_bytes(s, p) for s, p in fitting if p.closed_form_s <= slowest_s)
        lean = search(
            instance, pins, Objective.MEMORY, memory_limit_bytes=limit, max_slowdown=SLOWDOWN
        )

        assert lean.search.value <= leanest / GIB * (1 + 1e-5) + 1e-5
    of_levels = {price_cache.recompute_operators(LayerKind.BLOCK, level) for level in Recompute}
    assert recomputed - of_levels


def test_grids_are_asked_for_by_name_on_every_stack():
    instance = instance_of(FOUR_GPUS[0])

    def rows(stack, pins=PINS):
        training = replace(instance.training, stack=stack)
        space = enumerate_candidates(instance.model, instance.cluster, training, pins)
        return {layout.mesh.tp_rows for layout in space.layouts}

    for stack in (NEUTRAL, load_stack("parplan")):
        assert rows(stack) == {1}
        assert rows(stack, GRIDS) == {2}
        assert rows(stack, replace(PINS, tp_rows=(1, 2))) == {1, 2}


def test_a_plan_file_says_the_grid_and_the_placements_over_rows_and_columns(tmp_path):
    plan = search(instance_of(FOUR_GPUS[0]))
    path = tmp_path / "plan.yaml"
    path.write_text(plan_to_yaml(plan), encoding="utf-8")
    read = read_plan(path)

    assert read == plan
    assert strategy_of(read, prices_of_plan(read)).layout.mesh.tp_rows == 2
    block = read.layer_plans["A"].operators
    assert block["fc1"].parameters["weight"] == ("Shard(1)@tp_rows", "Shard(0)@tp_columns")
    assert block["fc2"].parameters["weight"] == ("Shard(1)@tp_rows", "Shard(0)@tp_columns")
    assert block["fc2"].input == ("Shard(0)@tp_rows",)
    assert block["norm1"].output == ("Shard(0)@tp_rows", "Shard(2)@tp_columns")

    turned = replace(
        read,
        layer_plans=read.layer_plans
        | {"A": replace(read.layer_plans["A"], operators=block | {"fc1": block["norm1"]})},
    )
    with pytest.raises(ConfigError, match="its placements are not those of tp_rows 2"):
        strategy_of(turned, prices_of_plan(turned))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tp": 4, "tp_rows": 3}, "tp_rows is 3, it must divide tp 4"),
        ({"tp": 4, "tp_rows": 4}, "tp_rows is 4, it must divide tp 4 into rows of two"),
        ({"tp": 4, "tp_rows": 2, "ep": 2}, "2-D tensor parallelism divides dense models"),
    ],
)
def test_a_mesh_that_is_no_grid_is_an_error(mesh, message):
    with pytest.raises(ConfigError, match=message):
        Mesh(pp=1, dp=1, **mesh)
