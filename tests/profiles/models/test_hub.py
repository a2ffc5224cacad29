"""Hugging Face's libraries: one class for their errors, and no network unless the user asks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parplan.executor.external.external_source import open_source
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.hub import hub_refusals, stay_offline
from parplan.profiles.models.huggingface import entry_from_config, is_described_family
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.tracing.record import record
from parplan.profiles.tracing.traced_source import open_workload
from tests.helpers.command_runs import fail
from tests.helpers.executor_plans import LLAMA, make_plan

ROOT = Path(__file__).resolve().parents[3]
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
}
REFUSED = [
    pytest.param({"model_type": ["bert"]}, "model_type is", id="model-type-list"),
    pytest.param({"model_type": {"bert": 1}}, "model_type is", id="model-type-dict"),
    pytest.param({"model_type": None}, "model_type is", id="no-model-type"),
    pytest.param({"architectures": {"a": 1}}, "architectures is", id="architectures-dict"),
    pytest.param({"architectures": "BertForMaskedLM"}, "architectures is", id="architectures-text"),
    pytest.param(
        {"architectures": [["BertForMaskedLM"]]}, "architectures is", id="architectures-of-lists"
    ),
    pytest.param({"architectures": ["AutoConfig"]}, "no model AutoConfig", id="no-model-class"),
    pytest.param(
        {"architectures": ["GPT2LMHeadModel"]}, "cannot make the model", id="class-of-another-model"
    ),
    pytest.param({"hidden_size": "x"}, "'hidden_size' expected int", id="own-validation"),
    pytest.param({"num_hidden_layers": [1]}, "expected int, got list", id="list-for-a-number"),
    pytest.param({"hidden_size": -1}, "negative dimension", id="negative"),
    pytest.param({"num_attention_heads": 0}, "cannot make the model", id="division-by-zero"),
    pytest.param(
        {"hidden_act": "nonsense"}, "raises KeyError at .*: 'nonsense'", id="unknown-activation"
    ),
    pytest.param({"hidden_size": 10**18}, "cannot make the model", id="overflow"),
    pytest.param({"id2label": 5}, "cannot make the model", id="number-for-a-mapping"),
]


@pytest.fixture
def no_network(monkeypatch):
    """Fails the test at the first look-up or connection."""
    attempts: list[object] = []

    def refuse(*arguments: object, **options: object) -> None:
        attempts.append(arguments)
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    yield
    assert attempts == []


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_config_that_transformers_refuses_is_one_error_where_it_is_traced(
    values, message, no_network
):
    pytest.importorskip("transformers")

    with pytest.raises(ConfigError, match=message) as caught:
        open_workload(ModuleSource(huggingface=BERT | values), seq_length=16)

    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"model_type": ["llama"]}, "model_type is", id="model-type-list"),
        pytest.param(
            {"model_type": "llama", "hidden_size": "x"},
            "'hidden_size' expected int",
            id="own-validation",
        ),
        pytest.param(
            {"model_type": "llama", "hidden_size": 64, "hidden_act": "nonsense"},
            "cannot make the model",
            id="unknown-activation",
        ),
    ],
)
def test_a_config_that_transformers_refuses_is_one_error_where_it_is_run(
    values, message, no_network
):
    pytest.importorskip("transformers")

    with pytest.raises(ConfigError, match=message):
        open_source(replace(make_plan(LLAMA), module=ModuleSource(huggingface=values)), seed=0)


def test_sizes_that_torch_refuses_in_a_batch_are_one_error(no_network):
    pytest.importorskip("transformers")
    values = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 3,
        "intermediate_size": 32,
        "vocab_size": 50,
    }

    with pytest.raises(
        ConfigError,
        match=r"^module: a forward pass of qwen2 raises RuntimeError at .*must match the size",
    ):
        record(open_workload(ModuleSource(huggingface=values), seq_length=16), 2)


@pytest.mark.parametrize("kind", [["llama"], {"llama": 1}, 5, [], True])
def test_a_model_type_that_is_no_name_is_one_error(kind, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind}))

    assert is_described_family({"model_type": kind})
    with pytest.raises(ConfigError, match=r"model_type is .*, it must be a name"):
        entry_from_config({"model_type": kind}, "config.json")
    assert "it must be a name" in fail(2, "--model", str(path), "--gpus", "1")


def test_a_module_that_would_fetch_its_backbone_fails_without_the_network(no_network, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # as `stay_offline` has it where nothing is imported yet
    backbone = {
        "use_timm_backbone": False,
        "backbone": "microsoft/resnet-50",
        "use_pretrained_backbone": True,
        "backbone_config": None,
    }

    with pytest.raises(ConfigError, match="cannot make the model"):
        open_workload(
            ModuleSource(
                huggingface={"model_type": "detr", "architectures": ["DetrModel"], **backbone}
            ),
            seq_length=16,
        )


def test_the_libraries_are_told_to_stay_offline_before_they_are_imported():
    code = (
        "from parplan.commands import style; style.run_command(lambda *a, **o: 0, [], "
        "prog_name='plan')\n"
        "from huggingface_hub import constants; raise SystemExit(0 if "
        "constants.HF_HUB_OFFLINE else 1)"
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"
    } | {"PYTHONPATH": str(ROOT)}

    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=environment, check=False, timeout=60
        ).returncode
        == 0
    )


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    stay_offline()

    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_an_error_of_another_library_is_one_line_and_ours_stay():
    with (
        pytest.raises(ConfigError, match=r"^module: KeyError 'x'$"),
        hub_refusals("module", "hint"),
    ):
        raise KeyError("x")
    with pytest.raises(ConfigError, match=r"^module: two lines$"), hub_refusals("module", "hint"):
        raise Exception("two\nlines")
    with pytest.raises(ConfigError, match=r"^ours$"), hub_refusals("module", "hint"):
        raise ConfigError("ours")
