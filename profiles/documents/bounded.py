"""The one way in for files from outside: bytes, text and lines, bounded before they are read.

Only a regular file is read: a pipe would wait for its writer, and a device might never end. Limits:

    documents    64 MiB of UTF-8                        (read_text)
    logs         256 MiB, 2,000,000 lines, 6 s a pass, 4,096 characters of a line     (read_lines)
    packed       1 GiB unpacked, and 32 MiB or 60 times the packed bytes              (unpacked)

Each reader bounds the values in what it reads: profiles/documents/reader.py those of YAML and JSON,
profiles/documents/numbers.py every number.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import os
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO

from parplan.profiles.errors import ConfigError
from parplan.profiles.units import GIB, MIB

MAX_BYTES = 64 * MIB
MAX_LOG_BYTES = 256 * MIB
MAX_UNPACKED_BYTES = GIB
MAX_RATIO = 60  # unpacked bytes of a packed one; traces have 10 to 30
_USUAL_BYTES = 32 * MIB  # unpacked bytes of a file of any size
MAX_LINES = 2_000_000
MAX_LINE = 4096  # characters of a line; arguments and steps are shorter
MAX_PASS_S = 6.0  # CPU seconds of one pass over the lines of a log, with what is made of them
_LINES_A_LOOK = 256  # lines between two looks at the clock
_GZIP = b"\x1f\x8b"
_BOM = codecs.BOM_UTF8
_OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x00\x00\xfe\xff": "UTF-32"}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class Hints:
    """The actions for a file that cannot be read, and for one with a wrong content."""

    absent: str = "check the path"
    broken: str = "correct that line"


@contextmanager
def opened(
    source: Path | Traversable,
    where: str | None = None,
    hints: Hints = Hints(),
    *,
    most_bytes: int = MAX_BYTES,
) -> Iterator[IO[bytes]]:
    """Yields a regular file of at most `most_bytes` bytes, opened to read.

    where: the file's name in messages, its path by default
    Raises ConfigError: not there, not readable, not a regular file, too large.
    """
    where = str(source) if where is None else where
    try:
        if not isinstance(source, Path):
            yield io.BytesIO(source.read_bytes())  # a file of the package, perhaps in an archive
            return
        handle = _handle(source, where, hints)
        try:
            status = os.fstat(handle)
            _require_regular(status, where, hints, most_bytes)
            if not status.st_size:  # files of the kernel have no size, and some no end
                yield io.BytesIO(b"")
                return
            with open(handle, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(handle)
    except OSError as error:
        problem = error.strerror or str(error)
        raise ConfigError(f"cannot read {where}: {problem}", hint=hints.absent) from None


def _handle(source: Path, where: str, hints: Hints) -> int:
    try:
        return os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"cannot read {where!r}: {error}", hint=hints.absent) from None


def read_bytes(
    source: Path | Traversable,
    where: str | None = None,
    hints: Hints = Hints(),
    *,
    most_bytes: int = MAX_BYTES,
) -> bytes:
    """Returns the bytes of a regular file. Raises ConfigError, as `opened` does."""
    where = str(source) if where is None else where
    with opened(source, where, hints, most_bytes=most_bytes) as file:
        body = file.read(most_bytes + 1)
    if len(body) > most_bytes:  # it grew, or its stated size is wrong
        raise _too_large(len(body), most_bytes, where, hints)
    return body


def read_text(
    source: Path | Traversable,
    where: str | None = None,
    hints: Hints = Hints(),
    *,
    lossy: bool = False,
) -> str:
    """Returns the text of a regular file of UTF-8 without its byte order mark.

    lossy: bytes that are not UTF-8 are replaced
    Raises ConfigError: not there, not readable, not a regular file, too large, not UTF-8, with NUL
    bytes.
    """
    where = str(source) if where is None else where
    return text_of(read_bytes(source, where, hints), where, hints, lossy=lossy)


def text_of(body: bytes, where: str, hints: Hints = Hints(), *, lossy: bool = False) -> str:
    """Returns bytes of UTF-8 as text, as `read_text` does. Raises ConfigError."""
    body = body.removeprefix(_BOM)
    encoding = next((name for mark, name in _OTHER_BOMS.items() if body.startswith(mark)), None)
    if encoding is not None:
        raise ConfigError(
            f"{where}: not UTF-8 text: it is {encoding}", hint="save that file as UTF-8"
        )
    if not lossy and b"\0" in body:
        raise ConfigError(
            f"{where}:{_line_at(body, body.index(0))}: a NUL byte, text has none", hint=hints.broken
        )
    try:
        return body.decode("utf-8", errors="replace" if lossy else "strict")
    except UnicodeDecodeError as error:
        place = f"{where}:{_line_at(body, error.start)}"
        raise ConfigError(
            f"{place}: not UTF-8 text: {error.reason} at byte {error.start}", hint=hints.broken
        ) from None


def read_lines(source: Path, hints: Hints = Hints()) -> Iterator[str]:
    """Yields the beginnings of the lines of a log, each state of a progress bar as one.

    Bytes that are not UTF-8 are replaced. Raises ConfigError as `opened` does, and for too many
    lines or too long a time, which counts the caller's work on each line.
    """
    with opened(source, None, hints, most_bytes=MAX_LOG_BYTES) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace")
        end_s = time.process_time() + MAX_PASS_S
        for number in range(MAX_LINES):
            if number % _LINES_A_LOOK == 0 and time.process_time() > end_s:
                raise ConfigError(
                    f"{source}: its first {number:,} lines take more than {MAX_PASS_S:g} s to read",
                    hint="give the part of one run alone",
                )
            line = text.readline(MAX_LINE)
            if not line:
                return
            rest = line
            while rest and not rest.endswith("\n"):
                rest = text.readline(MIB)
            yield line
    raise ConfigError(
        f"{source}: more than {MAX_LINES:,} lines", hint="give the part of one run alone"
    )


def lines_of(text: str, where: str, hints: Hints = Hints()) -> list[str]:
    """Returns the lines of a text. Raises ConfigError for too many."""
    if text.count("\n") > MAX_LINES:
        raise ConfigError(f"{where}: more than {MAX_LINES:,} lines", hint=hints.broken)
    return text.splitlines()


def unpacked(
    source: Path, hints: Hints = Hints(), *, most_bytes: int = MAX_UNPACKED_BYTES
) -> bytes:
    """Returns the bytes of a regular file, unpacked where it is packed with gzip.

    Raises ConfigError as `opened` does, for a damaged archive, and for one that unpacks to more
    bytes than its own tell.
    """
    with opened(source, None, hints, most_bytes=most_bytes) as file:
        packed_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        is_packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        most = most_bytes
        if is_packed:
            most = min(most, max(_USUAL_BYTES, MAX_RATIO * packed_bytes))
        body = _start(file, most + 1, is_packed=is_packed, where=str(source), hints=hints)
    if len(body) > most:
        raise ConfigError(
            f"cannot read {source}: it unpacks to more than {most:,} bytes", hint=hints.absent
        )
    return body


def start_of(source: Path, num_bytes: int, hints: Hints = Hints()) -> bytes:
    """Returns the first bytes of a regular file of any size, unpacked. Raises ConfigError."""
    with opened(source, None, hints, most_bytes=1 << 62) as file:
        is_packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        return _start(file, num_bytes, is_packed=is_packed, where=str(source), hints=hints)


def fingerprint_of(source: Path, num_digits: int) -> str:
    """Returns the first digits of the SHA-256 of a regular file. Raises ConfigError."""
    digest = hashlib.sha256()
    with opened(source, most_bytes=1 << 62) as file:
        while part := file.read(MIB):
            digest.update(part)
    return digest.hexdigest()[:num_digits]


def _start(file: IO[bytes], num_bytes: int, *, is_packed: bool, where: str, hints: Hints) -> bytes:
    if not is_packed:
        return file.read(num_bytes)
    try:
        with gzip.open(file, "rb") as archive:
            return archive.read(num_bytes)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {where}: {error}", hint=hints.absent) from None


def _require_regular(status: os.stat_result, where: str, hints: Hints, most_bytes: int) -> None:
    """Raises ConfigError for a file that is not regular or is too large."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ConfigError(f"cannot read {where}: {kind}, not a regular file", hint=hints.absent)
    if status.st_size > most_bytes:
        raise _too_large(status.st_size, most_bytes, where, hints)


def _too_large(n_bytes: int, most_bytes: int, where: str, hints: Hints) -> ConfigError:
    return ConfigError(
        f"cannot read {where}: it has {n_bytes:,} bytes, at most {most_bytes:,} are read",
        hint=hints.absent,
    )


def _line_at(body: bytes, place: int) -> int:
    return body.count(b"\n", 0, place) + 1
