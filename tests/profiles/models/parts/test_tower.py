"""The layers of a tower: FLOPs, parameters and tensors by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind, ModelPart
from parplan.profiles.models.spec import TrainingSpec, text_alone
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL, AttentionKernel

TRAINING = TrainingSpec(global_batch_size=8, seq_length=2048, stack=NEUTRAL)
B = 2  # sequences of a micro-batch


def graph_of(name, images=1, **changes):
    spec = load_model(name).spec
    seen = replace(spec, tower=replace(spec.tower, images=images))
    return build_graph(seen, replace(TRAINING, **changes), B)


def layers(graph):
    return {str(layer.key): layer for layer in graph}


def flops(layer):
    return {op.name: op.flops_forward for op in layer.operators if op.flops_forward}


def test_the_tower_stands_between_the_embedding_and_the_blocks():
    graph = graph_of("qwen2-vl-7b")

    assert [(str(run.layer.key), run.count) for run in graph.layers] == [
        ("embedding", 1),
        ("vision-patches", 1),
        ("vision", 32),
        ("vision-projector", 1),
        ("language", 28),
        ("head", 1),
    ]
    assert {layer.kind for layer in graph if layer.block} == {LayerKind.BLOCK}


def test_without_the_tower_the_text_has_the_same_layers():
    seen, text = graph_of("qwen2-vl-7b"), text_alone(load_model("qwen2-vl-7b").spec)
    alone = build_graph(text, TRAINING, B)

    assert alone.block.operators == layers(seen)["language"].operators
    assert alone.embedding == seen.embedding
    assert alone.head == seen.head


def test_flops_of_qwens_tower_are_those_by_hand():
    images, p, h, ffn, out = 3, 5120, 1280, 5120, 3584
    tokens = B * images * p
    of = layers(graph_of("qwen2-vl-7b", images))

    assert flops(of["vision-patches"]) == {"patches": 2 * tokens * 1176 * h}
    assert flops(of["vision"]) == {
        "qkv": 2 * tokens * h * 3 * h,
        "attention": 4 * tokens * p * h,  # every patch reads all of its image, of no other
        "attention_out": 2 * tokens * h * h,
        "fc1": 2 * tokens * h * ffn,
        "fc2": 2 * tokens * ffn * h,
    }
    assert flops(of["vision-projector"]) == {
        "projection0": 2 * (tokens // 4) * (4 * h) * (4 * h),
        "projection1": 2 * (tokens // 4) * (4 * h) * out,
    }
    assert of["vision"].flops_backward == 2 * of["vision"].flops_forward


def test_a_window_of_patches_reads_its_own_alone():
    p, h, ffn = 5120, 1280, 3420
    of = layers(graph_of("qwen2.5-vl-7b"))

    assert flops(of["vision-full"])["attention"] == 4 * B * p * p * h
    assert flops(of["vision-window-64"])["attention"] == 4 * B * p * 64 * h
    assert flops(of["vision-full"])["fc1"] == 2 * B * p * h * 2 * ffn


def test_flops_of_gemmas_projector_are_of_pooled_patches():
    of = layers(graph_of("gemma-3-4b"))

    assert flops(of["vision-projector"]) == {"projection0": 2 * B * 256 * 1152 * 2560}
    assert flops(of["vision-patches"]) == {"patches": 2 * B * 4096 * 588 * 1152}


def test_the_class_token_of_llama_4_is_a_token_of_its_blocks_alone():
    of = layers(graph_of("llama4-scout"))

    assert flops(of["vision-patches"]) == {"patches": 2 * B * 576 * 588 * 1408}
    assert flops(of["vision"])["attention"] == 4 * B * 577 * 577 * 1408
    assert flops(of["vision-projector"]) == {
        "projection0": 2 * B * 144 * 5632 * 4096,
        "projection1": 2 * B * 144 * 4096 * 4096,
        "projection2": 2 * B * 144 * 4096 * 5120,
    }
    assert of["vision-patches"].num_parameters == 588 * 1408 + 1408 + 577 * 1408 + 2 * 1408


def test_whispers_convolutions_read_three_frames_each():
    of = layers(graph_of("whisper-large-v3", seq_length=448))
    patches = of["audio-patches"]

    assert flops(patches) == {
        "frames": 2 * B * 3000 * (3 * 128) * 1280,
        "patches": 2 * B * 1500 * (3 * 1280) * 1280,
    }
    saved = {tensor.name: tensor.num_elements for op in patches.operators for tensor in op.saved}
    assert saved["sound"] == B * 3000 * 128
    assert saved["frames_activation"] == B * 3000 * 1280
    table = next(p for op in patches.operators for p in op.parameters if not p.trained)
    assert table.shape == (1500, 1280)


@pytest.mark.parametrize("name", ["qwen2-vl-7b", "gemma-3-4b", "llama4-scout", "whisper-large-v3"])
def test_every_operator_reads_what_is_made_before_it(name):
    for layer in graph_of(name, seq_length=448):
        made = {layer.input.name if layer.input else "", "embedded", "tower_output"}
        for operator in layer.operators:
            assert {tensor.name for tensor in operator.inputs} <= made, operator.name
            made |= {tensor.name for tensor in operator.outputs}


def test_the_last_operator_puts_images_among_the_text():
    graph = graph_of("qwen2-vl-7b", 2)
    projector = layers(graph)["vision-projector"]
    last = projector.operators[-1]

    assert projector.input.num_elements == B * 2 * 5120 * 1280
    assert {tensor.name for tensor in last.inputs} == {"projection1", "embedded"}
    assert last.outputs[0].dims == graph.boundary.dims
    assert graph.tower_boundary.dims == projector.input.dims


def test_the_scores_of_un_fused_attention_are_those_of_images():
    block = layers(graph_of("gemma-3-4b", attention=AttentionKernel.UNFUSED))["vision"]
    scores = next(t for t in block.operator("attention").saved if t.name == "attention_softmax")

    assert scores.num_elements == B * 16 * 4096 * 4096
    assert not block.operator("attention").attention.causal


def test_products_of_a_width_that_ranks_do_not_divide_are_whole():
    block = layers(graph_of("qwen2.5-vl-7b"))["vision-full"]
    fc1, fc2, qkv = (block.operator(name) for name in ("fc1", "fc2", "qkv"))

    for tp, whole in ((2, False), (4, False), (8, True)):
        sharding = Sharding(tp, sequence_parallel=True)
        share = 1 if whole else tp
        assert sharding.parameter_elements(fc1) == fc1.num_parameters // share
        assert sharding.splits(fc2)[0].dim == ("sequence" if whole else "ffn")
        assert sharding.parameter_elements(qkv) == qkv.num_parameters // tp


def test_parts_are_told_apart():
    parts = [layer.part for layer in graph_of("qwen2-vl-7b")]

    assert parts == [
        ModelPart.LANGUAGE,
        ModelPart.PATCHES,
        ModelPart.TOWER,
        ModelPart.PROJECTOR,
        ModelPart.LANGUAGE,
        ModelPart.LANGUAGE,
    ]
