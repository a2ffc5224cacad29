"""`plan profile` on the command line: errors, --show and --diff.

Its measurements are in test_profiling.py.
"""

from __future__ import annotations

import json

import pytest

from parplan.planner.calibration.profiling import fitted
from parplan.profiles.machines.user_profile import (
    PROFILE_VERSION,
    ProfileEnvironment,
    UserProfile,
    write_profile,
)
from tests.helpers.command_runs import fail, run, succeed
from tests.helpers.synthetic_profiles import Machine

HERE = ProfileEnvironment(
    date="2026-01-01", device="NVIDIA A100-SXM4-80GB", num_devices=8, torch="2.13.0"
)


@pytest.fixture(scope="module")
def measured():
    return fitted(
        UserProfile(
            profile_version=PROFILE_VERSION,
            device="a100-80gb",
            precision="bf16",
            environment=HERE,
            records=Machine().every(),
        )
    )


@pytest.fixture
def mine(tmp_path, measured):
    path = tmp_path / "mine.yaml"
    write_profile(measured, path)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("--show",), "--show prints one file, 0 given", id="show-nothing"),
        pytest.param(("--diff", "a.yaml"), "--diff compares two files, 1 given", id="diff-one"),
        pytest.param(("--show", "--diff", "a.yaml"), "leave out one of them", id="show-and-diff"),
        pytest.param(("a.yaml",), "a measurement takes no file", id="a-file-alone"),
        pytest.param(("--minutes", "0"), "not in the range", id="no-time"),
        pytest.param(("--devise", "cpu"), "--device", id="a-misspelled-option"),
    ],
)
def test_what_contradicts_itself_is_a_usage_error(arguments, message):
    result = run("profile", *arguments)

    assert result.exit_code == 2
    assert message in result.stderr


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert "torch sees no GPU" in fail(
        2, "profile", "--device", "cuda", "-o", str(tmp_path / "mine.yaml")
    )


def test_a_folder_that_is_not_there_is_found_before_anything_is_measured(tmp_path):
    assert "no such folder" in fail(2, "profile", "-o", str(tmp_path / "nowhere" / "mine.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profile_version: [", "not YAML"),
        ("profile_version: 1", "this parplan reads 2"),
        (f"profile_version: {PROFILE_VERSION}\ndevice: cpu\nspeed: 3", "unknown key speed"),
    ],
)
def test_a_broken_profile_says_what_is_wrong(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)

    assert message in fail(2, "profile", "--show", str(tmp_path / "mine.yaml"))


@pytest.mark.slow
def test_a_profile_is_shown_and_drawn(mine, tmp_path):
    shown = succeed("profile", "--show", str(mine), "--plot", str(tmp_path / "mine.png")).stdout

    assert "curve" in shown
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_json_alone(mine):
    assert json.loads(succeed("profile", "--show", str(mine), "--json").stdout)
    assert json.loads(succeed("profile", "--diff", str(mine), str(mine), "--json").stdout)


def test_two_profiles_are_compared(mine):
    assert "it takes longer" in succeed("profile", "--diff", str(mine), str(mine)).stdout


def test_what_nccl_tests_printed_needs_a_profile_to_join(tmp_path):
    (tmp_path / "all_reduce.txt").write_text(NCCL)
    arguments = (
        "profile",
        "--nccl-tests",
        str(tmp_path / "all_reduce.txt"),
        "--nodes",
        "1",
        "--ranks-per-node",
        "8",
    )

    assert "no such profile" in fail(2, *arguments, "-o", str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("options", [("--show",), ("--diff", "mine.yaml")])
def test_the_tables_of_profiles_fit_a_narrow_terminal(options, width, mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = succeed("profile", *options, mine.name).stdout.splitlines()

    assert lines
    assert [line for line in lines if len(line) > width] == []


@pytest.mark.slow
def test_what_nccl_tests_printed_joins_a_profile(tmp_path, mine):
    (tmp_path / "all_reduce.txt").write_text(NCCL)

    shown = succeed(
        "profile",
        "--nccl-tests",
        str(tmp_path / "all_reduce.txt"),
        "--nodes",
        "1",
        "--ranks-per-node",
        "8",
        "-o",
        str(mine),
    ).stdout

    assert "all_reduce" in shown
    assert "8 ranks" in shown


def test_a_profile_without_measurements_takes_none(tmp_path):
    path = tmp_path / "mine.yaml"
    write_profile(UserProfile(profile_version=PROFILE_VERSION, device="cpu"), path)
    (tmp_path / "all_reduce.txt").write_text(NCCL)

    message = fail(
        2,
        "profile",
        "--nccl-tests",
        str(tmp_path / "all_reduce.txt"),
        "--nodes",
        "1",
        "--ranks-per-node",
        "8",
        "-o",
        str(path),
    )

    assert "does not say what it was measured on" in message


def test_the_schema_of_the_file_is_printed():
    assert "records" in json.loads(succeed("schema", "--profile").stdout)["properties"]


NCCL = (
    "# nThread 1 nGpus 8 minBytes 8388608 maxBytes 33554432 step: 2(factor) warmup "
    "iters: 5 iters: 20 agg iters: 1 validation: 1\n"
    "# all_reduce_perf\n"
    "#                                                              out-of-place     "
    "                  in-place\n"
    "#       size         count      type   redop    root     time   algbw   busbw "
    "#wrong     time   algbw   busbw #wrong\n"
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)   "
    "         (us)  (GB/s)  (GB/s)\n"
    "     8388608       2097152     float     sum      -1    134.5   62.37  109.15   "
    "   0    133.9   62.65  109.63      0\n"
    "    16777216       4194304     float     sum      -1    196.5   85.38  149.42   "
    "   0    195.6   85.77  150.10      0\n"
    "    33554432       8388608     float     sum      -1    319.3  105.09  183.90   "
    "   0    319.0  105.19  184.08      0\n"
)
