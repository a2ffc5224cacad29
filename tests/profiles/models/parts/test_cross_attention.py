"""Attention to the output of a tower: FLOPs, parameters and saved tensors by hand."""

from __future__ import annotations

from parplan.costmodels.layers.recompute import saved_tensors
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

WHISPER = load_model("whisper-large-v3").spec
TRAINING = TrainingSpec(global_batch_size=8, seq_length=448, stack=NEUTRAL)
B, S, E, H = 2, 448, 1500, 1280
GRAPH = build_graph(WHISPER, TRAINING, B)
BLOCK = next(layer for layer in GRAPH if str(layer.key) == "language")


def test_flops_are_those_of_queries_over_the_tokens_of_the_tower():
    flops = {op.name: op.flops_forward for op in BLOCK.operators}

    assert flops["cross_q"] == 2 * B * S * H * H
    assert flops["cross_kv"] == 2 * B * E * H * 2 * H
    assert flops["cross_attention"] == 4 * B * S * E * H
    assert flops["cross_out"] == 2 * B * S * H * H
    assert flops["attention"] == 4 * B * S * S * H  # causal attention is counted in full


def test_keys_have_no_bias():
    shapes = {
        (op.name, parameter.name): parameter.shape
        for op in BLOCK.operators
        for parameter in op.parameters
    }

    assert shapes["qkv", "bias"] == (2 * H,)
    assert shapes["cross_kv", "weight"] == (2 * H, H)
    assert shapes["cross_kv", "bias"] == (H,)
    assert shapes["cross_q", "bias"] == (H,)


def test_the_output_of_the_tower_is_saved_by_no_block_and_every_other_tensor_once():
    for recompute in ((), tuple(op.name for op in BLOCK.operators)):
        names = [tensor.name for tensor in saved_tensors(BLOCK, recompute)]
        assert "tower_output" not in names
        assert len(names) == len(set(names))
    saved = {tensor.name: tensor.num_elements for tensor in saved_tensors(BLOCK, ())}
    assert saved["cross_kv"] == B * E * 2 * H
    assert saved["cross_attention_logsumexp"] == B * 20 * S
    assert saved["attention_logsumexp"] == B * 20 * S


def test_the_blocks_read_what_the_tower_gives():
    read = next(t for op in BLOCK.operators for t in op.inputs if t.name == "tower_output")

    assert read == GRAPH.attended
    assert read.num_elements == B * E * H
    assert BLOCK.input.name == "block_input"
