"""Runs cases in order, one at a time on every device, until all are done or the time is over.

Every record is in the journal before the next case starts. Cases in the journal are not measured
again, so a session that was killed or ran out of time continues where it stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from parplan.profiles.interrupts import on_ctrl_c
from parplan.profiles.machines.measurements import Case, CaseOutcome, Record
from parplan.profiles.profiler.journal import Journal
from parplan.profiles.profiler.measuring_child import Program
from parplan.profiles.profiler.session_progress import OnProgress, SessionProgress
from parplan.profiles.profiler.worker import Child, end_child, poll_child, preload, start

# Works that use the host and its memory; a concurrent case on another device would disturb them.
ALONE = frozenset({"transfer", "host_adam", "launch"})
_TICK_S = 0.5  # between two checks of the clock and of Ctrl-C


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The result of a session: records in the order of the cases, and the cases not reached.

    `interrupted` is True if Ctrl-C ended it.
    """

    records: tuple[Record, ...]
    missed: tuple[Case, ...]
    interrupted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The limits of a session.

    deadline_s      seconds from now after which no case starts; a running case may finish
    hang_limit_s    seconds after which one case counts as hung
    retry_failed    measures journal records without figures again
    modules         slow imports of the processes (torch, the program's module), preloaded once
    """

    deadline_s: float
    hang_limit_s: float
    retry_failed: bool = False
    modules: Sequence[str] = ()


def run_session(
    cases: Sequence[Case],
    program: Program,
    devices: Sequence[str],
    journal: Journal,
    options: SessionOptions,
    on_progress: OnProgress | None = None,
) -> Measurements:
    """Measures the cases that the journal does not hold, in order, each in its own process.

    Raises ConfigError if the journal cannot be written or no process can start.
    """
    preload(options.modules)
    tell = on_progress or (lambda progress: None)
    session = _Session(cases, journal, options.retry_failed, time.monotonic() + options.deadline_s)
    with _noticed_ctrl_c() as interrupts:
        try:
            while not interrupts and session.start(program, devices, options.hang_limit_s):
                tell(session.progress())
                session.collect()
        finally:
            session.stop()
    tell(session.progress())
    return session.measurements(interrupted=bool(interrupts))


class _Session:
    """Waiting cases, running cases by device, and the journal."""

    def __init__(
        self, cases: Sequence[Case], journal: Journal, retry_failed: bool, over_s: float
    ) -> None:
        self._cases = tuple(dict.fromkeys(cases))
        self._journal, self._over_s = journal, over_s
        self._waiting = deque(
            case for case in self._cases if not _settled(self._record(case), retry_failed)
        )
        self._running: dict[str, Child] = {}
        self._finished = 0
        self._spent_s = 0.0
        self._num_devices = 1

    def _record(self, case: Case) -> Record | None:
        """The journal's record of exactly this case; one with its key may have other passes."""
        record = self._journal.records.get(case.key)
        return record if record is not None and record.case == case else None

    def start(self, program: Program, devices: Sequence[str], limit_s: float) -> bool:
        """Gives idle devices the next cases while there is time. Returns True if anything runs."""
        self._num_devices = len(devices)
        for device in devices:
            if device not in self._running and self._may_start():
                self._running[device] = start(program, self._waiting.popleft(), device, limit_s)
        return bool(self._running)

    def _may_start(self) -> bool:
        if not self._waiting or time.monotonic() >= self._over_s:
            return False
        works = {child.case.work for child in self._running.values()}
        return not works or not ALONE & {self._waiting[0].work, *works}

    def collect(self) -> None:
        """Waits for news and appends finished records to the journal."""
        wait([news for child in self._running.values() for news in child.ready], _TICK_S)
        for device, child in list(self._running.items()):
            record = poll_child(child)
            if record is not None:
                del self._running[device]
                self._finished += 1
                self._spent_s += time.monotonic() - child.started_s
                self._journal.append(record)

    def stop(self) -> None:
        """Ends the running cases, which count as not measured."""
        for child in self._running.values():
            self._waiting.appendleft(child.case)
            end_child(child)
        self._running.clear()

    def progress(self) -> SessionProgress:
        records = [record for record in map(self._record, self._cases) if record is not None]
        left = len(self._waiting) + len(self._running)
        return SessionProgress(
            done=len(self._cases) - left,
            total=len(self._cases),
            failed=sum(record.outcome is not CaseOutcome.MEASURED for record in records),
            running=tuple(child.case.key for child in self._running.values()),
            expected_s=left * self._spent_s / self._finished / self._num_devices
            if self._finished
            else None,
            budget_s=max(0.0, self._over_s - time.monotonic()),
        )

    def measurements(self, *, interrupted: bool) -> Measurements:
        """The result of the session."""
        records = [(case, self._record(case)) for case in self._cases]
        return Measurements(
            records=tuple(record for _, record in records if record is not None),
            missed=tuple(case for case, record in records if record is None),
            interrupted=interrupted,
        )


def _settled(record: Record | None, retry_failed: bool) -> bool:
    return record is not None and (record.outcome is CaseOutcome.MEASURED or not retry_failed)


@contextlib.contextmanager
def _noticed_ctrl_c() -> Iterator[list[int]]:
    """Yields a list that is not empty once Ctrl-C or SIGTERM came.

    It is checked between two cases, so that no record is lost. A second signal raises
    KeyboardInterrupt.
    """
    interrupts: list[int] = []

    def on_interrupt(number: int, _: object) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    with on_ctrl_c(on_interrupt):
        yield interrupts
