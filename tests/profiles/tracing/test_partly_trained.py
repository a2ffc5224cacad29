"""Adapters and frozen parts of Hugging Face modules: which parameters train, and how many."""

from __future__ import annotations

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.tracing.trace import trace
from parplan.profiles.tracing.traced_source import open_workload
from tests.helpers.builtin_modules import CONFIGS

R = 4


def module_of(tuning: FineTuning, family: str = "llama"):
    source = ModuleSource(huggingface=CONFIGS[family], fine_tuning=tuning)
    return open_workload(source, seq_length=16).module


def trained(tuning: FineTuning, family: str = "llama") -> set[str]:
    named = module_of(tuning, family).named_parameters()
    return {name for name, parameter in named if parameter.requires_grad}


@pytest.mark.parametrize(
    ("family", "targets", "modules"),
    [
        ("llama", ("q_proj", "down_proj"), {"q_proj", "down_proj"}),
        ("llama", ("qkv", "proj"), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (
            "llama",
            ("all-linear",),
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ),
        ("gpt2", ("qkv",), {"c_attn"}),
    ],
)
def test_targets_name_operators_or_modules(family, targets, modules):
    names = trained(FineTuning(lora_rank=R, lora_targets=targets), family)

    assert all(".lora_" in name for name in names)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == modules


def test_a_frozen_run_of_blocks_has_no_adapters():
    tuning = FineTuning(lora_rank=R, lora_targets=("q_proj",), freeze=("blocks:0-0",))
    names = module_of(tuning).state_dict()

    with_adapters = {name.split(".")[2] for name in names if ".lora_" in name}
    assert with_adapters == {str(n) for n in range(1, CONFIGS["llama"]["num_hidden_layers"])}


def test_frozen_parts_are_named_by_their_role():
    frozen = set(module_of(FineTuning(freeze=("embedding",))).state_dict()) - trained(
        FineTuning(freeze=("embedding", "norms", "blocks:0-0"))
    )

    assert {name for name in frozen if ".layers." not in name} >= {
        "model.embed_tokens.weight",
        "model.norm.weight",
    }
    assert {name for name in frozen if ".layers.1." in name} == {
        f"model.layers.1.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")
    }


@pytest.mark.slow
def test_a_trace_knows_what_is_trained():
    tuning = FineTuning(lora_rank=R, lora_targets=("q_proj",))
    source = ModuleSource(huggingface=CONFIGS["llama"], fine_tuning=tuning)
    parameters = {
        parameter.name: parameter
        for each in trace(source, seq_length=16).operators
        for parameter in each.operator.parameters
    }

    assert {name for name, each in parameters.items() if each.trained} == trained(tuning)
    assert not all(each.trained for each in parameters.values())


@pytest.mark.parametrize(
    ("tuning", "problem"),
    [
        ({"lora_rank": R, "lora_targets": ("qproj",)}, "--lora-targets qproj is no linear module"),
        ({"freeze": ("blocks:1-9",)}, "the model has blocks 0 to"),
        ({"lora_rank": R, "lora_targets": ("qkv",), "base_bits": 8}, "base_bits is 8"),
    ],
)
def test_what_the_module_does_not_have_is_an_error(tuning, problem):
    with pytest.raises(ConfigError, match=problem):
        module_of(FineTuning(**tuning))


def test_a_function_adds_its_adapters_itself():
    tuning = FineTuning(freeze=("embedding",))
    with pytest.raises(ConfigError, match="returns the module that is trained"):
        ModuleSource(factory="my.module:build", fine_tuning=tuning)
