"""`plan diff`: two plans, and a plan beside the best of another machine or batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from parplan.cli import main


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("diff") / "plan.yaml"
    made = CliRunner().invoke(main, ["--model", "gpt-1.5b", "--gpus", "2", "-o", str(path)])
    assert made.exit_code == 0, made.output
    return str(path)


@pytest.mark.slow
def test_a_plan_is_set_beside_the_best_of_another_machine(plan_file: str, tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["diff", plan_file, "--gpu", "h100-80gb", "--json"])
    assert run.exit_code == 0, run.output
    other = tmp_path / "other.yaml"
    CliRunner().invoke(
        main, ["--model", "gpt-1.5b", "--gpus", "2", "--gpu", "h100-80gb", "-o", str(other)]
    )
    both = CliRunner().invoke(main, ["diff", plan_file, str(other), "--json"])
    assert both.exit_code == 0, both.output
    found, stated = json.loads(run.stdout), json.loads(both.stdout)
    assert found["baselines"][0]["step_time_s"] == stated["baselines"][0]["step_time_s"]
    text = CliRunner().invoke(main, ["diff", plan_file, "--global-batch-size", "256"])
    assert "2 x a100-80gb" in text.stdout
    assert "  step times are predicted (interpolated), not measured; memory is" in text.stdout


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ((), "name a second plan, or another machine"),
        (("--gpu", "h1000"), "unknown GPU"),
        (("--gpu", "v100-32gb"), "has no bf16 arithmetic"),
    ],
)
def test_what_cannot_be_set_beside_it_is_named(
    plan_file: str, more: tuple[str, ...], text: str
) -> None:
    run = CliRunner().invoke(main, ["diff", plan_file, *more])
    assert run.exit_code == 2
    assert text in run.output
