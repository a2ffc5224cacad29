"""Runs each measurement in a process of its own and turns every end of it into a record.

A forkserver imports torch once and forks a process for every case in milliseconds. It has no CUDA
context, which would not survive a fork. A process that dies does not end its session; when the
session is killed, its processes end.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

from parplan.profiles.documents.schema import parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.interrupts import hidden_signals
from parplan.profiles.machines.measurements import Case, CaseOutcome, Record
from parplan.profiles.profiler.measuring_child import Program, measure, out_of_memory, shortened
from parplan.profiles.units import format_seconds

GRACE_S = 2.0  # for a process to end by itself at its limit, or after a signal
KERNEL_COUNTS = Path("/proc/vmstat")
_TAIL_BYTES = 65536


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """A process that measures `case` on `device`.

    `kernel_kills` counts the machine's processes killed for lack of memory before it started.
    """

    case: Case
    device: str
    process: ForkServerProcess
    answer: Connection
    output: Connection
    limit_s: float
    started_s: float
    kernel_kills: int | None

    @property
    def ready(self) -> tuple[Connection, int]:
        """The objects that `multiprocessing.connection.wait` reports ready when there is news."""
        return self.answer, self.process.sentinel


def preload(modules: Sequence[str]) -> None:
    """Lets a server that is not running yet import these modules before it forks.

    A process then starts in milliseconds.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["parplan.profiles.profiler.measuring_child", *modules]
    )


def start(program: Program, case: Case, device: str, limit_s: float) -> Child:
    """Starts a measurement, and the server if needed. Raises ConfigError on failure."""
    kills = _kernel_kills()
    try:
        try:
            process, ours, theirs, output = _started(program, case, device, limit_s)
        except (EOFError, ConnectionError):  # the server died a moment ago
            process, ours, theirs, output = _started(program, case, device, limit_s)
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"cannot start a process to measure {case.key} in: {error or 'its server ended'}",
            hint="see that memory and process slots are free, then run the command again: "
            "it goes on",
        ) from None
    theirs.close()
    return Child(
        case=case,
        device=device,
        process=process,
        answer=ours,
        output=output,
        limit_s=limit_s,
        started_s=time.monotonic(),
        kernel_kills=kills,
    )


def _started(
    program: Program, case: Case, device: str, limit_s: float
) -> tuple[ForkServerProcess, Connection, Connection, Connection]:
    """Returns the process, both ends of the pipe for its answer, and the file for its output."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    output = _no_file()
    process = context.Process(
        target=measure, args=(theirs, output, program, case, device, limit_s), daemon=True
    )
    with hidden_signals():
        forkserver.ensure_running()
    with _no_main():
        process.start()
    return process, ours, theirs, output


def poll_child(child: Child) -> Record | None:
    """Returns the record of a process that has ended and cleans up; None while it is at work."""
    over = time.monotonic() >= child.started_s + child.limit_s + GRACE_S
    record = None
    if child.answer.poll():
        record = _received(child)
        if record is None:
            child.process.join(GRACE_S)  # its pipe closes a moment before its exit code is known
            over = True
    if record is None and (over or child.process.exitcode is not None):
        outcome, detail = _death(child)
        record = Record(case=child.case, outcome=outcome, detail=detail)
    if record is not None:
        end_child(child)
    return record


def end_child(child: Child) -> None:
    """Kills the process if it runs; one that hangs in a driver is left behind."""
    child.process.kill()
    child.process.join(GRACE_S)
    if child.process.exitcode is not None:
        child.process.close()
    child.answer.close()
    child.output.close()


def _received(child: Child) -> Record | None:
    try:
        return parse(Record, json.loads(child.answer.recv_bytes()), child.case.key)
    except (EOFError, OSError, ValueError, ConfigError):  # it died before the end of its answer
        return None


def _death(child: Child) -> tuple[CaseOutcome, str]:
    """The outcome of a process that ended without an answer or has to be ended."""
    code, text = child.process.exitcode, _tail(child.output)
    # Exit code 1 with this text means that the process ended itself at its limit.
    if code is None or (code == 1 and re.search(r"^Timeout \(\d", text, re.MULTILINE)):
        waited_s = min(child.limit_s, time.monotonic() - child.started_s)
        return CaseOutcome.HUNG, f"no answer in {format_seconds(waited_s)}{_last_seen(text)}"
    return _ended(code, text, _kernel_kills() != child.kernel_kills)


def _ended(code: int, text: str, kernel_killed: bool) -> tuple[CaseOutcome, str]:
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    if code == -signal.SIGKILL and kernel_killed:
        return CaseOutcome.OUT_OF_MEMORY, "killed by the kernel, which was out of memory"
    # Either an exception that could not be sent or a C++ exception.
    if code in (1, -signal.SIGABRT) and out_of_memory(last):
        return CaseOutcome.OUT_OF_MEMORY, shortened(last)
    how = f"exit code {code}" if code >= 0 else _signal_name(-code)
    return CaseOutcome.CRASHED, shortened(": ".join(filter(None, (how, last))))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_seen(text: str) -> str:
    """The last position of the main thread, from the traceback that is printed at the limit.

    Its block is the last one, with the innermost frame first.
    """
    frame = re.search(r'File "([^"\n]*)", line (\d+) in (\S+)', text[text.rfind("\nThread 0x") :])
    return f", last seen in {frame[3]} ({Path(frame[1]).name}:{frame[2]})" if frame else ""


def _tail(output: Connection) -> str:
    """The end of the process's output."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(
        errors="replace"
    )


def _no_file() -> Connection:
    """Opens a file without a name as a Connection, which multiprocessing can pass to a child."""
    handle, name = tempfile.mkstemp(prefix="parplan-")
    os.unlink(name)
    return Connection(handle)


def _kernel_kills() -> int | None:
    """The number of processes that the kernel killed for lack of memory, or None if unknown."""
    with contextlib.suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", KERNEL_COUNTS.read_text(), re.MULTILINE)
        return int(match[1]) if match else None
    return None


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Keeps a child from running the main script, which would outlast most measurements."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
