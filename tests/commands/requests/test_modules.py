"""A plan for a Hugging Face or a user's module names it, and fits what the executor can run."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from parplan import cli
from parplan.commands.requests.external import load_module, narrowed
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.plan.plan_file import read_plan
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.operator_graph import LayerKind

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_scaling": None,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
}
WHERE = ("--gpu", "cpu", "--gpus", "4", "--gpus-per-node", "4", "--global-batch-size", "16")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(values: dict[str, object]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return "config.json"

    return write


def run(*arguments: str):
    return CliRunner().invoke(cli.main, list(arguments))


def test_a_plan_holds_the_whole_configuration_and_does_not_pad_its_vocabulary(config, tmp_path):
    done = run("--model", config(LLAMA), "--module", "huggingface", *WHERE)

    assert done.exit_code == 0, done.output
    plan = read_plan(tmp_path / "plan.yaml")
    assert plan.module == ModuleSource(huggingface=LLAMA)
    assert plan.model.padded_vocab_size == 300
    assert "module    Hugging Face llama" in done.stdout


@pytest.mark.slow
def test_the_search_for_a_module_names_no_operators(config, tmp_path):
    """The memory is so little that most blocks must recompute."""
    path = config({**LLAMA, "num_hidden_layers": 8, "max_position_embeddings": 1024})
    arguments = (
        "--model",
        path,
        *WHERE,
        "--pp",
        "1",
        "--dp",
        "4",
        "--micro-batch-size",
        "4",
        "--memory-limit",
        "810MiB",
    )
    free, kept = (
        run(*arguments, "-o", "free.yaml"),
        run(*arguments, "--module", "huggingface", "-o", "kept.yaml"),
    )

    assert free.exit_code == kept.exit_code == 0, free.output + kept.output
    lengths = {
        name: {
            len(plan.recompute)
            for plan in read_plan(tmp_path / name).layer_plans.values()
            if plan.layer is LayerKind.BLOCK
        }
        for name in ("free.yaml", "kept.yaml")
    }
    assert lengths["kept.yaml"] == {0, 11}
    assert lengths["free.yaml"] - {0, 11}  # without the module the search does choose operators


def test_a_family_without_a_tensor_parallel_plan_is_searched_without(config):
    path = config(GPT2)

    assert narrowed(Constraints(), load_module("huggingface", path)).tp == (1,)
    with pytest.raises(ConfigError, match="--tp 4: no tensor-parallel plan is known for gpt2"):
        narrowed(Constraints(tp=(1, 4)), load_module("huggingface", path))


def test_pins_stay_and_what_is_open_is_what_the_executor_runs():
    pins = narrowed(
        Constraints(recompute=(Recompute.FULL,), pp=(2,)), ModuleSource(factory="a.b:c")
    )

    assert (pins.recompute, pins.pp, pins.tp, pins.megatron_sharding) == (
        (Recompute.FULL,),
        (2,),
        (1,),
        True,
    )
    assert narrowed(Constraints(), None) == Constraints()


def test_selective_recompute_is_refused_for_a_module():
    with pytest.raises(ConfigError, match="--recompute selective"):
        narrowed(Constraints(recompute=(Recompute.SELECTIVE,)), ModuleSource(factory="a.b:c"))


def test_a_plan_for_a_function_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    done = run("--model", "gpt-tiny", "--module", "broken_module:build", *WHERE)

    assert done.exit_code == 0, done.output
    assert read_plan(tmp_path / "plan.yaml").module == ModuleSource(factory="broken_module:build")
    assert "broken_module" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "gpt-tiny", "--module", "huggingface"),
            "--module huggingface needs a Hugging Face config.json, --model is gpt-tiny",
        ),
        (
            ("--model", "gpt-tiny", "--module", "my_model"),
            "module is 'my_model', it must be huggingface or package.module:function",
        ),
        (
            ("estimate", "--model", "gpt-tiny", "--module", "a:b", "--tp", "2"),
            "tp is 2, and nothing says how",
        ),
        (
            ("estimate", "--model", "gpt-tiny", "--module", "a:b", "--recompute", "selective"),
            "or none",
        ),
    ],
)
def test_a_module_that_cannot_be_run_is_an_error(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    done = run(*arguments, *WHERE)

    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("given", [{}, {"huggingface": {}, "factory": "a:b"}])
def test_a_source_is_one_of_the_two(given):
    with pytest.raises(ConfigError, match="either huggingface or factory"):
        ModuleSource(**given)


def test_a_traced_module_has_no_preference(config):
    done = run("--model", config(LLAMA), "--trace", *WHERE, "--prefer", "leanest")

    assert done.exit_code == 2
    assert "--prefer: the error band of a traced module is unknown" in done.output


def test_a_module_without_a_position_is_refused(config):
    done = run("--model", config({**LLAMA, "max_position_embeddings": 0}), *WHERE, "--trace")

    assert done.exit_code == 2
    assert "max_position_embeddings is 0" in done.output
