"""Divisions of an operator follow from its dims: the legal ones, the refused ones, and costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parplan.costmodels.layers.layer_price import StageAxes
from parplan.costmodels.layers.model_states import StateSharding, operator_states
from parplan.costmodels.layers.operator_price import operator_price, single_operator_sharding
from parplan.costmodels.operators.legal_splits import operator_splits
from parplan.costmodels.operators.plan_placements import placed_splits, placements
from parplan.costmodels.operators.sharding import PARTIAL, Sharding, Split
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind, OperatorKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

MACHINE = machine_for(with_gpus(load_cluster("a100-80gb"), 8))
TRAINING = TrainingSpec(global_batch_size=8, seq_length=2048, stack=NEUTRAL)
GPT = build_graph(load_model("gpt-20b").spec, TRAINING, 4)
LLAMA = build_graph(load_model("llama3-8b").spec, TRAINING, 4)
INSIDE = StageAxes((4,), MACHINE, TRAINING)


def operator(name, graph=LLAMA, kind=LayerKind.BLOCK):
    return graph.layer_class(kind).operator(name)


def legal(name, degrees=(4,), graph=LLAMA):
    return {
        ", ".join(map(str, splits)) for splits in operator_splits(operator(name, graph), degrees)[0]
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("norm1", {"replicated", "batch", "sequence"}, id="a-norm-by-token"),
        pytest.param(
            "qkv",
            {
                "replicated",
                "batch",
                "sequence",
                "heads",
                "hidden",
                "hidden -> batch",
                "hidden -> sequence",
            },
            id="column",
        ),
        pytest.param("rotary", {"replicated", "batch", "heads"}, id="positions-are-whole"),
        pytest.param("attention", {"replicated", "batch", "heads"}, id="attention-by-head"),
        pytest.param(
            "attention_out",
            {
                "replicated",
                "batch",
                "sequence",
                "hidden",
                "heads",
                "heads -> batch",
                "heads -> sequence",
            },
            id="row",
        ),
        pytest.param("activation", {"replicated", "batch", "sequence", "ffn"}, id="elementwise"),
        pytest.param("residual1", {"replicated", "batch", "sequence", "hidden"}, id="residual"),
    ],
)
def test_the_strategies_of_an_operator_follow_from_its_dims(name, expected):
    assert legal(name) == expected


@pytest.mark.parametrize(
    ("name", "degree", "split", "reason"),
    [
        pytest.param(
            "norm1",
            4,
            Split("hidden"),
            "hidden cannot be divided: a norm is over the whole of it",
            id="norm",
        ),
        pytest.param(
            "attention",
            4,
            Split("sequence"),
            "sequence cannot be divided: attention reads every token",
            id="attention",
        ),
        pytest.param(
            "rotary",
            4,
            Split("sequence"),
            "positions are counted from the first token",
            id="rotary",
        ),
        pytest.param(
            "qkv",
            16,
            Split("heads"),
            "16 ranks do not divide heads 6144, 8 groups of 768",
            id="key-value-heads",
        ),
        pytest.param("norm1", 8, Split("batch"), "8 ranks do not divide batch 4", id="batch"),
        pytest.param(
            "fc2",
            4,
            Split("ffn", "hidden"),
            "a reduce-scatter over hidden is not run by the executor",
            id="scatter",
        ),
    ],
)
def test_every_rejected_strategy_says_why(name, degree, split, reason):
    _, rejected = operator_splits(operator(name), (degree,))

    assert reason in {r.splits: r.reason for r in rejected}[(split,)]


def test_on_two_axes_every_pair_is_tried_and_divisions_multiply():
    on_one_axis, (both, rejected) = (
        operator_splits(operator("fc1"), (2,))[0],
        operator_splits(operator("fc1"), (2, 2)),
    )
    pairs = {(*a, *b) for a in on_one_axis for b in on_one_axis}

    assert set(both) <= pairs
    assert pairs - set(both) <= {r.splits for r in rejected}
    assert (Split("ffn"), Split("hidden")) in both
    sharding = single_operator_sharding(operator("fc1"), (Split("ffn"), Split("hidden")), (2, 2))
    assert sharding.parameter_shape(operator("fc1"), operator("fc1").parameters[0]) == (
        28672 // 2,
        4096 // 2,
    )


@pytest.mark.parametrize("graph", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_parts_of_every_strategy_add_up(graph):
    """FLOPs of one rank times the parts are the whole.

    The same holds for the elements of divided parameters, over all ranks.
    """
    for layer in graph:
        for op in layer.operators:
            for splits in operator_splits(op, (2, 2))[0]:
                sharding = single_operator_sharding(op, splits, (2, 2))
                parts = math.prod(sharding.parts(op, dim.name) for dim in op.dims)
                assert parts == 4 // math.prod(2 for split in splits if split.dim is None)
                local = math.prod(sharding.dim_size(op, dim.name) for dim in op.dims)
                assert local * parts == math.prod(dim.size for dim in op.dims)
                for parameter in op.parameters:
                    copies = 4 // math.prod(sharding.parts(op, dim.name) for dim in parameter.dims)
                    assert (
                        math.prod(sharding.parameter_shape(op, parameter)) * (4 // copies)
                        == parameter.num_elements
                    )


def test_gradients_are_sums_where_a_tensor_lacks_the_split_dim():
    fc1, fc2 = operator("fc1"), operator("fc2")

    assert single_operator_sharding(fc1, (Split("ffn"),), (4,)).gradient_place(
        fc1, fc1.inputs[0]
    ) == (PARTIAL,)
    assert single_operator_sharding(fc1, (Split("sequence"),), (4,)).gradient_place(
        fc1, fc1.inputs[0]
    ) == ("sequence",)
    assert single_operator_sharding(fc2, (Split("ffn"),), (4,)).place_inside(
        fc2, fc2.outputs[0]
    ) == (PARTIAL,)
    assert single_operator_sharding(fc2, (Split("ffn", "sequence"),), (4,)).place(
        fc2, fc2.outputs[0]
    ) == ("sequence",)
    assert single_operator_sharding(fc1, (Split("sequence"),), (4,)).summed_axes(
        fc1, fc1.parameters[0]
    ) == (0,)
    assert (
        single_operator_sharding(fc1, (Split("ffn"),), (4,)).summed_axes(fc1, fc1.parameters[0])
        == ()
    )


@pytest.mark.parametrize("graph", [GPT, LLAMA], ids=["gpt", "llama"])
def test_placements_say_how_an_operator_is_divided(graph):
    for layer in graph:
        for op in layer.operators:
            for splits in operator_splits(op, (4,))[0]:
                placed = placements(op, Sharding(4, own=((op.name, splits),)))
                assert (
                    placed_splits(op, Sharding(4), placed) == splits
                    or op.kind is OperatorKind.CROSS_ENTROPY
                )


def test_the_price_of_a_strategy_is_compute_ending_states_and_bytes():
    fc2 = operator("fc2")
    kept, recomputed = (
        operator_price(
            fc2, (Split("ffn", "sequence"),), INSIDE, TRAINING, recomputed=flag, zero=1, dp=2
        )
        for flag in (False, True)
    )

    assert recomputed.recompute_s == pytest.approx(kept.forward_s)
    assert kept.recompute_s == 0.0
    assert kept.states == operator_states(
        fc2, single_operator_sharding(fc2, (Split("ffn"),), (4,)), StateSharding(1, 2), TRAINING
    )
    assert kept.ending.forward.value_s > 0
    assert kept.ending.backward.value_s > 0  # the gradient of the output is gathered
    whole = operator_price(fc2, (Split(),), INSIDE, TRAINING)
    assert whole.ending.forward.value_s == 0
    assert whole.compute.forward.value_s > 3 * kept.compute.forward.value_s
    assert whole.states.parameters == 4 * kept.states.parameters


def test_a_recomputed_operator_keeps_nothing_of_its_own():
    dropout = build_graph(
        replace(load_model("gpt-tiny").spec, dropout=0.1), TRAINING, 4
    ).block.operator("residual1")

    kept = operator_price(dropout, (Split("sequence"),), INSIDE, TRAINING, recomputed=False)
    recomputed = operator_price(dropout, (Split("sequence"),), INSIDE, TRAINING, recomputed=True)

    assert kept.saved_bytes == dropout.saved[0].num_bytes // 4
    assert recomputed.saved_bytes == 0
