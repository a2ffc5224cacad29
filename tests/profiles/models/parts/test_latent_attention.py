"""Latent attention of DeepSeek, by hand: products, what tensor parallelism divides, recompute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import saved_tensors
from parplan.costmodels.operators.operator_kernels import operator_kernels
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

B, S = 1, 4096
TRAINING = TrainingSpec(global_batch_size=8, seq_length=S, stack=NEUTRAL)
# h 7168, 128 heads, q rank 1536, kv rank 512, heads of 128 + 64 for keys and 128 for values
V3 = replace(load_model("deepseek-v3").spec, mtp_layers=0)
LITE = load_model("deepseek-v2-lite").spec  # h 2048, 16 heads, no compressed queries


def dense(model):
    graph = build_graph(model, TRAINING, B)
    return graph.layer_class(graph.key(1))


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        pytest.param("q_down", 7168, 1536, id="q-down"),
        pytest.param("q_up", 1536, 128 * 192, id="q-up"),
        pytest.param("kv_down", 7168, 512 + 64, id="kv-down"),
        pytest.param("kv_up", 512, 128 * 256, id="kv-up"),
        pytest.param("attention_out", 128 * 128, 7168, id="out"),
    ],
)
def test_each_product_has_its_weight_and_flops(name, rows, columns):
    operator = dense(V3).operator(name)

    assert operator.num_parameters == rows * columns
    assert operator.flops_forward == 2 * B * S * rows * columns
    assert operator.flops_backward == 2 * operator.flops_forward


def test_queries_need_not_be_compressed():
    names = [operator.name for operator in dense(LITE).operators]

    assert names[:3] == ["norm1", "q", "kv_down"]
    assert dense(LITE).operator("q").num_parameters == 2048 * 16 * 192


def test_attention_sums_keys_of_192_and_values_of_128():
    operator = dense(V3).operator("attention")
    (kernel,) = operator_kernels(operator, Sharding(), TRAINING).forward

    # q k^T over 192 features and p v over 128; the causal mask counts in full
    assert operator.flops_forward == 2 * B * S * S * 128 * (192 + 128)
    assert kernel.flops == operator.flops_forward / 2
    assert kernel.head_dim == 160
    assert operator.attention.value_dim == 128
    assert operator.attention.kv_features == 128 * (192 + 128)


def test_tensor_parallel_ranks_divide_heads_and_hold_the_products_down_whole():
    layer, sharding = dense(V3), Sharding(8, sequence_parallel=True)

    for name in ("q_up", "kv_up", "attention_out"):
        operator = layer.operator(name)
        assert sharding.parameter_elements(operator) == operator.num_parameters / 8
    for name in ("q_down", "kv_down"):
        operator = layer.operator(name)
        assert sharding.parameter_elements(operator) == operator.num_parameters
        assert [split.dim for split in sharding.splits(operator)] == ["sequence"]


def test_recompute_of_the_products_up_keeps_the_compressed_tokens_alone():
    layer = dense(V3)
    kept = {tensor.name: tensor for tensor in saved_tensors(layer, ())}
    recomputed = {
        tensor.name: tensor for tensor in saved_tensors(layer, ("q_up", "kv_up", "rotary"))
    }

    assert set(kept) - set(recomputed) == {"qk_rotated", "kv"}
    freed = sum(kept[name].num_bytes for name in ("qk_rotated", "kv"))
    assert freed == 2 * B * S * 128 * (2 * 192 + 256)
