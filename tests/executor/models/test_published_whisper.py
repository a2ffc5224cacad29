"""Whisper computes what transformers' module computes with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from parplan.executor.checking.parity import forward
from parplan.executor.data.seen_images import PIXELS
from parplan.profiles.models.huggingface import entry_from_config
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import NEUTRAL, AttentionKernel
from tests.helpers.executor_world import reference_layers

HEADS, TEXT, SOUND = 4, 16, 12
CONFIG = {
    "model_type": "whisper",
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": SOUND,
    "max_target_positions": TEXT,
    "num_mel_bins": 10,
    "vocab_size": 128,
    "pad_token_id": 0,
    "dropout": 0.0,
}


def copy_attention(product: nn.Module, attention: nn.Module, parts: str) -> None:
    """Queries, keys and values by head, of which keys have no bias."""
    for name, parameter in product.named_parameters():
        each = [getattr(attention, f"{part}_proj") for part in parts]
        each = [part for part in each if getattr(part, name) is not None]
        heads = [getattr(part, name).unflatten(0, (HEADS, 1, -1)) for part in each]
        parameter.copy_(torch.cat(heads, dim=1).flatten(0, 2))


def copy_block(ours: nn.Module, block: nn.Module) -> None:
    ours.norm1.load_state_dict(block.self_attn_layer_norm.state_dict())
    copy_attention(ours.qkv, block.self_attn, "qkv")
    ours.attention_out.load_state_dict(block.self_attn.out_proj.state_dict())
    ours.norm2.load_state_dict(block.final_layer_norm.state_dict())
    ours.fc1.load_state_dict(block.fc1.state_dict())
    ours.fc2.load_state_dict(block.fc2.state_dict())
    if hasattr(block, "encoder_attn"):
        ours.cross_norm.load_state_dict(block.encoder_attn_layer_norm.state_dict())
        ours.cross_q.load_state_dict(block.encoder_attn.q_proj.state_dict())
        copy_attention(ours.cross_kv, block.encoder_attn, "kv")
        ours.cross_out.load_state_dict(block.encoder_attn.out_proj.state_dict())


def copy(layers: nn.ModuleDict, theirs: nn.Module, model: ModelSpec) -> None:
    encoder, decoder = theirs.encoder, theirs.decoder
    first = layers["block0"]
    for ours, convolution in ((first.frames, encoder.conv1), (first.patches, encoder.conv2)):
        ours.weight.copy_(convolution.weight.flatten(1))
        ours.bias.copy_(convolution.bias)
    last = model.tower.num_layers + 1
    layers[f"block{last}"].norm.load_state_dict(encoder.layer_norm.state_dict())
    for number, block in enumerate(encoder.layers):
        copy_block(layers[f"block{number + 1}"], block)
    for number, block in enumerate(decoder.layers):
        copy_block(layers[f"block{last + 1 + number}"], block)
    layers["embedding"].tokens.weight.copy_(decoder.embed_tokens.weight)
    layers["embedding"].positions.weight.copy_(decoder.embed_positions.weight)
    layers["head"].norm.load_state_dict(decoder.layer_norm.state_dict())


@pytest.mark.parametrize(
    "kernel",
    [AttentionKernel.FLASH, pytest.param(AttentionKernel.UNFUSED, marks=pytest.mark.slow)],
)
def test_whisper_computes_what_transformers_computes_with_the_same_weights(kernel):
    transformers = pytest.importorskip("transformers")
    model = entry_from_config(CONFIG, "whisper/config.json").spec
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**{**CONFIG, "attn_implementation": "eager"})
    theirs = transformers.WhisperForConditionalGeneration(config)
    training = TrainingSpec(global_batch_size=2, seq_length=TEXT, attention=kernel, stack=NEUTRAL)
    layers = reference_layers(model, training, 0)
    positions = layers["block0"].positions.weight
    torch.testing.assert_close(positions, theirs.model.encoder.embed_positions.weight)
    assert not positions.requires_grad
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        copy(layers, theirs.model, model)
    sound, ids = torch.randn(2, 10, 2 * SOUND), torch.randint(1, 128, (2, TEXT))

    ours = forward(layers, ids, images={PIXELS: sound.transpose(1, 2)[:, None]})
    expected = theirs(input_features=sound, decoder_input_ids=ids).logits

    torch.testing.assert_close(ours[..., :128], expected, rtol=1e-4, atol=1e-5)
    for logits in (ours, expected):
        functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    torch.testing.assert_close(
        layers["block0"].frames.weight.grad.unflatten(1, (-1, 3)),
        theirs.model.encoder.conv1.weight.grad,
        rtol=1e-3,
        atol=1e-6,
    )
