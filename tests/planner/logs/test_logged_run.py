"""Logs of every launcher are read to their steps, whatever stands between these."""

from __future__ import annotations

import pytest

from parplan.planner.logs.log_lines import read_lines
from parplan.planner.logs.logged_run import is_log, read_log
from parplan.planner.logs.titan_lines import titan_options
from parplan.profiles.errors import ConfigError
from parplan.profiles.units import GIB, MIB
from tests.helpers import run_logs

STEADY = range(7, 21)


def read(tmp_path, text: str, warm_up: int = 5):
    path = tmp_path / "train.log"
    path.write_text(text)
    return read_log(path, warm_up)


@pytest.mark.parametrize(
    ("text", "name", "quantity"),
    [
        pytest.param(
            run_logs.megatron_log(dict.fromkeys(range(1, 21), 2.5)), "megatron", "ms", id="megatron"
        ),
        pytest.param(
            run_logs.titan_log(dict.fromkeys(range(1, 21), 6500)),
            "torchtitan",
            "tokens_per_s",
            id="torchtitan",
        ),
        pytest.param(
            run_logs.deepspeed_log(dict.fromkeys(range(1, 21), 12.5)),
            "deepspeed",
            "samples_per_s",
            id="deepspeed",
        ),
        pytest.param(run_logs.nemo_log(dict.fromkeys(range(1, 21), 2.5)), "nemo", "s", id="nemo"),
        pytest.param(
            run_logs.trainer_log(dict.fromkeys(range(1, 21), 2.5)),
            "trainer",
            "s_per_it",
            id="trainer",
        ),
    ],
)
def test_every_launcher_prints_its_steps(tmp_path, text, name, quantity):
    run = read(tmp_path, text)

    assert (run.format.name, run.quantity) == (name, quantity)
    assert len(run.values) == 15  # of 20, without the first five
    assert len(set(run.values)) == 1
    assert (run.parts, run.left_out) == (1, 5)


def test_first_steps_do_not_count_and_the_median_is_taken(tmp_path):
    times = {1: 30_000.0, 2: 9_000.0} | dict.fromkeys(range(3, 20), 2_000.0) | {20: 60_000.0}
    run = read(tmp_path, run_logs.megatron_log(times))

    assert run.middle == 2_000.0
    assert run.spread == (2_000.0, 2_000.0)


def test_a_line_of_ten_iterations_counts_once_all_are_past_the_warm_up(tmp_path):
    times = {1: 30_000.0, 10: 5_000.0, 20: 2_000.0, 30: 2_100.0}
    run = read(tmp_path, run_logs.megatron_log(times))

    assert run.values == (2_000.0, 2_100.0)


def test_a_restart_has_a_warm_up_of_its_own(tmp_path):
    first = run_logs.megatron_log(dict.fromkeys(range(1, 21), 2_000.0))
    again = run_logs.megatron_log({11: 30_000.0} | dict.fromkeys(range(12, 31), 2_200.0))
    run = read(tmp_path, first + "Traceback: NCCL timeout\n" + again)

    assert run.parts == 2
    assert sorted(set(run.values)) == [2_000.0, 2_200.0]
    assert len(run.values) == 15 + 15


def test_ranks_that_print_through_one_another_are_one_run(tmp_path):
    run = read(tmp_path, run_logs.titan_log(dict.fromkeys(range(1, 21), 6_500), ranks=range(4)))

    assert run.parts == 1
    assert len(run.values) == 15
    assert run.reserved_bytes == 50.25 * GIB


def test_lost_lines_are_not_missed(tmp_path):
    text = run_logs.megatron_log(dict.fromkeys(range(1, 21), 2_000.0))
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if "iteration       12/" not in line]
    kept[-3] = kept[-3][:60] + "\n"  # two processes wrote at once
    run = read(tmp_path, "".join(kept))

    assert len(run.values) == 13
    assert run.parts == 1


def test_steps_of_another_batch_do_not_count(tmp_path):
    first = run_logs.nemo_log(dict.fromkeys(range(10), 1.0), batch=64)
    run = read(tmp_path, first + run_logs.nemo_log(dict.fromkeys(range(10, 30), 2.0), batch=128))

    assert (run.batch, run.middle, len(run.values)) == (128, 2.0, 20)


def test_memory_is_the_most_of_the_ranks_that_print_it(tmp_path):
    run = read(tmp_path, run_logs.megatron_log(dict.fromkeys(range(1, 21), 2_000.0)))

    assert (run.allocated_bytes, run.reserved_bytes) == (41_001 * MIB, 45_001 * MIB)


def test_evaluation_has_no_steps(tmp_path):
    text = run_logs.titan_log(dict.fromkeys(range(1, 21), 6_500))
    validation = text.splitlines()[-1].replace("step: 20", "validate step: 20")
    run = read(tmp_path, text + validation.replace("6,500", "19,000") + "\n")

    assert set(run.values) == {6_500.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("Traceback (most recent call last):\n", "no line of a step", id="no-steps"),
        pytest.param(
            run_logs.nemo_log({0: 9.0, 1: 2.0}), "all of its 2 lines .* first 5", id="short"
        ),
    ],
)
def test_a_log_without_enough_steps_is_an_error(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_file_that_is_no_log_is_not_one(tmp_path):
    (tmp_path / "run.sh").write_text("torchrun pretrain_gpt.py --bf16\n")

    assert not is_log(tmp_path / "run.sh")


@pytest.mark.parametrize(
    ("mesh", "degrees"),
    [
        pytest.param("['dp_shard'], [8]", {"shard": "8", "tensor": "1"}, id="data"),
        pytest.param("['dp_shard', 'tp'], [4, 2]", {"shard": "4", "tensor": "2"}, id="tensor"),
    ],
)
def test_the_mesh_of_older_releases_of_torchtitan_is_read(tmp_path, mesh, degrees):
    text = run_logs.titan_log({1: 300})
    new = "parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1"
    old = text.replace(f"device mesh with {new}", f"{mesh.count(',')}-D device mesh with {mesh}")
    (tmp_path / "titan.log").write_text(old)
    given, machine = titan_options(read_lines(tmp_path / "titan.log"), "titan.log")
    words = {each.name: each.words for each in given}

    assert machine == {"--gpu": "h100-80gb", "--gpus": "8"}
    for axis, degree in degrees.items():
        name = f"data_parallel_{axis}" if axis == "shard" else f"{axis}_parallel"
        assert words[f"--parallelism.{name}_degree"] == (degree,)


def test_a_log_of_torchtitan_without_its_batch_is_an_error(tmp_path):
    text = run_logs.titan_log({1: 300}).replace("Trainer is initialized", "")
    (tmp_path / "titan.log").write_text(text)

    with pytest.raises(ConfigError, match="Trainer is initialized"):
        titan_options(read_lines(tmp_path / "titan.log"), "titan.log")
