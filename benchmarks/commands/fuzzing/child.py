"""The life of a fork: it becomes the process that a shell would start, and ends as Python ends."""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from benchmarks.commands.fuzzing.contained import contain
from benchmarks.commands.fuzzing.inputs import Input, Program, Stream

MEMORY_BYTES = 6 * 2**30
CPU_S = 20
FILE_BYTES = 2**30  # the largest file that an input may write
LOST = 120  # Python's exit code if it cannot write standard output at its end
BROKEN = 99  # the fuzzer's own fault
_MODULES = {Program.PLAN: "cli", Program.EXECUTOR: "executor"}


def become(given: Input, folder: Path, logs: Path, stack: IO[str], dump_s: float) -> None:
    """Run the input in `folder` with its output in `logs`; never returns."""
    try:
        _prepare(given, folder, logs, stack, dump_s)
        code = _ended(_run(given))
    except BaseException:
        traceback.print_exc(file=stack)
        stack.flush()
        code = BROKEN
    os._exit(code)


def _prepare(given: Input, folder: Path, logs: Path, stack: IO[str], dump_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    os.chdir(folder)
    _forget_the_server()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(dump_s, file=stack)
    faulthandler.register(signal.SIGXCPU, file=stack, chain=True)  # the signal then ends it
    _environment(given, folder)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    os.dup2(sys.stdin.fileno(), 0)
    sys.stdout = _stream(given.stdout, 1, logs / "stdout", given.encoding, "strict")
    sys.stderr = _stream(given.stderr, 2, logs / "stderr", given.encoding, "backslashreplace")
    contain(folder.parent)
    warnings.resetwarnings()
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", ignored)


def _forget_the_server() -> None:
    """Drop the exit handlers of the server, which would remove its folders."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def _environment(given: Input, folder: Path) -> None:
    tempfile.tempdir = None
    os.environ["TMPDIR"] = os.fspath(folder.parent / "tmp")
    for name, value in given.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _stream(
    where: Stream, number: int, path: Path, encoding: str, errors: str
) -> io.TextIOWrapper | None:
    """Return file descriptor `number` with its text stream; None if it is closed.

    An interpreter has the same at its start.
    """
    if where is Stream.CLOSED:
        os.close(number)
        return None
    if where is Stream.LEFT:
        reader, handle = os.pipe()
        os.close(reader)
    else:
        target = "/dev/full" if where is Stream.FULL else os.fspath(path)
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, number)
    os.close(handle)
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(number, "w", closefd=False)),
        encoding,
        errors,
        line_buffering=number == 2,
    )


def _run(given: Input) -> int:
    """Return the exit code that the interpreter makes of the program's end."""
    sys.argv = [given.program.value, *given.arguments]
    sys.path.insert(0, os.getcwd())
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if given.program is Program.RULES:
            _rules(Path(given.arguments[0]))
        else:
            runpy.run_module(_MODULES[given.program], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        with suppress(OSError, ValueError, AttributeError):
            traceback.print_exc()
        return 1
    return 0


def _rules(path: Path) -> None:
    """Refuse the plan as the executor does before it starts any rank."""
    from parplan.executor.rules.all_rules import validate
    from parplan.executor.rules.traced_rules import validate_traced_plan
    from parplan.executor.run_options import Options
    from parplan.planner.plan.plan_file import read_any_plan
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.profiles.errors import PlannerError

    try:
        plan = read_any_plan(path)
        if isinstance(plan, TracedPlan):
            validate_traced_plan(plan, Options())
        else:
            validate(plan)
    except PlannerError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        sys.exit(error.exit_code)


def _ended(code: int) -> int:
    """End like an interpreter: wait for threads, run exit handlers, write buffers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except AttributeError:  # click's wrapper of a closed stream
            continue
        except (OSError, ValueError) as error:
            with suppress(OSError, ValueError):
                os.write(
                    2,
                    (
                        f"Exception ignored in: {stream.name}\n{type(error).__name__}: {error}\n"
                    ).encode(),
                )
            if stream is sys.stdout:
                code = LOST
    return code
