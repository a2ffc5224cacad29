"""One process for each measurement: figures come back unchanged, and failures are told apart."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from parplan.profiles.machines.measurements import CaseOutcome
from parplan.profiles.profiler import worker
from parplan.profiles.profiler.communication import comm_launch as launch
from parplan.profiles.profiler.measuring_child import outcome_of
from tests.helpers.programs import by_work, case, measured_alone, processes_left, steady

ROOT = Path(__file__).resolve().parents[3]


def failed(work: str, limit_s: float = 20.0) -> tuple[CaseOutcome, str]:
    record = measured_alone(case(work), limit_s=limit_s)

    assert record.case == case(work)
    assert record.measured is None
    return record.outcome, record.detail


@pytest.mark.parametrize(
    "program", [steady, "tests.helpers.programs:steady"], ids=["function", "name"]
)
def test_what_a_program_measures_comes_back_unchanged(program):
    record = measured_alone(case("linear", 3), program)

    assert record.outcome is CaseOutcome.MEASURED
    assert record.measured == steady(case("linear", 3), "cpu")


def test_what_a_program_prints_harms_nothing_and_is_not_shown(capfd):
    record = measured_alone(case("babbles"))

    assert record.measured == steady(case("babbles"), "cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("work", ["allocates", "small_blocks"])
def test_memory_that_runs_out_is_told(work):
    assert failed(work) == (CaseOutcome.OUT_OF_MEMORY, "MemoryError")


def test_memory_that_runs_out_in_torch_is_told():
    assert failed("of_torch") == (
        CaseOutcome.OUT_OF_MEMORY,
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    )


def test_the_cpu_allocators_own_error_is_out_of_memory():
    torch = pytest.importorskip("torch")

    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 50)

    assert outcome_of(error.value)[0] is CaseOutcome.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
            CaseOutcome.OUT_OF_MEMORY,
        ),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
            CaseOutcome.OUT_OF_MEMORY,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            CaseOutcome.OUT_OF_MEMORY,
        ),
        (
            NotImplementedError(
                "Could not run 'aten::_foo' with arguments from the 'CPU' backend."
            ),
            CaseOutcome.UNSUPPORTED,
        ),
        (RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'"), CaseOutcome.UNSUPPORTED),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), CaseOutcome.CRASHED),
        (ValueError("more rows than are out of memory"), CaseOutcome.CRASHED),
    ],
)
def test_what_an_error_means_is_read_from_its_type_and_text(error, outcome):
    assert outcome_of(error)[0] is outcome


@pytest.mark.parametrize(
    ("work", "outcome", "detail"),
    [
        ("exits", CaseOutcome.CRASHED, "exit code 7: last words"),
        ("leaves", CaseOutcome.CRASHED, "SystemExit: enough"),
        ("segfaults", CaseOutcome.CRASHED, "SIGSEGV"),
        ("is_killed", CaseOutcome.CRASHED, "SIGKILL"),
        ("raises", CaseOutcome.CRASHED, "ValueError: the shape is odd"),
        ("is_unsupported", CaseOutcome.UNSUPPORTED, "no transfers on a CPU"),
        (
            "returns_nothing",
            CaseOutcome.CRASHED,
            "TypeError: the program returned NoneType, needed is Measured",
        ),
        (
            "measures_nonsense",
            CaseOutcome.CRASHED,
            "ValueError: Out of range float values are not JSON compliant",
        ),
    ],
)
def test_a_failure_says_what_it_was(work, outcome, detail):
    assert failed(work) == (outcome, detail)


def test_a_program_that_does_not_exist_is_a_crash_that_names_it():
    record = measured_alone(case("linear"), "tests.programmes:measure")

    assert (record.outcome, record.detail) == (
        CaseOutcome.CRASHED,
        "ModuleNotFoundError: No module named 'tests.programmes'",
    )


def test_a_process_that_the_kernel_killed_for_lack_of_memory_is_out_of_memory(
    tmp_path, monkeypatch
):
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 7\noom_kill 3\n")
    monkeypatch.setattr(worker, "KERNEL_COUNTS", counts)

    assert worker._kernel_kills() == 3
    child = worker.start(by_work, case("sleeps"), "cpu", 20.0)
    counts.write_text("nr_free_pages 5\noom_kill 4\n")
    child.process.kill()
    wait(child.ready, 5.0)

    while (record := worker.poll_child(child)) is None:
        wait(child.ready, 0.1)
    assert (record.outcome, record.detail) == (
        CaseOutcome.OUT_OF_MEMORY,
        "killed by the kernel, which was out of memory",
    )


@pytest.mark.parametrize(
    ("work", "where"), [("sleeps", "_sleeps"), ("holds_the_interpreter", "_holds_the_interpreter")]
)
def test_a_hang_is_ended_and_says_where_it_was(work, where):
    outcome, detail = failed(work, limit_s=0.3)

    assert outcome is CaseOutcome.HUNG
    assert detail.startswith(f"no answer in 300 ms, last seen in {where} (programs.py:")


def test_a_process_that_cannot_end_itself_is_killed(monkeypatch):
    monkeypatch.setattr(worker, "GRACE_S", 0.2)

    assert failed("stops", limit_s=0.2) == (CaseOutcome.HUNG, "no answer in 200 ms")


def test_a_process_that_cannot_answer_any_more_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(worker, "GRACE_S", 0.2)

    assert failed("closes_everything", limit_s=1000.0)[0] in (
        CaseOutcome.HUNG,
        CaseOutcome.CRASHED,
    )  # as it notices itself, or not


def test_nothing_is_left_open_when_a_case_is_done():
    measured_alone(case("linear"))
    before = sorted(os.listdir("/proc/self/fd"))

    for work in ("linear", "exits", "raises"):
        measured_alone(case(work))

    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_script_without_a_guard_is_not_run_again_in_its_children(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\nfrom tests.helpers.programs import case, measured_alone\n"
        "print(measured_alone(case('linear')).outcome)\n"
    )

    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert (done.stdout, done.stderr) == ("once\nmeasured\n", "")


@pytest.mark.parametrize(("work", "limit_s"), [("sleeps", 1000.0), ("holds_the_interpreter", 1.0)])
def test_no_process_is_left_by_one_that_is_killed(work, limit_s):
    code = (
        "import time; from parplan.profiles.profiler.worker import start; "
        "from tests.helpers.programs import by_work, case; "
        f"child = start(by_work, case({work!r}), 'cpu', {limit_s}); "
        "print('begun', flush=True); time.sleep(1000)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    process.stdout.readline()

    process.kill()
    process.communicate()

    assert processes_left(process.pid) == []


@pytest.mark.slow
def test_a_server_that_died_is_started_again():
    from multiprocessing.forkserver import _forkserver

    measured_alone(case("linear"))
    os.kill(_forkserver._forkserver_pid, 9)
    time.sleep(0.05)

    assert measured_alone(case("linear")).measured == steady(case("linear"), "cpu")


def test_a_sigterm_of_the_whole_group_is_the_sessions_and_no_record_of_a_crash():
    from multiprocessing.forkserver import _forkserver

    worker.preload(("tests.helpers.programs",))
    child = worker.start(by_work, case("sleeps"), "cpu", 20.0)
    for pid in (child.process.pid, _forkserver._forkserver_pid):
        os.kill(pid, signal.SIGTERM)

    assert not wait(child.ready, 0.5)

    worker.end_child(child)


def test_an_interrupt_ends_the_ranks_that_measure_communication(tmp_path):
    def interrupted(line: str) -> None:
        raise KeyboardInterrupt

    command = [
        sys.executable,
        "-c",
        "import sys, time; print('begun', file=sys.stderr, flush=True); time.sleep(600)",
        str(tmp_path),
    ]

    with pytest.raises(KeyboardInterrupt):
        launch._run(command, deque(), interrupted)

    assert not [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in _read(path)
    ]


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
