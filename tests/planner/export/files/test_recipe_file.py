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


BRANCHING = "".join(
    f"def r{n}():\n" + f"    r{n + 1}()\n" * 9 + "    return ConfigContainer()\n" for n in range(14)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(BRANCHING, "call one another more than 2,000 times", id="branching"),
        pytest.param(
            "def r0():\n    x = " + "-" * 3000 + "1\n", "no Python of a|nested", id="deep"
        ),
        pytest.param("def r0():\n    x = " + "[" * 150 + "]" * 150, "nested more", id="brackets"),
        pytest.param(f"X = 0x{'f' * 9000}\ndef r0():\n    pass\n", "18 digits", id="endless"),
        pytest.param(f"X = {'9' * 9000}\ndef r0():\n    pass\n", "no Python", id="9000-digits"),
        pytest.param("def r0():\n" + "    x = 1\n" * 120_000, "more than 1,000,000", id="long"),
        pytest.param(
            "def r0():\n    c = ConfigContainer()\n"
            + "".join(f"    c.a.x{n} = 1\n" for n in range(2001))
            + "    return c\n",
            "more than 2,000 settings",
            id="settings",
        ),
        pytest.param("def r0():\n    x = 1\0\n", "a NUL byte", id="nul"),
    ],
)
def test_a_recipe_without_end_is_an_error(tmp_path, text, message):
    (tmp_path / "r.py").write_text(text)

    with pytest.raises(ConfigError, match=message):
        recipe_settings(tmp_path / "r.py", "r0")


@pytest.mark.parametrize(
    "line",
    [
        "if a is None is None:\n        c.b.x = 2",
        "from .......... import y\n    c.b.y = y",
        "def f(a=1, /, b=2):\n        return c\n    f()",
        "x = []\n    c.b.x = of(x)",
        "c.b.x = LOOP",
        "x, *y = 1, 2",
        "c.b.x = -(-1)",
    ],
)
def test_a_line_that_no_recipe_has_is_passed_over(tmp_path, line):
    head = "from other import LOOP\ndef g(a=1, /, b=2):\n    return ConfigContainer()\n"
    (tmp_path / "other.py").write_text("from r import LOOP\n")
    (tmp_path / "r.py").write_text(
        f"{head}def r0():\n    c = g(3)\n    c.a.n = 4\n    {line}\n    return c\n"
    )

    found = {each.name: each.words for each in recipe_settings(tmp_path / "r.py", "r0")}
    assert found["a.n"] == ("4",)
