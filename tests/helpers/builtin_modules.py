"""The executor's GPT and Llama as modules of a user and as Hugging Face configurations.

The specs that describe them are beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from parplan.executor.models.transformer_layers import Block, Embedding, Head
from parplan.profiles.models.huggingface import entry_from_config
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

SEQ_LENGTH, VOCAB = 128, 256
GPT = ModelSpec(
    name="gpt",
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_hidden_size=256,
    vocab_size=VOCAB,
    max_seq_length=SEQ_LENGTH,
    tied_embeddings=False,
)
LLAMA = ModelSpec(
    name="llama",
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=160,
    vocab_size=VOCAB,
    max_seq_length=SEQ_LENGTH,
    norm=Norm.RMS_NORM,
    positions=Positions.ROTARY,
    gated_ffn=True,
    linear_bias=False,
    qkv_bias=False,
    tied_embeddings=False,
)
NEOX = replace(
    LLAMA,
    name="neox",
    num_kv_heads=4,
    norm=Norm.LAYER_NORM,
    ffn_hidden_size=256,
    gated_ffn=False,
    linear_bias=True,
    qkv_bias=True,
    parallel_residual=True,
    rotary_fraction=0.25,
)
DROPPED = replace(GPT, name="gpt-dropped", dropout=0.1)
SPECS = {spec.name: spec for spec in (GPT, LLAMA, NEOX, DROPPED)}
TRAINING = TrainingSpec(global_batch_size=8, seq_length=SEQ_LENGTH, stack=NEUTRAL)

_SIZES = {"vocab_size": VOCAB, "max_position_embeddings": SEQ_LENGTH}
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **_SIZES,
}
CONFIGS = {
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": SEQ_LENGTH,
        "vocab_size": VOCAB,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        **_SIZES,
    },
    "llama": _LLAMA,
}


def spec_of(config: dict[str, object]) -> ModelSpec:
    """Returns the built-in description of a configuration, without padding."""
    return replace(entry_from_config(config, "config.json").spec, vocab_multiple=1)


class Decoder(nn.Module):
    """The executor's parts one after the other, and the mean of its loss."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        graph = build_graph(model, TRAINING, 1)
        self.embedding = Embedding(graph.embedding, model, TRAINING)
        self.blocks = nn.ModuleList(
            Block(graph.block, model, TRAINING) for _ in range(model.num_layers)
        )
        self.head = Head(graph.head, model, TRAINING)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head.loss(self.head(x), targets) / targets.numel()


def _batch(size: int) -> dict[str, Tensor]:
    return {key: torch.randint(VOCAB, (size, SEQ_LENGTH)) for key in ("ids", "targets")}


Made = tuple[nn.Module, Callable[[int], dict[str, Tensor]]]


def gpt() -> Made:
    return Decoder(GPT), _batch


def gpt_dropped() -> Made:
    return Decoder(DROPPED), _batch


def llama() -> Made:
    return Decoder(LLAMA), _batch


def neox() -> Made:
    return Decoder(NEOX), _batch


LONG = 1024  # tokens of the large ones
_LARGE: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 4096,
    "num_heads": 32,
    "head_dim": 128,
    "max_seq_length": LONG,
}
LARGE_GPT = replace(GPT, name="gpt-large", num_kv_heads=32, ffn_hidden_size=16384, **_LARGE)
LARGE_LLAMA = replace(LLAMA, name="llama-large", num_kv_heads=8, ffn_hidden_size=14336, **_LARGE)


def _long_batch(size: int) -> dict[str, Tensor]:
    return {key: torch.randint(VOCAB, (size, LONG)) for key in ("ids", "targets")}


def gpt_large() -> Made:
    return Decoder(LARGE_GPT), _long_batch


def llama_large() -> Made:
    return Decoder(LARGE_LLAMA), _long_batch
