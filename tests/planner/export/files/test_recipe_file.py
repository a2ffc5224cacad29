"""Recipes in Python files are followed, not run."""

from __future__ import annotations

import pytest

from parplan.planner.export.files.recipe_file import recipe_names, recipe_settings
from parplan.profiles.errors import ConfigError

COMMON = """
def _base():
    cfg = ConfigContainer(train=Training(global_batch_size=32), mixed_precision="bf16_mixed")
    return cfg

def _quick(cfg, size):
    cfg.train.micro_batch_size = size
    if cfg.model.fused:
        cfg.model.sequence_parallel = True
"""
RECIPES = """
from common import _base, _quick as _settle
from sizes import LENGTH

NAME = "meta-llama/Llama-2-7b-hf"

def small_pretrain_8gpu_config():
    cfg = _base()
    cfg.model = Bridge.from_hf_pretrained(NAME).provider(load=False)
    cfg.model.recompute_modules = ["layernorm", "mlp"]
    cfg.dataset.seq_length = LENGTH
    cfg.model.seq_length = cfg.dataset.seq_length
    cfg.mixed_precision = precision("fp8_cs")
    _settle(cfg, 2)
    return cfg
"""


@pytest.fixture
def recipes(tmp_path):
    (tmp_path / "common.py").write_text(COMMON)
    (tmp_path / "sizes.py").write_text("LENGTH: int = 4096\n")
    path = tmp_path / "recipes.py"
    path.write_text(RECIPES)
    return path


def test_a_recipe_is_what_it_and_the_recipes_before_it_set(recipes):
    found = {each.name: each.words for each in recipe_settings(recipes, recipe_names(recipes)[0])}

    assert found["train.global_batch_size"] == ("32",)
    assert found["model"] == ("meta-llama/Llama-2-7b-hf",)
    assert found["model.recompute_modules"] == ("layernorm", "mlp")
    assert found["model.seq_length"] == found["dataset.seq_length"] == ("4096",)
    assert found["mixed_precision"] == ("fp8_cs",)
    assert found["train.micro_batch_size"] == ("2",)


def test_what_stands_under_a_condition_is_listed_and_not_taken(recipes):
    names = [each.name for each in recipe_settings(recipes, "small_pretrain_8gpu_config")]

    assert "if model.sequence_parallel" in names
    assert "model.sequence_parallel" not in names


def test_an_unknown_recipe_is_refused_with_those_that_are_there(recipes):
    with pytest.raises(ConfigError, match="no recipe 'large'") as caught:
        recipe_settings(recipes, "large")
    assert "small_pretrain_8gpu_config" in str(caught.value.hint)


def test_a_file_that_is_no_python_is_refused_with_its_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"broken.py:1: it is no Python"):
        recipe_names(path)
