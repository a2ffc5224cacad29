from __future__ import annotations

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec, Norm, Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL, AttentionKernel

SHAPE = dict.fromkeys(
    (
        "num_layers",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn_hidden_size",
        "vocab_size",
        "max_seq_length",
    ),
    4,
)


def test_plain_strings_name_the_choices():
    training = TrainingSpec(
        global_batch_size=8, seq_length=4, precision="fp16", attention="unfused", stack=NEUTRAL
    )
    model = ModelSpec(name="m", norm="rms_norm", **SHAPE)

    assert training.precision is Precision.FP16
    assert training.attention is AttentionKernel.UNFUSED
    assert model.norm is Norm.RMS_NORM


def test_a_name_outside_the_choices_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown attention") as error:
        TrainingSpec(global_batch_size=8, seq_length=4, attention="flsh", stack=NEUTRAL)

    assert error.value.hint == "did you mean 'flash'?"


def test_16_bit_gradients_need_16_bit_weights():
    with pytest.raises(ConfigError, match="gradient_precision bf16 is below precision fp32"):
        TrainingSpec(
            global_batch_size=8,
            seq_length=4,
            precision="fp32",
            gradient_precision="bf16",
            stack=NEUTRAL,
        )
