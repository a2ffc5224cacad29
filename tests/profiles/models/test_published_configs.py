"""Published configurations: exact parameter counts, shapes of blocks, what is told and refused."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import replace

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import BlockRun, LatentAttention, Mixer, QkNorm, SharedExperts
from parplan.profiles.models.hf.config_families import ALIASES, FAMILIES
from parplan.profiles.models.hf.not_described import NOT_DESCRIBED
from parplan.profiles.models.huggingface import entry_from_config, is_described_family
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from tests.helpers.cases import mostly_slow
from tests.helpers.published_configs import CONFIGS

TRAINING = TrainingSpec(global_batch_size=1, seq_length=4096, stack=NEUTRAL)
# families whose published models are tested at small sizes in test_huggingface.py
ELSEWHERE = {"gemma", "gpt2", "gpt_neox", "llama", "opt", "stablelm", "starcoder2"}


def spec_of(name):
    return entry_from_config(CONFIGS[name], f"{name}/config.json").spec


def text_of(name):
    config = CONFIGS[name]
    return config.get("text_config", config)


def torch_parameters(name):
    """Returns the parameters of transformers' model without memory; tied ones count once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoModelForSpeechSeq2Seq,
        )

        if spec_of(name).tower:
            speaks = CONFIGS[name]["model_type"] == "whisper"
            whole = AutoModelForSpeechSeq2Seq if speaks else AutoModelForImageTextToText
            config = AutoConfig.for_model(**CONFIGS[name])
            with torch.device("meta"):
                return whole.from_config(config).num_parameters()
        only_here = ("model_type", "auto_map", "quantization_config")
        keys = {key: value for key, value in text_of(name).items() if key not in only_here}
        model_type = text_of(name)["model_type"]
        config = AutoConfig.for_model(ALIASES.get(model_type, model_type), **keys)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        # ERNIE holds the correction of its router, which no gradient trains, as a parameter
        return model.num_parameters(only_trainable=True)


@pytest.mark.parametrize("name", mostly_slow(CONFIGS, [*CONFIGS][::3]))
def test_the_parameter_count_is_exactly_that_of_the_torch_model(name):
    # transformers leaves multi-token prediction out, and pads no vocabulary
    spec = replace(spec_of(name), vocab_multiple=1, mtp_layers=0)

    assert build_graph(spec, TRAINING, 1).num_parameters == torch_parameters(name)


@pytest.mark.parametrize("name", [name for name in CONFIGS if spec_of(name).tower])
def test_a_tower_is_read_the_same_from_the_file_that_transformers_writes(name):
    from transformers import AutoConfig

    written = AutoConfig.for_model(**CONFIGS[name]).to_dict()

    spec = entry_from_config(written, f"{name}/config.json").spec
    assert spec == spec_of(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_read_in_under_a_second(name):
    before = time.process_time()

    spec_of(name)

    assert time.process_time() - before < 1.0


def test_every_family_has_a_published_model():
    families = {text_of(name)["model_type"] for name in CONFIGS}

    assert families | ELSEWHERE >= set(FAMILIES) | set(ALIASES)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unknown_key_is_refused_by_name(name):
    config = {**CONFIGS[name], "rotate_experts": 2}

    with pytest.raises(ConfigError, match="rotate_experts is not understood"):
        entry_from_config(config, "config.json")


def test_an_unknown_key_of_the_text_is_refused_by_name():
    config = CONFIGS["gemma-3-12b"]
    text = {**config["text_config"], "rotate_experts": 2}

    with pytest.raises(ConfigError, match="rotate_experts is not understood"):
        entry_from_config({**config, "text_config": text}, "config.json")


def test_deepseek_has_latent_attention_dense_blocks_and_shared_experts():
    spec = spec_of("deepseek-v3")

    assert spec.latent == LatentAttention(
        q_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128
    )
    assert spec.blocks == (BlockRun(num_blocks=3, experts=False), BlockRun(num_blocks=58))
    assert spec.shared_experts == SharedExperts(ffn_hidden_size=2048)
    assert (spec.ffn_hidden_size, spec.expert_ffn_hidden_size) == (18432, 2048)
    assert spec.mtp_layers == 1
    assert spec_of("deepseek-v2-lite").latent.q_rank == 0


def test_gpt_oss_has_windows_in_turns_sinks_and_biases():
    spec = spec_of("gpt-oss-20b")

    assert spec.blocks == (BlockRun(window=128), BlockRun())
    assert (spec.sinks, spec.expert_bias, spec.router_bias) == (True, True, True)
    assert (spec.qkv_bias, spec.attention_output_bias, spec.linear_bias) == (True, True, False)


def test_gemma_has_local_blocks_in_turns_and_four_norms():
    old, new = spec_of("gemma-2-27b"), spec_of("gemma-3-12b")

    assert old.blocks == (BlockRun(window=4096), BlockRun())
    assert new.blocks == (BlockRun(num_blocks=5, window=1024), BlockRun())
    assert (old.attention_soft_cap, old.logit_soft_cap) == (50.0, 30.0)
    assert (new.attention_soft_cap, new.logit_soft_cap) == (0.0, 0.0)
    assert (old.qk_norm, new.qk_norm) == (QkNorm.NONE, QkNorm.HEAD)
    assert old.norm_layout == new.norm_layout == "both"


def test_llama_4_has_chunks_blocks_without_positions_and_experts_in_turns():
    local = BlockRun(chunk=8192)
    dense = replace(local, experts=False)

    assert spec_of("llama4-scout").blocks == (
        replace(local, num_blocks=3),
        BlockRun(rotary=False),
    )
    assert spec_of("llama4-maverick").blocks == (dense, local, dense, BlockRun(rotary=False))


def test_falcon_has_one_norm_or_two_before_its_parallel_parts():
    small, large = spec_of("falcon-7b"), spec_of("falcon-40b")

    assert (small.num_kv_heads, small.norm_layout, small.parallel_residual) == (1, "shared", True)
    assert (large.num_kv_heads, large.norm_layout, large.parallel_residual) == (8, "pre", True)


def test_nemotron_3_has_experts_in_blocks_of_their_own():
    nano, large = (spec_of(name) for name in CONFIGS if name.startswith("nemotron-3"))

    assert [sum(kind.feed_forward for kind in spec.block_kinds) for spec in (nano, large)] == [
        23,
        40,
    ]
    assert (nano.ffn_hidden_size, nano.expert_latent_size, large.expert_latent_size) == (0, 0, 1024)
    assert large.shared_experts == SharedExperts(ffn_hidden_size=5376)


def test_nemotron_h_has_blocks_of_one_part_each():
    spec = spec_of("nemotron-h-8b")
    kinds = spec.block_kinds

    assert len(kinds) == 52
    assert sum(kind.mixer is Mixer.STATE_SPACE for kind in kinds) == 24
    assert sum(kind.mixer is Mixer.ATTENTION for kind in kinds) == 4
    assert sum(kind.feed_forward for kind in kinds) == 24


def test_granite_4_has_a_network_behind_each_scan():
    small, dense = spec_of("granite-4-h-tiny"), spec_of("granite-4-micro")
    kinds = small.block_kinds

    assert sum(kind.mixer is Mixer.STATE_SPACE for kind in kinds) == 36
    assert all(kind.feed_forward for kind in kinds)
    assert (small.positions, small.shared_experts) == ("none", SharedExperts(ffn_hidden_size=1024))
    assert (dense.blocks, dense.num_experts, dense.ffn_hidden_size) == ((), 0, 8192)
    assert dense.positions == "rotary"


def test_windows_and_positions_are_in_turns():
    assert spec_of("olmo-3-7b").blocks == (BlockRun(num_blocks=3, window=4096), BlockRun())
    assert spec_of("smollm3-3b").blocks == (BlockRun(num_blocks=3), BlockRun(rotary=False))


def test_experts_begin_behind_the_first_blocks_and_have_shared_ones():
    ernie, hunyuan = spec_of("ernie-4.5-300b-a47b"), spec_of("hunyuan-a13b")

    assert ernie.blocks == (BlockRun(num_blocks=3, experts=False), BlockRun(num_blocks=51))
    assert (ernie.shared_experts, hunyuan.shared_experts) == (
        None,
        SharedExperts(ffn_hidden_size=3072),
    )
    assert (hunyuan.experts_per_token, hunyuan.qk_norm) == (8, QkNorm.HEAD)


def test_a_minimax_rotates_half_of_a_head_and_norms_all_of_them():
    spec = spec_of("minimax-m2")

    assert (spec.rotary_fraction, spec.qk_norm, spec.mtp_layers) == (0.5, QkNorm.WHOLE, 3)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("minimax-m2", {"attn_type_list": [1, 0] * 31}, "attn_type_list is"),
        ("hunyuan-a13b", {"use_cla": True}, "use_cla is True"),
        ("hunyuan-a13b", {"moe_topk": [8, 4] * 16}, "moe_topk is .* the same for every block"),
        ("ernie-4.5-21b-a3b", {"moe_layer_interval": 2}, "moe_layer_interval is 2"),
        ("granite-4-h-tiny", {"mamba_d_head": 32}, "mamba_d_head is 32"),
        ("granite-4-h-tiny", {"position_embedding_type": "alibi"}, "must be nope or rope"),
        ("seed-oss-36b", {"attention_out_bias": True}, "attention_out_bias is True"),
    ],
)
def test_what_changes_the_graph_and_is_not_described_is_refused_by_name(name, changes, said):
    with pytest.raises(ConfigError, match=said):
        entry_from_config({**CONFIGS[name], **changes}, "config.json")


@pytest.mark.parametrize("model_type", NOT_DESCRIBED)
def test_a_family_of_other_blocks_is_refused_by_the_key_that_says_so(model_type):
    name, meaning = NOT_DESCRIBED[model_type]

    assert is_described_family({"model_type": model_type})  # it is not traced unasked
    with pytest.raises(ConfigError, match=re.escape(name)) as error:
        entry_from_config({"model_type": model_type, "hidden_size": 64}, "config.json")

    assert meaning in error.value.message


def test_the_refusal_says_the_value_of_a_nested_key():
    config = {"model_type": "qwen3_vl", "vision_config": {"deepstack_visual_indexes": [8, 16]}}

    with pytest.raises(ConfigError, match=r"deepstack_visual_indexes is \[8, 16\]"):
        entry_from_config(config, "config.json")
