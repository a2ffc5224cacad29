"""Sessions of measurements: order, budget, devices at once, and failures.

Nothing is lost or done twice however a session ends.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from parplan.profiles.machines.measurements import CaseOutcome, CasePass, Record
from parplan.profiles.profiler import measuring_session as session
from parplan.profiles.profiler.journal import open_journal
from parplan.profiles.profiler.measuring_session import Measurements, SessionOptions, run_session
from parplan.profiles.profiler.session_progress import SessionProgress
from tests.helpers.programs import (
    ASKED,
    apart,
    by_work,
    case,
    logged,
    meeting,
    processes_left,
    steady,
)

ROOT = Path(__file__).resolve().parents[3]
NUM_CASES = 30


def cases(work: str, count: int):
    return [case(work, size) for size in range(1, count + 1)]


def measured(actual) -> Record:
    return Record(case=actual, outcome=CaseOutcome.MEASURED, measured=steady(actual, "cpu"))


@pytest.fixture
def journal(tmp_path):
    journal = open_journal(tmp_path / "x.journal", ASKED)
    yield journal
    journal.close()


def ran(
    journal, requested, program=None, devices=("cpu",), on_progress=None, **options
) -> Measurements:
    """A session of `program`, or of one that logs what it begins."""
    program = program or partial(logged, str(journal.path.with_name("log")))
    return run_session(
        requested,
        program,
        devices,
        journal,
        SessionOptions(
            **{
                "deadline_s": 60.0,
                "hang_limit_s": 20.0,
                "modules": ("tests.helpers.programs",),
                **options,
            }
        ),
        on_progress,
    )


def log(journal) -> list[str]:
    """Cases in the order in which they were begun."""
    path = journal.path.with_name("log")
    return (
        [line.rpartition(" on ")[0] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def test_all_cases_are_measured_once_and_in_their_order(journal):
    requested = random.Random(1).sample(cases("linear", 6), 6)

    measurements = ran(journal, [*requested, requested[0]])

    assert measurements == Measurements(
        records=tuple(map(measured, requested)), missed=(), interrupted=False
    )
    assert log(journal) == [case.key for case in requested]


def test_failures_are_recorded_and_the_others_complete(journal):
    works = (
        "linear",
        "allocates",
        "softmax",
        "exits",
        "segfaults",
        "is_unsupported",
        "sleeps",
        "babbles",
        "gelu",
    )
    outcomes = {
        "allocates": CaseOutcome.OUT_OF_MEMORY,
        "exits": CaseOutcome.CRASHED,
        "segfaults": CaseOutcome.CRASHED,
        "is_unsupported": CaseOutcome.UNSUPPORTED,
        "sleeps": CaseOutcome.HUNG,
    }

    measurements = ran(journal, [case(work) for work in works], by_work, hang_limit_s=2.0)

    assert [record.outcome for record in measurements.records] == [
        outcomes.get(work, CaseOutcome.MEASURED) for work in works
    ]
    assert [record.measured for record in measurements.records] == [
        None if work in outcomes else steady(case(work), "") for work in works
    ]


def test_what_the_journal_holds_is_not_measured_again_not_even_failures(journal):
    requested = cases("linear", 5)
    kept = [
        measured(requested[1]),
        Record(case=requested[3], outcome=CaseOutcome.HUNG, detail="no answer"),
    ]
    for record in kept:
        journal.append(record)

    measurements = ran(journal, requested)

    assert log(journal) == [requested[index].key for index in (0, 2, 4)]
    assert measurements.records == tuple(
        kept[1] if case is requested[3] else measured(case) for case in requested
    )


def test_failures_are_measured_again_when_asked(journal):
    requested = cases("linear", 3)
    journal.append(measured(requested[0]))
    journal.append(Record(case=requested[1], outcome=CaseOutcome.OUT_OF_MEMORY))

    measurements = ran(journal, requested, retry_failed=True)

    assert log(journal) == [requested[1].key, requested[2].key]
    assert measurements.records == tuple(map(measured, requested))


def test_a_failure_that_is_not_reached_again_stays(journal):
    failure = Record(case=case("linear"), outcome=CaseOutcome.OUT_OF_MEMORY)
    journal.append(failure)

    measurements = ran(journal, [case("linear")], retry_failed=True, deadline_s=0.0)

    assert measurements == Measurements(records=(failure,), missed=(), interrupted=False)


def test_a_record_of_other_passes_is_no_record_of_the_case(journal):
    second = Record(
        case=session.Case(
            work="linear",
            sizes=(("size", 1),),
            precision="fp32",
            passes=(CasePass(name="forward"),),
        ),
        outcome=CaseOutcome.CRASHED,
    )
    journal.append(second)

    assert ran(journal, [case("linear")]).records == (measured(case("linear")),)


def test_no_case_starts_when_the_time_is_over(journal, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 100.0 if len(journal.records) >= 2 else 0.0)
    monkeypatch.setattr(session, "time", clock)
    requested = cases("linear", 5)

    measurements = ran(journal, requested)

    assert measurements == Measurements(
        records=tuple(map(measured, requested[:2])), missed=tuple(requested[2:]), interrupted=False
    )
    assert log(journal) == [case.key for case in requested[:2]]


def test_devices_work_at_the_same_time(journal, tmp_path):
    (tmp_path / "met").mkdir()

    measurements = ran(
        journal,
        [case(work, 3) for work in "abc"],
        partial(meeting, str(tmp_path / "met")),
        ("d0", "d1", "d2"),
    )

    assert [record.outcome for record in measurements.records] == [CaseOutcome.MEASURED] * 3


def test_a_device_has_one_case_at_a_time_and_works_of_the_host_have_it_alone(journal, tmp_path):
    requested = [case("launch" if index % 4 == 2 else "linear", index + 1) for index in range(12)]

    measurements = ran(journal, requested, partial(apart, str(tmp_path)), ("d0", "d1", "d2"))

    assert measurements.records == tuple(map(measured, requested))


def test_progress_counts_what_is_done_what_failed_and_what_runs(journal):
    requested, told = [case(work) for work in ("linear", "exits", "gelu")], []
    journal.append(measured(requested[0]))

    ran(journal, requested, by_work, on_progress=told.append)

    first, last = told[0], told[-1]
    assert (first.done, first.total, first.failed, first.running, first.expected_s) == (
        1,
        3,
        0,
        (requested[1].key,),
        None,
    )
    assert (last.done, last.total, last.failed, last.running, last.expected_s) == (3, 3, 1, (), 0.0)
    assert [progress.done for progress in told] == sorted(progress.done for progress in told)
    assert all(0 < progress.budget_s <= 60 for progress in told)


@pytest.fixture
def _ctrl_c():
    """SIGINT interrupts as in a shell's foreground; tests may run with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupting(actual, times: int):
    def interrupt(progress: SessionProgress) -> None:
        for _ in range(times * (progress.running == (actual.key,))):
            signal.raise_signal(signal.SIGINT)

    return interrupt


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_ends_what_runs_and_keeps_what_is_done(journal):
    requested = [case("linear"), case("gelu"), case("sleeps"), case("softmax")]

    measurements = ran(journal, requested, by_work, on_progress=interrupting(requested[2], times=1))

    assert measurements == Measurements(
        records=tuple(map(measured, requested[:2])), missed=tuple(requested[2:]), interrupted=True
    )
    assert ran(journal, [requested[3]]).records == (measured(requested[3]),)


@pytest.mark.usefixtures("_ctrl_c")
def test_a_second_ctrl_c_does_not_wait(journal):
    requested = [case("linear"), case("sleeps")]

    with pytest.raises(KeyboardInterrupt):
        ran(journal, requested, by_work, on_progress=interrupting(requested[1], times=2))

    assert list(journal.records) == [requested[0].key]
    assert multiprocessing.active_children() == []


# kill -9


class Killed:
    """A session in a process of its own, over cases that say in a log when they begin."""

    def __init__(self, folder: Path) -> None:
        self.journal, self.log = folder / "x.journal", folder / "log"
        self.process: subprocess.Popen[str]

    def begin(self) -> None:
        arguments = f"{str(self.journal)!r}, {str(self.log)!r}, {NUM_CASES}"
        code = f"from tests.helpers.programs import main; main({arguments})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def begun(self) -> list[str]:
        return (
            [line.rpartition(" on ")[0] for line in self.log.read_text().splitlines()]
            if self.log.exists()
            else []
        )

    def kill(self, more: int, then_s: float) -> None:
        """Some moments after `more` cases have begun."""
        target = min(len(self.begun()) + more, NUM_CASES)
        while len(self.begun()) < target and self.process.poll() is None:
            time.sleep(0.002)
        time.sleep(then_s)
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_a_session_killed_five_times_ends_as_one_that_was_not(tmp_path):
    draw = random.Random(6)
    killed = Killed(tmp_path)
    journaled = set()
    for round_ in range(6):
        before = len(killed.begun())
        killed.begin()
        if round_ < 5:
            killed.kill(draw.randrange(0, 5), draw.uniform(0.0, 0.02))
        else:
            assert killed.process.communicate(timeout=60)[0] == "done\n"
        assert processes_left(killed.process.pid) == []

        started = killed.begun()[before:]
        assert not journaled & set(started), "measured again"
        assert max(Counter(started).values(), default=0) <= 1
        journal = open_journal(killed.journal, ASKED)
        journal.close()
        assert set(journal.records) >= journaled
        assert all(record == measured(record.case) for record in journal.records.values())
        assert len(set(started) - set(journal.records)) <= 2, (
            "no more than one case in flight on each of the two devices"
        )
        journaled = set(journal.records)

    lines = killed.journal.read_bytes().splitlines()
    assert journaled == {requested_case.key for requested_case in cases("logged", NUM_CASES)}
    assert len(lines) == 1 + NUM_CASES
