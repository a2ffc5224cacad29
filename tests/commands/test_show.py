"""plan show --instructions prints the lists that the executor runs, for plans of either kind."""

from __future__ import annotations

import json

import pytest

from parplan.executor.placed_layers import action_rows
from parplan.planner.plan.plan_file import read_any_plan
from parplan.planner.runs.run_file import write_run
from tests.helpers.command_runs import fail, succeed
from tests.helpers.documented import ROOT
from tests.helpers.synthetic_runs import estimated, run_of

PLANS = [ROOT / "tests/golden" / f"plan-1-{kind}.yaml" for kind in ("described", "traced")]


@pytest.mark.parametrize("path", PLANS, ids=["described", "traced"])
def test_it_prints_every_rank_of_described_and_traced_plans(path):
    plan = read_any_plan(path)
    text = succeed("show", str(path), "--instructions").stdout
    body = json.loads(succeed("show", str(path), "--instructions", "--json").stdout)["ranks"]

    assert [each["rank"] for each in body] == list(range(plan.mesh.pp))
    for each, row in zip(body, action_rows(plan), strict=True):
        assert f"rank {each['rank']}, stage " in text
        passes = [name for name in each["instructions"] if not set(name) & set("><")]
        assert len(passes) == len(row.split(","))
        assert each["exchanges"] == sum(name[0] == "[" for name in each["instructions"])
    assert max(map(len, text.splitlines())) <= 80


def test_one_rank_is_chosen_and_a_rank_that_is_not_there_is_refused():
    text = succeed("show", str(PLANS[1]), "--instructions", "--rank", "2").stdout

    assert "rank 2, stage 2: 5 batched operations" in text
    assert "rank 1" not in text.split("rank 2, stage 2", 1)[1]
    assert "ranks 0 to 3" in fail(2, "show", str(PLANS[1]), "--instructions", "--rank", "4")


def test_other_outputs_and_runs_have_no_instructions(tmp_path):
    described = str(PLANS[0])
    assert "choose one" in fail(2, "show", described, "--instructions", "--chunks")
    assert "--plot is for --chunks" in fail(
        2, "show", described, "--instructions", "--plot", str(tmp_path / "x.png")
    )
    assert "--rank is for --chunks and --instructions" in fail(2, "show", described, "--rank", "0")
    write_run(run_of(estimated(pp=2)), tmp_path / "run.json")
    assert "--instructions is for plans" in fail(
        2, "show", str(tmp_path / "run.json"), "--instructions"
    )


def test_show_of_a_run_has_the_waits_and_what_is_in_flight_by_stage(tmp_path):
    run = run_of(estimated(pp=2))
    write_run(run, tmp_path / "run.json")

    lines = succeed("show", str(tmp_path / "run.json")).stdout.splitlines()

    idle = {line.split("  ")[1]: line.split()[-4:] for line in lines if "idle, stage" in line}
    first = run.ranks[0].idle_share
    assert idle["idle, stage 0"] == f"{100 * first.predicted:.1f} %".split() * 2
    assert any(line.split()[:5] == ["in", "flight,", "stage", "0", "2"] for line in lines)


def test_a_run_file_of_before_has_no_rows_of_stages(tmp_path):
    path = tmp_path / "run.json"
    write_run(run_of(estimated(pp=2)), path)
    body = json.loads(path.read_text())
    for rank in body["ranks"]:
        del rank["idle_share"], rank["in_flight"]
    path.write_text(json.dumps(body))

    text = succeed("show", str(path)).stdout
    assert "idle, stage" not in text
    assert "idle " in text


def test_a_tower_has_a_line_of_its_tokens_its_seconds_and_its_bytes(tmp_path):
    path = str(tmp_path / "plan.yaml")
    pins = "--pp", "2", "--tp", "1", "--micro-batch-size", "1", "--global-batch-size", "16"
    machine = "--gpus", "8", "--gpu", "h100-80gb"
    printed = succeed("--model", "gemma-3-4b", *machine, *pins, "-o", path).stdout

    text = " ".join(succeed("show", path).stdout.split())

    assert "34 layers, vision tower of 27" in " ".join(printed.split())
    assert "tower 1 x 4,096 vision tokens a sequence, which become 256 | its passes take" in text
    assert "of states" in text
    assert "blocks 0 (vision-patches)" in text
