"""`plan compare` prices both sides alike, its parts add up, and losses are as plain as gains."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from parplan.costmodels.step_breakdown import NAMES
from parplan.planner.launchers.compare_described import compare
from parplan.planner.plan.plan_file import read_plan, write_plan
from parplan.planner.plan.prediction import Quantity
from parplan.planner.plan.ratio_band import plan_shape, ratio_share
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.search.comparison import MEMORY_NAMES, Comparison
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB
from tests.helpers.command_runs import fail, succeed
from tests.helpers.planning import find_plan

SMALL = ("--model", "gpt-2.5b", "--gpus", "8", "--global-batch-size", "16")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def printed(*arguments: str) -> str:
    result = succeed("compare", *arguments)
    assert result.stderr == ""
    return result.stdout


@cache
def small_plan(pins: Constraints | None = None):
    entry = load_model("gpt-2.5b")
    training = TrainingSpec(global_batch_size=16, seq_length=entry.seq_length, stack=NEUTRAL)
    return find_plan(
        entry.spec, with_gpus(load_cluster("a100-80gb"), 8), training, constraints=pins
    )


def compared(*names: str, pins: Constraints | None = None, **options) -> Comparison:
    return compare(small_plan(pins), names, SearchOptions(**options))


def part_table(
    output: str, title: str, names: tuple[str, ...]
) -> tuple[dict[str, list[float]], list[float]]:
    """Returns the printed numbers of the parts and of their last line, for each side."""
    lines = output[output.index(title) :].split("\n\n")[0].splitlines()[2:]
    rows = {line.split()[0]: [float(cell) for cell in line.split()[1:]] for line in lines}
    last = "step" if "compute" in names else "total"
    return {name: values for name, values in rows.items() if name in names}, rows[last]


# The comparison itself


@pytest.mark.slow
def test_the_differences_of_the_parts_add_up_to_the_difference_of_the_step_and_of_the_memory():
    comparison = compared(
        "megatron", "megatron-defaults", "zero-3", pins=Constraints(pp=(2,), tp=(2,))
    )

    for row in comparison.rows:
        assert row.side is not None
        parts_s = [
            theirs - ours
            for theirs, ours in zip(
                row.side.parts.values, comparison.ours.parts.values, strict=True
            )
        ]
        memory = [
            theirs - ours
            for theirs, ours in zip(
                row.side.memory_bytes, comparison.ours.memory_bytes, strict=True
            )
        ]
        assert sum(parts_s) == pytest.approx(
            row.side.step_s - comparison.ours.step_s, rel=1e-9, abs=1e-9
        )
        assert sum(memory) == pytest.approx(
            row.side.fullest.total - comparison.ours.fullest.total, rel=1e-9, abs=1.0
        )


@pytest.mark.slow
def test_a_tie_is_a_step_inside_the_band_of_ours():
    comparison = compared("megatron-defaults")
    side = comparison.ours
    band = comparison.share_of(side)
    assert band == ratio_share(
        side.plan.predicted.error_band, plan_shape(side.plan), plan_shape(side.plan)
    )

    for share, tie in ((0.99, True), (1.01, False), (-0.99, True), (-1.01, False)):
        assert comparison.is_tie(replace(side, step_s=side.step_s * (1 + share * band))) is tie


@pytest.mark.slow
def test_ours_free_of_pins_is_never_behind_megatron_in_the_price_that_the_search_minimises():
    plan = small_plan()
    optimum = compare(plan, ["megatron"], SearchOptions()).rows[0].baseline.optimum

    assert optimum is not None
    assert plan.search.value <= optimum.price.closed_form_s + 1e-6


@pytest.mark.slow
def test_a_plan_file_of_other_prices_is_priced_again():
    plan = small_plan()
    old = replace(
        plan,
        predicted=replace(
            plan.predicted, step_time_s=Quantity(value=1.0, kind=plan.predicted.step_time_s.kind)
        ),
    )

    assert compare(plan, [], SearchOptions()).filed_step_s is None
    stale = compare(old, [], SearchOptions())
    assert stale.filed_step_s == 1.0
    assert stale.ours.plan == plan


# What it prints


@pytest.mark.slow
def test_the_printed_parts_add_up_and_leave_out_what_is_nothing():
    output = printed(*SMALL, "--baseline", "megatron,zero-3,fsdp", "--pp", "2")

    for title, names in (("of the mean GPU", NAMES), ("GiB of the fullest GPU", MEMORY_NAMES)):
        rows, last = part_table(output, title, names)
        assert rows
        assert [sum(column) for column in zip(*rows.values(), strict=True)] == pytest.approx(
            last, abs=0.005 * len(names)
        )
    assert "tensor" not in part_table(output, "of the mean GPU", NAMES)[0]
    assert re.search(r"^  ours +\d+ ms +[\d,]+ +[\d.]+ % ", output, re.MULTILINE)
    assert "the pins hold for ours" in output
    assert "tie: the ratio to our step time is inside its error band, +- " in output


@pytest.mark.slow
def test_it_says_in_what_ours_loses():
    slow = printed(*SMALL, "--tp", "4", "--pp", "1", "--zero", "0", "--baseline", "zero-1,fsdp")

    assert re.search(
        r"zero-1 takes [\d.]+ % less time[;,] .* Ours loses in step time", " ".join(slow.split())
    )
    assert re.search(
        r"fsdp takes .* GiB less redundant over all GPUs\. Ours loses in .*redundant memory",
        " ".join(slow.split()),
    )


def test_the_same_plan_on_both_sides_takes_as_long_and_loses_nothing():
    output = " ".join(
        printed(
            *SMALL,
            "--zero",
            "1",
            "--pp",
            "1",
            "--tp",
            "1",
            "--recompute",
            "none",
            "--baseline",
            "zero-1",
        ).split()
    )

    assert (
        "zero-1 takes as long; as much at the peak, as much redundant over all GPUs step times are"
        in output
    )


@pytest.mark.slow
def test_a_baseline_that_does_not_fit_says_by_how_much_and_the_others_stay():
    output = " ".join(
        printed("--model", "gpt-20b", "--gpus", "16", "--baseline", "zero-1,zero-3").split()
    )

    match = re.search(
        r"zero-1 does not fit: its leanest \(pp 1 x dp 16 x tp 1, micro-batch 1 x 64\) "
        r"needs ([\d.]+) GiB on stage 0, ([\d.]+) GiB more than the ([\d.]+) usable",
        output,
    )
    assert match
    need, short, usable = map(float, match.groups())
    assert short == pytest.approx(need - usable, abs=0.11)
    assert "zero-1 no fit - - - - -" in output
    assert re.search(r"zero-3 takes [\d.]+ % longer", output)


@pytest.mark.slow
def test_a_baseline_without_a_legal_layout_says_so():
    arguments = (
        "--model",
        "gpt-1.5b",
        "--gpus",
        "8",
        "--global-batch-size",
        "4",
        "--recompute",
        "full",
    )
    output = " ".join(printed(*arguments, "--baseline", "zero-1").split())

    assert "zero-1 has no legal layout on 8 GPUs with a global batch of 4" in output


def test_the_json_has_every_number_and_nothing_else_is_printed():
    document = json.loads(
        printed(
            "--model",
            "gpt-1.5b",
            "--gpus",
            "4",
            "--global-batch-size",
            "8",
            "--baseline",
            "all",
            "--json",
        )
    )

    assert [row["name"] for row in document["baselines"]] == [
        "megatron",
        "megatron-defaults",
        "megatron-guide",
        "deepspeed-3d",
        "torchtitan",
        "merak",
        "zero-1",
        "zero-2",
        "zero-3",
        "fsdp",
    ]
    ours = document["ours"]
    for row in document["baselines"]:
        assert row["fits"]
        assert sum(row["difference"]["parts_s"].values()) == pytest.approx(
            row["step_time_s"] - ours["step_time_s"], abs=1e-9
        )
        assert row["slower"] == pytest.approx(row["step_time_s"] / ours["step_time_s"] - 1)
        assert row["peak_memory_gib"] == pytest.approx(sum(row["memory_gib"].values()))
        assert row["peak_memory_gib"] <= document["memory_limit_gib"]


@pytest.mark.slow
def test_the_json_of_a_baseline_that_does_not_fit_has_its_shortfall():
    (row,) = json.loads(
        printed(
            *SMALL,
            "--memory-limit",
            "40GiB",
            "--baseline",
            "zero-1",
            "--recompute",
            "none",
            "--json",
        )
    )["baselines"]
    (none,) = json.loads(
        printed("--model", "gpt-20b", "--gpus", "16", "--baseline", "zero-1", "--json")
    )["baselines"]

    assert row["fits"]
    assert not none["fits"]
    assert none["short_gib"] > 0


@pytest.mark.slow
def test_the_memory_limit_holds_for_the_baselines_too():
    free = json.loads(printed(*SMALL, "--baseline", "zero-3", "--json"))
    tight = json.loads(printed(*SMALL, "--memory-limit", "10GiB", "--baseline", "zero-3", "--json"))

    assert free["baselines"][0]["peak_memory_gib"] > 10
    assert tight["baselines"][0]["peak_memory_gib"] <= 10
    assert tight["memory_limit_gib"] == 10


@pytest.mark.slow
def test_a_plan_file_is_compared_as_it_is():
    plan = small_plan(Constraints(tp=(2,)))
    write_plan(plan, Path("plan.yaml"))

    document = json.loads(printed("plan.yaml", "--baseline", "fsdp", "--json"))

    alone = {"cp": 1, "ep": 1, "etp": 1, "tp_rows": 1, "context_form": None}
    degrees = {"pp": plan.mesh.pp, "dp": plan.mesh.dp, "tp": 2, **alone}
    assert document["ours"]["mesh"] == degrees | {"order": plan.mesh.order.value}
    assert document["ours"]["step_time_s"] == pytest.approx(
        plan.predicted.step_time_s.value, rel=1e-5
    )
    assert document["filed_step_time_s"] is None
    assert read_plan(Path("plan.yaml")) == plan


def test_a_plan_file_that_needs_more_than_the_limit_is_said_to():
    write_plan(small_plan(), Path("plan.yaml"))
    limit_gib = (
        max(memory.total for memory in read_plan(Path("plan.yaml")).predicted.memory_gib) - 1
    )

    output = " ".join(
        printed(
            "plan.yaml", "--memory-limit", f"{limit_gib:.2f}GiB", "--baseline", "zero-3"
        ).split()
    )

    assert "GiB, more than the" in output


# What it refuses


def test_an_unknown_baseline_is_refused_with_the_nearest_name():
    message = fail(2, "compare", *SMALL, "--baseline", "megatron,zero3")

    assert "unknown baseline 'zero3'" in message
    assert "did you mean 'zero-3'?" in message


@pytest.mark.parametrize(
    "more", [("--gpus", "8"), ("--model", "gpt-1.5b"), ("--objective", "memory"), ("--tp", "2")]
)
def test_a_plan_file_and_a_request_exclude_each_other(more):
    write_plan(small_plan(), Path("plan.yaml"))

    assert f"{more[0]} and a plan file exclude each other" in fail(2, "compare", "plan.yaml", *more)


def test_neither_a_plan_nor_a_model_is_refused():
    assert "--model is missing" in fail(2, "compare")


@pytest.mark.slow
def test_a_request_that_nothing_fits_ends_as_the_search_ends():
    assert "does not fit" in fail(
        3, "compare", "--model", "gpt-175b", "--gpus", "8", "--offload", "none"
    )


def test_sizes_are_in_bytes_inside_and_in_gib_outside():
    comparison = compared("zero-3")

    assert comparison.rows[0].side is not None
    assert comparison.rows[0].side.fullest.total / GIB == pytest.approx(
        max(memory.total for memory in comparison.rows[0].side.plan.predicted.memory_gib), abs=1e-3
    )
