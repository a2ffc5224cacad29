"""One set of defaults: Python asks the question that the command asks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parplan.commands.options import TargetOptions
from parplan.commands.requests.machine import DEFAULT_STACK
from parplan.commands.requests.requests import request_of
from parplan.planner.plan.plan_file import read_plan
from parplan.profiles.models.spec import TrainingSpec
from tests.helpers.command_runs import succeed

ROOT = Path(__file__).parents[3]


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
    from_command = re.search(r"^  step +([\d.]+) s", (ROOT / "README.md").read_text(), re.MULTILINE)

    assert from_python
    assert from_command
    assert f"{float(from_python[1]):.1f}" == from_command[1]
