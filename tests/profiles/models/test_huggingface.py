"""Hugging Face configurations give the shape and the exact parameter count of transformers."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.functions import Activations, Functions
from parplan.profiles.models.hf.config_families import ALIASES, FAMILIES, WRAPPERS
from parplan.profiles.models.huggingface import (
    DEFAULT_GLOBAL_BATCH_SIZE,
    MAX_DEFAULT_SEQ_LENGTH,
    entry_from_config,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

SHAPE = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 160,
    "vocab_size": 384,
    "max_position_embeddings": 64,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
SUPPORTED = ", ".join(sorted((*FAMILIES, *ALIASES, *WRAPPERS)))
OPT = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "ffn_dim": 160,
    "vocab_size": 384,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 96,
}
GPT2 = {"n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 384, "n_positions": 64}


def config_of(class_name, keys):
    """Returns a configuration of the installed transformers, whose import may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        return getattr(transformers, class_name)(**keys)


def torch_parameters(config):
    """Returns the parameters of the model that transformers builds; tied ones count once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).num_parameters()


def graph_parameters(spec):
    return build_graph(
        spec, TrainingSpec(global_batch_size=1, seq_length=16, stack=NEUTRAL), 1
    ).num_parameters


@pytest.mark.parametrize(
    ("class_name", "keys"),
    [
        pytest.param("GPT2Config", GPT2, id="gpt2"),
        pytest.param("GPT2Config", {**GPT2, "n_inner": 200}, id="gpt2-own-ffn-size"),
        pytest.param("GPT2Config", {**GPT2, "tie_word_embeddings": False}, id="gpt2-untied"),
        pytest.param("GPTNeoXConfig", SHAPE, id="neox"),
        pytest.param(
            "GPTNeoXConfig", {**SHAPE, "use_parallel_residual": False}, id="neox-sequential"
        ),
        pytest.param("GPTNeoXConfig", {**SHAPE, "tie_word_embeddings": True}, id="neox-tied"),
        pytest.param("LlamaConfig", SHAPE, id="llama"),
        pytest.param("LlamaConfig", GROUPED, id="llama-grouped-queries"),
        pytest.param("LlamaConfig", {**GROUPED, "tie_word_embeddings": True}, id="llama-tied"),
        pytest.param("LlamaConfig", {**GROUPED, "head_dim": 24}, id="llama-own-head-dim"),
        pytest.param(
            "LlamaConfig", {**GROUPED, "attention_bias": True, "mlp_bias": True}, id="llama-biases"
        ),
        pytest.param("LlamaConfig", {**GROUPED, "attention_bias": True}, id="llama-qkvo-biases"),
        pytest.param("MistralConfig", GROUPED, id="mistral"),
        pytest.param("MistralConfig", {**GROUPED, "head_dim": 24}, id="mistral-own-head-dim"),
        pytest.param("MixtralConfig", GROUPED, id="mixtral"),
        pytest.param(
            "MixtralConfig",
            {**GROUPED, "num_local_experts": 5, "num_experts_per_tok": 3},
            id="mixtral-own-experts",
        ),
        pytest.param("Qwen2Config", GROUPED, id="qwen2"),
        pytest.param("Qwen2Config", {**GROUPED, "tie_word_embeddings": True}, id="qwen2-tied"),
        pytest.param("OPTConfig", OPT, id="opt"),
        pytest.param("GemmaConfig", GROUPED, id="gemma"),
        pytest.param("Phi3Config", {**GROUPED, "pad_token_id": 0}, id="phi3"),
        pytest.param("StableLmConfig", GROUPED, id="stablelm"),
        pytest.param("Starcoder2Config", GROUPED, id="starcoder2"),
    ],
)
def test_the_parameter_count_is_exactly_that_of_the_torch_model(class_name, keys):
    config = config_of(class_name, keys)

    spec = entry_from_config(config.to_dict(), "config.json").spec

    assert graph_parameters(spec) == torch_parameters(config)


def test_the_flops_of_experts_are_those_that_run_in_transformers():
    keys = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    spec = entry_from_config(config_of("MixtralConfig", keys).to_dict(), "config.json").spec
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from torch.utils.flop_counter import FlopCounterMode
        from transformers import MixtralForCausalLM

        theirs = MixtralForCausalLM._from_config(
            config_of("MixtralConfig", keys),
            attn_implementation="eager",
            experts_implementation="eager",
        )
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            theirs(torch.randint(384, (2, 64)))
    positions = (
        2 * 2 * 64 * 8
    )  # the angles of 64 positions and half of a head of 16, a product for each sequence

    training = TrainingSpec(global_batch_size=2, seq_length=64, stack=NEUTRAL)
    forward_flops = build_graph(spec, training, 2).model_flops / 3

    assert forward_flops == pytest.approx(counted.get_total_flops(), rel=0, abs=positions)


def test_a_vocabulary_is_the_only_thing_padded():
    config = config_of("LlamaConfig", {**GROUPED, "vocab_size": 300})

    spec = entry_from_config(config.to_dict(), "config.json").spec

    assert graph_parameters(spec) - torch_parameters(config) == 2 * (384 - 300) * 96


@pytest.mark.parametrize(
    ("class_name", "keys"),
    [("GPT2Config", GPT2), ("GPTNeoXConfig", SHAPE), ("LlamaConfig", GROUPED)],
)
def test_a_saved_configuration_is_read_from_its_folder(tmp_path, class_name, keys):
    config = config_of(class_name, keys)
    config.save_pretrained(tmp_path)

    entry = load_model(str(tmp_path))

    assert entry.spec.name == tmp_path.name
    assert graph_parameters(entry.spec) == torch_parameters(config)


def test_gpt2_is_read_with_its_defaults():
    spec = entry_from_config({"model_type": "gpt2", **GPT2}, "models/gpt2-xs/config.json").spec

    assert spec == ModelSpec(
        name="gpt2-xs",
        num_layers=3,
        hidden_size=96,
        num_heads=6,
        num_kv_heads=6,
        head_dim=16,
        ffn_hidden_size=384,
        vocab_size=384,
        max_seq_length=64,
        norm=Norm.LAYER_NORM,
        positions=Positions.LEARNED,
        dropout=0.1,
        tied_embeddings=True,
    )


def test_neox_is_read_with_its_defaults():
    spec = entry_from_config({"model_type": "gpt_neox", **SHAPE}, "neox/config.json").spec

    assert spec == ModelSpec(
        name="neox",
        num_layers=3,
        hidden_size=96,
        num_heads=6,
        num_kv_heads=6,
        head_dim=16,
        ffn_hidden_size=160,
        vocab_size=384,
        max_seq_length=64,
        positions=Positions.ROTARY,
        tied_embeddings=False,
        parallel_residual=True,
        rotary_fraction=0.25,
        functions=Functions(activation=Activations.GELU),
    )


def test_opt_is_read_with_its_defaults_and_the_two_rows_that_no_position_uses():
    entry = entry_from_config({"model_type": "opt", **OPT}, "opt/config.json")

    assert entry.spec == ModelSpec(
        name="opt",
        num_layers=3,
        hidden_size=96,
        num_heads=6,
        num_kv_heads=6,
        head_dim=16,
        ffn_hidden_size=160,
        vocab_size=384,
        max_seq_length=66,
        norm=Norm.LAYER_NORM,
        positions=Positions.LEARNED,
        dropout=0.1,
        tied_embeddings=True,
        functions=Functions(activation=Activations.RELU),
    )
    assert entry.seq_length == 64


def test_gemma_has_heads_of_256_where_the_file_leaves_them_out():
    spec = entry_from_config(
        {"model_type": "gemma", **SHAPE, "num_attention_heads": 16}, "gemma/config.json"
    ).spec

    assert (spec.head_dim, spec.num_kv_heads, spec.tied_embeddings, spec.gated_ffn) == (
        256,
        16,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("opt", "do_layer_norm_before", False),
        ("opt", "word_embed_proj_dim", 48),
        ("opt", "layerdrop", 0.1),
        ("opt", "enable_bias", False),
        ("opt", "activation_function", "gelu"),
        ("gemma", "attention_bias", True),
        ("gemma", "hidden_act", "silu"),
        ("stablelm", "qk_layernorm", True),
        ("stablelm", "use_qkv_bias", True),
        ("stablelm", "use_parallel_residual", True),
        ("starcoder2", "use_bias", False),
    ],
)
def test_a_variant_of_a_family_that_the_graph_does_not_have_is_refused(model_type, key, value):
    with pytest.raises(ConfigError, match=f"{key} is {value!r}"):
        entry_from_config(
            {"model_type": model_type, **OPT, "intermediate_size": 160, key: value}, "config.json"
        )


@pytest.mark.parametrize(
    ("model_type", "kv_heads", "qkv_bias"),
    [
        pytest.param("llama", 32, False, id="llama"),
        pytest.param("mistral", 8, False, id="mistral"),
        pytest.param("qwen2", 32, True, id="qwen2"),
    ],
)
def test_the_llama_like_families_are_read_with_their_defaults(model_type, kv_heads, qkv_bias):
    keys = {**SHAPE, "hidden_size": 512, "num_attention_heads": 32, "sliding_window": None}

    spec = entry_from_config({"model_type": model_type, **keys}, "m/config.json").spec

    assert spec == ModelSpec(
        name="m",
        num_layers=3,
        hidden_size=512,
        num_heads=32,
        num_kv_heads=kv_heads,
        head_dim=16,
        ffn_hidden_size=160,
        vocab_size=384,
        max_seq_length=64,
        norm=Norm.RMS_NORM,
        positions=Positions.ROTARY,
        gated_ffn=True,
        linear_bias=False,
        qkv_bias=qkv_bias,
        tied_embeddings=False,
        norm_epsilon=1e-6,
    )


def test_a_mistral_has_a_window_unless_the_file_has_none():
    keys = {"model_type": "mistral", **SHAPE, "num_key_value_heads": 2}

    windows = [
        entry_from_config({**keys, **own}, "m/config.json").spec.blocks
        for own in ({}, {"sliding_window": 8}, {"sliding_window": None})
    ]

    assert windows == [(BlockRun(window=4096),), (BlockRun(window=8),), ()]


def test_a_text_inside_another_configuration_is_read_as_by_itself():
    text = {"model_type": "mistral", **SHAPE, "num_key_value_heads": 2}
    wrapped = {
        "model_type": "mistral3",
        "text_config": text,
        "vision_config": {"hidden_size": 64, "num_hidden_layers": 3, "head_dim": 4},
        "image_token_index": 10,
    }

    spec = entry_from_config(wrapped, "m/config.json").spec

    assert (spec.tower.num_layers, spec.tower.hidden_size) == (3, 64)
    assert spec.tower.patches == (1540 // 14) ** 2  # the default of transformers
    assert replace(spec, tower=None) == entry_from_config(text, "m/config.json").spec
    with pytest.raises(ConfigError, match="audio_config is not understood"):
        entry_from_config({**wrapped, "audio_config": {}}, "m/config.json")


@pytest.mark.parametrize(
    "aliases",
    [
        pytest.param(
            {"d_model": 96, "n_layers": 3, "n_heads": 6, "ffn_dim": 384, "n_ctx": 64}, id="d-model"
        ),
        pytest.param(
            {
                "hidden_size": 96,
                "num_hidden_layers": 3,
                "num_attention_heads": 6,
                "intermediate_size": 384,
                "max_position_embeddings": 64,
            },
            id="hidden-size",
        ),
        pytest.param(
            {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_inner": None, "n_positions": 64},
            id="null-is-absent",
        ),
    ],
)
def test_every_spelling_of_a_size_is_understood(aliases):
    spec = entry_from_config(
        {"model_type": "gpt2", "vocab_size": 384, **aliases}, "config.json"
    ).spec

    assert (
        spec.hidden_size,
        spec.num_layers,
        spec.num_heads,
        spec.ffn_hidden_size,
        spec.max_seq_length,
    ) == (96, 3, 6, 384, 64)


@pytest.mark.parametrize(
    ("keys", "theta", "fraction"),
    [
        pytest.param({"rope_theta": 5e5}, 5e5, 0.25, id="older-llama"),
        pytest.param({"rotary_emb_base": 2e4, "rotary_pct": 0.5}, 2e4, 0.5, id="older-neox"),
        pytest.param(
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1.0}},
            1e6,
            1.0,
            id="newer-transformers",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4},
            3e4,
            0.25,
            id="both-places",
        ),
        pytest.param({}, 1e4, 0.25, id="absent"),
    ],
)
def test_rotary_settings_are_found_wherever_a_version_of_transformers_put_them(
    keys, theta, fraction
):
    spec = entry_from_config({"model_type": "gpt_neox", **SHAPE, **keys}, "config.json").spec

    assert (spec.rope_theta, spec.rotary_fraction) == (theta, fraction)


def test_the_largest_dropout_decides_because_it_decides_the_memory():
    spec = entry_from_config(
        {"model_type": "gpt2", **GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.2},
        "config.json",
    ).spec

    assert spec.dropout == 0.2


@pytest.mark.parametrize(
    ("context", "seq_length"),
    [
        pytest.param(1024, 1024, id="short-context"),
        pytest.param(131072, MAX_DEFAULT_SEQ_LENGTH, id="long-context-is-capped"),
    ],
)
def test_training_defaults_are_the_context_up_to_a_cap_and_a_stated_batch(context, seq_length):
    entry = entry_from_config(
        {"model_type": "llama", **SHAPE, "max_position_embeddings": context}, "config.json"
    )

    assert (entry.seq_length, entry.global_batch_size) == (seq_length, DEFAULT_GLOBAL_BATCH_SIZE)
    assert entry.spec.max_seq_length == context


@pytest.mark.parametrize(
    ("keys", "where", "name"),
    [
        pytest.param(
            {"_name_or_path": "meta-llama/Llama-3.1-8B"},
            "x/config.json",
            "Llama-3.1-8B",
            id="published-name",
        ),
        pytest.param({"_name_or_path": ""}, "folder/config.json", "folder", id="folder"),
        pytest.param({}, "config.json", "llama", id="family"),
    ],
)
def test_a_model_is_named_after_its_publication_its_folder_or_its_family(keys, where, name):
    assert entry_from_config({"model_type": "llama", **SHAPE, **keys}, where).spec.name == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"model_type": "mixtral", "n_shared_experts": 1},
            "c.json: n_shared_experts is not understood in the family mixtral",
            id="a-key-of-another-family",
        ),
        pytest.param(
            {"sparse_attention": True, "block_heads": 4},
            "c.json: block_heads is not understood in the family llama (and sparse_attention)",
            id="unknown-keys",
        ),
        pytest.param(
            {"model_type": "qwen3_moe", "use_sliding_window": True},
            "c.json: use_sliding_window is True, it must be False, the only one that the operator "
            "graph expresses",
            id="a-window-that-the-family-does-not-place",
        ),
        pytest.param(
            {"model_type": "gemma2", "hidden_act": "gelu", "layer_types": ["linear_attention"] * 3},
            "c.json: layer_types is 'linear_attention', it must be made of full_attention, "
            "sliding_attention, chunked_attention",
            id="unknown-attention",
        ),
        pytest.param(
            {"model_type": "gemma2", "layer_types": ["full_attention"]},
            "c.json: layer_types has 1 items, the model has 3 layers",
            id="too-few-kinds",
        ),
        pytest.param(
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M-X"},
            "c.json: hybrid_override_pattern is 'X', it must be made of linear_attention, mamba, "
            "full_attention, attention, mlp, moe",
            id="unknown-block",
        ),
        pytest.param(
            {"model_type": "mamba"},
            f"c.json: model_type is 'mamba', supported are {SUPPORTED}",
            id="other-family",
        ),
        pytest.param(
            {"model_type": None},
            f"c.json: model_type is missing (supported: {SUPPORTED})",
            id="no-family",
        ),
        pytest.param(
            {"hidden_size": None},
            "c.json: hidden_size is missing (or n_embd, d_model)",
            id="missing-size",
        ),
        pytest.param(
            {"vocab_size": None}, "c.json: vocab_size is missing", id="missing-without-aliases"
        ),
        pytest.param(
            {"num_hidden_layers": "two"},
            "c.json: num_hidden_layers is 'two', it must be a positive integer",
            id="text-for-a-number",
        ),
        pytest.param(
            {"num_hidden_layers": True},
            "c.json: num_hidden_layers is True, it must be a positive integer",
            id="flag-for-a-number",
        ),
        pytest.param(
            {"intermediate_size": 0},
            "c.json: intermediate_size is 0, it must be a positive integer",
            id="zero",
        ),
        pytest.param(
            {"rms_norm_eps": "small"},
            "c.json: rms_norm_eps is 'small', it must be a number",
            id="text-for-a-fraction",
        ),
        pytest.param(
            {"tie_word_embeddings": 1},
            "c.json: tie_word_embeddings is 1, it must be true or false",
            id="number-for-a-flag",
        ),
        pytest.param(
            {"rope_parameters": 3},
            "c.json: rope_parameters is 3, it must be a mapping",
            id="number-for-a-mapping",
        ),
        pytest.param(
            {"rope_parameters": {"rope_theta": "x"}},
            "c.json: rope_parameters: rope_theta is 'x', it must be a number",
            id="inner-key",
        ),
        pytest.param(
            {"num_attention_heads": 7},
            "c.json: hidden size 96 is not a multiple of the 7 heads",
            id="heads-do-not-divide",
        ),
        pytest.param(
            {"num_key_value_heads": 4},
            "c.json: model c: num_heads 6 is not a multiple of num_kv_heads 4",
            id="key-value-heads",
        ),
        pytest.param(
            {"hidden_act": "relu"},
            "c.json: hidden_act is 'relu', it must be one of silu, swish in this family",
            id="activation",
        ),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_the_key(change, message):
    config = {"model_type": "llama", "_name_or_path": "c", **SHAPE, **change}

    with pytest.raises(ConfigError) as caught:
        entry_from_config(config, "c.json")

    assert caught.value.message == message


def test_two_names_of_the_number_of_experts_must_agree():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {"model_type": "qwen3_moe", "_name_or_path": "c", **GROUPED, **experts}

    assert entry_from_config({**config, "num_local_experts": 4}, "c.json").spec.num_experts == 4
    with pytest.raises(ConfigError, match="num_experts is 4 and num_local_experts is 8, but they"):
        entry_from_config({**config, "num_local_experts": 8}, "c.json")


def test_a_configuration_survives_json():
    config = config_of("Qwen2Config", GROUPED).to_dict()

    assert entry_from_config(json.loads(json.dumps(config)), "c.json") == entry_from_config(
        config, "c.json"
    )
