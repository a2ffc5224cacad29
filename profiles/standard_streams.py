"""Standard streams whose faults never end the work of a command.

A command computes, writes its files and prints. Its output may be lost (`2>&-`, `>/dev/full`,
`| head -1`, a character that the stream cannot encode), its results must not be: a write that
fails is noted, and the command ends with that error when everything else is done.
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
_ERRORS = "backslashreplace"  # for characters that the stream's encoding does not have


class _Descriptor(io.FileIO):
    """A file descriptor whose writes do not fail.

    It keeps the first failure and drops everything after it.
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
    """The stdout of a command; `out` is None where stdout is closed or no file, as in tests."""

    out: _Descriptor | None

    def failure(self) -> OSError | None:
        """Returns the error that kept stdout from being written, or None.

        A reader that went away is no failure: it has read all that it needed.
        """
        with suppress(OSError):
            sys.stdout.flush()
        failure = None if self.out is None else self.out.failure
        return None if isinstance(failure, BrokenPipeError) else failure


@contextmanager
def sturdy_streams() -> Iterator[Streams]:
    """Replaces sys.stdout and sys.stderr in the block by streams whose writes do not fail."""
    _open_closed()
    before = sys.stdout, sys.stderr
    sys.stdout, out = _sturdy(sys.stdout)
    sys.stderr, _ = _sturdy(sys.stderr)
    try:
        yield Streams(out)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _open_closed() -> None:
    """Opens /dev/null in the place of each standard stream that was closed.

    The next file that is opened would otherwise get the descriptor of that stream.
    """
    while True:
        handle = os.open(os.devnull, os.O_RDWR)
        if handle > STDERR_FD:
            os.close(handle)
            return


def _sturdy(stream: TextIO | None) -> tuple[TextIO, _Descriptor | None]:
    """Returns the stream over a descriptor that keeps its failure.

    A stream that was closed drops everything.
    """
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8"), None
    try:
        stream.flush()
        raw = _Descriptor(stream.fileno(), "w", closefd=False)
    except (OSError, ValueError):  # not a file
        return stream, None
    text = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=_ERRORS,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )
    return text, raw
