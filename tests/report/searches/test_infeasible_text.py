"""The hint of a request that does not fit: what it prints can be typed, and gives what it says."""

from __future__ import annotations

import re
import signal
from functools import partial

import pytest
from click.testing import CliRunner

from parplan import cli
from parplan.planner.request import Constraints, PlanRequest, SearchOptions
from parplan.planner.search.one_candidate import fastest_choice
from parplan.planner.search.relaxations import Relaxation, Relaxations, relaxations
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.report.searches import infeasible_text as relaxations_report
from parplan.report.searches.infeasible_text import hint_text
from tests.helpers.cases import mostly_slow

BASE = (
    "--model",
    "llama3-8b",
    "--gpus",
    "8",
    "--global-batch-size",
    "16",
    "--seq-length",
    "4096",
    "--offload",
    "none",
)
ENOUGH_S = 300.0  # no search of these is cut off
CLUSTER = with_gpus(load_cluster("a100-80gb"), 8)
ASKED = PlanRequest(
    model=load_model("gpt-tiny").spec,
    cluster=CLUSTER,
    constraints=Constraints(),
    training=TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL),
    options=SearchOptions(),
)


def relaxation(flags, step_s=1.0, **fields):
    return Relaxation(flags=flags, request=ASKED, step_s=step_s, **{"proven": True, **fields})


@pytest.mark.slow
@pytest.mark.parametrize(
    "pinned",
    [
        pytest.param(
            ("--recompute", "none", "--memory-limit", "17GiB"), id="a-pin", marks=pytest.mark.slow
        ),
        pytest.param(
            (
                "--tp",
                "1",
                "--pp",
                "1",
                "--dp",
                "8",
                "--zero",
                "0",
                "--recompute",
                "none",
                "--memory-margin",
                "0.1",
            ),
            id="a-mesh",
        ),
        pytest.param(
            (
                "--forbid",
                "zero=3",
                "--tp",
                "1",
                "--dp",
                "8",
                "--pp",
                "1",
                "--memory-limit",
                "35GiB",
            ),
            id="a-ban",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_the_hint_says_can_be_typed_and_takes_what_it_says(pinned, monkeypatch):
    monkeypatch.setattr(
        relaxations_report, "relaxations", partial(relaxations, budget_s=ENOUGH_S)
    )  # also on a busy machine
    result = CliRunner().invoke(cli.main, [*BASE, *pinned])
    assert (result.exit_code, result.stdout) == (3, ""), result.output
    error, hint, *lines = result.stderr.splitlines()
    assert error.startswith("error: llama3-8b does not fit on 8 x a100-80gb: ")
    assert hint == "hint: it fits with"
    assert lines

    for line in lines:
        how, cost = re.split(r"\s{2,}", line.strip(), maxsplit=1)
        flags, _, without = how.partition("without ")
        kept = " ".join(pinned).replace(without, "").split()
        rerun = CliRunner().invoke(cli.main, [*BASE, *kept, *flags.split()])
        assert rerun.exit_code == 0, rerun.output
        assert f"step      {cost.partition(' a step')[0]} " in rerun.stdout


@pytest.mark.parametrize("after", mostly_slow(range(3), {1}))
def test_ctrl_c_ends_the_search_for_ways_out_and_not_the_error(after, monkeypatch):
    """The interrupted search has a plan by then, with which it would end otherwise."""
    solved = []

    def interrupted(*arguments):
        if len(solved) >= after:
            signal.raise_signal(signal.SIGINT)
        solved.append(arguments)
        return fastest_choice(*arguments)

    monkeypatch.setattr("parplan.planner.search.fastest_layouts.fastest_choice", interrupted)

    result = CliRunner().invoke(cli.main, [*BASE, "--recompute", "none", "--memory-limit", "17GiB"])

    assert (result.exit_code, result.stdout) == (3, "")
    assert re.fullmatch(
        r"error: llama3-8b does not fit .*\nhint: ask for more GPUs or pin less; .* \(Ctrl-C\)\n",
        result.stderr,
    )
    assert len(solved) == after


def test_the_hint_is_a_table_with_the_reference_once():
    answer = Relaxations(
        found=(
            relaxation(("--zero 3",), 41.2),
            relaxation(("--tp 8", "--dp 1"), 55.0, proven=False, dropped=("--forbid tp=8",)),
            relaxation(
                ("--memory-margin 0.01",), 80.0, note="below the 0.04 that measured runs ask for"
            ),
            relaxation(("--gpus 16",), None),
        ),
        unlimited_s=36.8,
        untried=("--recompute",),
    )

    assert hint_text(answer, CLUSTER).splitlines() == [
        "it fits with",
        "        --zero 3                             41.2 s a step "
        "(+12 % on the 36.8 s it would take with unlimited memory)",
        "        --tp 8 --dp 1 without --forbid tp=8  at most 55.0 s a step (+49 %)",
        "        --memory-margin 0.01                 80.0 s a step (+117 %), "
        "below the 0.04 that measured runs ask for",
        "        --gpus 16                            its step was not searched",
        "      not tried in 10 s: --recompute",
    ]


def test_without_a_way_out_the_hint_says_how_far_it_looked():
    assert (
        hint_text(Relaxations(found=(), unlimited_s=1.0, untried=()), CLUSTER)
        == "no cluster up to 512 GPUs fits; use a larger device"
    )
