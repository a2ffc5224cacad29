"""`plan --objective pareto`: its output, its file, its early end, and its errors."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from parplan.planner.master import Master
from parplan.planner.plan.plan_file import read_plan
from parplan.planner.search.pareto import ANY_SLOWDOWN, DEFAULT_POINTS, SLOWDOWNS
from tests.helpers.command_runs import run, succeed

FRONT = (
    "--model",
    "gpt-tiny",
    "--gpu",
    "cpu",
    "--gpus",
    "4",
    "--objective",
    "pareto",
    "--points",
    "3",
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


@pytest.mark.slow
def test_a_front_is_a_table_and_a_file_for_every_point_that_show_prints():
    result = succeed(*FRONT)

    files = written()
    plans = [read_plan(Path(name)) for name in files]
    assert result.stderr == ""
    assert files == [f"plan-{number:02}.yaml" for number in range(1, len(files) + 1)]
    assert len(files) > 1
    assert [plan.search.front.number for plan in plans] == list(range(1, len(files) + 1))
    times = [plan.predicted.step_time_s.value for plan in plans]
    assert times == sorted(times)
    for name in files:
        assert f"point {int(name[5:7])} of {len(files)}" in succeed("show", name).stdout


@pytest.mark.slow
def test_the_same_request_writes_the_same_bytes():
    succeed(*FRONT, "--output", "a.yaml")
    succeed(*FRONT, "--output", "b.yaml")

    for first in Path().glob("a-*.yaml"):
        assert first.read_bytes() == Path(first.name.replace("a-", "b-")).read_bytes()


@pytest.mark.slow
def test_a_file_of_an_earlier_longer_front_is_kept_and_pointed_out():
    count = len(json.loads(succeed(*FRONT, "--json").stdout)["points"])
    left = Path(f"plan-{count + 1:02}.yaml")
    left.write_text("older")

    assert (
        succeed(*FRONT).stderr == f"note: {left} and the files after it are of an earlier front\n"
    )
    assert left.read_text() == "older"


def test_json_is_one_document_and_the_files_are_written_all_the_same():
    result = succeed(*FRONT, "--json", "--plot", "front.svg")

    body = json.loads(result.stdout)
    assert result.stderr == "wrote front.svg\n"
    assert [point["plan_file"] for point in body["points"]] == [
        name for name in written() if name != "front.svg"
    ]
    for point in body["points"]:
        plan = read_plan(Path(point["plan_file"]))
        assert point["step_time_s"]["value"] == plan.predicted.step_time_s.value
        assert point["peak_memory_gib"] == max(stage.total for stage in plan.predicted.memory_gib)
        assert point["redundancy_gib"] == plan.predicted.redundancy_gib.total


@pytest.mark.slow
def test_plot_draws_the_front_and_files_are_named_after_output():
    result = succeed(*FRONT, "--plot", "front.png", "--output", "front.yml")

    assert result.stdout.endswith("wrote front.png\n")
    assert Path("front.png").read_bytes().startswith(b"\x89PNG")
    assert "front-01.yml" in written()


@pytest.mark.slow
def test_ctrl_c_writes_the_points_so_far_and_says_that_the_front_is_incomplete(monkeypatch):
    monkeypatch.setattr(Master, "leanest", lambda *_: signal.raise_signal(signal.SIGINT))

    result = run(*FRONT, "--gpu", "a100-80gb", "--gpus-per-node", "4")

    assert result.exit_code == 130
    assert "early (Ctrl-C): the front is incomplete" in result.stdout
    assert read_plan(Path("plan-01.yaml")).search.front.complete is False
    assert "the front is incomplete" in succeed("show", "plan-01.yaml").stdout


def test_ctrl_c_before_the_first_plan_writes_nothing(monkeypatch):
    monkeypatch.setattr(
        "parplan.planner.search.fastest_layouts.fastest_choice",
        lambda *_: signal.raise_signal(signal.SIGINT),
    )

    result = run(*FRONT)

    assert (result.exit_code, result.stdout, written()) == (130, "", [])
    assert result.stderr == "interrupted before a plan was found; nothing was written\n"


def test_a_late_ctrl_c_says_that_all_plans_are_written(monkeypatch):
    monkeypatch.setattr(
        "parplan.report.searches.front_table.print_front",
        lambda *_: signal.raise_signal(signal.SIGINT),
    )

    result = run(*FRONT)

    assert result.exit_code == 130
    assert result.stderr.startswith("interrupted after it wrote plan-01.yaml, plan-02.yaml")
    assert len(written()) > 1


def test_a_time_limit_writes_the_points_so_far():
    body = json.loads(succeed(*FRONT, "--time-limit", "0.000001", "--json").stdout)

    assert (body["complete"], body["stopped"]) == (False, "the time limit")
    assert len(body["points"]) == len(written()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            (*FRONT, "--output", "-"),
            r"--output - is one plan, a front is several\nhint: .*--json",
            id="stdout",
        ),
        pytest.param(
            (*FRONT, "--max-slowdown", "0.1"),
            r"--max-slowdown is for --objective memory",
            id="slowdown",
        ),
        pytest.param(
            (*FRONT, "--prefer", "leanest"),
            r"--prefer is for --objective throughput, the objective is pareto",
            id="preference",
        ),
        pytest.param(
            (*FRONT, "--points", "2"), r"--points is 2, it must be from 3 to 1,000", id="points"
        ),
        pytest.param(
            (*FRONT, "--plot", "front.jpg"),
            r"cannot draw front.jpg: .jpg is not .png, .svg, .pdf",
            id="format",
        ),
        pytest.param(
            (*FRONT, "--plot", "missing/front.png"),
            r"cannot write missing/front.png: missing: no such folder",
            id="plot-folder",
        ),
        pytest.param(
            (*FRONT, "--output", "missing/plan.yaml"),
            r"cannot write missing/plan.yaml: .*\nhint: .*--output",
            id="folder",
        ),
        pytest.param(
            (*FRONT[:6], "--plot", "front.png"),
            r"--plot is for --objective pareto, the objective is throughput",
            id="plot",
        ),
        pytest.param(
            (*FRONT[:6], "--points", "9", "--objective", "memory"),
            r"--points is for --objective pareto.*memory",
            id="memory",
        ),
    ],
)
def test_wrong_use_is_one_error_before_any_search(arguments, message, monkeypatch):
    monkeypatch.setattr("parplan.planner.search.find_plan.search", None)

    result = run(*arguments)

    assert result.exit_code == 2
    assert re.match(f"error: {message}", result.stderr)
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error", "hint"]
    assert (result.stdout, written()) == ("", [])


def test_plot_without_matplotlib_is_the_error_of_validate(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert run(*FRONT, "--plot", "front.png").stderr == (
        "error: --plot needs matplotlib, which is not installed\n"
        "hint: pip install 'parplan[plot]'\n"
    )


def test_the_help_says_the_default_number_of_points():
    assert f"[default: {DEFAULT_POINTS}]" in " ".join(succeed("--help").stdout.split())
    assert SLOWDOWNS[-1] == ANY_SLOWDOWN
