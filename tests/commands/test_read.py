"""Launchers' own files are read as plans, with the price that their settings have."""

from __future__ import annotations

import json
import re

import pytest

from parplan.planner.export.exported import export_plan
from parplan.planner.export.targets import TARGETS
from parplan.planner.plan.reprice import reprice
from tests.helpers.command_runs import fail, run, succeed
from tests.helpers.laid_out_plans import laid_out
from tests.helpers.launcher_scripts import SCRIPT


@pytest.mark.parametrize("name", TARGETS)
def test_an_export_is_read_back_with_its_price(name, tmp_path):
    pp = 2 if any("pp" in row.facts for row in TARGETS[name].table) else 1
    plan = laid_out("llama3-8b", pp=pp, dp=2, tp=2, zero=2)
    one = export_plan(plan, TARGETS[name], "plan.yaml")
    file = next(iter(one.files))
    for name_of_file, text in one.files.items():
        (tmp_path / name_of_file).write_text(text)

    body = json.loads(succeed("show", str(tmp_path / file), "--json").stdout)

    read = reprice(plan).plan.predicted if not one.losses else None
    step_s = body["predicted"]["step_time_s"]["value"]
    assert step_s == pytest.approx(one.configured.price.step_s, rel=1e-5)  # six figures
    assert read is None or step_s == read.step_time_s.value


def test_a_script_of_a_reader_is_priced_and_written_as_a_plan(tmp_path):
    (tmp_path / "train.sh").write_text(SCRIPT)
    arguments = ("read", f"{tmp_path}/train.sh", "--gpu", "h100-80gb")
    result = succeed(*arguments, "-o", f"{tmp_path}/plan.yaml")

    assert "pp 8 x dp 2 x tp 8" in result.stdout
    assert "recompute full" in result.stdout
    assert "not understood" not in result.output
    assert "pp 8 x dp 2 x tp 8" in succeed("show", f"{tmp_path}/plan.yaml").stdout


def test_a_machine_that_no_file_states_is_asked_for(tmp_path):
    (tmp_path / "train.sh").write_text(SCRIPT)

    assert "does not say its machine, --gpu is missing" in fail(2, "show", f"{tmp_path}/train.sh")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param("--optimizer-cpu-offload", "train.sh:8: .* has no price", id="no-price"),
        pytest.param("--recompute-modules moe_router", "train.sh:8: .* is not priced", id="module"),
        pytest.param("--tensor-model-parallel-size $X", r"train.sh:8: .*\$X", id="variable"),
        pytest.param("--pipeline-model-parallel-size 7", "does not divide the 128", id="degree"),
        pytest.param("--num-experts 8 --expert-model-parallel-size 3", "ep 3", id="experts"),
    ],
)
def test_an_argument_that_cannot_be_priced_is_an_error_with_its_line(words, message, tmp_path):
    script = SCRIPT.replace("--sequence-parallel", words)
    (tmp_path / "train.sh").write_text(script)
    result = run("read", f"{tmp_path}/train.sh", "--gpu", "h100-80gb")

    assert result.exit_code == 2

    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr


@pytest.mark.slow
def test_check_says_how_much_a_stage_lacks(tmp_path):
    lean = laid_out("llama3-8b", dp=2, tp=2)
    fat = laid_out("llama3-70b", dp=2, tp=2)
    for name, plan, code in (("lean", lean, 0), ("fat", fat, 3)):
        files = export_plan(plan, TARGETS["megatron"], "plan.yaml").files
        (tmp_path / f"{name}.sh").write_text(files["megatron.sh"])
        result = run("check", f"{tmp_path}/{name}.sh")
        assert result.exit_code == code, result.output
        assert ("does not fit: stage 0 needs" in result.stdout) is bool(code)


def test_files_of_nobody_are_refused(tmp_path):
    (tmp_path / "other.sh").write_text("echo --lr 1\n")

    assert "no arguments of a launcher" in fail(2, "read", f"{tmp_path}/other.sh")


@pytest.mark.parametrize("arguments", ["", "--num-layers 4", "--tensor-model-parallel-size 2"])
def test_a_script_with_few_arguments_is_known_by_its_program(arguments, tmp_path):
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py {arguments}\n")

    said = fail(2, "read", f"{tmp_path}/run.sh", "--gpus", "2", "--gpu", "a100-80gb")

    assert re.search(r"run\.sh: --\S+ is not among its arguments", said)


@pytest.mark.parametrize("command", ["read", "check", "show", "compare"])
def test_a_script_of_no_launcher_is_an_error_that_says_what_is_read(command, tmp_path):
    (tmp_path / "run.sh").write_text("python serve.py --port 80\n")
    said = fail(2, command, f"{tmp_path}/run.sh")

    assert "no arguments of a launcher that is known" in said
    assert "megatron, " in said
