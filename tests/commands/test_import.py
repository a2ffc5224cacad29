"""Logs become rows of a steps table, and factors of a calibration."""

from __future__ import annotations

import csv
import json

import pytest

from tests.helpers import run_logs
from tests.helpers.command_runs import fail, succeed
from tests.helpers.launcher_scripts import SCRIPT

STEPS_MS = {1: 30_000.0} | dict.fromkeys(range(2, 21), 6_500.0)
H100 = ("--gpu", "h100-80gb")


@pytest.fixture
def megatron(tmp_path):
    path = tmp_path / "pretrain.log"
    path.write_text(run_logs.megatron_log(STEPS_MS))
    return path


def rows_of(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_log_that_prints_its_arguments_needs_only_the_gpu(megatron, tmp_path):
    table = tmp_path / "steps.csv"
    (measured,) = json.loads(
        succeed("import", str(megatron), *H100, "-o", str(table), "--json").stdout
    )["logs"]
    (row,) = rows_of(table)

    cells = {name: row[name] for name in ("id", "layers", "vocab", "dp", "tp", "zero_stage")}
    assert cells == {
        "id": "log-pretrain",
        "layers": "32",
        "vocab": "32000",
        "dp": "4",
        "tp": "2",
        "zero_stage": "1",
    }
    assert (row["step_time_s"], row["recompute"]) == ("6.5", "none")
    assert measured["step_s"] == 6.5
    assert (measured["steps"], measured["remarks"][0][:7]) == (15, "5 steps")


def test_plan_validate_prices_the_row_as_plan_read_prices_the_log(megatron, tmp_path):
    table = tmp_path / "steps.csv"
    succeed("import", str(megatron), *H100, "-o", str(table))
    read = json.loads(succeed("read", str(megatron), *H100, "--json").stdout)
    validated = json.loads(succeed("validate", "--steps", str(table), "--json").stdout)

    (row,) = validated["rows"]
    assert row["predicted_s"] == pytest.approx(read["predicted"]["step_time_s"]["value"], rel=1e-3)
    assert row["measured_s"] == 6.5


def test_rows_are_added_and_a_log_that_grew_replaces_its_row(megatron, tmp_path):
    table = tmp_path / "steps.csv"
    titan = tmp_path / "titan.log"
    titan.write_text(run_logs.titan_log(dict.fromkeys(range(1, 21), 6_553)))

    succeed("import", str(megatron), *H100, "-o", str(table))
    succeed("import", str(titan), "-o", str(table))  # its log names the GPU
    said = succeed("import", str(titan), "-o", str(table)).stdout

    first, second = rows_of(table)
    assert (first["id"], second["id"]) == ("log-pretrain", "log-titan")
    assert "1 of them again" in said
    assert (second["recompute"], second["zero_stage"]) == ("selective", "3")
    assert float(second["step_time_s"]) == pytest.approx(8 * 8192 / (8 * 6_553), rel=1e-5)


def test_a_launchers_file_says_what_a_log_does_not(tmp_path):
    log, script = tmp_path / "nemo.log", tmp_path / "train.sh"
    log.write_text(run_logs.nemo_log(dict.fromkeys(range(20), 31.0), batch=512))
    script.write_text(SCRIPT)
    table = tmp_path / "steps.csv"

    succeed("import", str(log), "--config", str(script), *H100, "-o", str(table))

    (row,) = rows_of(table)
    assert (row["pp"], row["recompute"], row["step_time_s"]) == ("8", "full", "31")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((), "does not say the model and the layout", id="nothing"),
        pytest.param(
            ("--model", "llama2-7b", "--gpus", "8", *H100, "--global-batch-size", "64"),
            "have 128 sequences, the configuration 64",
            id="batch",
        ),
    ],
)
def test_a_fact_that_is_missing_or_contradicts_is_an_error(arguments, message, tmp_path):
    log = tmp_path / "nemo.log"
    log.write_text(run_logs.nemo_log(dict.fromkeys(range(20), 3.0)))

    assert message in fail(2, "import", str(log), *arguments, "-o", f"{tmp_path}/steps.csv")
    assert not (tmp_path / "steps.csv").exists()


def test_a_log_gives_one_factor_of_the_whole_step(megatron, tmp_path):
    profile = tmp_path / "mygpu.yaml"
    body = json.loads(
        succeed("calibrate", str(megatron), *H100, "-o", str(profile), "--json").stdout
    )

    factors = body["calibration"]
    assert factors["forward"]["value"] == factors["backward"]["value"]
    (run,) = body["runs"]
    assert run["calibrated_s"] == pytest.approx(6.5, rel=1e-4)
