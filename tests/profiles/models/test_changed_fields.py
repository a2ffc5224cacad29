"""Changes of one field of a published configuration: counted as transformers counts, or refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.hf.config_families import ALIASES
from parplan.profiles.models.huggingface import entry_from_config
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from tests.helpers.cases import mostly_slow
from tests.helpers.published_configs import CONFIGS

Config = dict[str, Any]
LAYERS = 4
TRAINING = TrainingSpec(global_batch_size=1, seq_length=128, stack=NEUTRAL)
# the file names the number of experts by its other name; transformers keeps the last
TWICE = {"num_local_experts", "num_experts"}


def shortened(name: str) -> Config | None:
    """Returns the text of a configuration with few blocks, None for one of another form."""
    whole = CONFIGS[name]
    config: Config = copy.deepcopy(whole.get("text_config", whole))
    others = "vision_config" in config or "hybrid_override_pattern" in config
    if others or config["model_type"] == "whisper":
        return None
    blocks = config["num_hidden_layers"]
    for key, value in config.items():
        if isinstance(value, list) and len(value) == blocks:
            config[key] = value[:LAYERS]
    config["num_hidden_layers"] = LAYERS
    for key, value in (("first_k_dense_replace", 1), ("moe_layer_start_index", 1)):
        if key in config:
            config[key] = min(config[key], value)
    if config.get("moe_layer_end_index", -1) > 0:
        config["moe_layer_end_index"] = LAYERS - 1
    return config


def one_of_each() -> dict[str, Config]:
    families: dict[str, Config] = {}
    for name in CONFIGS:
        config = shortened(name)
        if config is not None:
            families.setdefault(config["model_type"], config)
    return families


FAMILIES = one_of_each()


def changes(config: Config) -> Iterator[Config]:
    for key, value in config.items():
        if isinstance(value, bool):
            yield {**config, key: not value}
        elif isinstance(value, int) and key not in TWICE:
            yield {**config, key: value * 2}
            yield {**config, key: max(1, value // 2)}


def counted(config: Config) -> int:
    spec = entry_from_config(config, "config.json").spec
    spec = replace(spec, vocab_multiple=1, mtp_layers=0)
    return build_graph(spec, TRAINING, 1).num_parameters


def of_torch(config: Config) -> int | None:
    """Returns the parameters of transformers' model, None where it cannot be made."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    others = ("model_type", "auto_map", "quantization_config")
    keys = {key: value for key, value in config.items() if key not in others}
    model_type = ALIASES.get(config["model_type"], config["model_type"])
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            made = AutoConfig.for_model(model_type, **keys)
            model = AutoModelForCausalLM.from_config(made)
        except (ArithmeticError, AssertionError, IndexError, RuntimeError, TypeError, ValueError):
            return None
    return int(model.num_parameters(only_trainable=True))


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, {"qwen3_next"}))
def test_a_changed_field_is_counted_as_in_torch_or_refused(family: str) -> None:
    checked = 0
    for config in changes(FAMILIES[family]):
        try:
            actual = counted(config)
        except ConfigError:
            continue
        expected = of_torch(config)
        if expected is None:
            continue
        checked += 1
        assert actual == expected, [key for key in config if config[key] != FAMILIES[family][key]]
    assert checked > 5


def test_an_absurd_number_of_blocks_is_refused_before_a_list_of_them_is_made() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000, it must be from 1 to"):
        entry_from_config(
            {**CONFIGS["llama4-scout"]["text_config"], "num_hidden_layers": 10**9}, ""
        )
