"""Frozen parameters and adapters in the graph: parameters, FLOPs and saved tensors by hand."""

from __future__ import annotations

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

GPT = load_model("gpt-tiny").spec  # 4 blocks of 64, feed-forward 256, vocabulary 512
H, F, M, R = 64, 256, 2 * 128, 4  # widths, tokens, rank


def graph(tuning: FineTuning | None = None):
    training = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL, fine_tuning=tuning)
    return build_graph(GPT, training, 2)


def test_adapters_add_the_parameters_and_flops_of_their_two_products():
    whole = graph()
    tuned = graph(FineTuning(lora_rank=R, lora_targets=("q_proj", "fc2")))

    added = 4 * R * ((H + 3 * H) + (F + H))
    assert tuned.num_trained_parameters == added
    assert tuned.num_parameters == whole.num_parameters + added
    weights = 3 * H * H + H * H + 2 * H * F  # of the four products of a block
    per_block = 2 * M * weights  # gradients of weights that are left out
    head = 2 * M * H * GPT.padded_vocab_size
    assert tuned.model_flops == whole.model_flops - 4 * per_block - head + 3 * 2 * M * added


def test_frozen_products_save_no_input_and_adapters_do():
    block = graph(FineTuning(lora_rank=R, lora_targets=("fc1",))).block
    saved = {op.name: [tensor.name for tensor in op.saved] for op in block.operators}

    assert saved["qkv"] == saved["fc1"] == saved["fc2"] == []
    assert saved["attention_out"] == ["context"]  # fused attention saves its output itself
    assert saved["fc1_lora_a"] == ["norm2"]
    assert saved["fc1_lora_b"] == ["fc1_lora_a"]


def test_layers_below_the_first_trained_one_have_no_backward_pass():
    tuned = graph(FineTuning(freeze=("embedding", "blocks:0-1")))
    states = [(run.layer.gradient, run.layer.trained, run.count) for run in tuned.layers]

    # the head's table is tied to the frozen embedding, its norm is trained
    assert states == [(False, False, 1), (False, False, 2), (True, True, 2), (True, True, 1)]
    forward = tuned.layers[1].layer
    assert forward.flops_backward == 0
    assert not any(operator.saved for operator in forward.operators)
    assert [str(key) for key in tuned.keys] == ["embedding", "forward", "trained", "head"]


def seen(*freeze: str, **parts):
    training = TrainingSpec(
        global_batch_size=8,
        seq_length=2048,
        stack=NEUTRAL,
        fine_tuning=FineTuning(freeze=freeze, **parts),
    )
    graph = build_graph(load_model("qwen2-vl-7b").spec, training, 1)
    return {str(layer.key): layer for layer in graph}


def test_a_frozen_tower_has_no_backward_pass_whatever_the_embedding_does():
    layers = seen("tower")

    for name in ("vision-patches", "vision"):
        assert not layers[name].gradient
        assert not any(op.saved for op in layers[name].operators)
    assert layers["vision-projector"].trained
    assert layers["language"].trained
    assert layers["embedding"].trained


def test_a_trained_projector_before_a_frozen_language_model_gets_its_gradient():
    layers = seen("tower", "embedding", "blocks 0-27", "head")

    assert not layers["vision"].gradient
    assert layers["vision-projector"].trained
    assert layers["language"].gradient
    assert not layers["language"].trained
    whole = seen("head")["language"]
    products = sum(op.flops_forward for op in whole.operators if op.kind == "matmul")
    assert layers["language"].flops_backward == whole.flops_backward - products


def test_a_frozen_projector_passes_the_gradient_to_a_trained_tower():
    layers = seen("projector", "embedding")

    assert layers["vision"].trained
    assert layers["vision-projector"].gradient
    assert not layers["vision-projector"].trained


def test_adapters_are_in_the_language_model_alone():
    layers = seen(lora_rank=R, lora_targets=("qkv",), base_bits=8)

    assert not layers["vision"].gradient
    assert not any(op.is_adapter for op in layers["vision"].operators)
    assert any(op.is_adapter for op in layers["language"].operators)
    assert not any(p.quantised for op in layers["vision"].operators for p in op.parameters)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"freeze": ("embedding", "head", "norms", "blocks 0-3")}, "every parameter"),
        ({"freeze": ("blocks 2-4",)}, "blocks 0 to 3"),
        ({"lora_rank": 4, "lora_targets": ("gate",)}, "no product"),
        ({"lora_rank": 4}, "without --lora-targets"),
        ({"freeze": ("all",)}, "nothing to train"),
        ({"freeze": ("body",)}, "no part"),
        ({"freeze": ("tower",)}, "has no tower"),
        ({"freeze": ("norms",), "base_bits": 4}, "16 or 8"),
    ],
)
def test_contradictions_are_named(parts, message):
    with pytest.raises(ConfigError, match=message):
        graph(FineTuning(**parts))
