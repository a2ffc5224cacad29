"""The integer program of a block agrees with the search, and finds the fault of a worse block."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Split
from parplan.planner.infeasible.shortfall import price_cache_of
from parplan.planner.layer_options.catalogue import catalogue_of
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import strategy_of
from parplan.planner.request import Constraints, SearchOptions, SolverName
from parplan.planner.search.layer_proof import layer_proof
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.units import GIB
from tests.helpers.planning import find_plan, request

ENTRY = load_model("gpt-2.5b")
CLUSTER = with_gpus(load_cluster("a100-80gb"), 8)
TRAINING = TrainingSpec(global_batch_size=32, seq_length=1024, stack=load_stack("parplan"))
PINS = Constraints(pp=(1,), tp=(4,), tp_overlap=(0,), micro_batch_size=(1, 2))


@pytest.fixture(scope="module")
def priced():
    plan = plan_within(9)  # memory binds
    asked = request(ENTRY.spec, CLUSTER, TRAINING, constraints=PINS)
    price_cache = price_cache_of(asked)
    return plan, strategy_of(plan, price_cache), catalogue_of(price_cache, PINS)


def plan_within(limit_gib: float) -> Plan:
    options = SearchOptions(memory_limit_bytes=int(limit_gib * GIB))
    return find_plan(ENTRY.spec, CLUSTER, TRAINING, constraints=PINS, options=options)


def proof(strategy, catalogue):
    return layer_proof(strategy, catalogue, SolverName.CBC, 60.0)


def with_blocks(strategy, **changes):
    stages = tuple(
        tuple(
            replace(choice, **changes) if choice.kind is LayerKind.BLOCK else choice
            for choice in stage
        )
        for stage in strategy.stages
    )
    return replace(strategy, stages=stages)


def with_products_whole(strategy):
    replicated = replace(strategy.layout.sharding, own=(("activation", (Split(),)),))
    return with_blocks(strategy, sharding=replicated, recompute=Recompute.NONE)


@pytest.mark.slow
def test_a_plan_has_the_proof_of_its_blocks(priced):
    plan, strategy, catalogue = priced

    assert plan.search.layers == proof(strategy, catalogue)
    assert plan.search.layers.programs > 0
    assert plan.search.layers.gap == 0.0
    # the same proof finds the fault of a worse block
    assert proof(with_products_whole(strategy), catalogue).gap > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("limit_gib", [7, 70])
def test_they_agree_where_memory_binds_more_and_where_it_does_not(limit_gib):
    assert plan_within(limit_gib).search.layers.gap == 0.0


def test_recompute_that_frees_nothing_has_a_faster_alternative(priced):
    _, strategy, catalogue = priced
    wasteful = with_blocks(strategy, recompute=("fc2",))  # no backward pass reads its output

    assert proof(wasteful, catalogue).gap > 0.0


def test_blocks_without_a_choice_need_no_program():
    plain = replace(TRAINING, stack=load_stack("megatron-core"))
    plan = find_plan(ENTRY.spec, CLUSTER, plain, constraints=replace(PINS, tp=(1,)))

    assert plan.search.layers is None
