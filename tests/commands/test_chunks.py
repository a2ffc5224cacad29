"""plan estimate and plan show of blocks in chunks, as a user types them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from parplan.costmodels.host.state_location import Access
from parplan.planner.plan.plan_file import read_any_plan, read_plan, write_plan
from parplan.planner.runs.run_file import ChunkMoved, PredictedAndMeasured, write_run
from tests.helpers.command_runs import fail, run, succeed
from tests.helpers.synthetic_runs import estimated, run_of

ASKED = (
    "--model",
    "gpt-tiny",
    "--gpus",
    "2",
    "--gpu",
    "v100-32gb",
    "--precision",
    "fp16",
    "--stack",
    "parplan",
)
CHUNKS = ("--offload", "optimizer,parameters")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("chunks") / "plan.yaml"
    succeed(
        "estimate", *ASKED, *CHUNKS, "--host-blocks", "2", "--memory-limit", "2GiB", "-o", str(path)
    )
    return path


def homes(*options):
    """Returns host states and eviction policy by layer plan of the estimate."""
    plan = json.loads(succeed("estimate", *ASKED, *options, "--json").stdout)
    kept = {
        name: layer_plan["offload"]
        for name, layer_plan in plan["layer_plans"].items()
        if layer_plan["layer"] == "block"
    }
    return kept, plan["chunks"] and plan["chunks"]["eviction"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(CHUNKS, ({"A": ["optimizer", "parameters"]}, "opt"), id="all-on-the-host"),
        pytest.param(
            (*CHUNKS, "--host-blocks", "1"),
            ({"A": ["optimizer"], "B": ["optimizer", "parameters"]}, "opt"),
            id="the-rest-optimizer",
        ),
        pytest.param(
            (*CHUNKS, "--host-blocks", "1", "--host-optimizer", "1", "--eviction", "lru"),
            ({"A": [], "B": ["optimizer"], "C": ["optimizer", "parameters"]}, "lru"),
            id="the-rest-stays",
        ),
        pytest.param(
            ("--offload", "optimizer", "--host-optimizer", "1"),
            ({"A": [], "B": ["optimizer"]}, "opt"),
            id="optimizer",
        ),
        pytest.param(
            ("--offload", "parameters", "--host-blocks", "1"),
            ({"A": [], "B": ["optimizer", "parameters"]}, "opt"),
            id="parameters",
        ),
        pytest.param((), ({"A": []}, None), id="without"),
    ],
)
def test_options_say_the_homes_of_blocks(options, expected):
    assert homes(*options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param((*CHUNKS[:1], "optimizer,states"), "states is of whole layers", id="states"),
        pytest.param(("--host-blocks", "1"), "--host-blocks is of chunks", id="without-chunks"),
        pytest.param(
            ("--chunk-access", "operator"),
            "--chunk-access is of chunks",
            id="operators-without-chunks",
        ),
        pytest.param(
            ("--memory-limit", "2GiB"), "--memory-limit is of chunks", id="a-limit-of-nothing"
        ),
        pytest.param(
            ("--offload", "optimizer", "--host-blocks", "1"),
            "--offload has no parameters",
            id="blocks-without-parameters",
        ),
        pytest.param(
            (*CHUNKS, "--host-optimizer", "1"), "with parameters all go", id="which-are-the-others"
        ),
        pytest.param(
            (*CHUNKS, "--host-blocks", "99"), "the model has 4 blocks", id="more-than-there-are"
        ),
        pytest.param(
            (*CHUNKS, "--host-blocks", "3", "--host-optimizer", "2"),
            "are 5 blocks, the model has 4",
            id="more-together",
        ),
        pytest.param((*CHUNKS, "--ep", "2"), "ep 2", id="experts"),
        pytest.param((*CHUNKS, "--zero", "2"), "sharded as with ZeRO 3", id="zero"),
        pytest.param(
            (*CHUNKS, "--module", "tests.helpers.external_modules:small"),
            "only the executor's own blocks",
            id="module",
        ),
    ],
)
def test_what_does_not_fit_together_is_said(options, message):
    assert message in " ".join(fail(2, "estimate", *ASKED, *options).split())


@pytest.mark.slow
def test_blocks_used_an_operator_at_a_time_are_in_the_file_the_check_and_the_moments(tmp_path):
    path = tmp_path / "plan.yaml"
    more = ("--recompute", "full", "--chunk-access", "operator", "-o", str(path))
    succeed("estimate", *ASKED, *CHUNKS, "--host-blocks", "2", *more)

    assert read_plan(path).chunks.access is Access.OPERATOR
    assert "blocks used an operator at a time" in " ".join(
        succeed("show", str(path)).stdout.split()
    )
    assert "with the bytes of the file" in succeed("check", str(path)).stdout
    moments = succeed("show", str(path), "--chunks").stdout
    assert "part" in moments.splitlines()[1].split()
    document = json.loads(succeed("show", str(path), "--chunks", "--json").stdout)
    backward = [each for each in document["moments"] if each["work"] == "B" and each["block"] == 3]
    # gpt-tiny has four parts; three of them run again before the backward pass
    assert [(each["part"], each["again"]) for each in backward[:7]] == [
        *((part, True) for part in (0, 1, 2)),
        *((part, False) for part in (3, 2, 1, 0)),
    ]


def test_a_search_takes_the_access_that_is_pinned(tmp_path):
    path = tmp_path / "plan.yaml"
    pins = ("--tp", "1", "--dp", "2", "--micro-batch-size", "1", "--memory-limit", "1.2GiB")
    succeed("--model", *ASKED[1:], *CHUNKS, *pins, "--chunk-access", "operator", "-o", str(path))

    chunks = read_plan(path).chunks
    assert chunks is None or chunks.access is Access.OPERATOR


def test_a_traced_module_is_used_a_shard_at_a_time():
    module = ("--model", "tests.helpers.external_modules:small", "--gpus", "1", "--gpu", "cpu")

    error = fail(2, *module, "--chunk-access", "operator")

    assert "a shard is one function to the executor" in " ".join(error.split())


def test_a_limit_that_is_too_small_says_the_smallest():
    error = " ".join(fail(3, "estimate", *ASKED, *CHUNKS, "--memory-limit", "0.7GiB").split())

    assert "need at least" in error
    assert "the limit leaves nothing for tensors beside the reserve" in error


def test_a_host_that_is_too_small_says_what_to_keep_there():
    assert "keep fewer blocks on the host: --host-blocks" in " ".join(
        fail(3, "estimate", *ASKED, *CHUNKS, "--host-memory", "1MiB").split()
    )


def test_show_has_the_groups_and_what_they_move(plan_file):
    text = succeed("show", str(plan_file)).stdout

    assert "2 of 4 blocks on the host the optimizer of 2 more," in " ".join(text.split())
    assert [
        line.split()[1]
        for line in text.splitlines()
        if line.startswith("      0  ") and line.endswith("%")
    ] == ["optimizer", "host"]
    assert "evicting by opt" in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("optimizer",), "the optimizer of 4 of 4 blocks on the host"),
        (("optimizer", "--host-optimizer", "0"), "0 of 4 blocks on the host"),
    ],
)
def test_the_summary_says_whose_states_leave_the_device(options, expected):
    assert expected in succeed("estimate", *ASKED, "--offload", *options).stdout


def test_show_has_the_fullest_moments_for_people_and_all_for_programs(plan_file):
    text = succeed("show", str(plan_file), "--chunks").stdout
    assert "in after the update" in text.splitlines()[-1]
    body = json.loads(succeed("show", str(plan_file), "--chunks", "--rank", "0", "--json").stdout)

    assert "fullest of" in text
    assert len(body["moments"]) % 8 == 0  # forward and backward of four blocks
    assert all(
        sum(moment[f"{name}_bytes"] for name in ("always", "pool", "group", "other"))
        <= body["device_bytes"]
        for moment in body["moments"]
    )


def test_check_prices_the_chunks_again_and_compares_them_with_the_file(plan_file, tmp_path):
    plan = read_plan(plan_file)
    as_filed = succeed("check", str(plan_file)).stdout
    (stage,) = json.loads(succeed("check", str(plan_file), "--json").stdout)["stages"]
    assert "every stage fits its device and its host, with the bytes of the file" in as_filed
    assert stage["now"] == stage["file"]
    assert stage["now"]["chunks"]["in_bytes"] == plan.chunks.ranks[0].in_bytes > 0

    ranks = (replace(plan.chunks.ranks[0], in_bytes=1),)
    write_plan(replace(plan, chunks=replace(plan.chunks, ranks=ranks)), tmp_path / "changed.yaml")
    changed = succeed("check", str(tmp_path / "changed.yaml")).stdout
    assert "stage 0 of the file is not as priced now" in changed

    small = replace(plan, cluster=replace(plan.cluster, host_memory_bytes=1024))
    write_plan(small, tmp_path / "small.yaml")
    result = run("check", str(tmp_path / "small.yaml"))
    assert result.exit_code == 3
    assert "the host of a node has too little memory for what the plan keeps there" in result.stdout


@pytest.mark.slow
def test_show_draws_the_moments(plan_file, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "moments.svg"
    succeed("show", str(plan_file), "--chunks", "--plot", str(picture))

    text = picture.read_text()
    assert text.startswith("<?xml")
    assert text.count("<path") > 10


def test_a_picture_without_chunks_is_refused(plan_file, tmp_path):
    assert (
        "is for --chunks" in run("show", str(plan_file), "--plot", str(tmp_path / "x.png")).stderr
    )
    assert "not .png" in fail(
        2, "show", str(plan_file), "--chunks", "--plot", str(tmp_path / "x.txt")
    )
    assert "pipeline rank 1" in fail(2, "show", str(plan_file), "--chunks", "--rank", "1")


@pytest.mark.parametrize(
    ("counted", "verdict", "cell"),
    [(5000, "all as predicted", "5,000"), (4000, "NOT as predicted", "4,000 for 5,000")],
)
def test_show_of_a_run_has_what_chunks_moved_beside_what_was_predicted(
    counted, verdict, cell, tmp_path
):
    same, run = PredictedAndMeasured(predicted=7, measured=7), run_of(estimated(pp=2, dp=2))
    moved = ChunkMoved(
        in_bytes=PredictedAndMeasured(predicted=5000, measured=counted),
        out_bytes=same,
        gathered_bytes=same,
        reduced_bytes=same,
        device_bytes=same,
    )
    write_run(
        replace(run, ranks=tuple(replace(rank, chunks=moved) for rank in run.ranks)),
        tmp_path / "run.json",
    )

    text = succeed("show", str(tmp_path / "run.json")).stdout

    assert "a run of" in text
    assert text.count(f"  {cell} ") == 4  # ranks
    assert text.splitlines()[-1].strip() == verdict
    assert "--chunks is for plans" in fail(2, "show", str(tmp_path / "run.json"), "--chunks")
    assert (
        json.loads(succeed("show", str(tmp_path / "run.json"), "--json").stdout)["run_version"] == 1
    )


@pytest.mark.slow
def test_check_compares_the_chunks_of_a_traced_module_with_the_file(tmp_path):
    path = tmp_path / "plan.yaml"
    source = ("--model", "tests.helpers.traced_modules:unlike", "--trace", "--seq-length", "16")
    machine = ("--gpus", "2", "--gpu", "a100-40gb", "--stack", "parplan", "--dp", "2")
    sizes = ("--global-batch-size", "4", "--micro-batch-size", "1")
    succeed("estimate", *source, *machine, *sizes, *CHUNKS, "-o", str(path))

    text = succeed("check", str(path)).stdout
    (stage,) = json.loads(succeed("check", str(path), "--json").stdout)["chunks"]

    plan = read_any_plan(path)
    assert "chunks of one GPU as scheduled now" in text
    assert stage["as_filed"] is True
    assert stage["now"]["chunks"]["in_bytes"] == plan.chunks.ranks[0].in_bytes > 0
    ranks = (replace(plan.chunks.ranks[0], in_bytes=1),)
    write_plan(replace(plan, chunks=replace(plan.chunks, ranks=ranks)), path)
    assert "not as in the file" in succeed("check", str(path)).stdout


def test_the_communication_of_chunks_is_asked_for_and_in_the_file(tmp_path):
    path = tmp_path / "plan.yaml"
    single = ("--chunk-communication", "single")

    succeed("estimate", *ASKED, *CHUNKS, *single, "-o", str(path))

    assert read_any_plan(path).chunks.communication == "single"
    error = fail(2, "estimate", *ASKED, *single)
    assert "--chunk-communication is of chunks" in " ".join(error.split())
