"""Divisions of traced layers are Megatron's, found by following dims, at the described price."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from parplan.costmodels.layers.layer_price import LayerTime, price_operators
from parplan.costmodels.layers.model_states import StateSharding, layer_states
from parplan.costmodels.layers.recompute import saved_bytes
from parplan.costmodels.operators.sharding import Sharding, Split
from parplan.planner.layer_options.traced_shardings import (
    divisible_dims,
    replicated_operators,
    traced_shardings,
)
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.operator_graph import LayerClass, LayerKind, Operator, layer_class
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.tracing.trace import trace
from tests.helpers.builtin_modules import CONFIGS, LARGE_GPT, LONG, TRAINING, spec_of
from tests.helpers.cases import mostly_slow
from tests.helpers.traced_modules import HUGGING_FACE

MACHINE = machine_for(load_cluster("a100-80gb"))
LARGE = replace(TRAINING, seq_length=LONG, stack=load_stack("parplan"))
SMALL = replace(TRAINING, seq_length=16)
BLOCKS = {
    "gpt2": "transformer.h.1.",
    "llama": "model.layers.1.",
    "bert": "bert.encoder.layer.1.",
    "vit": "vit.layers.1.",
    "t5": "decoder.block.1.",
}


def layer_of(source: ModuleSource, path: str, seq_length: int = 16) -> LayerClass:
    """The operators of one module of a traced model, as the planner's shards have them."""
    model = trace(source, seq_length=seq_length)
    operators = (
        each.operator
        for each in model.operators
        if each.operator.name.startswith(path) and not each.view and not each.constant
    )
    return layer_class(LayerKind.BLOCK, tuple(operators))


@cache
def block(name: str) -> LayerClass:
    return layer_of(ModuleSource(huggingface=(CONFIGS | HUGGING_FACE)[name]), BLOCKS[name])


@cache
def large_gpt() -> LayerClass:
    return layer_of(
        ModuleSource(factory="tests.helpers.builtin_modules:gpt_large"), "blocks.0.", LONG
    )


def described() -> LayerClass:
    return build_graph(LARGE_GPT, LARGE, 2).block


def named(layer: LayerClass, suffix: str) -> Operator:
    (operator,) = (each for each in layer.operators if each.name.endswith(suffix))
    return operator


@pytest.mark.parametrize("name", mostly_slow(BLOCKS, {"t5"}))
def test_heads_and_mlp_of_a_block_are_divided_by_column_and_row(name):
    assert divisible_dims(block(name), 2) == {"heads", "ffn"}

    sharding = traced_shardings(block(name), 2)[0]
    divided = {
        operator.name: sharding.splits(operator)[0]
        for operator in block(name).operators
        if operator.parameters and operator.flops_forward
    }
    assert set(divided.values()) == {Split("heads"), Split("ffn")}
    assert replicated_operators(block(name), sharding) == ()


@pytest.mark.slow
def test_the_parts_of_a_fused_matrix_are_divided_with_their_heads_whole():
    qkv = named(block("gpt2"), "c_attn.addmm")
    gate = named(block("llama"), "q_proj.linear")

    assert qkv.parallel_dim == gate.parallel_dim == "heads"
    assert (qkv.dims[1].size, qkv.dims[1].unit) == (3 * 64, 3 * 16)  # 4 heads of q, k and v
    assert gate.dims[2].unit == 2 * 16  # two heads of queries read one of keys


def test_a_dim_that_ranks_do_not_divide_is_whole_and_the_reason_says_so():
    llama = block("llama")  # 2 groups of key-value heads

    first, *rest = traced_shardings(llama, 4)

    assert divisible_dims(llama, 4) == {"ffn"}
    assert [reason for name, reason in replicated_operators(llama, first) if "q_proj" in name] == [
        "4 ranks do not divide heads 64, 2 groups of 32"
    ]
    assert rest == [traced_shardings(llama, 4)[-1]]
    assert all(split.dim is None for op in llama.operators for split in rest[0].splits(op))


def test_each_dim_can_be_left_whole_alone():
    gpt = block("gpt2")
    full, *others = traced_shardings(gpt, 2)

    left = [{reason for _, reason in replicated_operators(gpt, sharding)} for sharding in others]
    assert left == [
        {"this sharding leaves ffn whole"},
        {"this sharding leaves heads whole"},
        {"this sharding leaves ffn whole", "this sharding leaves heads whole"},
    ]
    assert full.own == ()
    assert traced_shardings(gpt, 1) == (Sharding(),)


def test_operators_without_a_rule_are_whole_with_the_reason():
    unet = layer_of(ModuleSource(factory="tests.helpers.traced_modules:unet"), "down.1.")

    (sharding,) = traced_shardings(unet, 2)

    assert dict(replicated_operators(unet, sharding)) == {
        "down.1.conv.conv2d": "contracted: conv2d is not divided"
    }


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_traced_gpt_block_has_the_collectives_of_the_described_one(tp):
    traced, expected = (_time(layer, tp) for layer in (large_gpt(), described()))

    assert traced.tp_forward.value_s > 0
    assert traced.tp_forward.value_s == pytest.approx(expected.tp_forward.value_s, rel=1e-12)
    assert traced.tp_backward.value_s == pytest.approx(expected.tp_backward.value_s, rel=1e-12)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_traced_gpt_block_computes_and_holds_what_the_described_one_does(tp):
    """It keeps two fp32 numbers a token of each of its two norms besides."""
    traced, expected = (_time(layer, tp) for layer in (large_gpt(), described()))
    statistics = 2 * 2 * 4 * 2 * LONG

    assert traced.forward.value_s == pytest.approx(expected.forward.value_s, rel=1e-3)
    assert traced.backward.value_s == pytest.approx(expected.backward.value_s, rel=2e-2)
    assert _saved(large_gpt(), tp) == _saved(described(), tp) + statistics
    for zero in range(4):
        assert _states(large_gpt(), tp, zero) == _states(described(), tp, zero)


def test_readers_of_one_tensor_sum_their_gradients_before_the_ranks_do():
    """Llama of Hugging Face reads a norm by three matrices, and the next by two."""
    expected = build_graph(spec_of(CONFIGS["llama"]), SMALL, 2).block
    traced = price_operators(block("llama"), Sharding(2), MACHINE, SMALL).time()
    fused = price_operators(expected, Sharding(2), MACHINE, SMALL).time()

    assert traced.tp_forward.value_s == pytest.approx(fused.tp_forward.value_s, rel=1e-12)
    assert traced.tp_backward.value_s == pytest.approx(fused.tp_backward.value_s, rel=1e-12)


def _time(layer: LayerClass, tp: int) -> LayerTime:
    return price_operators(layer, _sharding(layer, tp), MACHINE, LARGE).time()


def _saved(layer: LayerClass, tp: int) -> int:
    return saved_bytes(layer, _sharding(layer, tp), (), LARGE.stack)


def _states(layer: LayerClass, tp: int, zero: int) -> float:
    return layer_states(layer, _sharding(layer, tp), StateSharding(zero, 3), LARGE).total


def _sharding(layer: LayerClass, tp: int) -> Sharding:
    """Megatron's sharding, which is the traced layer's first."""
    return traced_shardings(layer, tp)[0]
