"""A session of measurements: cases in their order, one at a time on every device, until all are
done or the time is over.

Every record is in the journal before the next case starts. What the journal holds is not measured
again, so that a session that was killed goes on where it was, and one that ran out of time where it
stopped.
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
from parplan.profiles.profiler.worker import Child, end, finished, preload, start

# works of the host and of its memory: another device's case at the same time would be measured with
# them
ALONE = frozenset({"transfer", "host_adam", "launch"})
_TICK_S = 0.5  # between two looks at the clock and at Ctrl-C


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What a session leaves: records in the order of the cases, those that it did not reach, and
    whether Ctrl-C ended it.
    """

    records: tuple[Record, ...]
    missed: tuple[Case, ...]
    interrupted: bool


def run_session(
    cases: Sequence[Case],
    program: Program,
    devices: Sequence[str],
    journal: Journal,
    *,
    deadline_s: float,
    hang_limit_s: float,
    on_progress: OnProgress | None = None,
    retry_failed: bool = False,
    modules: Sequence[str] = (),
) -> Measurements:
    """Measure what the journal does not hold of `cases`, the first ones first, each in a process of
    its own.

    deadline_s      from now; no case starts after it, and one that has started is let finish
    hang_limit_s    of one case, after which it counts as hung
    retry_failed    measure again what the journal has without figures
    modules         what the processes need that takes long to import (torch, the program's module);
                    not its own

    Raises ConfigError: the journal cannot be written, no process can be started.
    """
    preload(modules)
    tell = on_progress or (lambda progress: None)
    session = _Session(cases, journal, retry_failed, time.monotonic() + deadline_s)
    with _noticed_ctrl_c() as interrupts:
        try:
            while not interrupts and session.start(program, devices, hang_limit_s):
                tell(session.progress())
                session.collect()
        finally:
            session.stop()
    tell(session.progress())
    return session.measurements(interrupted=bool(interrupts))


class _Session:
    """What is waiting, what runs on which device, and what is known."""

    def __init__(
        self, cases: Sequence[Case], journal: Journal, retry_failed: bool, over_s: float
    ) -> None:
        self._cases = tuple(dict.fromkeys(cases))
        self._journal, self._over_s = journal, over_s
        self._waiting = deque(
            case for case in self._cases if not _settled(self._record(case), retry_failed)
        )
        self._running: dict[str, Child] = {}
        self._finished, self._spent_s, self._num_devices = 0, 0.0, 1

    def _record(self, case: Case) -> Record | None:
        """What is known of it: a journal's record of the same key may be of other passes."""
        record = self._journal.records.get(case.key)
        return record if record is not None and record.case == case else None

    def start(self, program: Program, devices: Sequence[str], limit_s: float) -> bool:
        """Give idle devices the next cases, while there is time. Whether anything runs."""
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
        """Wait for news, and keep what has finished."""
        wait([news for child in self._running.values() for news in child.ready], _TICK_S)
        for device, child in list(self._running.items()):
            record = finished(child)
            if record is not None:
                del self._running[device]
                self._finished += 1
                self._spent_s += time.monotonic() - child.started_s
                self._journal.append(record)

    def stop(self) -> None:
        """End what runs; it is measured again."""
        for child in self._running.values():
            self._waiting.appendleft(child.case)
            end(child)
        self._running.clear()

    def progress(self) -> SessionProgress:
        """Where it is."""
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
        """What it leaves."""
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
    """A list that is not empty once Ctrl-C or SIGTERM came: looked at between two cases, so that no
    record is lost half-way.

    The second one is the usual KeyboardInterrupt.
    """
    interrupts: list[int] = []

    def on_interrupt(number: int, _: object) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    with on_ctrl_c(on_interrupt):
        yield interrupts
