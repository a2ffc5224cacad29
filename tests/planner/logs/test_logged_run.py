"""Logs of every launcher are read to their steps, whatever stands between these."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from parplan.planner.logs.log_configuration import configuration_of_log
from parplan.planner.logs.log_lines import read_lines
from parplan.planner.logs.logged_run import is_log, read_log
from parplan.planner.logs.printed_arguments import printed_arguments
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


TAGS = (
    "[1,0]<stdout>:",
    "[1,0]<stdout>: ",
    "[prterun-node-7@1,0]<stdout>: ",
    "Sat Aug 22 15:22:22 2026[1,0]<stdout>:",
    "[default0]:",
    "[rank0]: ",
    "[0] ",
    "0: ",
    " 0: ",
    "worker-0: ",
    "2026-08-22T15:22:22.123456789Z ",
    "[2026-08-22 15:22:22] ",
    "2026-08-22 15:22:22,123 ",
    "Aug 22 15:22:22 ",
    "15:22:22 ",
    "Aug 22 15:22:22 worker-0: [rank0]:",
)


@pytest.mark.parametrize("tag", TAGS)
def test_a_log_reads_alike_behind_the_words_of_launchers(tmp_path, tag):
    text = run_logs.megatron_log(dict.fromkeys(range(1, 21), 2_000.0))
    (tmp_path / "bare.log").write_text(text)
    (tmp_path / "train.log").write_text("".join(f"{tag}{line}\n" for line in text.splitlines()))
    bare, run = read_log(tmp_path / "bare.log"), read_log(tmp_path / "train.log")
    given, processes = printed_arguments(read_lines(tmp_path / "train.log"), "train.log")

    assert replace(run, path=bare.path) == bare
    assert processes == 8
    assert ("--tensor-model-parallel-size", ("2",)) in [(each.name, each.words) for each in given]


NEMO_LINE = (
    " 0: Training epoch 0, iteration {step}/99 | lr: 5.389e-06 | global_batch_size: 512 | "
    "global_step: {step} | max_memory_reserved: 57466159104 | max_memory_allocated: 53930270720 | "
    "reduced_train_loss: 10.22 | train_step_timing in s: 27.01 | consumed_samples: 4608 | "
    "TFLOPS_per_GPU: 48.58\n 0: \n"
)
BRIDGE_MEMORY = (
    "[Rank 1] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 63.66 | "
    "mem-reserved-gigabytes: 182.2 | mem-max-allocated-gigabytes: 153.4 | "
    "mem-max-reserved-gigabytes: 182.5 | mem-alloc-retires: 0\n"
)
OLD_MEMORY = (
    "after 5 iterations memory (MB) | allocated: 10250.5693359375 | "
    "max allocated: 12606.0 | reserved: 17482.0 | max reserved: 17483.0\n"
)


@pytest.mark.parametrize(
    ("text", "allocated_bytes", "reserved_bytes"),
    [
        pytest.param(
            "".join(NEMO_LINE.format(step=step) for step in range(10)),
            53_930_270_720,
            57_466_159_104,
            id="nemo-2",
        ),
        pytest.param(
            BRIDGE_MEMORY + run_logs.megatron_log({9: 2.0}).replace("memory (MB)", ""),
            153.4e9,
            182.5e9,
            id="megatron-bridge",
        ),
        pytest.param(
            OLD_MEMORY + run_logs.megatron_log({9: 2.0}).replace("(MB) | allocated: 21", ""),
            12606 * MIB,
            17483 * MIB,
            id="old-megatron",
        ),
        pytest.param(
            run_logs.nemo_log(dict.fromkeys(range(9), 1.0)), None, None, id="nemo-without"
        ),
    ],
)
def test_memory_is_read_in_the_words_and_units_of_each_release(
    tmp_path, text, allocated_bytes, reserved_bytes
):
    run = read(tmp_path, text, warm_up=0)

    assert (run.allocated_bytes, run.reserved_bytes) == (allocated_bytes, reserved_bytes)


def _two_starts(**second: object) -> str:
    steps = dict.fromkeys(range(1, 21), 2_000.0)
    first = run_logs.megatron_log(dict.fromkeys(range(1, 31), 3_000.0))
    later = run_logs.megatron_log(steps, **second).replace(": 41", ": 31").replace(": 45", ": 35")
    return first + later


def test_steps_and_memory_of_another_layout_do_not_count(tmp_path):
    run = read(tmp_path, _two_starts(tensor_model_parallel_size=4))

    assert (run.middle, run.parts, run.other_layouts) == (2_000.0, 1, 1)
    assert (run.allocated_bytes, run.reserved_bytes) == (31_001 * MIB, 35_001 * MIB)


def test_starts_with_one_layout_count_together(tmp_path):
    run = read(tmp_path, _two_starts())

    assert (run.middle, run.parts, run.other_layouts) == (3_000.0, 2, 0)
    assert run.reserved_bytes == 45_001 * MIB


def test_the_configuration_is_that_of_the_steps_that_count(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(_two_starts(tensor_model_parallel_size=4, fp8="hybrid"))
    file = configuration_of_log(path)
    words = {each.name: each.words for each in file.given}

    assert (words["--tensor-model-parallel-size"], words["--fp8-format"]) == (("4",), ("hybrid",))


def test_a_mesh_of_another_start_does_not_count(tmp_path):
    steps = dict.fromkeys(range(1, 21), 6_000)
    sharded = run_logs.titan_log(steps, ranks=range(2))
    divided = run_logs.titan_log(steps).replace("dp_shard=8, cp=1, tp=1", "dp_shard=4, cp=1, tp=2")
    (tmp_path / "train.log").write_text(sharded + divided.replace("memory: 50.25", "memory: 40.25"))
    run = read_log(tmp_path / "train.log")

    assert (run.other_layouts, run.reserved_bytes) == (1, 40.25 * GIB)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sequence length 8192", "sequence length 0", "seq_len is '0', needed is a whole number"),
        ("dp_shard=8", "dp_shard=0", "data_parallel_shard_degree is '0', needed is a whole"),
        ("tp=1", "tp=99999999999", "device mesh with parallelism: ..` is missing"),
        ("tp=1", "tp=\u00b2", "is missing"),
    ],
)
def test_a_number_of_a_log_that_no_run_has_is_an_error(tmp_path, old, new, message):
    text = run_logs.titan_log({1: 300}).replace(old, new)
    (tmp_path / "titan.log").write_text(text)

    with pytest.raises(ConfigError, match=message.replace("..", r"\.\.")):
        titan_options(read_lines(tmp_path / "titan.log"), "titan.log")


HOSTILE_LINES = {
    "iterations": "iteration 1/1 |" * 400,
    "times": "iteration 1/1 |" + "elapsed time per iteration (ms): " * 200,
    "memory": "step: 1 loss: " + "memory: " * 800,
    "sentences": "initialized with local batch size 1, global batch size 8, " * 100,
    "bars": "1%|" * 2000,
    "digits": "9" * 8000,
    "colours": "\x1b]" * 4000,
    "escapes": "\x1b[" + "0;" * 4000,
    "brackets": "[" * 8000,
    "spaces": "a" + " " * 8000 + "b",
    "dots": "  name " + "." * 8000,
    "epochs": "Training epoch Epoch 1/1 [" * 300,
    "kernels": "global_step=1, RunningAvgSamplesPerSec=" * 200,
}


@pytest.mark.parametrize("line", HOSTILE_LINES)
def test_a_line_costs_its_length_whatever_it_is(tmp_path, line):
    (tmp_path / "train.log").write_text(f"{HOSTILE_LINES[line]}\n" * 300)
    started_s = time.process_time()

    with pytest.raises(ConfigError, match="no line of a step"):
        read_log(tmp_path / "train.log")
    assert configuration_of_log(tmp_path / "train.log") is None
    assert time.process_time() - started_s < 3  # a third of a second here
