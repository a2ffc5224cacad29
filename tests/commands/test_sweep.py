"""`plan sweep`: a row for every combination, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from parplan.cli import main
from parplan.commands.style import has_several

ASKED = ["--model", "gpt-1.5b", "--gpus", "2,4", "--seq-length", "512,256", "--tp", "1"]


@pytest.mark.slow
def test_every_combination_has_a_row_a_file_and_a_point(tmp_path: Path) -> None:
    output, plot = tmp_path / "s.yaml", tmp_path / "s.svg"
    run = CliRunner().invoke(
        main, ["sweep", *ASKED, "--json", "-o", str(output), "--plot", str(plot)]
    )
    assert run.exit_code == 0, run.output
    rows = json.loads(run.stdout)["rows"]
    assert [(row["gpus"], row["seq_length"]) for row in rows] == [
        (2, 512),
        (2, 256),
        (4, 512),
        (4, 256),
    ]
    for row in rows:
        shown = CliRunner().invoke(main, ["show", row["plan_file"], "--json"])
        assert json.loads(shown.stdout)["predicted"]["step_time_s"] == row["step_time_s"]
    assert "perfect scaling" in plot.read_text()


def test_plans_have_lines_of_their_own_where_the_table_is_too_wide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = CliRunner().invoke(
        main, ["sweep", *ASKED[:2], "--gpus", "2,4", "--gpu", "a100", "--pp", "2", "--tp", "1"]
    )
    assert run.exit_code == 0, run.output
    assert "  #  plan\n  1  pp 2 x dp 1 x tp 1, " in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_plan_with_several_numbers_of_gpus_is_a_sweep_and_names_those_without_a_plan() -> None:
    run = CliRunner().invoke(main, ["--model", "gpt-1.5b", "--gpus", "2,12", "--pp", "2"])
    assert run.exit_code == 0, run.output
    assert "GPUs" in run.stdout
    assert "no plan   12: 12 GPUs do not fill whole nodes of 8" in run.stdout


def test_a_sweep_without_any_plan_is_an_error() -> None:
    run = CliRunner().invoke(main, ["sweep", "--model", "gpt-1.5b", "--gpus", "12,20"])
    assert run.exit_code == 2
    assert "20 GPUs do not fill whole nodes of 8" in run.output


@pytest.mark.parametrize(
    ("line", "several"),
    [
        ("--gpus 32,64 --model x", True),
        ("--model x --seq-length=1,2", True),
        ("--gpus 64 --tp 1,2", False),
        ("--gpus", False),
    ],
)
def test_several_values_are_seen(line: str, *, several: bool) -> None:
    assert has_several(line.split()) is several
