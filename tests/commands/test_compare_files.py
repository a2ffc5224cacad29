"""Any two files of plans, launchers and runs stand side by side."""

from __future__ import annotations

import json
from itertools import permutations

import pytest

from parplan.planner.export.exported import export_plan
from parplan.planner.export.targets import TARGETS
from parplan.planner.plan.plan_file import write_plan
from tests.helpers.command_runs import fail, succeed
from tests.helpers.laid_out_plans import laid_out
from tests.helpers.run_logs import megatron_log

H100 = ("--gpu", "h100-80gb")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a plan, its exports to three launchers, and a log of a run."""
    folder = tmp_path_factory.mktemp("files")
    plan = laid_out("llama3-8b", dp=4, tp=2)
    write_plan(plan, folder / "plan.yaml")
    found = [folder / "plan.yaml"]
    for launcher in ("megatron", "torchtitan", "deepspeed"):
        export = export_plan(plan, TARGETS[launcher], "plan.yaml")
        name, text = next(iter(export.files.items()))
        found.append(folder / name)
        found[-1].write_text(text)
    found.append(folder / "train.log")
    found[-1].write_text(megatron_log({1: 9_000.0}))
    return found


@pytest.mark.slow
def test_every_pair_of_files_is_compared(files):
    for one, other in permutations(files, 2):
        out = succeed("compare", str(one), str(other), *(() if _states(one, other) else H100))
        assert f"than {one.name}" in out.stdout
        assert other.name in out.stdout


def _states(*files) -> bool:
    """True if all files state their machine; a log says its GPUs and not their kind."""
    return all(file.suffix != ".log" for file in files)


def test_a_plan_and_its_export_are_equal(files):
    plan, megatron = files[0], next(file for file in files if file.name == "megatron.sh")
    body = json.loads(succeed("compare", str(plan), str(megatron), "--json").stdout)

    (row,) = body["baselines"]
    assert (row["name"], row["fits"]) == ("megatron.sh", True)
    assert row["slower"] == pytest.approx(0.0, abs=1e-9)


def test_steps_of_other_sizes_are_compared_by_token_and_gpu(files, tmp_path):
    small = tmp_path / "small.yaml"
    write_plan(laid_out("llama3-8b", dp=2, tp=2), small)
    out = succeed("compare", str(files[0]), str(small)).stdout

    assert "for each token on each GPU" in out
    assert out.count("llama3-8b, 8.03 B parameters") == 2  # two machines


def test_what_a_plan_says_is_not_said_again(files):
    assert "--gpu and a plan file exclude each other" in fail(
        2, "compare", str(files[0]), str(files[0]), *H100
    )


def test_files_of_one_name_are_told_apart_by_their_folders(files, tmp_path):
    again = tmp_path / "plan.yaml"
    again.write_text(files[0].read_text())

    assert f"than {files[0]}"[:30] in succeed("compare", str(files[0]), str(again)).stdout
