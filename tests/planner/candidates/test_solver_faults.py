"""A CBC that fails or lies leaves the best plan so far with its gap, or an error with its log."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from itertools import product

import pulp
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parplan.cli import main
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.candidates.solver_faults import MOST_FAILURES, can_place
from parplan.planner.plan.plan_file import plan_to_yaml, read_plan
from parplan.planner.plan.prediction import Status
from parplan.planner.request import Constraints, SearchOptions, SolverName
from parplan.planner.solver import Unsolved
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.profiles.errors import SolverError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.cases import named
from tests.helpers.planning import find_plan
from tests.planner.test_solver import hard_problem, knapsack

REAL = pulp.PULP_CBC_CMD.pulp_cbc_path
LAST = "for last; do :; done; "  # the solution file is the last argument
SOLVE = f'{LAST}{shlex.quote(REAL)} "$@" >/dev/null; '
FAULTS = {
    "an-exit-code": ("exit 3", r"cbc failed: exit code 3; its log ends: Segmentation near row 7$"),
    "a-signal": (
        "kill -9 $$",
        r"cbc failed: it was ended by signal 9; its log ends: Segmentation near row 7$",
    ),
    "no-file": (
        "exit 0",
        r"cbc failed: wrote no solution \(No such file or directory\); "
        r"its log ends: Segmentation near row 7$",
    ),
    "an-empty-file": (
        f'{LAST}: > "$last"',
        "cbc failed: its solution is empty; its log ends: Segmentation near row 7$",
    ),
    "garbage": (
        f'{LAST}head -c 4000 /dev/urandom > "$last"',
        r"cbc (failed|ended without an answer)",
    ),
    "a-garbled-number": (
        f"""{SOLVE}sed -i 's/X0000000 .*/X0000000 one 0/' "$last" """,
        "cbc failed: ",
    ),
    "half-a-file": (
        f'{SOLVE}head -n 2 "$last" > "$last.half"; mv "$last.half" "$last"',
        r"failed: its solution has \d of \d+ variables",
    ),
    "half-a-line": (
        f'{SOLVE}head -c 60 "$last" > "$last.half"; mv "$last.half" "$last"',
        "failed: its solution breaks off in a line",
    ),
    "a-point-that-breaks-rows": (
        f"""{SOLVE}awk 'NR > 1 {{ $3 = 3 }} 1' "$last" > "$last.new"; mv "$last.new" "$last" """,
        r"gave an answer that breaks \d+ rows",
    ),
    "unbounded": (
        f'{LAST}echo "Unbounded - objective value 0" > "$last"',
        r"cbc ended without an answer \(unbounded\); its log ends: Seg",
    ),
}


# Their ranks may hold any number of blocks, so that every fastest choice is a program's.
PIPELINES = Constraints(pp=(2, 4, 8), schedule=(Schedule.ONE_F_ONE_B,), zero=(0, 1))


def find_pipeline(objective="throughput", **choices):
    entry = load_model("gpt-1.5b")
    training = TrainingSpec(
        global_batch_size=entry.global_batch_size, seq_length=entry.seq_length, stack=NEUTRAL
    )
    cluster = with_gpus(load_cluster("a100-80gb"), 8)
    return find_plan(entry.spec, cluster, training, objective, PIPELINES, **choices)


@pytest.fixture(scope="module")
def whole():
    return find_pipeline()


each_fault = pytest.mark.parametrize(("fault", "message"), list(FAULTS.values()), ids=list(FAULTS))


@pytest.fixture
def fake_cbc(tmp_path, monkeypatch):
    """Makes a CBC that works `after` times, then fails `times` times; returns its call counter."""

    def make(fault: str, after: int = 0, times: int = 1000):
        calls, script = tmp_path / "calls", tmp_path / "cbc"
        calls.touch()
        script.write_text(
            f"#!/bin/sh\necho >> {calls}\nn=$(wc -l < {calls})\n"
            f"if [ $n -le {after} ] || [ $n -gt {after + times} ]; "
            f'then exec {shlex.quote(REAL)} "$@"; fi\n'
            f'echo "Welcome to the CBC"; echo "Segmentation near row 7" >&2; echo; {fault}\n'
        )
        script.chmod(0o755)
        monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(script))
        return calls

    return make


@each_fault
def test_a_faulty_answer_is_an_error_with_the_last_line_of_the_log(fault, message, fake_cbc):
    fake_cbc(fault)

    with pytest.raises(SolverError, match=message) as error:
        knapsack()[0].solve(SolverName.CBC)

    assert "highs" in error.value.hint
    assert error.value.exit_code == 4


def test_a_fake_that_has_no_fault_is_the_real_solver(fake_cbc):
    fake_cbc("exit 3", after=1)

    assert knapsack()[0].solve(SolverName.CBC).objective == pytest.approx(-20)


def test_a_solver_that_does_not_stop_at_its_limit_is_ended(fake_cbc, monkeypatch):
    monkeypatch.setattr("parplan.planner.solver.GRACE_S", 0.2)
    fake_cbc("exec sleep 600")

    with pytest.raises(
        SolverError, match=r"did not stop at its limit of 0.1 s; its log ends: Segmentation"
    ):
        knapsack()[0].solve(SolverName.CBC, time_limit_s=0.1)


@pytest.mark.parametrize(
    ("mode", "content", "message"),
    [
        pytest.param(0o644, "#!/bin/sh\n", "cbc is not installed", id="not-executable"),
        pytest.param(
            0o755,
            "\x7fnot a program",
            r"cbc failed: .*cannot be run \(Exec format error\)",
            id="no-program",
        ),
    ],
)
def test_a_file_that_cannot_be_run_is_an_error(mode, content, message, tmp_path, monkeypatch):
    path = tmp_path / "cbc"
    path.write_text(content)
    path.chmod(mode)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(path))

    with pytest.raises(SolverError, match=message):
        knapsack()[0].solve(SolverName.CBC)


@pytest.mark.parametrize("fault", ["exit 3", "exec sleep 600"])
def test_no_file_of_the_solver_is_left_behind(fault, fake_cbc, tmp_path, monkeypatch):
    monkeypatch.setattr("parplan.planner.solver.GRACE_S", 0.2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    fake_cbc(fault, after=1)

    knapsack()[0].solve(SolverName.CBC, time_limit_s=5)
    with pytest.raises(SolverError):
        knapsack()[0].solve(SolverName.CBC, time_limit_s=0.1)

    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_solve_cut_off_by_its_limit_is_never_called_proven():
    """CBC may have a solution at that time, or nothing."""
    for limit_s in (1e-4, 0.05, 0.3):
        try:
            solution = hard_problem().solve(SolverName.CBC, time_limit_s=limit_s)
        except Unsolved:
            continue
        assert solution is not None
        assert not solution.proven


@pytest.mark.parametrize(("fault", "message"), named(FAULTS, {"half-a-file"}))
def test_a_fault_after_the_first_plan_keeps_it_with_an_honest_gap(fault, message, fake_cbc, whole):
    calls = fake_cbc(fault, after=2)

    plan = find_pipeline()

    assert len(calls.read_text()) == 2 + MOST_FAILURES  # it gave up then
    assert plan.search.status is Status.FEASIBLE
    assert plan.search.bound <= whole.search.value
    assert plan.search.gap == pytest.approx(1 - plan.search.bound / plan.search.value, abs=1e-5)
    assert plan.search.candidates.solved == 2
    assert plan.search.candidates.left >= MOST_FAILURES
    assert f"failed on {MOST_FAILURES} candidates" in plan.search.solver_failure


@pytest.mark.slow
def test_a_fault_on_one_candidate_leaves_only_that_one_open(fake_cbc, whole):
    fake_cbc("exit 3", after=2, times=1)

    plan = find_pipeline()

    assert plan.search.status is Status.FEASIBLE
    assert plan.search.candidates.left == 1
    assert plan.search.candidates.solved >= whole.search.candidates.solved - 1
    assert plan.search.solver_failure.endswith(
        "cbc failed: exit code 3; its log ends: Segmentation near row 7"
    )


@pytest.mark.slow
def test_a_fault_on_the_first_candidate_does_not_end_the_search(fake_cbc):
    fake_cbc("exit 3", times=1)

    plan = find_pipeline()

    assert plan.search.status is Status.FEASIBLE
    assert plan.search.gap > 0
    assert plan.search.candidates.left == 1


def test_a_solver_that_fails_from_the_start_is_an_error(fake_cbc):
    calls = fake_cbc("exit 3")

    with pytest.raises(SolverError, match="its log ends: Segmentation near row 7"):
        find_pipeline()

    assert len(calls.read_text()) == MOST_FAILURES


def test_a_solver_that_calls_everything_infeasible_is_not_believed(fake_cbc):
    fake_cbc(f'{LAST}echo "Infeasible - objective value 0" > "$last"')

    with pytest.raises(SolverError, match="cbc calls a problem infeasible that is not"):
        find_pipeline()


@pytest.mark.slow
def test_a_fault_in_the_second_pass_of_the_memory_objective_keeps_a_plan(fake_cbc):
    first = fake_cbc("exit 3", after=1000)
    find_pipeline()
    fastest = len(first.read_text())
    first.unlink()
    fake_cbc("exit 3", after=fastest)

    plan = find_pipeline("memory")

    assert plan.search.status is Status.FEASIBLE
    assert plan.search.solver_failure
    assert plan.search.bound <= plan.search.value


@pytest.mark.slow
def test_a_fault_in_the_first_pass_leaves_the_memory_objective_unproven(fake_cbc):
    fake_cbc("exit 3", after=1, times=1)

    plan = find_pipeline("memory")

    assert plan.search.status is Status.FEASIBLE
    assert "failed on 1 candidate," in plan.search.solver_failure


@pytest.mark.slow
def test_no_fault_leaves_no_word(fake_cbc, whole):
    fake_cbc("exit 3", after=1000)

    assert plan_to_yaml(find_pipeline()) == plan_to_yaml(whole)
    assert "solver_failure: null" in plan_to_yaml(whole)


def test_highs_that_is_missing_is_an_error_with_exit_code_4(monkeypatch):
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)

    with pytest.raises(SolverError, match="highs is not installed") as error:
        find_pipeline(options=SearchOptions(solver=SolverName.HIGHS))

    assert error.value.exit_code == 4


SMALL = ("--model", "gpt-1.5b", "--gpus", "8", "--pp", "2,4,8", "--schedule", "1f1b")
PROGRAMS_ONLY = ("--zero", "0,1")  # where every choice of blocks is a program's


@pytest.mark.slow
def test_the_command_warns_and_notes_what_the_solver_failed_on(fake_cbc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_cbc("exit 3", after=2)

    done = CliRunner().invoke(main, SMALL)

    assert done.exit_code == 0
    assert done.stderr.startswith(
        f"warning: the solver failed on {MOST_FAILURES} candidates, "
        "which nothing is proven about: cbc failed"
    )
    assert "stopped early; " in done.stdout
    assert "note      the solver failed on" in done.stdout
    assert read_plan(tmp_path / "plan.yaml").search.solver_failure in done.stderr


@pytest.mark.slow
def test_a_plan_that_needs_no_program_counts_none_that_failed(fake_cbc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_cbc("exit 3")

    done = CliRunner().invoke(main, SMALL)

    assert done.exit_code == 0
    assert done.stderr.startswith("warning: the solver failed on ")
    assert "integer program" not in done.stdout
    assert read_plan(tmp_path / "plan.yaml").search.certificate.programs == 0


@pytest.mark.slow
def test_the_command_ends_with_4_when_no_plan_was_found(fake_cbc, tmp_path):
    fake_cbc("exit 3")

    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, pulp; pulp.PULP_CBC_CMD.pulp_cbc_path = sys.argv.pop(1); "
            "from parplan import cli; cli.main()",
            pulp.PULP_CBC_CMD.pulp_cbc_path,
            *SMALL,
            *PROGRAMS_ONLY,
            "--output",
            str(tmp_path / "plan.yaml"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(
        "error: cbc failed: exit code 3; its log ends: Segmentation near row 7\nhint: "
    )


def column(num_blocks, zero):
    return StageColumn(((None, num_blocks),), zero, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0)


@settings(suppress_health_check=[HealthCheck.too_slow])  # other work may run beside it
@given(
    ranks=st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
    num_layers=st.integers(1, 12),
    tied=st.booleans(),
)
def test_what_can_be_placed_is_what_some_combination_of_columns_holds(ranks, num_layers, tied):
    options = [[column(*pair) for pair in rank] for rank in ranks]
    expected = any(
        sum(c.num_blocks for c in picked) == num_layers
        and (not tied or (picked[0].zero > 0) == (picked[-1].zero > 0))
        for picked in product(*options)
    )

    assert can_place(options, num_layers, tied=tied) is expected


def test_ctrl_c_ends_the_solver_with_the_search(fake_cbc, tmp_path):
    fake_cbc(f"echo $$ > {tmp_path}/pid; exec sleep 600")

    def interrupt():
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        knapsack()[0].solve(SolverName.CBC, time_limit_s=60)
    watcher.join()

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
