"""Handlers of Ctrl-C and SIGTERM around work that must not end half-way.

SIGTERM ends a run as Ctrl-C does.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells report it; SIGTERM ends a command in the same way
Handler = Callable[[int, FrameType | None], object]
# `timeout` sends SIGTERM to its command, and a moment later to the command's group
REPEATED_S = 0.3


@contextlib.contextmanager
def on_ctrl_c(handler: Handler) -> Iterator[None]:
    """Runs the block with `handler` as the handler of SIGINT and SIGTERM.

    Nothing changes outside the main thread. A signal that is ignored stays ignored: a job in a
    shell's background ignores SIGINT, since no Ctrl-C is meant for it, and SIGTERM ends that job.
    """
    with _handled(
        handler,
        [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) is not signal.SIG_IGN
        ],
    ):
        yield


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Ends the process without a word at Ctrl-C and SIGTERM, with the exit code of a command.

    A command imports its modules in the block: nothing is begun that would have to be ended.
    """
    with on_ctrl_c(lambda number, _: os._exit(INTERRUPTED)):
        yield


def end_quietly() -> None:
    """Ignores Ctrl-C and SIGTERM from the end of the interpreter on: the command is done."""
    atexit.unregister(_ignore_signals)
    atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Lets SIGTERM raise KeyboardInterrupt, unless something else handles it already.

    Its default action would leave solvers and ranks behind that the process has started.
    """
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with _handled(signal.default_int_handler, [signal.SIGTERM] if default else []):
        yield


def leave_signals_to_parent() -> None:
    """Leaves the group's signals to the parent of this forked child.

    The parent ends its children by SIGTERM, so the child ignores SIGINT.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def hidden_signals() -> Iterator[None]:
    """Hides Ctrl-C and SIGTERM from a process that is started in the block, and from its children.

    The parent gets the signals and ends them.
    """
    with _handled(signal.SIG_IGN, [signal.SIGINT, signal.SIGTERM]):
        yield


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Handles Ctrl-C and SIGTERM at the end of the block.

    A process that has just been started must first be known to the code that ends it.
    """
    came: list[int] = []
    numbers = [
        number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))
    ]
    with _handled(lambda number, _: came.append(number), numbers):
        yield
    for number in came:
        signal.raise_signal(number)


@contextlib.contextmanager
def _handled(handler: Handler | signal.Handlers, numbers: list[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # getsignal is None for a handler that C code has set
    before = {
        number: earlier for number in numbers if (earlier := signal.getsignal(number)) is not None
    }
    for number in before:
        signal.signal(
            number, _once(handler) if number == signal.SIGTERM and callable(handler) else handler
        )
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _once(handler: Handler) -> Handler:
    """Returns a handler that ignores the second of two signals that come close together."""
    last_s = -math.inf

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        repeated = time.monotonic() - last_s < REPEATED_S
        last_s = time.monotonic()
        if not repeated:
            handler(number, frame)

    return on_signal
