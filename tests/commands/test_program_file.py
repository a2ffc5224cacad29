"""`plan --write-lp` writes the certifying program, and another solver reproduces its optimum."""

from __future__ import annotations

from pathlib import Path

import highspy
import pytest

from parplan.planner.plan.plan_file import read_plan
from parplan.planner.search import search_results
from parplan.planner.search.certificate import with_program
from parplan.profiles.units import US_PER_S
from tests.helpers.cases import mostly_slow
from tests.helpers.command_runs import fail, run, succeed

SMALL = ("--model", "gpt-2.5b", "--gpus", "8", "--global-batch-size", "64", "--tp", "1")
ONE_RANK = (*SMALL, "--for", "none", "--pp", "1", "--memory-limit", "14GiB")
PIPELINE = (*SMALL, "--for", "none", "--pp", "4", "--schedule", "1f1b", "--memory-limit", "14GiB")
LAUNCHER = (*SMALL, "--for", "megatron")
TABLE = (*SMALL, "--for", "fsdp2,deepspeed")
UNLIKE = (
    "--model",
    "deepseek-tiny",
    "--for",
    "none",
    "--gpus",
    "4",
    "--pp",
    "2",
    "--global-batch-size",
    "16",
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def optimum_s(path: str) -> float:
    """Returns the seconds of the optimum that HiGHS finds in a file."""
    solver = highspy.Highs()
    solver.silent()
    solver.setOptionValue("threads", 1)  # as the planner: a process has one number of threads
    assert solver.readModel(path) == highspy.HighsStatus.kOk
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return solver.getInfo().objective_function_value / US_PER_S


@pytest.mark.parametrize("suffix", mostly_slow([".lp", ".mps"], {".lp"}))
@pytest.mark.parametrize(
    "request_of",
    [
        pytest.param(ONE_RANK, id="one-rank"),
        pytest.param(PIPELINE, id="pipeline", marks=pytest.mark.slow),
        pytest.param(LAUNCHER, id="launcher"),
        pytest.param(TABLE, id="fastest-launcher"),
        pytest.param(UNLIKE, id="unlike-blocks", marks=pytest.mark.slow),
    ],
)
def test_highs_finds_the_optimum_of_the_plan_in_the_file(request_of, suffix):
    succeed(*request_of, "--write-lp", f"program{suffix}")

    certifying = read_plan(Path("plan.yaml")).search.certificate.plan
    assert optimum_s(f"program{suffix}") == pytest.approx(certifying.optimum_s, abs=1e-5)
    assert certifying.gap == 0.0


@pytest.mark.slow
def test_an_older_file_is_kept_beside_the_new_one():
    Path("program.lp").write_text("older", encoding="utf-8")

    result = succeed(*ONE_RANK, "--write-lp", "program.lp")

    assert "wrote program.lp: the program that certifies the plan" in result.stderr
    assert Path("program.lp.1").read_text(encoding="utf-8") == "older"
    assert optimum_s("program.lp") > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--write-lp", "p.txt"), "--write-lp p.txt: a program is written as .lp or .mps"),
        (("--write-lp", "no/p.lp"), "no such folder"),
        (("--write-lp", "p.lp", "-o", "p.lp"), "--write-lp and --output both name p.lp"),
        (("--write-lp", "p.lp", "--objective", "memory"), "--objective memory exclude each other"),
        (("--write-lp", "p.lp", "--objective", "pareto"), "--objective pareto exclude each other"),
        (("--write-lp", "p.lp", "--search", "mcmc"), "--search mcmc exclude each other"),
    ],
)
def test_a_file_without_a_program_is_refused_before_the_search(options, message):
    assert message in fail(2, *SMALL, *options)
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_plan_that_no_program_certifies_is_written_without_one(monkeypatch):
    monkeypatch.setattr(
        search_results,
        "certified",
        lambda replayed, record, session: (replayed, with_program(record, None, session)),
    )

    result = run(*ONE_RANK, "--write-lp", "program.lp")

    assert result.exit_code == 4
    assert "no integer program certifies this plan, so program.lp was not written" in result.stderr
    assert Path("plan.yaml").exists()
    assert not Path("program.lp").exists()
