"""Weights over data-parallel ranks: which layouts have them, and what they pay and save."""

from dataclasses import replace

import numpy as np
import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.layer_price import price_operators
from parplan.costmodels.operators.legal_splits import operator_splits
from parplan.costmodels.operators.sharding import Sharding, Split
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.usage.rank_traffic import layer_moves
from parplan.planner.layer_options.catalogue import Catalogue
from parplan.planner.request import Constraints, PlanRequest
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.search_session import DescribedPrices
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec

MODEL = load_model("llama3-70b").spec
CLUSTER = with_gpus(load_cluster("h100-80gb"), 32)
TRAINING = TrainingSpec(
    global_batch_size=32,
    seq_length=512,
    overlap_grad_reduce=False,  # as the stack runs
    stack=load_stack("parplan"),
)
MESH = Mesh(pp=1, dp=4, tp=8)
PRICES = PriceCache(MODEL, TRAINING, machine_for(CLUSTER))
BOTH = Sharding(8, data=4)
FFN = tuple(
    (name, (Split(*ways), Split("ffn")))
    for name, ways in (
        ("fc1", ("ffn",)),
        ("activation", ("ffn",)),
        ("fc2", ("ffn", "batch")),
    )
)


def request(**pins) -> PlanRequest:
    return PlanRequest(
        model=MODEL, cluster=CLUSTER, training=TRAINING, constraints=Constraints(**pins)
    )


def test_a_sharding_that_divides_no_weight_over_data_has_the_price_of_data_parallelism():
    for level in Catalogue(PRICES).levels:
        alone = PRICES.layer_time(LayerKind.BLOCK, 2, Sharding(8), level)
        both = PRICES.layer_time(LayerKind.BLOCK, 2, BOTH, level)
        assert both.total_s == pytest.approx(alone.total_s, rel=1e-12)
        size = PRICES.activations(LayerKind.BLOCK, 2, Sharding(8), level)
        assert PRICES.activations(LayerKind.BLOCK, 2, BOTH, level) == size
    for zero in range(4):
        states = PRICES.states(LayerKind.BLOCK, MESH, Sharding(8), zero)
        assert PRICES.states(LayerKind.BLOCK, MESH, BOTH, zero) == states
        data = PRICES.data_parallel(LayerKind.BLOCK, 2, MESH, Sharding(8), zero)
        assert PRICES.data_parallel(LayerKind.BLOCK, 2, MESH, BOTH, zero) == data


def test_a_weight_over_data_has_one_holder_and_no_reduction():
    ffn = replace(BOTH, own=FFN)
    whole = PRICES.states(LayerKind.BLOCK, MESH, Sharding(8), 0).states
    divided = PRICES.states(LayerKind.BLOCK, MESH, ffn, 0).states
    elements = sum(
        parameter.num_elements
        for operator in PRICES.graph(1).block.operators
        if operator.name in ("fc1", "fc2")
        for parameter in operator.parameters
    )

    # 3 of 4 data-parallel ranks hold none of it: 2 + 4 + 12 bytes
    assert whole.total - divided.total == elements // 8 * 3 // 4 * 18
    reduced = PRICES.data_parallel(LayerKind.BLOCK, 2, MESH, Sharding(8), 0).step.value_s
    assert PRICES.data_parallel(LayerKind.BLOCK, 2, MESH, ffn, 0).step.value_s < 0.4 * reduced


def test_its_activations_are_gathered_and_reduced_over_data():
    ffn = replace(BOTH, own=FFN)
    layer = PRICES.divided_layer(LayerKind.BLOCK, 2, ffn)
    (tokens,) = (t for op in layer.operators if op.name == "norm2" for t in op.inputs)

    over_data = [move for move in layer_moves(layer, ffn, (), PRICES.training) if move.axis == 0]

    gathers, reductions = ["all_gather"] * 3, ["reduce_scatter"] * 2
    assert sorted(move.collective for move in over_data) == gathers + reductions
    assert {move.num_bytes for move in over_data} == {tokens.num_bytes}


def test_operators_divide_batch_or_weight_over_data_or_what_a_weight_leaves():
    ways = {
        operator.name: {
            splits[0] for splits in operator_splits(operator, (4, 8), over_data=True)[0]
        }
        for operator in PRICES.graph(8).block.operators
    }

    assert ways["norm1"] == ways["residual1"] == {Split("batch")}
    assert ways["attention"] == {Split("batch"), Split("heads")}
    assert ways["fc2"] == {Split("batch"), Split("hidden"), Split("ffn", "batch")}


def test_the_front_over_both_axes_has_the_prices_of_the_price_cache():
    catalogue = Catalogue(PRICES)
    options = catalogue.options(2, BOTH)

    assert {over for option in options for _, over in option.weight_layout} == {False, True}
    least_s = catalogue.fastest_s(2, BOTH)
    for option in options[:: max(1, len(options) // 12)]:
        time = PRICES.layer_time(LayerKind.BLOCK, 2, option.sharding, option.recompute)
        assert option.time_s == pytest.approx(time.total_s, rel=1e-9)
        size = PRICES.activations(LayerKind.BLOCK, 2, option.sharding, option.recompute)
        assert option.saved_bytes == pytest.approx(size.saved, rel=1e-9)
        assert option.workspace_bytes == pytest.approx(size.workspace, rel=1e-9)
        assert option.time_s >= least_s[option.weight_layout] * (1 - 1e-12)


@pytest.mark.slow
def test_a_search_finds_the_better_of_both_and_says_what_it_left_out():
    pins = {"pp": (1,), "tp": (8,), "micro_batch_size": (8,), "tp_overlap": (0,)}
    alone = find_plan(request(**pins, weights_over_data=(False,)))
    pinned = find_plan(request(**pins, weights_over_data=(True,)))
    free = find_plan(request(**pins))

    steps = [plan.predicted.step_time_s.value for plan in (alone, pinned, free)]
    assert steps[1] < 0.9 * steps[0]  # short sequences: ZeRO would gather more than it computes
    assert steps[2] == min(steps)
    assert any(layer_plan.divides_over_data for layer_plan in free.layer_plans.values())
    assert not any(layer_plan.divides_over_data for layer_plan in alone.layer_plans.values())
    long = replace(
        request(pp=(1,), tp=(8,)),
        training=replace(TRAINING, seq_length=8192, global_batch_size=256),
    )
    reasons = [pruned.reason for pruned in DescribedPrices(long).space.pruned]
    assert any("sends activations for" in reason for reason in reasons)


@pytest.mark.slow
def test_no_random_division_over_both_axes_beats_the_front():
    """Random legal divisions and recompute lists, each priced as a whole layer."""
    draw = np.random.default_rng(0)
    options = Catalogue(PRICES).options(2, BOTH)
    every = (*options, *Catalogue(PRICES).options(2, Sharding(8)))
    layer = PRICES.divided_layer(LayerKind.BLOCK, 2, BOTH)
    ways = {op.name: operator_splits(op, BOTH.degrees, over_data=True)[0] for op in layer.operators}
    for _ in range(200):
        base = options[draw.integers(len(options))].sharding
        own = dict(base.own)
        for name in draw.choice(list(ways), 2, replace=False):
            own[name] = ways[name][draw.integers(len(ways[name]))]
        sharding = replace(base, own=tuple(own.items()))
        time_s = price_operators(layer, sharding, PRICES.machine, TRAINING).time().total_s
        size = PRICES.activations(LayerKind.BLOCK, 2, sharding)
        states = PRICES.states(LayerKind.BLOCK, MESH, sharding, 0).states.total
        assert any(
            option.time_s <= time_s * (1 + 1e-9)
            and option.saved_bytes <= size.saved
            and PRICES.states(LayerKind.BLOCK, MESH, option.sharding, 0).states.total <= states
            for option in every
        )
