"""Starts `profiles/profile_comm.py` on this node and reads its records, without torch.

A run that a case ended is started again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import parplan
from parplan.profiles.errors import PlannerError
from parplan.profiles.profiler.communication.comm_file import (
    CommFile,
    in_flight_path,
    read_comm_file,
)

LAST_LINES = 50  # lines of output kept, because torchrun prints much after an error
ROOT = Path(parplan.__file__).resolve().parents[1]  # the folder that parplan is imported from
_ENDED = re.compile(r"^error: (?:hung|crashed|out of memory) in ")  # the messages of comm_run


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOptions:
    """The options of profile_comm, and how often a run that a case ended is started again."""

    device: str = "auto"
    minutes: float | None = None
    largest: str | None = None
    restart: bool = False
    reruns: int = 5


def comm_records(
    num_ranks: int,
    output: Path,
    options: CommOptions,
    told: Callable[[str], None] = lambda line: None,
) -> CommFile:
    """Measures the communication of `num_ranks` ranks on this node and writes it to `output`.

    A run that a case ended is started again, without that case, a few times. `told` is
    called with each line of progress. Raises PlannerError with the run's message when it fails
    otherwise, or once too often.
    """
    device, minutes = options.device, options.minutes
    ends_at_s = None if minutes is None else time.monotonic() + 60 * minutes
    extra = ["--restart"] if options.restart else []
    lines: deque[str] = deque(maxlen=LAST_LINES)
    for _ in range(options.reruns + 1):
        left = None if ends_at_s is None else max(1.0, ends_at_s - time.monotonic()) / 60
        command = _command(
            num_ranks,
            {
                "--output": output,
                "--device": device,
                "--minutes": left,
                "--largest": options.largest,
            },
        )
        if _run([*command, *extra], lines, told) == 0:
            return read_comm_file(output)
        if not in_flight_path(output).exists() and not any(_ENDED.match(line) for line in lines):
            break
        # No other process ended the run, so the case in flight did.
        extra = ["--attempts", "1"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    retry = _command(num_ranks, {"--output": output, "--device": device})
    last_line = " ".join(list(lines)[-1:])
    unmeasured = f"communication of {num_ranks} ranks was not measured: {last_line}"
    raise PlannerError(
        (errors or [unmeasured])[-1],
        hint=f"start it yourself to see all it says: {' '.join(['python', *retry[1:]])}",
    )


def _command(num_ranks: int, options: dict[str, object]) -> list[str]:
    """The command line that starts it; --standalone finds a free port."""
    said = [
        part for name, value in options.items() if value is not None for part in (name, str(value))
    ]
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    )
    return [*torchrun, "-m", "parplan.profiles.profile_comm", *said]


def _run(command: list[str], lines: deque[str], told: Callable[[str], None]) -> int:
    """Runs the command, stores its last lines and returns its exit code."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    lines.clear()
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                lines.append(line.rstrip())
                told(lines[-1])
        except BaseException:  # torchrun ends its ranks; else Popen would wait for it
            process.terminate()
            raise
    return process.returncode
