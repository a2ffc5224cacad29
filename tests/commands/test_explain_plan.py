"""`plan explain PLAN`: its sentences, and options that a plan file leaves no meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from parplan.cli import main
from parplan.planner.search.asked_plan import AskedPlan, Reply
from parplan.planner.search.what_if import PlanQuestion


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


@pytest.mark.slow
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
    usual, asked = AskedPlan.reply_to, []

    def first_alone(self: AskedPlan, question: PlanQuestion) -> Reply:
        asked.append(question)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return usual(self, question)

    monkeypatch.setattr(AskedPlan, "reply_to", first_alone)
    run = CliRunner().invoke(main, ["explain", plan_file])
    assert run.exit_code == 130
    assert "Each of 1 question was a search of its own" in " ".join(run.stdout.split())
    assert "Ctrl-C left no answer to" in " ".join(run.stdout.split())


def test_a_time_limit_ends_the_questions_and_names_what_is_left(plan_file: str) -> None:
    run = CliRunner().invoke(main, ["explain", plan_file, "--time-limit", "0.001"])
    assert run.exit_code == 0, run.output
    text = " ".join(run.stdout.split())
    assert "The time limit left no answer to" in text
    assert "--time-limit SECONDS gives them more time" in text
    assert "was a search of its own" not in text


def test_a_time_limit_without_a_plan_is_refused() -> None:
    run = CliRunner().invoke(main, ["explain", "--model", "gpt-1.5b", "--time-limit", "5"])
    assert run.exit_code == 2
    assert "--time-limit is for a plan file" in run.output


def test_a_plan_file_or_a_model_is_asked_for() -> None:
    run = CliRunner().invoke(main, ["explain"])
    assert run.exit_code == 2
    assert "a plan file is missing, or the --model of the operators to list" in run.output
