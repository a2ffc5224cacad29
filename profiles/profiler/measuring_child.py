"""Inside the process of one measurement: run the program on one case, and answer with a record
whatever comes of it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import resource
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from parplan.profiles.documents.schema import document
from parplan.profiles.machines.measurements import (
    Case,
    CaseFigures,
    CaseOutcome,
    Record,
    UnsupportedCase,
)

# `module:function`, or a function that pickle can name; it takes a case and the device that it is
# to use (cpu, cuda:0), and raises UnsupportedCase for what does not exist there
Program = str | Callable[[Case, str], CaseFigures]

MOST_CHARACTERS = 300  # of a detail
_NO_MEMORY = (
    "MemoryError",
    "OutOfMemoryError",
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "ALLOC_FAILED",
)  # the last of cuBLAS and cuDNN


def measure(
    answer: Connection,
    output: Connection,
    program: Program,
    case: Case,
    device: str,
    limit_s: float,
) -> None:
    """What the process runs: sends one record as JSON to `answer`; all that is printed goes to
    `output`.
    """
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    # of C: it ends a process that no Python thread can
    faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
    _end_with_the_parent()
    _spare_the_others()
    answer.send_bytes(_answer(program, case, device))


def out_of_memory(text: str) -> bool:
    """Whether an error says that memory ran out."""
    return any(word in text for word in _NO_MEMORY)


def shortened(text: str) -> str:
    """The text as a detail: one line of printable characters."""
    return "".join(character for character in text if character.isprintable())[:MOST_CHARACTERS]


def _end_with_the_parent() -> None:
    """Leave no orphan: the process ends when the session does, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _spare_the_others() -> None:
    """No core files, and where memory runs out the kernel ends this process before any other."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):  # Linux alone has the file
        Path("/proc/self/oom_score_adj").write_text("1000")


def _answer(program: Program, case: Case, device: str) -> bytes:
    try:
        return _json(
            Record(
                case=case, outcome=CaseOutcome.MEASURED, measured=_measured(program, case, device)
            )
        )
    except BaseException as error:  # whatever a program raises is what came of its case
        error.__traceback__ = None  # whose frames hold its tensors
        outcome, detail = outcome_of(error)
    return _json(Record(case=case, outcome=outcome, detail=detail))


def _measured(program: Program, case: Case, device: str) -> CaseFigures:
    measured = _loaded(program)(case, device)
    if not isinstance(measured, CaseFigures):
        raise TypeError(f"the program returned {type(measured).__name__}, needed is Measured")
    return measured


def _loaded(program: Program) -> Callable[[Case, str], object]:
    if not isinstance(program, str):
        return program
    module, _, name = program.partition(":")
    found: Callable[[Case, str], object] = getattr(importlib.import_module(module), name)
    return found


def _json(record: Record) -> bytes:
    return json.dumps(document(record), allow_nan=False).encode()


def outcome_of(error: BaseException) -> tuple[CaseOutcome, str]:
    """What an exception means for a case, and its type with the first line of its message.

    Allocators raise RuntimeErrors too, and so does an operator that has no kernel for a type of
    tensors.
    """
    message = str(error).strip().splitlines()[:1]
    if isinstance(error, UnsupportedCase):
        return CaseOutcome.UNSUPPORTED, shortened("".join(message))
    text = ": ".join((type(error).__name__, *message))
    if isinstance(error, MemoryError | RuntimeError | OSError) and out_of_memory(text):
        return CaseOutcome.OUT_OF_MEMORY, shortened(text)
    if isinstance(error, NotImplementedError) or " not implemented for " in text:
        return CaseOutcome.UNSUPPORTED, shortened(text)
    return CaseOutcome.CRASHED, shortened(text)
