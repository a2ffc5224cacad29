"""Towers from configurations: what is read, what the file leaves out, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.hf.config_families import WRAPPERS
from parplan.profiles.models.hf.tower_families import TOWERS
from parplan.profiles.models.huggingface import entry_from_config
from parplan.profiles.models.spec import text_alone
from parplan.profiles.models.towers import Projection
from tests.helpers.published_configs import CONFIGS

SEEING = tuple(name for name, config in CONFIGS.items() if "vision_config" in config)


def spec_of(config):
    return entry_from_config(config, "m/config.json").spec


def with_vision(name, **keys):
    config = CONFIGS[name]
    return {**config, "vision_config": {**config["vision_config"], **keys}}


def test_every_wrapper_has_its_tower():
    assert {*WRAPPERS, "whisper"} == set(TOWERS)
    assert {CONFIGS[name]["model_type"] for name in SEEING} == set(WRAPPERS)


def test_an_image_size_of_the_file_decides_the_patches():
    tower = spec_of(with_vision("mistral-small-3.1-24b", image_size=1024, patch_size=16)).tower

    assert (tower.patches, tower.image_tokens) == (64 * 64, 32 * 32)
    assert tower.patch_features == 3 * 16 * 16


def test_keys_that_the_file_leaves_out_are_those_of_transformers():
    published = CONFIGS["qwen2-vl-7b"]
    without = {key: value for key, value in published.items() if key != "vision_config"}

    assert spec_of({**without, "vision_config": {}}).tower == spec_of(published).tower
    assert spec_of(without).tower == spec_of(published).tower


def test_a_distilled_whisper_has_fewer_blocks_than_its_encoder():
    turbo = spec_of({**CONFIGS["whisper-large-v3"], "decoder_layers": 4})

    assert (turbo.num_layers, turbo.tower.num_layers) == (4, 32)
    assert turbo.max_seq_length == 448
    assert not turbo.key_bias


def test_the_projector_of_mistral_joins_patches_before_its_two_products():
    tower = spec_of(CONFIGS["mistral-small-3.1-24b"]).tower

    assert tower.projector == (
        Projection(width=1024),
        Projection(width=5120, activated=True),
        Projection(width=5120),
    )
    assert tower.divided_widths == (0, 5120, 0)


@pytest.mark.parametrize("name", SEEING)
def test_an_unknown_key_of_the_tower_is_refused_by_name(name):
    with pytest.raises(ConfigError, match="vision_config: rotate_patches is not understood"):
        spec_of(with_vision(name, rotate_patches=2))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gemma-3-4b", {"vision_use_head": True}, "vision_use_head is True"),
        ("gemma-3-4b", {"model_type": "clip_vision_model"}, "model_type is 'clip_vision_model'"),
        ("gemma-3-4b", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("gemma-3-4b", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("gemma-3-4b", {"image_size": 910}, "mm_tokens_per_image is 256"),
        ("llama4-scout", {"intermediate_size": 4096}, "intermediate_size is 4096"),
        ("llama4-scout", {"vision_output_dim": 7680}, "vision_output_dim is 7680"),
        ("qwen2-vl-7b", {"hidden_size": 1536}, "hidden_size is 1536"),
        ("qwen2.5-vl-7b", {"out_hidden_size": 2048}, "out_hidden_size is 2048"),
        ("mistral-small-3.1-24b", {"head_dim": 32}, "head_dim is 32"),
    ],
)
def test_other_architectures_are_refused(name, keys, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(with_vision(name, **keys))


def test_a_projector_that_reads_another_layer_is_refused():
    with pytest.raises(ConfigError, match="vision_feature_layer is -2"):
        spec_of({**CONFIGS["mistral-small-3.1-24b"], "vision_feature_layer": -2})


def test_layers_that_a_whisper_drops_are_refused():
    with pytest.raises(ConfigError, match=r"encoder_layerdrop is 0\.1"):
        spec_of({**CONFIGS["whisper-large-v3"], "encoder_layerdrop": 0.1})


@pytest.mark.parametrize("name", SEEING)
def test_the_text_beside_a_tower_is_that_of_its_family(name):
    seen = spec_of(CONFIGS[name])

    assert seen.left_out == ()
    assert replace(text_alone(seen), left_out=()) == replace(seen, tower=None)


@pytest.mark.slow
def test_a_plan_of_a_configuration_with_a_tower_needs_little_memory(tmp_path):
    """The GiB holds Python, its packages and the solver as well."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama4-scout"]))
    pins = "--gpu", "h100-80gb", "--pp", "4", "--tp", "4", "--ep", "4", "--dp", "4"
    command = "--model", "config.json", "--gpus", "64", *pins, "--micro-batch-size", "1"
    # ru_maxrss would have the size of the process that starts this one
    code = (
        "import re, sys; from pathlib import Path; from parplan.cli import main\n"
        "try: main()\n"
        "finally: print(re.search(r'VmHWM:\\s+(\\d+)', "
        "Path('/proc/self/status').read_text())[1], file=sys.stderr)"
    )

    run = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert run.returncode == 0, run.stderr
    assert "vision tower of 34" in run.stdout
    assert int(run.stderr.split()[-1]) < 2**20  # KiB
