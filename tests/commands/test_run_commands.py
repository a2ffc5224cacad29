"""The commands after a run: from its file to a profile, and from that to a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from parplan import cli
from parplan.planner.plan.plan_file import write_plan
from parplan.planner.runs.run_file import write_run as write_run
from tests.helpers.kineto_traces import one_step, write_kineto
from tests.helpers.synthetic_runs import estimated, factors, run_of

ESTIMATE = (
    "estimate",
    "--model",
    "gpt-2.5b",
    "--gpu",
    "a100-80gb",
    "--gpus",
    "1",
    "--stack",
    "torchtitan",
    "--global-batch-size",
    "8",
    "--seq-length",
    "1024",
    "--micro-batch-size",
    "2",
    "--json",
)


@pytest.fixture(autouse=True)
def _a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = estimated()
    write_run(
        run_of(plan, factors(plan, forward=1.5, backward=1.25, optimizer=2.0)),
        tmp_path / "run.json",
    )


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def succeed(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def error(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error", "hint"]
    return result.stderr


def test_a_run_becomes_a_profile_that_meets_its_step():
    out = succeed("calibrate", "run.json", "-o", "mine.yaml")

    assert re.search(r"forward passes +1\.5  run [0-9a-f]{16} of 2026-11-01\n", out)
    assert re.search(r"transfers between stages +-  no run exercised it\n", out)
    assert (
        out.splitlines()[-1]
        == "wrote mine.yaml; plan with it: --gpu a100-80gb --stack torchtitan --profile mine.yaml"
    )
    measured_s = yaml.safe_load(Path("mine.yaml").read_text())["runs"][0]["measured_s"]
    before = json.loads(succeed(*ESTIMATE))["predicted"]["step_time_s"]
    after = json.loads(succeed(*ESTIMATE, "--profile", "mine.yaml"))["predicted"]["step_time_s"]
    assert before["value"] < 0.8 * measured_s
    assert after == {"value": pytest.approx(measured_s, rel=1e-4), "kind": "interpolated"}


def test_a_trace_of_any_framework_becomes_a_profile_beside_its_plan():
    write_kineto(Path("rank0.json"), one_step())
    write_plan(estimated(tp=2, dp=2), Path("there.yaml"))

    out = succeed("calibrate", "rank0.json", "--plan", "there.yaml", "-o", "mine.yaml")

    assert "1 traced step of 1 rank: 1.00 ms a step" in out
    assert re.search(r"products +450 us +45\.0 % +\d+ ms", out)
    # the trace is of a toy, the plan of 2.5 B parameters
    assert "check that it is the plan of this run" in " ".join(out.split())
    assert re.search(r"exposed tensor-parallel communication +50\.0 us +5\.0 %", out)
    assert re.search(r"all_reduce +tensor +2 +1 +0\.001953 +60\.0 us +50\.0 us", out)
    assert re.search(r"forward passes +\S+  kineto trace [0-9a-f]{16} of 2023-11-14\n", out)
    made = yaml.safe_load(Path("mine.yaml").read_text())
    assert made["calibration"]["tensor"]["measured"] is True
    by_options = ("calibrate", "rank0.json", *ESTIMATE[1:-1], "--gpus", "4", "--tp", "2")
    again = succeed(*by_options, "--global-batch-size", "16", "-o", "same.yaml")
    assert again.splitlines()[:-1] == out.splitlines()[:-1]
    assert Path("same.yaml").read_text() == Path("mine.yaml").read_text()
    assert "give --plan FILE, or the options" in error("calibrate", "rank0.json")
    assert "leave --model out" in error(*by_options, "--plan", "there.yaml")
    assert "a run.json holds its plan" in error("calibrate", "run.json", "--plan", "there.yaml")


def test_files_of_other_planners_become_a_profile():
    Path("sp_time_1nodes_8gpus_per_node.json").write_text('{"allreduce_size_4_64MB_time": 1.2}')
    Path("DeviceType.A100_tp1_bs1.json").write_text('{"execution_time": {}}')
    of_galvatron = ("profile", "--import", "sp_time_1nodes_8gpus_per_node.json", "-o", "mine.yaml")

    out = succeed(*of_galvatron, "--gpu", "a100-80gb")

    assert re.search(r"measured +files of Galvatron, \S+ on 8 x NVIDIA A100-SXM4-80GB", out)
    assert re.search(r"all_reduce +4 ranks, 2 groups +1 +64\.0 MiB +1\.20 ms", out)
    before = json.loads(succeed(*ESTIMATE, "--gpus", "4", "--tp", "4"))
    after = json.loads(succeed(*ESTIMATE, "--gpus", "4", "--tp", "4", "--profile", "mine.yaml"))
    tensor_s = [plan["predicted"]["breakdown"]["tp_comm_s"]["value"] for plan in (before, after)]
    assert tensor_s[1] > 1.1 * tensor_s[0]
    assert "plan calibrate DeviceType.A100_tp1_bs1.json --plan PLAN" in error(
        "profile", "--import", "DeviceType.A100_tp1_bs1.json"
    )
    assert "layer_compute_total_ms is missing" in error(
        "calibrate", "DeviceType.A100_tp1_bs1.json", "--plan", _plan_file()
    )


def _plan_file() -> str:
    write_plan(estimated(), Path("there.yaml"))
    return "there.yaml"


def test_json_is_the_profile_and_a_dash_is_stdout():
    body = json.loads(succeed("calibrate", "run.json", "--json"))

    assert body == yaml.safe_load(Path("profile.yaml").read_text())
    assert yaml.safe_load(succeed("calibrate", "run.json", "-o", "-")) == body


@pytest.mark.slow
def test_a_search_takes_a_profile_too():
    succeed("calibrate", "run.json", "-o", "mine.yaml")

    plan = json.loads(
        succeed(
            "--model",
            "gpt-2.5b",
            "--gpus",
            "2",
            "--stack",
            "torchtitan",
            "--profile",
            "mine.yaml",
            "--json",
            "--tp",
            "1",
            "--zero",
            "1",
        )
    )

    assert plan["cluster"]["calibration"]["forward"]["value"] == pytest.approx(1.5)


def test_another_device_is_refused_unless_forced():
    succeed("calibrate", "run.json", "-o", "mine.yaml")
    arguments = [argument.replace("a100", "h100") for argument in ESTIMATE]

    assert "the profile is of device a100-80gb, asked is h100-80gb" in error(
        *arguments, "--profile", "mine.yaml"
    )
    assert json.loads(succeed(*arguments, "--profile", "mine.yaml", "--force-profile"))["cluster"][
        "calibration"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("steps: 1", "run.json:1: not JSON", id="not-json"),
        pytest.param('{"run_version": 9}', "run_version is 9", id="version"),
    ],
)
def test_what_is_no_run_is_one_line_and_a_hint(text, message, tmp_path):
    (tmp_path / "run.json").write_text(text)

    assert message in error("calibrate", "run.json")
    assert not (tmp_path / "profile.yaml").exists()


def test_a_missing_run_and_a_folder_that_is_not_there():
    assert "cannot read none.json" in error("calibrate", "none.json")
    assert "no such folder" in error("calibrate", "run.json", "-o", "none/mine.yaml")


def test_the_trace_of_a_plan_alone(tmp_path):
    write_plan(estimated(), tmp_path / "plan.yaml")

    assert (
        succeed("trace", "plan.yaml", "-o", "t.json")
        == "wrote t.json; open it in https://ui.perfetto.dev\n"
    )
    assert json.loads(succeed("trace", "plan.yaml", "-o", "-")) == json.loads(
        (tmp_path / "t.json").read_text()
    )
