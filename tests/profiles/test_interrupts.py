"""Ctrl-C and SIGTERM: what handles them while a search or a measurement runs, and afterwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from parplan.commands.style import noticing_ctrl_c
from parplan.profiles import interrupts
from parplan.profiles.interrupts import (
    deferred_signals,
    hidden_signals,
    leave_signals_to_parent,
    on_ctrl_c,
    sigterm_as_ctrl_c,
)

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in BOTH]
    yield
    after = [signal.getsignal(number) for number in BOTH]
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def noticed(*numbers: int) -> list[int]:
    """Returns the signals that reach the handler when `numbers` are raised."""
    noticed_signals: list[int] = []
    with on_ctrl_c(lambda number, _: noticed_signals.append(number)):
        for number in numbers:
            signal.raise_signal(number)
    return noticed_signals


def test_both_signals_reach_the_handler():
    assert noticed(signal.SIGINT, signal.SIGTERM) == [signal.SIGINT, signal.SIGTERM]


def test_a_sigterm_that_comes_at_once_again_is_the_same_one_and_a_ctrl_c_is_not(monkeypatch):
    assert noticed(signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT) == [
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGINT,
    ]

    monkeypatch.setattr(interrupts, "REPEATED_S", 0.0)
    assert noticed(signal.SIGTERM, signal.SIGTERM) == [signal.SIGTERM, signal.SIGTERM]


def test_an_ignored_ctrl_c_stays_ignored_and_sigterm_is_handled():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert noticed(signal.SIGINT, signal.SIGTERM) == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_sigterm_is_a_keyboard_interrupt_where_nothing_else_handles_it():
    with sigterm_as_ctrl_c(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)

    noticed_signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: noticed_signals.append(number))
    with sigterm_as_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert noticed_signals == [signal.SIGTERM]


def test_other_threads_change_no_handler():
    before, during = [signal.getsignal(number) for number in BOTH], []

    def look() -> None:
        with hidden_signals(), sigterm_as_ctrl_c(), on_ctrl_c(lambda number, _: None):
            during.extend(signal.getsignal(number) for number in BOTH)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert during == before


def test_signals_that_come_while_a_process_is_started_are_handled_afterwards():
    noticed_signals: list[object] = []
    with on_ctrl_c(lambda number, _: noticed_signals.append(number)), deferred_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        noticed_signals.append("started")

    assert noticed_signals == ["started", signal.SIGINT, signal.SIGTERM]


def test_what_is_started_without_signals_ignores_both():
    with hidden_signals():
        assert [signal.getsignal(number) for number in BOTH] == [signal.SIG_IGN, signal.SIG_IGN]


def test_a_forked_child_ends_on_the_sigterm_of_its_parent_although_that_handles_its_own():
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def wait() -> None:
        leave_signals_to_parent()
        ready.set()
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait()

    with sigterm_as_ctrl_c():
        child = context.Process(target=wait, daemon=True)
        child.start()
        ready.wait()
        child.terminate()
        child.join()

    assert child.exitcode == -signal.SIGTERM


def _replaced_by_c_code() -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        raise ImportError("numpy.core.multiarray failed to import") from None


def test_an_error_that_c_code_raises_for_an_interrupt_is_the_interrupt():
    with pytest.raises(KeyboardInterrupt), noticing_ctrl_c():
        _replaced_by_c_code()
    with pytest.raises(ImportError), noticing_ctrl_c():
        raise ImportError("a bug")


def ended(program: str) -> tuple[int, str]:
    """Returns the exit code and the output of a Python program."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_command_is_imported_ends_it_quietly(number):
    program = f"""
import signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "parplan.commands.plan":
            signal.raise_signal({number.value})
sys.meta_path.insert(0, Interrupting())
import parplan.cli
print("imported")
"""
    assert ended(program) == (130, "")


def test_a_signal_at_the_end_of_the_interpreter_changes_nothing():
    program = """
import atexit, signal
from parplan.profiles.interrupts import end_quietly
atexit.register(signal.raise_signal, signal.SIGINT)
atexit.register(signal.raise_signal, signal.SIGTERM)
end_quietly()
"""
    assert ended(program) == (0, "")
