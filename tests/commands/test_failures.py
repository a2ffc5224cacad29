"""The goodput that commands print where failures are stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parplan.cli import main
from parplan.commands.options.failure_options import FailureOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.requests.failures import chooses_spares, failures_of, without_goodput
from parplan.commands.requests.requests import require_shares
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus

TINY = ["--model", "gpt-1.5b", "--gpus", "8", "--pp", "1", "--tp", "1", "--micro-batch-size", "8"]


@pytest.mark.slow
def test_a_plan_says_its_goodput_where_failures_are_stated(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    run = CliRunner().invoke(main, [*TINY, "-o", path, "--mtbf", "1000h", "--spare-nodes", "1"])
    assert run.exit_code == 0, run.output
    assert "a failure every 5.2 days" in run.output
    assert "1 spare node" in run.output
    shown = CliRunner().invoke(main, ["show", path, "--mtbf", "1000h", "--json"])
    goodput = json.loads(shown.stdout)["goodput"]
    assert goodput["failure_s"] == 1000 * 3600 / 8
    assert goodput["share"] == pytest.approx(
        goodput["running_share"] * goodput["ready_share"], abs=1e-6
    )
    assert "goodput" not in CliRunner().invoke(main, ["show", path]).stdout


def test_the_objective_goodput_chooses_how_many_nodes_train(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    two = ["--gpus", "2", "--gpus-per-node", "1", "--tp", "1", "--pp", "1", "--zero", "1"]
    asked = ["--model", "gpt-1.5b", *two, "--global-batch-size", "16", "-o", path]
    run = CliRunner().invoke(main, [*asked, "--objective", "goodput", "--mtbf", "10h"])
    assert run.exit_code == 0, run.output
    assert "1 of 2 GPUs train" in run.output
    shown = CliRunner().invoke(main, ["show", path, "--json"])
    body = json.loads(shown.stdout)
    assert body["cluster"]["nodes"] == 1
    assert (
        body["search"]["spares"]["failures"]["spare_nodes"] == body["goodput"]["spare_nodes"] == 1
    )
    assert body["search"]["spares"]["goodput"] == body["goodput"]["share"]


@pytest.mark.parametrize("flags", [{"method": "greedy"}, {"launchers": ("megatron",)}])
def test_numbers_of_nodes_are_of_the_search_of_the_planner(flags: dict[str, str]) -> None:
    asked = SearchFlags(objective="goodput", **flags)
    with pytest.raises(ConfigError, match="--objective goodput chooses how many nodes train"):
        chooses_spares(asked, FailureOptions(mtbf="1h"), described=True)
    assert not chooses_spares(asked, FailureOptions(mtbf="1h", spare_nodes=0), described=True)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"robust": 0.2}, "--robust"),
        ({"objective": "pareto"}, "--objective pareto"),
        ({}, "--mtbf"),
    ],
)
def test_pools_that_divide_the_batch_refuse_what_they_do_not_do(
    flags: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=f"--pools data does not go with {what}"):
        require_shares(SearchFlags(pools="data", **flags), failures=what == "--mtbf")
    require_shares(SearchFlags(pools="data"), failures=False)
    require_shares(SearchFlags(**flags), failures=True)


def test_the_objective_goodput_needs_failures_and_takes_the_fastest_plan() -> None:
    run = CliRunner().invoke(main, [*TINY, "--objective", "goodput"])
    assert run.exit_code == 2
    assert "--objective goodput needs the time between failures" in run.output

    assert without_goodput(
        SearchFlags(objective="goodput"), FailureOptions(mtbf="1h")
    ) == SearchFlags(objective="throughput")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (FailureOptions(storage="1GB/s"), "--storage is for the goodput"),
        (FailureOptions(mtbf="50"), "--mtbf is '50', it must be a number and a unit"),
        (FailureOptions(mtbf="1h", storage="1GB"), "--storage is '1GB'"),
        (FailureOptions(mtbf="0h"), "--mtbf is 0h, it must be more than nothing"),
    ],
)
def test_failures_that_cannot_be_are_named(options: FailureOptions, text: str) -> None:
    cluster = with_gpus(load_cluster("a100-80gb", what="GPU"), 8, None)
    with pytest.raises(ConfigError, match=text):
        failures_of(options, cluster)
