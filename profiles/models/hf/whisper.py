"""The two halves of a Whisper in one configuration, each with the names of other models' keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WHISPER = "whisper"
_ENCODER = {
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
    "max_source_positions": "max_source_positions",
    "num_mel_bins": "num_mel_bins",
}
_DECODER = {
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size",
    "max_target_positions": "max_position_embeddings",
}
_BOTH = {"d_model": "hidden_size", "activation_function": "hidden_act"}


def encoder_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of the encoder of sound."""
    names = {**_ENCODER, **_BOTH}
    return {names[name]: value for name, value in config.items() if name in names}


def decoder_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of the decoder of text, with all that is not the encoder's.

    `num_hidden_layers` of the file is the number of the encoder's layers.
    """
    names = {**_DECODER, **_BOTH}
    without = {*_ENCODER, "num_hidden_layers"}
    return {names.get(name, name): value for name, value in config.items() if name not in without}
