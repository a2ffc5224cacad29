"""`plan explain PLAN`: its sentences, and options that a plan file leaves no meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from parplan.cli import main


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explained") / "plan.yaml"
    made = CliRunner().invoke(main, ["--model", "gpt-1.5b", "--gpus", "2", "-o", str(path)])
    assert made.exit_code == 0, made.output
    return str(path)


@pytest.mark.slow
def test_a_plan_is_explained_in_sentences(plan_file: str) -> None:
    run = CliRunner().invoke(main, ["explain", plan_file])
    assert run.exit_code == 0, run.output
    for title in ("Why this plan", "What holds it back", "What more would buy"):
        assert title in run.stdout
    assert "Twice the GPUs buys" in run.stdout


def test_options_of_operators_are_refused_beside_a_plan(plan_file: str) -> None:
    run = CliRunner().invoke(main, ["explain", plan_file, "--operator", "fc1"])
    assert run.exit_code == 2
    assert "--operator is for the strategies of operators" in run.output


def test_a_missing_plan_is_an_error(tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["explain", str(tmp_path / "none.yaml")])
    assert run.exit_code == 2
    assert "none.yaml" in run.output


def test_an_explanation_says_that_ctrl_c_left_questions_out(
    plan_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_alone(work, items, what):
        return [(items[0], work(items[0]))], True

    monkeypatch.setattr("parplan.commands.explain.in_processes", first_alone)
    run = CliRunner().invoke(main, ["explain", plan_file])
    assert run.exit_code == 130
    assert "stopped early (Ctrl-C): the questions without an answer are left out" in run.stdout


def test_a_plan_file_or_a_model_is_asked_for() -> None:
    run = CliRunner().invoke(main, ["explain"])
    assert run.exit_code == 2
    assert "a plan file is missing, or the --model of the operators to list" in run.output
