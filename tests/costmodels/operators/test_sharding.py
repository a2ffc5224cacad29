"""Megatron's tensor and sequence parallelism: splits, communication and DTensor placements."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from parplan.costmodels.communication.redistribution import moves
from parplan.costmodels.layers.tensor_flow import tensor_flows_of
from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import PARTIAL, Sharding
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

TRAINING = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)
GPT = build_graph(load_model("gpt-tiny").spec, TRAINING, 2)
NEOX = build_graph(replace(load_model("gpt-tiny").spec, parallel_residual=True), TRAINING, 2)
LLAMA = build_graph(load_model("llama3-8b").spec, TRAINING, 1)
TP4 = Sharding(tp=4)
TP4_SP = Sharding(tp=4, sequence_parallel=True)


def input_gradients_are_sums(actual):
    return any(PARTIAL in TP4.gradient_place(actual, tensor) for tensor in actual.inputs)


def outputs_are_sums(actual):
    return any(PARTIAL in TP4.place_inside(actual, tensor) for tensor in actual.outputs)


def ways(edge):
    return (edge.source, edge.target), (edge.gradient, edge.source)


def operator(name, graph=GPT, kind=LayerKind.BLOCK):
    return graph.layer_class(kind).operator(name)


@pytest.mark.parametrize(
    ("sharding", "tensor_degree", "token_degree"),
    [
        pytest.param(Sharding(), 1, 1, id="none"),
        pytest.param(TP4, 4, 1, id="tp"),
        pytest.param(TP4_SP, 4, 4, id="tp-and-sequence-parallel"),
    ],
)
def test_features_split_over_tp_and_tokens_only_under_sequence_parallelism(
    sharding, tensor_degree, token_degree
):
    qkv, norm = operator("qkv"), operator("norm1")

    assert sharding.tensor_bytes(qkv, qkv.outputs[0]) == qkv.outputs[0].num_bytes // tensor_degree
    assert sharding.tensor_bytes(norm, norm.inputs[0]) == norm.inputs[0].num_bytes // token_degree


def test_tokens_that_ranks_do_not_divide_are_whole_on_each_of_them():
    norm = operator("norm1")
    uneven = Sharding(tp=3, sequence_parallel=True)

    assert uneven.tensor_bytes(norm, norm.inputs[0]) == norm.inputs[0].num_bytes
    assert TP4_SP.tensor_bytes(norm, norm.inputs[0]) == norm.inputs[0].num_bytes // 4


def test_a_tensor_that_does_not_divide_is_rounded_up():
    norm = operator("norm1")
    tokens = norm.inputs[0]

    assert Sharding(tp=3).local_bytes(tokens, ("sequence",)) == -(-tokens.num_bytes // 3)


def test_a_matmul_sees_every_token_and_its_share_of_the_split_dim():
    qkv, fc2 = operator("qkv"), operator("fc2")

    assert [TP4_SP.dim_size(qkv, dim) for dim in ("batch", "sequence", "heads", "hidden")] == [
        2,
        128,
        3 * 64 // 4,
        64,
    ]
    assert [TP4_SP.dim_size(fc2, dim) for dim in ("sequence", "ffn", "hidden")] == [
        128,
        256 // 4,
        64,
    ]


def test_a_norm_sees_its_share_of_the_tokens_under_sequence_parallelism_only():
    assert TP4.dim_size(operator("norm1"), "sequence") == 128
    assert TP4_SP.dim_size(operator("norm1"), "sequence") == 32


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        pytest.param("qkv", [(48, 64), (48,)], id="column-parallel"),
        pytest.param("attention_out", [(64, 16), (64,)], id="row-parallel-keeps-its-bias-whole"),
        pytest.param("norm1", [(64,), (64,)], id="norm-is-replicated"),
    ],
)
def test_parameters_split_along_the_operators_own_dim(name, shapes):
    graph_operator = operator(name)

    assert [
        TP4.parameter_shape(graph_operator, parameter) for parameter in graph_operator.parameters
    ] == shapes


@pytest.mark.parametrize("graph", [GPT, NEOX, LLAMA], ids=["gpt", "neox", "llama"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_split_parameters_add_up_to_the_whole(graph, tp):
    for layer in graph:
        for actual in layer.operators:
            for parameter in actual.parameters:
                shape = Sharding(tp=tp).parameter_shape(actual, parameter)
                split = parameter.tensor_dim(actual.parallel_dim) is not None
                local = shape[0] if len(shape) == 1 else shape[0] * shape[1]
                assert local * (tp if split else 1) == parameter.num_elements


def test_four_of_the_blocks_operators_communicate_two_before_and_two_after():
    gathers = [
        candidate.name for candidate in GPT.block.operators if input_gradients_are_sums(candidate)
    ]
    reduces = [candidate.name for candidate in GPT.block.operators if outputs_are_sums(candidate)]

    assert gathers == ["qkv", "fc1"]
    assert reduces == ["attention_out", "fc2"]


def test_nothing_communicates_without_tensor_parallelism():
    layers = [tensor_flows_of(layer, Sharding()) for layer in GPT]

    assert not any(
        list(moves(1024, *way, (1,)))
        for flow in layers
        for edge in flow.values()
        for way in ways(edge)
    )


def test_the_embedding_sums_over_its_vocabulary_and_the_head_gathers_its_input():
    assert outputs_are_sums(operator("tokens", kind=LayerKind.EMBEDDING))
    assert not input_gradients_are_sums(operator("tokens", kind=LayerKind.EMBEDDING))
    assert input_gradients_are_sums(operator("lm_head", kind=LayerKind.HEAD))


@pytest.mark.parametrize(
    ("name", "kind", "sharding", "expected"),
    [
        pytest.param(
            "qkv",
            LayerKind.BLOCK,
            TP4,
            {
                "parameters": {"weight": ("Shard(0)@tp",), "bias": ("Shard(0)@tp",)},
                "input": (),
                "output": ("Shard(2)@tp",),
            },
            id="column-parallel",
        ),
        pytest.param(
            "fc2",
            LayerKind.BLOCK,
            TP4,
            {
                "parameters": {"weight": ("Shard(1)@tp",), "bias": ()},
                "input": ("Shard(2)@tp",),
                "output": (),
            },
            id="row-parallel",
        ),
        pytest.param(
            "fc2",
            LayerKind.BLOCK,
            TP4_SP,
            {
                "parameters": {"weight": ("Shard(1)@tp",), "bias": ()},
                "input": ("Shard(2)@tp",),
                "output": ("Shard(1)@tp",),
            },
            id="row-parallel-scatters-tokens",
        ),
        pytest.param(
            "norm1",
            LayerKind.BLOCK,
            TP4_SP,
            {
                "parameters": {"weight": (), "bias": ()},
                "input": ("Shard(1)@tp",),
                "output": ("Shard(1)@tp",),
            },
            id="norm-by-token",
        ),
        pytest.param(
            "norm1",
            LayerKind.BLOCK,
            TP4,
            {"parameters": {"weight": (), "bias": ()}, "input": (), "output": ()},
            id="norm-replicated",
        ),
        pytest.param(
            "activation",
            LayerKind.BLOCK,
            TP4_SP,
            {"parameters": {}, "input": ("Shard(2)@tp",), "output": ("Shard(2)@tp",)},
            id="elementwise-follows",
        ),
        pytest.param(
            "tokens",
            LayerKind.EMBEDDING,
            TP4_SP,
            {"parameters": {"weight": ("Shard(0)@tp",)}, "input": (), "output": ("Shard(1)@tp",)},
            id="vocabulary-parallel-embedding",
        ),
        pytest.param(
            "lm_head",
            LayerKind.HEAD,
            TP4_SP,
            {"parameters": {"weight": ("Shard(0)@tp",)}, "input": (), "output": ("Shard(2)@tp",)},
            id="vocabulary-parallel-head",
        ),
    ],
)
def test_placements_are_megatrons(name, kind, sharding, expected):
    assert asdict(placements(operator(name, kind=kind), sharding)) == expected
