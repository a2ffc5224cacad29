"""One set of defaults: Python asks the question that the command asks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.machine import DEFAULT_STACK, TrainingDefaults
from parplan.commands.requests.requests import request_about, request_of
from parplan.planner.plan.plan_file import read_plan
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from tests.helpers.command_runs import succeed

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_python_gets_the_training_and_the_machine_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    succeed("--model", "gpt-tiny", "--gpus", "2", "--gpu", "a100-80gb")

    plan, request = (
        read_plan(Path("plan.yaml")),
        request_of(TargetOptions(model="gpt-tiny", gpus=2)),
    )
    assert (plan.model, plan.cluster, plan.training) == (
        request.model,
        request.cluster,
        request.training,
    )
    assert request.training.stack.name == DEFAULT_STACK


def test_a_training_has_no_stack_by_default():
    with pytest.raises(TypeError, match="stack"):
        TrainingSpec(global_batch_size=8, seq_length=64)


def test_the_python_page_says_the_step_of_the_readme_s_command():
    page = (ROOT / "docs/reference/python.md").read_text()
    from_python = re.search(r"step_time_s\.value.*# pp \d+ x dp \d+ x tp \d+ ([\d.]+)", page)
    from_command = re.search(
        r"^\* fsdp2 +([\d.]+) s", (ROOT / "README.md").read_text(), re.MULTILINE
    )

    assert from_python
    assert from_command
    assert f"{float(from_python[1]):.1f}" == from_command[1]


@pytest.mark.parametrize(
    ("seq_length", "expected", "whose"),
    [
        pytest.param(4096, 2048, "the model's", id="shorter"),
        pytest.param(8192, 2048, "the model's", id="its own"),
        pytest.param(131072, 128, "the model's 2048 x 8192 tokens", id="longer"),
        pytest.param(20000, 1024, "the model's 2048 x 8192 tokens", id="the nearest divisor"),
        pytest.param(2**40, 1, "the model's 2048 x 8192 tokens", id="at least one"),
    ],
)
def test_longer_sequences_keep_the_tokens_of_the_default_step(seq_length, expected, whose):
    defaults = TrainingDefaults(global_batch_size=2048, seq_length=8192)

    assert defaults.batch_of(seq_length) == (expected, whose)


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        pytest.param(16384, 2048, id="a-power-of-two"),
        pytest.param(96, 2048, id="stages-take-the-3"),
        pytest.param(100_000, 3125, id="5-to-the-fifth"),
        pytest.param(8 * 1249, 2498, id="a-prime"),
    ],
)
def test_the_default_batch_grows_to_what_an_awkward_number_of_gpus_divides(num_gpus, expected):
    defaults = TrainingDefaults(global_batch_size=2048, seq_length=8192, most_stages=126)
    whose = "the model's" if expected == 2048 else f"the model's 2048, more for {num_gpus} GPUs"

    assert defaults.batch_for(8192, num_gpus) == (expected, whose)


def test_the_assumed_batch_of_a_longer_sequence_says_which_tokens_it_keeps():
    entry = load_model("llama3-8b")
    longer = request_about(entry, TargetOptions(gpus=8, seq_length=32768))
    given = request_about(entry, TargetOptions(gpus=8, seq_length=32768, global_batch_size=1024))

    assert longer.training.global_batch_size == 128
    assert "--global-batch-size 128 (the model's 512 x 8192 tokens)" in longer.assumed
    assert given.training.global_batch_size == 1024
