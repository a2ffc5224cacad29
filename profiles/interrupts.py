"""Ctrl-C, and SIGTERM that ends a run as Ctrl-C does, while something is done that must not end
half-way.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object]
# `timeout` sends SIGTERM to its command, and a moment later to its group, which the command belongs
# to
REPEATED_S = 0.3


@contextlib.contextmanager
def on_ctrl_c(handler: Handler) -> Iterator[None]:
    """`handler` in place of what SIGINT and SIGTERM did.

    Nothing changes outside the main thread. A signal that is ignored stays ignored, as SIGINT in a
    background job of a shell, for which no Ctrl-C is meant: SIGTERM ends that job.
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
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, unless something else handles it already.

    Its default action would leave solvers and ranks behind that the process has started.
    """
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with _handled(signal.default_int_handler, [signal.SIGTERM] if default else []):
        yield


def leave_to_parent() -> None:
    """In a forked child: Ctrl-C and SIGTERM of the group are the parent's, which ends its children
    by SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def without_signals() -> Iterator[None]:
    """A process that is started here never sees Ctrl-C nor SIGTERM, nor do its children: they are
    the parent's, which ends them.
    """
    with _handled(signal.SIG_IGN, [signal.SIGINT, signal.SIGTERM]):
        yield


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM that come here are handled at the end: a process that is just started must
    be known to who ends it.
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
    before = {
        number: earlier for number in numbers if (earlier := signal.getsignal(number)) is not None
    }  # None: set by C code
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
    """`handler` for a signal that may come twice where it was sent once."""
    last_s = -math.inf

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        repeated = time.monotonic() - last_s < REPEATED_S
        last_s = time.monotonic()
        if not repeated:
            handler(number, frame)

    return on_signal
