"""One measurement in one process: started from a server that has loaded what it needs, watched, and
its end understood.

A forkserver imports torch once and forks a process for every case in milliseconds; it has no CUDA
context, which a fork would not survive. Whatever becomes of a process, the session that started it
goes on; and when that is killed, its processes end.
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
from parplan.profiles.interrupts import without_signals
from parplan.profiles.machines.measurements import Case, CaseOutcome, Record
from parplan.profiles.profiler.measuring_child import Program, measure, out_of_memory, shortened
from parplan.profiles.units import format_seconds

GRACE_S = 2.0  # for a process to end by itself at its limit, or after a signal
KERNEL_COUNTS = Path("/proc/vmstat")
_TAIL_BYTES = 65536


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """A process that measures `case` on `device`. `kernel_kills`: of the whole machine, for lack of
    memory, before it started.
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
        """What `multiprocessing.connection.wait` shows to be ready as soon as there is news."""
        return self.answer, self.process.sentinel


def preload(modules: Sequence[str]) -> None:
    """Have the server import these before it forks, where it does not run yet: a process then
    starts in milliseconds.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["parplan.profiles.profiler.measuring_child", *modules]
    )


def start(program: Program, case: Case, device: str, limit_s: float) -> Child:
    """Begin to measure; waits for the server where that is just starting. Raises ConfigError where
    no process can be had.
    """
    kills = _kernel_kills()
    try:
        try:
            process, ours, theirs, output = _started(program, case, device, limit_s)
        except (EOFError, ConnectionError):  # the server died a moment ago, and seemed to be there
            process, ours, theirs, output = _started(program, case, device, limit_s)
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"cannot start a process to measure {case.key} in: {error or 'its server ended'}",
            hint="see that memory and process slots are free, then run the command again: it goes on",
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
    """The process, both ends of the pipe for its answer, and the file for what it prints."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    output = _no_file()
    process = context.Process(
        target=measure, args=(theirs, output, program, case, device, limit_s), daemon=True
    )
    with without_signals():
        forkserver.ensure_running()
    with _no_main():
        process.start()
    return process, ours, theirs, output


def finished(child: Child) -> Record | None:
    """What came of it, and the process is gone; None while it is at work."""
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
        end(child)
    return record


def end(child: Child) -> None:
    """Kill the process, if it is there; one that hangs in a driver is left to it."""
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
    """Of a process that ended without an answer, or has to be ended."""
    code, text = child.process.exitcode, _tail(child.output)
    if code is None or (
        code == 1 and re.search(r"^Timeout \(\d", text, re.MULTILINE)
    ):  # its own clock ended it
        waited_s = min(child.limit_s, time.monotonic() - child.started_s)
        return CaseOutcome.HUNG, f"no answer in {format_seconds(waited_s)}{_last_seen(text)}"
    return _ended(code, text, _kernel_kills() != child.kernel_kills)


def _ended(code: int, text: str, kernel_killed: bool) -> tuple[CaseOutcome, str]:
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    if code == -signal.SIGKILL and kernel_killed:
        return CaseOutcome.OUT_OF_MEMORY, "killed by the kernel, which was out of memory"
    # an exception that could not be sent, or one of C++
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
    """Where the main thread was, of the traceback that is printed at the limit: its last block,
    innermost frame first.
    """
    found = re.search(r'File "([^"\n]*)", line (\d+) in (\S+)', text[text.rfind("\nThread 0x") :])
    return f", last seen in {found[3]} ({Path(found[1]).name}:{found[2]})" if found else ""


def _tail(output: Connection) -> str:
    """The end of what was printed."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(
        errors="replace"
    )


def _no_file() -> Connection:
    """A file without a name, as a thing that multiprocessing hands to a child."""
    handle, name = tempfile.mkstemp(prefix="parplan-")
    os.unlink(name)
    return Connection(handle)


def _kernel_kills() -> int | None:
    """How many processes of this machine the kernel has killed for lack of memory; None where it
    does not say.
    """
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", KERNEL_COUNTS.read_text(), re.MULTILINE)
        return int(found[1]) if found else None
    return None


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """A child would run the main script again for what is defined there, which takes longer than
    most measurements.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
