"""A process that imports the program once and forks for every input.

    with Server(torch=False) as server:
        ended = server.run(given)

A fork takes milliseconds, unlike a start of Python. The server is `python -m
benchmarks.commands.fuzzing.server`; requests and answers go over its standard input and output, in
the format of Python's multiprocessing.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Self

from benchmarks.commands.fuzzing import child, contained
from benchmarks.commands.fuzzing.inputs import Ended, Input

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 60.0  # on a busy machine; child.py bounds the CPU seconds
DUMP_S = LIMIT_S - 1.0  # when faulthandler dumps the stack of a hanging process
MOST_TEXT = 400_000  # most characters of an output
PACKAGES = ("profiles", "costmodels", "planner", "report", "commands")
WITH_TORCH = ("executor",)
WITH_TRANSFORMERS = (
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An input, and the names of files that it should leave and that are returned."""

    given: Input
    outputs: tuple[str, ...] = ()


class Server:
    """The client's end of one server."""

    def __init__(self, *, torch: bool) -> None:
        flags = ["--torch"] if torch else []
        request_end, self._requests = Pipe(duplex=False)
        self._answers, answer_end = Pipe(duplex=False)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.commands.fuzzing.server", *flags],
            cwd=ROOT,
            stdin=request_end.fileno(),
            stdout=answer_end.fileno(),
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            },
            start_new_session=True,
        )
        request_end.close()
        answer_end.close()

    def run(self, given: Input, outputs: tuple[str, ...] = ()) -> Ended:
        """Return the end of the input, with the files in `outputs` that it left."""
        self._requests.send(Request(given=given, outputs=outputs))
        ended: Ended = self._answers.recv()
        return ended

    def close(self) -> None:
        """End the server and remove its files."""
        self._requests.close()
        self._answers.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_one(request: Request, folder: Path) -> Ended:
    """Fork for an input in a folder of its own.

    Waits at most LIMIT_S, then kills the rest of its process group.
    """
    given = request.given
    work, logs = folder / "work", folder / "logs"
    work.mkdir()
    logs.mkdir()
    (folder / "tmp").mkdir()
    _fill(given, work)
    started_s = time.monotonic()
    with (logs / "stack").open("w+", encoding="utf-8", errors="replace") as stack:
        pid = os.fork()
        if pid == 0:
            child.become(given, work, logs, stack, DUMP_S)
        hung = _waited(pid, given.interrupt_s)
        _, status, used = os.wait4(pid, 0)
        seconds = time.monotonic() - started_s
        _kill_group(pid)
        stack.seek(0)
        dumped = stack.read(MOST_TEXT)
    return Ended(
        code=os.waitstatus_to_exitcode(status),
        stdout=_text(logs / "stdout"),
        stderr=_text(logs / "stderr"),
        stack=dumped,
        seconds=seconds,
        cpu_s=used.ru_utime + used.ru_stime,
        hung=hung,
        peak_bytes=used.ru_maxrss * 1024,
        files=dict(_left(work, (*request.outputs, *given.outputs))),
    )


def _left(work: Path, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each of these files, and of the files in these folders."""
    for name in names:
        for path in (work / name, *sorted((work / name).rglob("*"))):
            if path.is_file():
                yield str(path.relative_to(work)), path.read_bytes()


def _fill(given: Input, work: Path) -> None:
    for name in given.folders:
        (work / name).mkdir(parents=True, exist_ok=True)
    for name, content in given.files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name in given.pipes:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(work / name)
    for name, target in given.links.items():
        (work / name).symlink_to(target)


def _waited(pid: int, interrupt_s: float | None) -> bool:
    """Wait for a process; return True if it had to be killed."""
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        end_s = time.monotonic() + LIMIT_S
        if interrupt_s is not None and not poll.poll(1000 * interrupt_s):
            _signal_group(pid, signal.SIGINT)
        if poll.poll(1000 * max(0.0, end_s - time.monotonic())):
            return False
        _kill_group(pid)
        return True
    finally:
        os.close(handle)


def _kill_group(pid: int) -> None:
    _signal_group(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _text(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open(encoding="utf-8", errors="backslashreplace") as file:
        return file.read(MOST_TEXT)


def _preload(*, torch: bool) -> None:
    """Import all modules of the program, and fill the caches that every process would fill."""
    _import_all(PACKAGES)
    for name in ("cli", "rich.console", "rich.table", "rich.progress", "yaml", "pulp"):
        importlib.import_module(name)
    if torch:
        _import_all(WITH_TORCH)
        for name in WITH_TRANSFORMERS:
            importlib.import_module(name)
        import torch as library

        library.set_num_threads(1)  # a fork must not inherit a pool of threads
    _warm_caches()


def _import_all(packages: tuple[str, ...]) -> None:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] == "__main__":
                continue
            name = ".".join(("parplan", *(parts[:-1] if parts[-1] == "__init__" else parts)))
            with suppress(ImportError):  # modules that need torch
                if "torch" in sys.modules or not _needs_torch(path):
                    importlib.import_module(name)


def _needs_torch(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return (
        "\nimport torch" in text
        or "\nfrom torch" in text
        or "\nfrom parplan.executor" in text
        or "tracing" in path.parts
        or "profiler" in path.parts
    )


def _warm_caches() -> None:
    from click.testing import CliRunner

    from parplan import cli

    with tempfile.TemporaryDirectory() as folder:
        plan = f"{folder}/plan.yaml"
        for line in (
            f"estimate --model gpt-tiny --gpus 2 --gpu cpu -o {plan}",
            f"show {plan}",
            "models",
        ):
            CliRunner().invoke(cli.main, line.split())


def serve(requests: Connection, answers: Connection) -> None:
    """Answer requests until there are no more."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as base:
        number = 0
        while (request := _next(requests)) is not None:
            number += 1
            folder = Path(base) / str(number)
            folder.mkdir()
            ended = run_one(request, folder)
            shutil.rmtree(folder, ignore_errors=True)
            answers.send(ended)


def _next(requests: Connection) -> Request | None:
    try:
        request = requests.recv()
    except EOFError:
        return None
    assert isinstance(request, Request)
    return request


def main() -> None:
    """Serve over other descriptors than standard input and output.

    A fork then cannot write into the protocol.
    """
    requests, answers = (
        Connection(os.dup(0), writable=False),
        Connection(os.dup(1), readable=False),
    )  # no child inherits them
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    contained.require()
    contained.leave_the_network()
    _preload(torch="--torch" in sys.argv)
    gc.collect()
    gc.freeze()
    serve(requests, answers)


if __name__ == "__main__":
    from benchmarks.commands.fuzzing import server

    server.main()
