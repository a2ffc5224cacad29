"""Every command prints lines that fit terminals of 60 and 80 columns."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from parplan import cli
from parplan.planner.plan.plan_file import write_plan
from parplan.planner.runs.run_file import write_run
from parplan.report.machines.catalogue_tables import model_rows
from tests.helpers.cases import mostly_slow
from tests.helpers.command_runs import succeed
from tests.helpers.documented import ROOT
from tests.helpers.synthetic_runs import estimated, run_of

COMMANDS = (
    "models",
    "clusters",
    "stacks",
    "schemes --model gpt-tiny --gpus 2 --gpu cpu",
    "schemes --model gpt-tiny --gpus 2 --formulas",
    "--model gpt-tiny --gpus 2 --gpu cpu",
    pytest.param("--model gpt-tiny --gpus 2 --gpu cpu --verbose --explain", marks=pytest.mark.slow),
    "--model gpt-tiny --gpus 2 --gpu cpu --objective memory",
    "estimate --model mixtral-8x7b --gpus 64 --gpu h100-80gb --pp 4 --ep 8",
    "estimate --model gpt-18b --gpus 8 --gpu v100-32gb --offload optimizer,parameters "
    "--host-blocks 45",
    "estimate --model qwen2.5-vl-7b --gpus 8 --zero 3 --verbose",
    "show plan.yaml",
    "show plan.yaml --instructions",
    "show run.json",
    pytest.param("check tiny.yaml", marks=pytest.mark.slow),
    "compare plan.yaml issue-1031.sh --gpu h100-80gb",
    "diff plan.yaml --gpu h100-80gb",
    "explain --model gpt-20b --gpus 64 --tp 8 --operator fc1",
    "export plan.yaml --to megatron -o exported",
    "read issue-1031.sh --gpu h100-80gb",
    "sweep --model gpt-tiny --gpus 1,2 --gpu cpu",
    pytest.param(
        "size --model gpt-tiny --tokens 1M --days 7 --gpu a100-80gb", marks=pytest.mark.slow
    ),
)
ERRORS = {  # with their exit codes
    "--model gpt-tiny --gpus 2 --gpu cpu --tp 3": 2,
    "--model gpt-20b --gpus 2 --gpu v100-32gb --offload none --time-limit 1": 3,
    "--model gpt-20b --gpu 64 --gpuz 8": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands read."""
    folder = tmp_path_factory.mktemp("narrow")
    write_plan(estimated(pp=4, dp=2, tp=2), folder / "plan.yaml")
    write_run(run_of(estimated(pp=2)), folder / "run.json")
    tiny = "estimate --model gpt-tiny --gpus 2 --gpu cpu --tp 2 -o"
    succeed(*tiny.split(), str(folder / "tiny.yaml"))
    shutil.copy(ROOT / "examples/issue-1031.sh", folder)
    return folder


@pytest.mark.parametrize("width", [60, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", [*COMMANDS, *ERRORS])
def test_the_lines_of_a_command_fit(command, width, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(width))

    result = CliRunner().invoke(cli.main, shlex.split(command))

    assert result.exit_code == ERRORS.get(command, 0), result.output
    assert [line for line in result.output.splitlines() if len(line) > width] == []


@pytest.mark.slow
@pytest.mark.parametrize("width", mostly_slow([60, 72, 80], {60}))
def test_the_models_are_one_table(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))

    lines = succeed("models").stdout.splitlines()

    assert len(lines) == len(model_rows()) + 1
    assert max(map(len, lines)) <= width
