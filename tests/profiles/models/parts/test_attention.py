"""Attention: windows, chunks, norms of queries and keys, sinks, soft caps, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.operators.operator_kernels import operator_kernels
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.blocks import BlockRun, QkNorm
from parplan.profiles.models.documents import Documents
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import Attention, LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL, AttentionKernel

B, S = 2, 1024
TRAINING = TrainingSpec(global_batch_size=8, seq_length=S, stack=NEUTRAL)
UNFUSED = replace(TRAINING, attention=AttentionKernel.UNFUSED)
LLAMA = load_model("llama3-8b").spec  # 32 heads of 128, 8 of them of keys
Q, KV = 4096, 1024


def block(model, training=TRAINING):
    return build_graph(model, training, B).layer_class(LayerKind.BLOCK)


def with_run(**run):
    return replace(LLAMA, blocks=(BlockRun(**run),))


@pytest.mark.parametrize(
    ("attention", "met"),
    [
        pytest.param(Attention(causal=True), 512, id="causal"),
        pytest.param(Attention(causal=False), 1024, id="all"),
        pytest.param(Attention(causal=True, window=256), 256 - 32, id="window"),
        pytest.param(Attention(causal=True, window=1024), 512, id="window-of-the-sequence"),
        pytest.param(Attention(causal=True, window=9999), 512, id="window-beyond-the-sequence"),
        pytest.param(Attention(causal=False, window=256), 256, id="window-both-ways"),
        pytest.param(Attention(causal=True, window=256, chunked=True), 128, id="chunk"),
        pytest.param(Attention(causal=True, window=4096, chunked=True), 512, id="long-chunk"),
    ],
)
def test_a_query_meets_the_mean_number_of_keys_that_its_mask_leaves(attention, met):
    assert attention.keys_met(S) == met


def test_a_window_meets_the_keys_that_are_counted_one_by_one():
    seq, window = 64, 16
    pairs = sum(min(query, window) for query in range(1, seq + 1))

    # the formula counts half of the diagonal, as that of a whole causal mask does
    assert seq * Attention(causal=True, window=window).keys_met(seq) == pairs - window / 2


def test_model_flops_of_a_window_are_twice_what_its_mask_leaves():
    flops = block(with_run(window=256)).operator("attention").flops_forward

    # 4 b S h for each key, and twice as many keys as the mask leaves: 2 (256 - 32)
    assert flops == 4 * B * S * 448 * Q
    assert block(LLAMA).operator("attention").flops_forward == 4 * B * S * S * Q


def test_the_kernel_does_the_work_that_the_window_leaves():
    attention = block(with_run(window=256)).operator("attention")

    forward, backward = (
        way[0]
        for way in (
            operator_kernels(attention, Sharding(), TRAINING).forward,
            operator_kernels(attention, Sharding(), TRAINING).backward,
        )
    )

    assert forward.flops == 4 * B * 32 * S * 224 * 128
    assert backward.flops == 2.5 * forward.flops


def test_a_block_without_positions_has_no_rotary_operator():
    names = [operator.name for operator in block(with_run(rotary=False)).operators]

    assert "rotary" not in names
    assert block(with_run(rotary=False)).operator("attention").inputs[0].name == "qkv"


@pytest.mark.parametrize(
    ("norm", "parameters", "parallel_dim"),
    [
        pytest.param(QkNorm.HEAD, 2 * 128, "heads", id="head"),
        pytest.param(QkNorm.WHOLE, Q + KV, None, id="whole"),
        pytest.param(QkNorm.PLAIN, 0, "heads", id="plain"),
    ],
)
def test_queries_and_keys_have_their_norm(norm, parameters, parallel_dim):
    operator = block(replace(LLAMA, qk_norm=norm)).operator("qk_norm")

    assert operator.num_parameters == parameters
    assert operator.parallel_dim == parallel_dim
    assert operator.outputs[0].num_elements == B * S * (Q + KV)


def test_normed_queries_and_keys_are_kept_beside_the_product():
    attention = block(replace(LLAMA, qk_norm=QkNorm.HEAD)).operator("attention")

    assert [tensor.name for tensor in attention.saved] == [
        "qk_rotated",
        "qkv",
        "attention_logsumexp",
    ]


def test_a_norm_over_all_heads_is_not_divided_by_heads():
    operator = block(replace(LLAMA, qk_norm=QkNorm.WHOLE)).operator("qk_norm")

    assert dict(operator.undivided) == {"heads": "the norm is over all heads"}


def test_sinks_are_one_number_a_head():
    operator = block(replace(LLAMA, sinks=True)).operator("attention")

    assert [parameter.shape for parameter in operator.parameters] == [(32,)]
    assert Sharding(4).parameter_elements(operator) == 8


def test_unfused_attention_saves_its_capped_scores():
    plain, capped = (
        sum(tensor.num_bytes for tensor in block(model, UNFUSED).operator("attention").saved)
        for model in (LLAMA, replace(LLAMA, attention_soft_cap=50.0))
    )

    assert capped - plain == 2 * B * 32 * S * S


def test_the_output_has_a_bias_of_its_own():
    operator = block(replace(LLAMA, output_bias=True)).operator("attention_out")

    assert operator.num_parameters == 4096 * 4096 + 4096
    assert block(LLAMA).operator("attention_out").num_parameters == 4096 * 4096


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "whisper-large-v3"])
def test_documents_are_of_the_text_and_a_tower_is_read_whole(name):
    training = replace(TRAINING, seq_length=448, documents=Documents(lengths=((64, 1),)))
    graph = build_graph(load_model(name).spec, training, 1)
    kernels = [op.attention for run in graph.layers for op in run.layer.operators if op.attention]

    assert {each.in_documents.longest for each in kernels if each.causal} == {64}
    assert {each.in_documents for each in kernels if not each.causal} == {None}
