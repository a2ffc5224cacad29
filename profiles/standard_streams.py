"""The standard streams of a command: a stream that is closed, full, or cannot encode a character
never ends the work.

A command computes, writes its files and prints. What it prints may be lost (`2>&-`, `>/dev/full`,
`| head -1`), what it computes must not be: a write that fails is kept, and the command ends with it
when everything else is done.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDERR_FD = 2
_ERRORS = "backslashreplace"  # of characters that the stream's encoding does not have


class _Descriptor(io.FileIO):
    """A file descriptor whose writes do not fail: the first failure is kept, and everything after
    it is dropped.
    """

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        return memoryview(data).nbytes


@dataclass(frozen=True, slots=True)
class Streams:
    """What the command prints to; `out` is None where stdout is closed, or no file, as in tests."""

    out: _Descriptor | None

    def failure(self) -> OSError | None:
        """Why stdout could not be written. A reader that went away is no failure: it has all that
        it wanted.
        """
        with suppress(OSError):
            sys.stdout.flush()
        found = None if self.out is None else self.out.failure
        return None if isinstance(found, BrokenPipeError) else found


@contextmanager
def sturdy_streams() -> Iterator[Streams]:
    """sys.stdout and sys.stderr whose writes do not fail, until the end of the block."""
    _open_closed()
    before = sys.stdout, sys.stderr
    (sys.stdout, out), (sys.stderr, _) = (_sturdy(stream) for stream in before)
    try:
        yield Streams(out)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _open_closed() -> None:
    """Put /dev/null where a standard stream was closed: the next file that is opened would be taken
    for it.
    """
    while True:
        handle = os.open(os.devnull, os.O_RDWR)
        if handle > STDERR_FD:
            os.close(handle)
            return


def _sturdy(stream: TextIO | None) -> tuple[TextIO, _Descriptor | None]:
    """The stream over a descriptor that keeps its failures; a stream that was closed drops
    everything.
    """
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8"), None
    try:
        stream.flush()
        raw = _Descriptor(stream.fileno(), "w", closefd=False)
    except (OSError, ValueError):  # no file
        return stream, None
    text = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=_ERRORS,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )
    return text, raw
