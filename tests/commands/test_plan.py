"""The command line: its output, its files, and one line of error and hint for every bad input."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from parplan.commands.options import option_values
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule, csv_rows
from parplan.planner.deadline import deadline_after
from parplan.planner.objective import Objective
from parplan.planner.plan.error_band import margin_text
from parplan.planner.plan.oom_risk import default_margin
from parplan.planner.plan.plan_file import read_plan
from parplan.planner.plan.prediction import Status
from parplan.planner.request import SearchOptions, SolverName
from parplan.planner.search.one_candidate import fastest_choice
from parplan.profiles.machines.machine_catalog import load_stack, stack_names
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import AttentionKernel, Stack
from parplan.report.names import OPTIMIZER_NAMES
from parplan.report.text import band_text
from tests.helpers.cases import mostly_slow
from tests.helpers.command_runs import fail, run, succeed

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--model", "gpt-tiny", "--gpu", "cpu", "--gpus", "2")
BIG = ("--model", "gpt-20b", "--gpus", "64")
MIDDLE = ("--model", "gpt-2.5b", "--gpus", "16")
DP_ONLY = ("--pp", "1", "--tp", "1", "--zero", "0")  # a small search
FEW_STATES = (Optimizer.SGD,)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plan_file(*arguments: str) -> Path:
    succeed(*(arguments or (*TINY, *DP_ONLY)))
    return Path("plan.yaml")


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> tuple[Result, Path]:
    """Returns a search of BIG and its plan file."""
    path = tmp_path_factory.mktemp("searched") / "plan.yaml"
    return succeed(*BIG, "--output", str(path)), path


# What a search prints and writes


def test_a_search_writes_the_plan_and_prints_its_summary_and_how_to_run_it(searched):
    result, path = searched

    plan = read_plan(path)
    assert plan.model.name == "gpt-20b"
    assert plan.mesh.num_ranks == 64
    assert plan.search.status is Status.OPTIMAL
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "gpt-20b, 20.3 B parameters, 44 layers | 64 x a100-80gb, 8 a node | "
        "1,024 x 2,048 tokens, bf16, Adam"
    )
    assert f"pp {plan.mesh.pp} x dp {plan.mesh.dp} x tp {plan.mesh.tp}" in result.stdout
    assert f"({plan.predicted.step_time_s.kind})" in result.stdout
    assert lines[-2:] == [
        f"wrote {path}, a bound for the stack megatron-core: no program runs it as it is "
        "priced; the nearest runs with",
        f"  plan export {path} --to megatron",
    ]


def test_a_plan_for_a_launcher_is_exported_without_a_loss(tmp_path):
    path = tmp_path / "plan.yaml"
    result = succeed(
        "--model", "gpt-1.5b", "--gpus", "8", "--for", "megatron", "-v", "-o", str(path)
    )

    assert "the gap is over the settings that megatron can say" in " ".join(result.stdout.split())
    assert result.stdout.splitlines()[-1] == f"  plan export {path} --to megatron"
    assert read_plan(path).search.launcher == "megatron"
    exported = succeed("export", str(path), "--to", "megatron", "--strict", "-o", str(tmp_path))
    assert "lost      nothing" in exported.stdout


def test_every_default_that_was_taken_is_printed_and_no_other():
    def assumed(*arguments: str) -> str:
        match = re.search(
            r"assumed: (.*?)\n\n", succeed(*arguments, *DP_ONLY, "--verbose").stdout, re.DOTALL
        )
        return " ".join(match[1].split()) if match else ""

    margin = default_margin("megatron-core").share
    assert assumed(*TINY) == (
        "--gpus-per-node 2, --global-batch-size 16 (the model's), --seq-length 64 (the model's), "
        "--precision bf16, --gradient-precision fp32, --optimizer adam, --stack megatron-core, "
        f"--attention flash (the stack's), --memory-margin {margin:g} "
        f"({margin_text(load_stack('megatron-core'), SearchOptions())})"
    )
    assert assumed(
        *TINY,
        "--precision",
        "fp32",
        "--memory-limit",
        "3GiB",
        "--global-batch-size",
        "8",
        "--objective",
        "memory",
    ) == (
        "--gpus-per-node 2, --seq-length 64 (the model's), --gradient-precision fp32, "
        "--optimizer adam, --stack megatron-core, --attention flash (the stack's), "
        "--max-slowdown 0.1"
    )
    assert assumed(
        *TINY,
        "--stack",
        "nanotron",
        "--attention",
        "unfused",
        "--memory-margin",
        "0",
        "--precision",
        "bf16",
    ) == (
        "--gpus-per-node 2, --global-batch-size 16 (the model's), --seq-length 64 (the model's), "
        "--gradient-precision fp32, --optimizer adam"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "name"),
    mostly_slow(OPTIMIZER_NAMES.items(), {(each, OPTIMIZER_NAMES[each]) for each in FEW_STATES}),
)
def test_the_optimizer_is_in_the_summary_the_plan_and_its_bytes(optimizer, name):
    out = succeed(*TINY, *DP_ONLY, "--optimizer", optimizer.value).stdout
    plan = read_plan(Path("plan.yaml"))

    assert re.search(rf"bf16, {name}$", out, re.MULTILINE)
    assert plan.training.optimizer is optimizer
    adam = read_plan(plan_file()).predicted.memory_gib[0].optimizer
    held = plan.predicted.memory_gib[0].optimizer
    assert held == adam if optimizer is Optimizer.ADAM else held < adam


@pytest.mark.parametrize("what", ["optimizer", "parameters", "lookup"])
def test_the_host_has_states_of_adam_alone(what):
    error = " ".join(fail(2, *MIDDLE, "--optimizer", "muon", "--offload", what).split())

    assert f"--offload {what}: states on the host are updated there" in error
    assert "use --optimizer adam" in error


@pytest.mark.parametrize("offload", ["states", "optimizer,parameters"])
def test_an_estimate_with_states_on_the_host_is_refused_too(offload):
    arguments = ("--gpus", "16", "--dp", "16", "--optimizer", "sgd", "--offload", offload)
    error = " ".join(fail(2, "estimate", *MIDDLE[:2], *arguments).split())

    assert "for --optimizer adam alone, not for sgd" in error


@pytest.mark.slow
def test_a_model_on_one_node_is_run_without_nnodes():
    assert succeed(*TINY, "--stack", "parplan").stdout.endswith(
        "  torchrun --nproc-per-node 2 -m parplan.executor plan.yaml\n"
    )


def test_the_same_request_writes_the_same_bytes():
    succeed(*TINY)
    succeed(*TINY, "--output", "again.yaml")

    assert Path("plan.yaml").read_bytes() == Path("again.yaml").read_bytes()


def test_json_is_the_plan_and_the_elapsed_time_and_nothing_else():
    body = json.loads(succeed(*TINY, "--json").stdout)

    assert body.pop("elapsed_s") >= 0
    assert body == yaml.safe_load(Path("plan.yaml").read_text())


@pytest.mark.slow
def test_output_dash_puts_the_plan_on_stdout_and_the_summary_on_stderr():
    result = succeed(*TINY, "--output", "-")

    assert yaml.safe_load(result.stdout)["model"]["name"] == "gpt-tiny"
    assert "tokens/s/GPU" in result.stderr
    assert not Path("plan.yaml").exists()


def test_pins_and_options_reach_the_search():
    succeed(
        *TINY,
        "--tp",
        "2",
        "--micro-batch-size",
        "2,4",
        "--zero",
        "0",
        "--recompute",
        "full",
        "--sequence-parallel",
        "--precision",
        "fp32",
        "--seq-length",
        "32",
        "--objective",
        "memory",
        "--max-slowdown",
        "0.5",
        "--solver",
        "cbc",
        "--time-limit",
        "60",
    )

    plan = read_plan(Path("plan.yaml"))
    assert (plan.mesh.tp, plan.training.seq_length, plan.training.precision) == (
        2,
        32,
        Precision.FP32,
    )
    assert plan.pipeline.micro_batch_size in (2, 4)
    assert plan.search.objective is Objective.MEMORY
    assert all(layer.sequence_parallel for layer in plan.layer_plans.values())
    assert len(plan.layer_plans["A"].recompute) == 10


def test_pipeline_pins_reach_the_search():
    succeed(*TINY, "--pp", "2", "--schedule", "interleaved", "--virtual-stages", "2")

    assert read_plan(Path("plan.yaml")).pipeline.schedule is Schedule.INTERLEAVED


@pytest.mark.slow
def test_the_stack_decides_attention_and_overlap_unless_they_are_asked_for():
    def trained(*arguments: str) -> tuple[str, str, bool]:
        succeed(*TINY, *DP_ONLY, *arguments)
        training = read_plan(Path("plan.yaml")).training
        return training.stack.name, training.attention, training.overlap_grad_reduce

    assert trained() == ("megatron-core", "flash", True)
    assert trained("--stack", "megatron-deepspeed") == ("megatron-deepspeed", "unfused", False)
    assert trained("--stack", "Megatron_DeepSpeed", "--attention", "flash") == (
        "megatron-deepspeed",
        "flash",
        False,
    )
    assert trained("--stack", "nanotron") == ("nanotron", "flash", False)


@pytest.mark.slow
def test_a_stack_file_is_taken_whole():
    Path("mine.yaml").write_text(
        "name: mine\nattention: unfused\nkernel_slowdown: 1.5\npartitioned_transfers: true\n"
    )

    succeed(*TINY, "--stack", "mine.yaml")

    assert read_plan(Path("plan.yaml")).training.stack == Stack(
        name="mine", attention="unfused", kernel_slowdown=1.5, partitioned_transfers=True
    )


@pytest.mark.slow
def test_a_memory_limit_is_kept():
    succeed(*MIDDLE, "--memory-limit", "14GiB")

    assert max(stage.total for stage in read_plan(Path("plan.yaml")).predicted.memory_gib) <= 14.001


@pytest.mark.slow
def test_a_cluster_file_says_what_and_how_many():
    source = (
        (ROOT / "configs/clusters/cpu.yaml")
        .read_text()
        .replace("name: cpu", "name: mine", 1)
        .replace("nodes: 1", "nodes: 2")
    )
    Path("mine.yaml").write_text(source)

    def planned(*arguments: str) -> tuple[str, int, int]:
        succeed("--model", "gpt-tiny", "--cluster", "mine.yaml", *DP_ONLY, *arguments)
        cluster = read_plan(Path("plan.yaml")).cluster
        return cluster.name, cluster.nodes, cluster.gpus_per_node

    assert planned() == ("mine", 2, 2)
    assert planned("--gpus", "8") == ("mine", 4, 2)
    assert planned("--gpus-per-node", "4") == ("mine", 1, 4)


@pytest.mark.slow
def test_explain_groups_the_pruned_candidates_by_reason():
    output = succeed(*MIDDLE, "--explain").stdout

    assert re.match(r"[\d,]+ candidates: [\d,]+ legal, [\d,]+ pruned before the search\n", output)
    assert re.search(r"^ +\d+  tp 8 does not divide the 20 attention heads", output, re.MULTILINE)
    assert "such as pp 1 x dp 2 x tp 8" in output


# The other commands


def test_show_prints_the_summary_of_the_search_with_layer_plans():
    searched = succeed(*TINY, "--tp", "2", "--megatron-sharding").stdout

    shown = succeed("show", "plan.yaml").stdout

    assert searched.splitlines()[0] == shown.splitlines()[0]
    assert re.search(r"A +0 +none +blocks 0-3", shown)
    assert re.search(r"qkv +- +Shard\(2\)@tp +weight Shard\(0\)@tp", shown)


@pytest.mark.slow
def test_show_names_the_stack_and_no_kernel_of_gpus_on_a_cpu():
    succeed(*TINY, "--stack", "torchtitan")

    assert re.search(
        r"^  stack +torchtitan +flash attention", succeed("show", "plan.yaml").stdout, re.MULTILINE
    )


def test_the_error_band_is_in_the_file_and_the_summary(searched):
    summary, path = searched[0].stdout, searched[1]

    plan = read_plan(path)
    band = plan.predicted.error_band
    assert band.time.like["stack megatron-core"] > 0
    assert f" s {band_text(band.time.share)} ({plan.predicted.step_time_s.kind})" in summary
    whole = " ".join(succeed("show", str(path)).stdout.split())
    assert f"eight in ten of {band.time.rows:,} held-out measured steps" in whole


@pytest.mark.slow
def test_the_band_of_a_plan_that_trains_in_part_is_unknown():
    summary = succeed(*TINY, "--freeze", "embedding").stdout

    assert "band unknown: no measured steps of training in part\n" in summary
    assert yaml.safe_load(Path("plan.yaml").read_text())["predicted"]["error_band"] is None


def test_show_json_is_the_plan():
    path = plan_file()

    assert json.loads(succeed("show", str(path), "--json").stdout) == yaml.safe_load(
        path.read_text()
    )


def test_estimate_prices_a_layout_and_derives_the_data_parallel_degree():
    output = succeed(
        "estimate",
        "--model",
        "gpt-22b",
        "--gpus",
        "16",
        "--tp",
        "4",
        "--pp",
        "2",
        "--micro-batch-size",
        "2",
        "--recompute",
        "full",
        "--zero",
        "1",
        "--sequence-parallel",
        "--output",
        "hand.yaml",
    ).stdout

    plan = read_plan(Path("hand.yaml"))
    assert plan.mesh.dp == 2
    assert plan.search.status is Status.ESTIMATE
    assert "priced by hand, not searched" in output
    assert "recompute full" in output
    assert "wrote hand.yaml" in output


def test_estimate_prices_schedules_that_split_the_backward_by_name_and_from_a_file():
    layout = (
        "estimate",
        "--model",
        "gpt-tiny",
        "--gpus",
        "2",
        "--pp",
        "2",
        "--global-batch-size",
        "4",
        "--stack",
        "parplan",
        "--json",
    )
    rows = csv_rows(Schedule.ZBV, 2, 4, 2)
    Path("lists.csv").write_text("\n".join(rows))

    named = json.loads(succeed(*layout, "--schedule", "zbv").stdout)
    from_file = json.loads(succeed(*layout, "--schedule-file", "lists.csv").stdout)

    assert (named["pipeline"]["schedule"], named["pipeline"]["virtual_stages"]) == ("zbv", 2)
    assert from_file["pipeline"]["actions"] == list(rows)
    assert named["predicted"]["step_time_s"] == from_file["predicted"]["step_time_s"]


@pytest.mark.parametrize(
    ("text", "how", "message"),
    [
        ("0F0,0B0", (), "lists.csv is of 1 pipeline ranks, --pp is 2"),
        ("0F0,0B0\n1F0,1B0\n", ("--schedule", "1f1b"), "--schedule-file says the schedule"),
        ("0F0,0B0\n1F0,1B0\n", (), "stage 0 and micro-batch 1 have nothing"),
        ("0F0;0B0\n1F0,1B0\n", (), "'0F0;0B0' is no action"),
    ],
)
def test_a_schedule_file_that_does_not_fit_is_an_error_with_the_place(text, how, message):
    Path("lists.csv").write_text(text)

    layout = (
        "--model",
        "gpt-tiny",
        "--gpus",
        "2",
        "--pp",
        "2",
        "--global-batch-size",
        "2",
        "--stack",
        "parplan",
    )

    assert message in fail(2, "estimate", *layout, "--schedule-file", "lists.csv", *how)


def test_estimate_writes_nothing_unless_asked():
    succeed("estimate", *TINY)

    assert not list(Path().iterdir())


def test_estimate_says_by_how_much_a_layout_does_not_fit():
    output = succeed("estimate", "--model", "gpt-175b", "--gpus", "8").stdout

    assert re.search(r"does not fit: [\d.,]+ GiB more than the device has", output)


def test_estimate_says_who_holds_the_states_and_what_the_host_holds():
    layout = (
        "--micro-batch-size",
        "1",
        "--zero",
        "3",
        "--zero-ranks",
        "8",
        "--offload",
        "states,activations",
        "--recompute",
        "full",
    )
    output = succeed("estimate", *BIG, *layout).stdout

    assert (
        "ZeRO 3 over 8 ranks, states on the host recompute full; kept on the host: all"
        in " ".join(output.split())
    )
    assert re.search(r"host +[\d.]+ GiB for a GPU +[\d.]+ GiB a node of 2,048", output)
    block = json.loads(succeed("estimate", *BIG, *layout, "--json").stdout)["layer_plans"]["A"]
    assert (block["offload"], block["keep_on_host"]) == (["states"], ["norm1"])


def test_estimate_keeps_on_the_host_what_is_named():
    layout = (*BIG, "--micro-batch-size", "1", "--keep-on-host")

    assert "kept on the host: fc1, fc2" in " ".join(
        succeed("estimate", *layout, "fc2,fc1").stdout.split()
    )
    assert "unknown operator 'fc3'" in fail(2, "estimate", *layout, "fc3")


def test_estimate_prices_a_layout_on_a_stack():
    def step_s(stack: str) -> float:
        Path("slow.yaml").write_text("name: slow\nkernel_slowdown: 1.5\n")
        Path("fast.yaml").write_text("name: fast\n")
        return json.loads(succeed("estimate", *BIG, "--stack", stack, "--json").stdout)[
            "predicted"
        ]["step_time_s"]["value"]

    assert step_s("slow.yaml") > 1.3 * step_s("fast.yaml")


@pytest.mark.slow
def test_models_and_clusters_are_listed():
    models, clusters = succeed("models").stdout, succeed("clusters").stdout

    assert re.search(r"^gpt-20b +20\.3 B +44 +6144 +64 \(64\) +2048 +1024\b", models, re.MULTILINE)
    assert re.search(r"^a100-80gb +79\.2 +312 .*fitted$", clusters, re.MULTILINE)
    assert re.search(r"^cpu .*assumed$", clusters, re.MULTILINE)


def test_stacks_are_listed():
    stacks = succeed("stacks").stdout

    assert re.search(r"^megatron-core +flash \(cudnn\) .* dp, tp, pp$", stacks, re.MULTILINE)
    rows = json.loads(succeed("stacks", "--json").stdout)["stacks"]
    assert {row["name"] for row in rows} == set(stack_names())


@pytest.mark.parametrize("command", ["models", "clusters", "stacks"])
def test_lists_are_json_too(command):
    rows = json.loads(succeed(command, "--json").stdout)[command]

    assert rows[0]["name"]


def test_the_published_schema_is_that_of_the_code():
    assert succeed("schema").stdout == (ROOT / "docs/plan.schema.json").read_text()


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["show"],
        ["estimate"],
        ["compare"],
        ["models"],
        ["clusters"],
        ["stacks"],
        ["schema"],
        ["validate"],
        ["calibrate"],
        ["trace"],
    ],
    ids="-".join,
)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_help_has_an_example(command, flag):
    assert "\nExamples:\n  plan" in succeed(*command, flag).stdout


def test_version_is_printed():
    assert succeed("--version").stdout.startswith("plan, ")


def test_the_choices_of_the_options_are_those_of_the_planner():
    assert set(Schedule) - {Schedule.CUSTOM} == set(
        option_values.SCHEDULES
    )  # that one comes with --schedule-file
    assert set(Recompute) == set(option_values.RECOMPUTE)
    assert set(Offload) == set(option_values.OFFLOAD)
    assert set(Precision) == set(option_values.PRECISIONS)
    assert set(Optimizer) == set(option_values.OPTIMIZERS)
    assert set(AttentionKernel) == set(option_values.ATTENTION)
    assert set(SolverName) == {"cbc", "highs"}
    assert set(Objective) == {"throughput", "memory", "peak"}


# Bad input: one error, one hint, the exit code


OF_64 = ("--global-batch-size", "64")  # a given batch is never raised


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ("--model", "gtp-20b", "--gpus", "8"),
            r"unknown model 'gtp-20b'\nhint: did you mean 'gpt-20b'",
            id="unknown-model",
        ),
        pytest.param(
            (*BIG, "--gpu", "a100-80"),
            r"unknown GPU 'a100-80'\nhint: did you mean 'a100-80gb'",
            id="unknown-gpu",
        ),
        pytest.param(
            (*BIG, "--stack", "megatron-cor"),
            r"unknown stack 'megatron-cor'\nhint: did you mean 'megatron-core'",
            id="stack",
        ),
        pytest.param(
            (*BIG, "--stack", "missing.yaml"), r"cannot read missing.yaml", id="no-stack-file"
        ),
        pytest.param(
            (), r"--model is missing\nhint: .*plan --model gpt-20b --gpus 64", id="nothing"
        ),
        pytest.param(("--model", "gpt-20b"), r"--gpus is missing", id="no-gpus"),
        pytest.param(
            ("--model", "gpt-20b", "--gpus", "12"),
            r"12 GPUs do not fill whole nodes of 8 .*\nhint: use --gpus 8 or",
            id="12-gpus",
        ),
        pytest.param(
            ("--model", "gpt-20b", "--gpus", "97", "--gpus-per-node", "97", *OF_64),
            r"no legal way to use 97 GPUs",
            id="prime",
        ),
        pytest.param(
            ("--model", "gpt-20b", "--gpus", "24", "--pp", "3", "--schedule", "interleaved"),
            r"ruled out: interleaved needs micro-batches in multiples of the 3 pipeline ranks",
            id="no-interleaving",
        ),
        pytest.param(
            ("--model", "gpt-20b", "--gpus", "-4"),
            r"--gpus is -4, it must be from 1 to 10,000,000",
            id="negative-gpus",
        ),
        pytest.param(
            (*BIG, "--tp", "3"), r"tp 3 does not divide the 64 attention heads", id="heads"
        ),
        pytest.param(
            (*BIG, "--pp", "5,6"),
            r"--pp 5,6 does not divide the 64 GPUs",
            id="pins-that-do-not-divide",
        ),
        pytest.param(
            (*BIG, "--pp", "2", "--dp", "2", "--tp", "2"),
            r"no --pp x --dp x --tp that is pinned makes 64",
            id="pins-together",
        ),
        pytest.param(
            (*BIG, "--micro-batch-size", "3"),
            r"--micro-batch-size 3 does not divide the 1024 sequences",
            id="micro-batch",
        ),
        pytest.param(
            (*BIG, "--dp", "64", "--micro-batch-size", "32"),
            r"--dp 64 x --micro-batch-size 32 does not",
            id="dp-x-micro-batch",
        ),
        pytest.param((*BIG, "--tp", "0"), r"--tp", id="tp-0"),
        pytest.param((*BIG, "--tp", "two"), r"--tp", id="tp-word"),
        pytest.param((*BIG, "--zero", "4"), r"--zero", id="zero-4"),
        pytest.param(
            (*BIG, "--schedule", "1f2b"),
            r"'1f2b' is not one of 'gpipe', '1f1b', 'interleaved'",
            id="schedule",
        ),
        pytest.param(
            (*BIG, "--global-batch-size", "-1"), r"--global-batch-size is -1", id="negative-batch"
        ),
        pytest.param(
            (*BIG, "--seq-length", "4096"),
            r"--seq-length is 4096, gpt-20b learns 2048 positions",
            id="positions",
        ),
        pytest.param(
            (*BIG, "--gpu", "v100-32gb", "--precision", "bf16"),
            r"v100-32gb has no bf16 .*\nhint: choose another",
            id="bf16",
        ),
        pytest.param(
            (*BIG, "--memory-limit", "72"),
            r"--memory-limit is '72'.*\nhint: for example --memory-limit 72GiB",
            id="no-unit",
        ),
        pytest.param(
            (*BIG, "--memory-limit", "72XB"), r"--memory-limit is '72XB'", id="unknown-unit"
        ),
        pytest.param((*BIG, "--memory-limit", "0GiB"), r"more than nothing", id="no-memory"),
        pytest.param((*BIG, "--memory-margin", "2"), r"--memory-margin is 2.0", id="margin"),
        pytest.param(
            (*BIG, "--objective", "memory", "--max-slowdown", "-1"),
            r"--max-slowdown is -1.0",
            id="slowdown",
        ),
        pytest.param(
            (*BIG, "--max-slowdown", "0.1"),
            r"--max-slowdown is for --objective memory or peak, "
            r"the objective is throughput\nhint: leave it out",
            id="no-slowdown",
        ),
        pytest.param(
            (*BIG, "--memory-slack", "0.1"),
            r"--memory-slack is for --objective memory, the objective is throughput",
            id="no-slack",
        ),
        pytest.param(
            (*BIG, "--objective", "memory", "--memory-slack", "0", "--max-slowdown", "0"),
            r"--memory-slack puts memory first.*\nhint: leave one of them out",
            id="two-orders",
        ),
        pytest.param(
            (*BIG, "--objective", "memory", "--memory-slack", "-1"),
            r"--memory-slack is -1.0, it must be from 0 to 1000",
            id="slack",
        ),
        pytest.param(
            (*BIG, "--objective", "memory", "--memory-slack", "0.1", "--offload", "optimizer"),
            r"--memory-slack plans without the host's memory",
            id="slack-with-host",
        ),
        pytest.param(
            (*BIG, "--objective", "memory", "--prefer", "fastest"),
            r"--prefer is for --objective throughput, the objective is memory\nhint: leave it out",
            id="no-preference",
        ),
        pytest.param(
            ("compare", *BIG, "--max-slowdown", "0.1"),
            r"--max-slowdown is for --objective memory or peak",
            id="compare-slowdown",
        ),
        pytest.param(
            ("max-model", "--gpus", "8", "--max-slowdown", "0.1"),
            r"--max-slowdown is for --objective",
            id="max-model-slowdown",
        ),
        pytest.param((*BIG, "--time-limit", "-1"), r"--time-limit is -1.0", id="time-limit"),
        pytest.param(
            (*BIG, "--gpu", "cpu", "--cluster", "x.yaml"),
            r"--gpu and --cluster",
            id="gpu-and-cluster",
        ),
        pytest.param(
            ("--model", "gpt-20b", "--cluster", "missing.yaml"),
            r"cannot read missing.yaml",
            id="no-cluster-file",
        ),
        pytest.param(
            ("--modl", "gpt-20b"),
            r"no such option '--modl'\nhint: did you mean '--model'",
            id="wrong-flag",
        ),
        pytest.param(
            (*TINY, "--for", "megatron", "--objective", "memory"),
            r"--for megatron and --objective memory exclude each other",
            id="objective-of-a-launcher",
        ),
        pytest.param(
            (*TINY, "--for", "fsdp2", "--zero", "1"),
            r"--zero 1: fsdp2 has the stages 0, 2, 3\nhint: pin one of these",
            id="zero-that-a-launcher-lacks",
        ),
        pytest.param(
            (*TINY, "--for", "torchtitan"),
            r"torchtitan has no configuration of gpt-tiny",
            id="model-that-a-launcher-lacks",
        ),
        pytest.param(
            (*TINY, "--for", "megatron", "--stack", "parplan"),
            r"--stack parplan is not how megatron runs",
            id="stack-of-another-program",
        ),
        pytest.param(
            ("--modle", "gpt-20b"),
            r"no such option '--modle'\nhint: did you mean '--model'",
            id="wrong-order-of-letters",
        ),
        pytest.param(
            ("shwo", "plan.yaml"),
            r"unknown command 'shwo'\nhint: did you mean 'show'",
            id="wrong-command",
        ),
        pytest.param(
            (*BIG, "models"), r"--model stands before models", id="options-before-a-command"
        ),
        pytest.param(
            ("--json", "models"), r"--json stands before models", id="json-before-a-command"
        ),
        pytest.param(
            ("show",), r"missing argument 'PLAN'\nhint: see plan show --help", id="no-plan"
        ),
        pytest.param(("show", "missing.yaml"), r"cannot read missing.yaml", id="missing-plan"),
        pytest.param(
            ("estimate", *BIG, "--tp", "8", "--dp", "2"),
            r"pp 1 x dp 2 x tp 8 is 16 GPUs, the cluster has 64",
            id="estimate-mesh",
        ),
        pytest.param(
            ("estimate", *TINY, "--micro-batch-size", "5"),
            r"the global batch of 16 is not micro-batch 5",
            id="estimate-batch",
        ),
    ],
)
def test_bad_input_is_one_error_and_one_hint(arguments, message):
    assert re.match(f"error: .*{message}", fail(2, *arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda text: "a: [1\n", r"plan.yaml:2: not YAML", id="broken"),
        pytest.param(lambda text: "- 1\n", r"a plan is a mapping, found a list", id="a-list"),
        pytest.param(
            lambda text: text.replace("plan_version: 2", "plan_version: 3"),
            r"plan_version is 3, .* reads 1 and 2",
            id="version",
        ),
        pytest.param(
            lambda text: text.replace("\npipeline:", "\npiepline:"),
            r"unknown key piepline\nhint: did you mean 'pipeline'",
            id="key",
        ),
        pytest.param(
            lambda text: text.replace("{pp:", "{ppp:"),
            r"unknown key mesh.ppp\nhint: did you mean 'pp'",
            id="inner-key",
        ),
        pytest.param(
            lambda text: text.replace("nics: 1", "nicks: 1"),
            r"unknown key node.nicks\nhint: did you mean 'nics'",
            id="cluster",
        ),
        pytest.param(
            lambda text: text.replace("plan: A", "plan: B"),
            r"unknown layer plan 'B' in plan.yaml: stages.0",
            id="layer-plan",
        ),
        pytest.param(
            lambda text: text.replace("rank: 0", "rank: 7"),
            r"stages.0: rank is 7, the mesh has pp 1",
            id="rank",
        ),
        pytest.param(
            lambda text: text.replace("stage: 0", "stage: 1"),
            r"predicted.memory_gib has 1 stages",
            id="memory",
        ),
        pytest.param(
            lambda text: re.sub(r"zero: \d", "zero: 5", text), r"zero is 5, it must be", id="value"
        ),
    ],
)
def test_a_broken_plan_file_is_one_error_and_one_hint(change, message):
    path = plan_file()
    path.write_text(change(path.read_text()))

    assert re.search(message, fail(2, "show", str(path)))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param("missing/plan.yaml", "missing: no such folder", id="no-folder"),
        pytest.param("file/plan.yaml", "file: not a folder", id="under-a-file"),
        pytest.param(".", "a folder", id="a-folder"),
        pytest.param("/dev/null", "not a regular file", id="a-device"),
    ],
)
def test_an_output_that_cannot_be_written_is_found_before_the_search(output, message, monkeypatch):
    monkeypatch.setattr("parplan.planner.search.find_plan.find_plan", None)
    Path("file").touch()

    assert re.match(
        f"error: cannot write .*{message}\nhint: .*--output", fail(2, *TINY, "--output", output)
    )


@pytest.mark.slow
def test_a_model_that_does_not_fit_says_how_much_is_missing_of_what_and_what_would_fit():
    result = run("--model", "gpt-175b", "--gpus", "8", "--tp", "8", "--offload", "none", "--json")

    assert (result.exit_code, result.stdout) == (3, "")
    assert re.fullmatch(
        r"error: gpt-175b does not fit on 8 x a100-80gb: .* on stage \d+, "
        r".* usable with --memory-margin [\d.]+: [\d.]+ GiB short; "
        r"the largest part is states .*\nhint: it fits with\n"
        r" +--gpus \d+  .* a step \(-\d+ % on the [\d,]+ s it would take with unlimited memory\)\n"
        r"( +not tried in 10 s: --tp\n)?",
        result.stderr,
    )


def test_a_time_limit_ends_the_search_with_what_was_found_and_its_gap(monkeypatch):
    looks_s = itertools.count(step=1e-6)  # counts looks: no machine is too slow
    in_looks = partial(deadline_after, clock=lambda: next(looks_s))
    monkeypatch.setattr("parplan.commands.requests.requests.deadline_after", in_looks)

    output = succeed(*MIDDLE, "--time-limit", "0.000001").stdout

    assert re.search(
        r"gap (under )?[\d.]+ % +stopped early; [\d,]+ layouts, [\d,]+ closed by", output
    )
    assert read_plan(Path("plan.yaml")).search.status is Status.FEASIBLE


# Ctrl-C and pipes


@pytest.mark.parametrize("number", mostly_slow([signal.SIGINT, signal.SIGTERM], {signal.SIGINT}))
def test_ctrl_c_and_sigterm_print_and_write_the_best_plan_so_far(number, monkeypatch):
    solved = []

    def interrupted(*arguments):
        if solved:
            signal.raise_signal(number)
        solved.append(arguments)
        return fastest_choice(*arguments)

    monkeypatch.setattr("parplan.planner.search.fastest_layouts.fastest_choice", interrupted)

    result = run(*MIDDLE)

    assert result.exit_code == 130
    assert re.search(r"gap (under )?[\d.]+ %.*stopped early \(Ctrl-C\)", result.stdout)
    assert read_plan(Path("plan.yaml")).search.status is Status.FEASIBLE


def test_ctrl_c_before_the_first_plan_is_one_line(monkeypatch):
    monkeypatch.setattr(
        "parplan.planner.search.fastest_layouts.fastest_choice",
        lambda *_: signal.raise_signal(signal.SIGINT),
    )

    result = run(*MIDDLE)

    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "interrupted before a plan was found; nothing was written\n"
    assert not Path("plan.yaml").exists()


def in_a_shell(*arguments: str, before: str = "", **settings) -> subprocess.Popen[str]:
    """Starts the command in another process, which runs the statements `before` it."""
    code = f"{before}from parplan import cli; cli.main({list(arguments)!r})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **settings,
    )


@pytest.mark.slow
def test_a_search_in_another_process_ends_on_sigint_without_a_traceback():
    process = in_a_shell("--model", "gpt-1t", "--gpus", "12288", "--explain")
    # the pruned candidates are listed just before the search, which takes seconds
    process.stdout.readline()
    time.sleep(0.3)

    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", mostly_slow([False, True], {True}))
def test_a_search_with_sigint_ignored_ends_on_sigterm_and_leaves_no_solver(whole_group, tmp_path):
    """A shell's background job ignores SIGINT; `timeout` signals the process and then its group."""
    pid, solver = tmp_path / "pid", tmp_path / "cbc"
    solver.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 600\n")
    solver.chmod(0o755)
    process = in_a_shell(
        *MIDDLE,
        *("--pp", "2,4", "--schedule", "1f1b"),  # which a solver places
        start_new_session=True,
        before=(
            f"import pulp, signal; pulp.PULP_CBC_CMD.pulp_cbc_path = {str(solver)!r}; "
            "signal.signal(signal.SIGINT, signal.SIG_IGN); "
        ),
    )
    while not pid.exists() or not pid.read_text().strip():
        time.sleep(0.01)

    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    if whole_group:
        os.killpg(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=60)

    assert (process.returncode, errors) == (130, "")
    assert "stopped early (Ctrl-C)" in output  # a balanced pipeline is found before any program
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.slow
def test_a_closed_pipe_is_silent():
    with in_a_shell("models") as process:
        process.stdout.close()
        errors = process.stderr.read()

    assert errors == ""


@pytest.mark.slow
def test_fp8_products_are_in_the_plan_and_a_device_without_them_is_an_error():
    plan = read_plan(plan_file("--model", "gpt-1.5b", "--gpus", "8", "--gpu", "h100-80gb", "--fp8"))
    assert plan.training.products is ProductFormat.FP8_DELAYED
    assert "bf16 with fp8-delayed products" in succeed("show", "plan.yaml").stdout

    assert "a100-80gb has no fp8 arithmetic" in fail(
        2, "--model", "gpt-1.5b", "--gpus", "8", "--fp8"
    )


@pytest.mark.slow
def test_narrow_weights_are_in_the_plan_and_a_stack_without_them_is_an_error():
    plan_file(
        *("--model", "gpt-1.5b", "--gpus", "8", "--gpu", "h100-80gb"),
        *("--precision", "fp8-current", "--narrow-weights"),
    )
    shown = " ".join(succeed("show", "plan.yaml").stdout.split())
    assert "bf16 with fp8-current products and weights" in shown
    assert "1 of an input until the backward pass, 2 of the casts of a weight" in shown

    error = fail(
        2, *("--model", "gpt-1.5b", "--gpus", "8", "--gpu", "h100-80gb", "--narrow-weights")
    )
    assert "stack megatron-core gathers no weights in bf16" in error


@pytest.mark.slow
def test_gradients_in_16_bits_are_asked_for_and_need_less_memory():
    def gradients_gib(*more):
        return (
            read_plan(
                plan_file("--model", "gpt-1.5b", "--gpus", "8", "--dp", "8", "--zero", "0", *more)
            )
            .predicted.memory_gib[0]
            .gradients
        )

    assert gradients_gib("--gradient-precision", "bf16") == pytest.approx(
        gradients_gib() / 2, rel=0.01
    )
