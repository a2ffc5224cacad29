"""Prices of 2-D tensor parallelism, against the closed form of SUMMA and counts by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.divided_weights import illegal_grid, illegal_over_data
from parplan.costmodels.operators.sharding import GRID
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.costmodels.usage.rank_traffic import rank_traffic
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.schemes.scheme_prices import sent_bytes
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind, OperatorKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import estimate_plan

MODEL = replace(load_model("gpt-2.5b").spec, num_layers=2)
UNTIED = replace(load_model("llama3-8b").spec, num_layers=2)
TRAINING = TrainingSpec(global_batch_size=16, seq_length=1024, stack=NEUTRAL)
B, M = 4, 4
CLUSTER = with_gpus(load_cluster("a100-80gb"), 8)


def layout_of(rows, columns, **changes):
    fields = {
        "mesh": Mesh(pp=1, dp=1, tp=rows * columns, tp_rows=rows),
        "schedule": Schedule.ONE_F_ONE_B,
        "virtual_stages": 1,
        "micro_batch_size": B,
        "num_micro_batches": M,
        "sequence_parallel": False,
    }
    return ParallelLayout(**fields | changes)


def grid_plan(model, rows, columns):
    cluster = with_gpus(load_cluster("a100-80gb"), rows * columns)
    return estimate_plan(model, cluster, TRAINING, layout_of(rows, columns))


def prices(model):
    return PriceCache(model, TRAINING, machine_for(CLUSTER))


def lacking(rows, columns, *, along_row):
    """The share of a matrix in tiles that one device of a grid multiplies and does not own."""
    grid = itertools.product(range(rows), range(columns))
    missing = [
        {(i, k) for k in range(columns)} - {(i, j)}
        if along_row
        else {(k, j) for k in range(rows)} - {(i, j)}
        for i, j in grid
    ]
    return max(map(len, missing)) / (rows * columns)


def closed_form(model, rows, columns):
    """Bytes that a rank sends in a step: 3 times X and W of each product, and the rest by hand.

    A rank sends as much as it lacks (EQUATIONS T7). The table is gathered once and its output
    scattered; both have a gradient on the way back.
    """
    cache = prices(model)
    tokens = TRAINING.seq_length * B / rows
    x_share = lacking(rows, columns, along_row=True)
    w_share = lacking(rows, columns, along_row=False)
    sent = 0.0
    for key in cache.keys(0, cache.num_layers):
        for operator in cache.layer(key, B).operators:
            weight = max((2 * p.num_elements for p in operator.parameters), default=0)
            if operator.kind is OperatorKind.MATMUL:
                sent += 3 * (x_share * operator.inputs[0].num_bytes + w_share * weight)
            elif operator.kind is OperatorKind.EMBEDDING:
                sent += 2 * (x_share * operator.outputs[0].num_bytes + w_share * weight)
            elif operator.kind is OperatorKind.NORM:
                sums = 4 * len(operator.parameters) * tokens
                sent += 2 * 2 * (columns - 1) / columns * sums
            elif operator.kind is OperatorKind.CROSS_ENTROPY:
                sent += 3 * 2 * (columns - 1) / columns * 4 * tokens
    return M * sent


@pytest.mark.parametrize("model", [MODEL, UNTIED], ids=["gpt", "llama"])
@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 4), (4, 2)])
def test_a_rank_sends_the_bytes_of_the_closed_form(model, rows, columns):
    plan = grid_plan(model, rows, columns)
    cache = prices_of_plan(plan)
    traffic = rank_traffic(strategy_of(plan, cache), 0, cache)

    assert {each.axis for each in traffic} == {*GRID}
    sent = sum(sent_bytes(each, plan.mesh) for each in traffic)
    assert sent == pytest.approx(closed_form(model, rows, columns), rel=1e-9)


def test_states_and_saved_activations_are_divided_by_all_ranks_of_the_grid():
    grid, whole = layout_of(2, 4).sharding, replace(layout_of(2, 4).sharding, tp=1, rows=1, axes=())
    cache = prices(UNTIED)
    for kind, norms in ((LayerKind.BLOCK, 2), (LayerKind.HEAD, 1), (LayerKind.EMBEDDING, 0)):
        operators = cache.layer(cache.key({"block": 1, "head": 3, "embedding": 0}[kind], 1), B)
        elements = sum(map(grid.parameter_elements, operators.operators))
        vectors = norms * UNTIED.hidden_size // 4  # of norms, which all rows have
        all_of_them = sum(map(whole.parameter_elements, operators.operators))
        assert elements == (all_of_them - norms * UNTIED.hidden_size) // 8 + vectors
    saved = [
        cache.activations(LayerKind.BLOCK, B, sharding, ()).saved for sharding in (grid, whole)
    ]
    assert saved[0] * 8 == pytest.approx(saved[1], rel=1e-3)


def test_compute_of_a_product_is_that_of_its_tile():
    cache = prices(UNTIED)
    operator = cache.layer(LayerKind.BLOCK, B).operator("fc2")
    grid = layout_of(2, 4).sharding

    assert grid.dim_size(operator, "batch") == B // 2
    assert grid.dim_size(operator, "hidden") == UNTIED.hidden_size // 4
    assert grid.dim_size(operator, "ffn") == UNTIED.ffn_hidden_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_parallel": True}, "divides activations by batch and features alone"),
        ({"micro_batch_size": 1}, "2 rows do not divide the micro-batch of 1"),
        ({"schedule": Schedule.ZBV, "virtual_stages": 2}, "split backward passes"),
    ],
)
def test_layouts_that_a_grid_cannot_run_have_a_reason(changes, message):
    assert message in illegal_grid(layout_of(2, 2, **changes), MODEL, TRAINING)
    assert illegal_grid(layout_of(2, 2), MODEL, TRAINING) is None


def test_a_grid_divides_no_weights_over_data_besides():
    mesh = Mesh(pp=1, dp=2, tp=4, tp_rows=2)
    assert "divide the batch already" in illegal_over_data(layout_of(2, 2, mesh=mesh), MODEL)


def test_data_parallel_ranks_that_divide_no_weight_hold_whole_ones():
    mesh = Mesh(pp=1, dp=7, tp=1)
    assert "dp 7 divides no heads" in illegal_over_data(layout_of(1, 1, mesh=mesh), MODEL)
    assert illegal_over_data(layout_of(1, 1, mesh=replace(mesh, dp=2)), MODEL) is None


def test_models_with_experts_and_sizes_that_do_not_divide_have_a_reason():
    experts = load_model("mixtral-8x7b").spec
    assert "dense transformers" in illegal_grid(layout_of(2, 2), experts, TRAINING)
    odd = replace(MODEL, num_heads=5, num_kv_heads=5, head_dim=384)
    assert "does not divide 5 features or heads" in illegal_grid(layout_of(2, 2), odd, TRAINING)
