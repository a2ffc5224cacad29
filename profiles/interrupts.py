"""Ctrl-C while something is done that must not end half-way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_ctrl_c(handler: Callable[[int, object], None]) -> Iterator[None]:
    """`handler` in place of what SIGINT did.

    Not outside the main thread, nor in a background job of a shell, for which no Ctrl-C is meant.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
