from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parplan.executor.__main__ import run
from parplan.executor.launch import local_rank
from parplan.executor.pipeline.loss_scale import LossScale
from parplan.planner.plan.plan_file import read_plan, write_plan
from parplan.planner.runs.run_file import read_run as read_run
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision
from tests.helpers.executor_plans import LLAMA, SEQ_LENGTH, make_plan

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def _run(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["executor", *map(str, arguments)])
    return run()


def _write(plan, tmp_path) -> Path:
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    return path


@pytest.mark.slow
@pytest.mark.multiproc
def test_torchrun_trains_a_plan_on_a_token_file_and_reports_equal_bytes(tmp_path):
    tokens = tmp_path / "tokens.bin"
    (np.arange(64 * SEQ_LENGTH + 1) % 100).astype(np.uint32).tofile(tokens)
    plan = _write(make_plan(LLAMA, pp=2, num_micro_batches=4), tmp_path)

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "parplan.executor",
            str(plan),
            "--steps",
            "3",
            "--data",
            str(tokens),
            "--data-dtype",
            "uint32",
            "--learning-rate",
            "0.01",
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in lines[:3]] == [
        ["step", str(step), "loss"] for step in (1, 2, 3)
    ]
    assert all(line.endswith("tokens/s") for line in lines[:3])
    assert [line.split()[-1] for line in lines[4:6]] == ["equal", "equal"]
    losses = [float(line.split()[3]) for line in lines[:3]]
    assert losses[2] < losses[0]  # the next token is always the last plus one


def test_one_rank_runs_without_torchrun(tmp_path, monkeypatch, capsys):
    assert _run(monkeypatch, _write(make_plan(), tmp_path), "--steps", 1) == 0

    out, err = capsys.readouterr()
    assert out.startswith("step    1  loss 4.8")
    assert err == ""


def test_a_run_leaves_its_file_and_a_trace_and_shows_predicted_beside_measured(
    tmp_path, monkeypatch, capsys
):
    plan = _write(make_plan(), tmp_path)

    assert _run(monkeypatch, plan, "--steps", 4, "--trace", tmp_path / "t.json") == 0

    out = capsys.readouterr().out
    assert re.search(r"predicted +measured +off by\n +step, median of 2 ", out)
    assert (
        f"wrote {tmp_path / 'run.json'}\nwrote {tmp_path / 't.json'}; open it in "
        "https://ui.perfetto.dev\n"
    ) in out
    run = read_run(tmp_path / "run.json")
    assert run.recorded_steps == 2
    assert run.the_plan() == read_plan(plan)
    assert {
        event["ph"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    } == {"M", "X"}


def test_nothing_is_recorded_where_nothing_is_wanted(tmp_path, monkeypatch, capsys):
    assert _run(monkeypatch, _write(make_plan(), tmp_path), "--steps", 1, "--no-record") == 0

    assert not (tmp_path / "run.json").exists()
    assert "predicted  measured" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ("--no-record", "--trace", "t.json"),
            "--trace needs what --no-record leaves out",
            id="no-record",
        ),
        pytest.param(
            ("--run-json", "none/run.json"),
            "cannot write none/run.json: none: no such folder",
            id="no-folder",
        ),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_the_run(
    options, message, tmp_path, monkeypatch, capsys
):
    assert _run(monkeypatch, _write(make_plan(), tmp_path), *options) == 2

    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ("--timeout", "nan"), "'--timeout': nan is not a finite number", id="timeout-nan"
        ),
        pytest.param(
            ("--timeout", "inf"), "'--timeout': inf is not in the range", id="timeout-inf"
        ),
        pytest.param(
            ("--learning-rate", "inf"), "'--learning-rate': inf is not a finite number", id="rate"
        ),
        pytest.param(
            ("--betas", "0.9", "nan"), "'--betas': nan is not a finite number", id="betas"
        ),
        pytest.param(("--seed", 2**64), f"'--seed': {2**64} is not in the range", id="seed"),
        pytest.param(("--seed", -1), "'--seed': -1 is not in the range", id="negative-seed"),
        pytest.param(("--run-json", "pipe"), "cannot write pipe: not a regular file", id="pipe"),
        pytest.param(("--trace", "x" * 300), "File name too long", id="long-trace"),
        pytest.param(("--data", "tokens.npz"), "tokens.npz: an archive of arrays", id="archive"),
        pytest.param(("--data", "x" * 300), "File name too long", id="long-data"),
        pytest.param(("--checkpoint-dir", "x" * 300), "File name too long", id="long-folder"),
        pytest.param(("--resume", "x" * 300), "File name too long", id="long-checkpoint"),
        pytest.param(("--nonsense",), "no such option '--nonsense'", id="unknown"),
    ],
)
def test_an_option_that_cannot_be_is_one_error_and_a_hint(
    options, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")

    assert _run(monkeypatch, _write(make_plan(), tmp_path), *options) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_a_disk_that_is_full_at_the_end_is_one_error(tmp_path, monkeypatch, capsys):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = _write(make_plan(), tmp_path)
    monkeypatch.setattr(os, "fsync", full)

    assert _run(monkeypatch, plan, "--steps", 3) == 2

    assert capsys.readouterr().err == (
        f"error: cannot write {tmp_path / 'run.json'}: No space left on device\nhint: "
        "choose another file with --run-json\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_the_largest_seed_of_64_bits_trains(tmp_path, monkeypatch):
    assert (
        _run(
            monkeypatch,
            _write(make_plan(), tmp_path),
            "--steps",
            1,
            "--no-record",
            "--seed",
            2**64 - 1,
        )
        == 0
    )


def test_a_stdout_that_fails_does_not_end_the_training(tmp_path, monkeypatch, capsys):
    plan = _write(make_plan(), tmp_path)
    with open(os.open(os.devnull, os.O_RDONLY), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert _run(monkeypatch, plan, "--steps", 3) == 2

    assert capsys.readouterr().err.startswith(
        "error: cannot write to stdout: Bad file descriptor\nhint: "
    )
    assert read_run(tmp_path / "run.json").recorded_steps == 1


def test_a_step_says_its_gradient_norm_and_a_rate_that_varies(tmp_path, monkeypatch, capsys):
    plan = _write(make_plan(), tmp_path)

    assert (
        _run(
            monkeypatch,
            plan,
            "--steps",
            2,
            "--warmup-steps",
            2,
            "--learning-rate",
            0.01,
            "--clip-gradients",
            0.5,
        )
        == 0
    )

    first, second = capsys.readouterr().out.splitlines()[:2]
    assert " clipped to 0.5  lr 5.00e-03  " in first
    assert "  grad norm " in first
    assert "  lr 1.00e-02  " in second


def test_a_step_of_fp16_that_was_left_out_is_said_and_recorded(tmp_path, monkeypatch, capsys):
    plan = make_plan(precision=Precision.FP16)
    device = dataclasses.replace(plan.cluster.device, peak_flops_per_s={"fp16": 1e12, "fp32": 1e12})
    plan = _write(
        dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=device)),
        tmp_path,
    )
    monkeypatch.setattr(
        "parplan.executor.training.train.loss_scale", lambda precision: LossScale(2.0**60)
    )

    assert _run(monkeypatch, plan, "--steps", 2) == 0

    assert re.search(
        r"grad norm (nan|inf) skipped, loss scale 5.76\d+e\+17  ",
        capsys.readouterr().out.splitlines()[0],
    )
    assert read_run(tmp_path / "run.json").steps.skipped == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["--learning-rate", -1], "--learning-rate is -1, it must be positive", id="rate"
        ),
        pytest.param(["--min-learning-rate", 1e-4], "with --lr-schedule constant", id="schedule"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_starts(
    tmp_path, monkeypatch, capsys, arguments, message
):
    assert _run(monkeypatch, _write(make_plan(), tmp_path), *arguments) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_compile_is_refused_where_a_block_is_no_single_graph(tmp_path, monkeypatch, capsys):
    assert _run(monkeypatch, _write(make_plan(recompute=("norm1",)), tmp_path), "--compile") == 2

    assert (
        "hint: leave --compile out, or make a plan with --recompute none,full"
        in capsys.readouterr().err
    )


def test_help_ends_with_an_example(monkeypatch, capsys):
    assert _run(monkeypatch, "--help") == 0

    assert (
        "Examples:\n  torchrun --nproc-per-node 8 -m parplan.executor plan.yaml --steps 5"
        in capsys.readouterr().out
    )


def test_a_wrong_number_of_ranks_says_which_command_to_use(tmp_path, monkeypatch, capsys):
    plan = _write(make_plan(pp=2, dp=2, tp=2), tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert _run(monkeypatch, plan) == 2

    err = capsys.readouterr().err
    assert "the plan needs 8 ranks (pp 2 x dp 2 x tp 2), 4 started" in err
    assert f"hint: start it with: torchrun --nproc-per-node 8 -m parplan.executor {plan}" in err


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        pytest.param(
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"},
            "MASTER_PORT is 'abc', it must be a whole number from 0 to 65535",
            id="port",
        ),
        pytest.param(
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"},
            "MASTER_PORT is '99999'",
            id="port-out-of-range",
        ),
        pytest.param(
            {"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR is set and MASTER_PORT is not", id="no-port"
        ),
        pytest.param(
            {"RANK": "abc"}, "RANK is 'abc', it must be a whole number from 0 to 0", id="rank"
        ),
        pytest.param({"RANK": "5"}, "RANK is '5'", id="rank-out-of-range"),
        pytest.param({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc'", id="world"),
        pytest.param({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'", id="nobody"),
    ],
)
def test_what_torchrun_says_has_to_make_sense(tmp_path, monkeypatch, capsys, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert _run(monkeypatch, _write(make_plan(), tmp_path), "--steps", 1, "--no-record") == 2

    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {message}")
    assert hint.startswith("hint: start it with torchrun")


def test_a_store_that_cannot_be_opened_is_an_error(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))

        assert _run(monkeypatch, _write(make_plan(), tmp_path), "--steps", 1, "--no-record") == 2

    assert re.search(
        r"^error: no store at MASTER_ADDR 127.0.0.1, MASTER_PORT \d+: ",
        capsys.readouterr().err,
        re.MULTILINE,
    )


@pytest.mark.parametrize("number", ["abc", "-1"])
def test_a_local_rank_that_is_none_is_an_error(monkeypatch, number):
    monkeypatch.setenv("LOCAL_RANK", number)

    with pytest.raises(ConfigError, match=f"LOCAL_RANK is '{number}'"):
        local_rank()


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("plan.yaml", "plan.yaml"), ()),
        (("a/plan.yaml", "b/plan.yaml"), ("--run-json", "run.json")),
        (("a/plan.yaml", "b/plan.yaml"), ("--trace", "trace.json")),
    ],
)
def test_pools_that_would_write_one_file_are_refused(names, options, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        write_plan(make_plan(), Path(name))

    assert _run(monkeypatch, *names, *options) == 2

    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {' '.join(names)}: two pools would write ")
    assert hint == "hint: give the plan files different names"


def test_only_rank_0_says_what_is_wrong_with_a_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    assert _run(monkeypatch, tmp_path / "none.yaml") == 2

    assert capsys.readouterr().err == ""


def test_an_error_in_the_data_is_one_line_and_a_hint(tmp_path, monkeypatch, capsys):
    plan = _write(make_plan(), tmp_path)

    assert _run(monkeypatch, plan, "--data", tmp_path / "none.bin") == 2

    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: cannot read ")
    assert hint == "hint: check --data and --data-dtype"


def test_an_unknown_option_is_a_usage_error(monkeypatch, capsys):
    assert _run(monkeypatch, "plan.yaml", "--stepz", 3) == 2

    assert "--steps" in capsys.readouterr().err


def test_ctrl_c_ends_the_run_without_a_traceback(tmp_path):
    plan = _write(make_plan(), tmp_path)

    with subprocess.Popen(
        [sys.executable, "-u", "-m", "parplan.executor", str(plan), "--steps", "1000000"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)

    assert process.returncode in (-signal.SIGINT, 130)
    assert err == ""
