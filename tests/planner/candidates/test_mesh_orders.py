"""The order of the mesh axes is a choice of the search where it changes what lies on a node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.planner.plan.mesh_orders import order_prices
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from tests.helpers.planning import enumerate_candidates, find_plan

MODEL = load_model("gpt-8.3b").spec
CLUSTER = with_gpus(load_cluster("a100-80gb"), 16)
TRAINING = TrainingSpec(global_batch_size=64, seq_length=1024, stack=load_stack("megatron-core"))
PINS = Constraints(pp=(2, 4), dp=(2, 4), zero=(0, 1))
FEW = replace(PINS, pp=(2,), micro_batch_size=(1, 2))


def orders(num_gpus=16, **pins):
    cluster = with_gpus(CLUSTER, num_gpus)
    space = enumerate_candidates(MODEL, cluster, TRAINING, replace(PINS, **pins))
    return {(str(layout.mesh.order), layout.mesh.tp) for layout in space.layouts}


def test_a_mesh_is_searched_in_every_order_that_lies_differently_on_the_nodes():
    # two nodes of 8: pp 4 x dp 2 x tp 2 has whole pipelines in a node, or whole stages
    both = {(order, tp) for order in ("pp-dp-tp", "dp-pp-tp") for tp in (1, 2, 4)}
    assert orders() == both
    assert orders(num_gpus=8) == {("pp-dp-tp", 1), ("pp-dp-tp", 2)}
    assert orders(num_gpus=32, tp=(8,)) == {("pp-dp-tp", 8)}
    assert {name for name, _ in orders(mesh_order=(MeshOrder.DP_PP_TP,))} == {"dp-pp-tp"}


@pytest.mark.slow
def test_the_search_finds_the_better_of_the_searches_in_each_order():
    found = {
        order: find_plan(
            MODEL, CLUSTER, TRAINING, constraints=replace(FEW, mesh_order=(order,))
        ).search.value
        for order in MeshOrder
    }
    plan = find_plan(MODEL, CLUSTER, TRAINING, constraints=FEW)

    assert len(set(found.values())) == 2
    assert plan.search.value == pytest.approx(min(found.values()), rel=1e-6)
    assert found[plan.mesh.order] == min(found.values())


@pytest.mark.slow
def test_the_prices_of_the_orders_say_what_the_chosen_one_gains():
    plan = find_plan(MODEL, CLUSTER, TRAINING, constraints=FEW)
    chosen, other = order_prices(plan)

    assert (chosen.chosen, other.chosen) == (True, False)
    assert chosen.order is plan.mesh.order is not other.order
    assert chosen.step_s == pytest.approx(plan.predicted.step_time_s.value, rel=1e-5)
    nodes = {each.order: each.dp_nodes for each in (chosen, other)}
    assert nodes[MeshOrder.DP_PP_TP] > nodes[MeshOrder.PP_DP_TP]
    sent_s = {each.order: each.p2p_s for each in (chosen, other)}
    assert sent_s[MeshOrder.DP_PP_TP] < sent_s[MeshOrder.PP_DP_TP]


def test_an_order_that_the_stack_cannot_start_in_is_refused():
    training = replace(TRAINING, stack=load_stack("torchtitan"))
    with pytest.raises(ConfigError, match="--mesh-order dp-pp-tp: the stack torchtitan"):
        find_plan(
            MODEL,
            CLUSTER,
            training,
            constraints=replace(PINS, mesh_order=(MeshOrder.DP_PP_TP,)),
        )
