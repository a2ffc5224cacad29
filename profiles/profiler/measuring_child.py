"""Runs one measurement in its process: calls the program on one case and always sends a record."""

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

# `module:function`, or a function that pickle can name. It takes a case and the device to use (cpu,
# cuda:0), and raises UnsupportedCase for a case that does not exist there.
Program = str | Callable[[Case, str], CaseFigures]

MOST_CHARACTERS = 300  # characters of a detail
_NO_MEMORY = (
    "MemoryError",
    "OutOfMemoryError",
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "ALLOC_FAILED",  # cuBLAS and cuDNN
)


def measure(
    answer: Connection,
    output: Connection,
    program: Program,
    case: Case,
    device: str,
    limit_s: float,
) -> None:
    """Measures one case, sends its record as JSON to `answer`, and prints to `output`."""
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    # Written in C, so it also ends a process that no Python thread can end.
    faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
    _end_with_the_parent()
    _spare_the_others()
    answer.send_bytes(_answer(program, case, device))


def out_of_memory(text: str) -> bool:
    """Tells whether an error text says that memory ran out."""
    return any(word in text for word in _NO_MEMORY)


def shortened(text: str) -> str:
    """Returns the text as a detail: one line of printable characters."""
    return "".join(character for character in text if character.isprintable())[:MOST_CHARACTERS]


def _end_with_the_parent() -> None:
    """Ends the process when the session ends, for whatever reason."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _spare_the_others() -> None:
    """Disables core files and makes the kernel end this process first when memory runs out."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):  # exists only on Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


def _answer(program: Program, case: Case, device: str) -> bytes:
    try:
        return _json(
            Record(
                case=case, outcome=CaseOutcome.MEASURED, measured=_measured(program, case, device)
            )
        )
    except BaseException as error:  # any error of a program is an outcome of its case
        error.__traceback__ = None  # its frames hold tensors
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
    function: Callable[[Case, str], object] = getattr(importlib.import_module(module), name)
    return function


def _json(record: Record) -> bytes:
    return json.dumps(document(record), allow_nan=False).encode()


def outcome_of(error: BaseException) -> tuple[CaseOutcome, str]:
    """Returns the outcome that an exception means, and its type with the first line of its message.

    Allocators also raise RuntimeError, and so does an operator without a kernel for a dtype.
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
