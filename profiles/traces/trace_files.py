"""Finds the traces of a run's ranks among files and folders, and reads them by their format."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from parplan.profiles.documents.files import changed_on
from parplan.profiles.errors import ConfigError
from parplan.profiles.traces.kineto import read_kineto
from parplan.profiles.traces.nsight import HEAD, read_nsight
from parplan.profiles.traces.nsight_csv import begins_nsight_csv, read_nsight_csv
from parplan.profiles.traces.trace_record import RankTrace
from parplan.profiles.units import GIB, KIB

MAX_TEXT_BYTES = 4 * GIB
FINGERPRINT_DIGITS = 16
_HEAD_BYTES = 64 * KIB
_GZIP = b"\x1f\x8b"
_RANK = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
_HINT = "give traces of torch.profiler or nsys export, or a folder with one for each rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """One format of traces.

    begins   returns whether the first bytes of a file, unpacked, are of this format
    read     reads a file with its fingerprint and its date
    """

    name: str
    begins: Callable[[bytes], bool]
    read: Callable[[Path, str, str], tuple[RankTrace, ...]]


def _text(path: Path) -> str:
    """Returns the text of a file, unpacked. Raises ConfigError: not readable, too large."""
    body = _body(path, MAX_TEXT_BYTES + 1)
    if len(body) > MAX_TEXT_BYTES:
        raise ConfigError(
            f"{path}: its text is larger than {MAX_TEXT_BYTES // GIB} GiB",
            hint="record fewer steps",
        )
    return body.decode("utf-8", errors="replace")


FORMATS = (
    TraceFormat(
        name="Kineto (torch.profiler)",
        begins=lambda head: (
            head.lstrip()[:1] == b"{" and (b'"traceEvents"' in head or b'"schemaVersion"' in head)
        ),
        read=lambda path, fingerprint, date: (
            read_kineto(_text(path), str(path), fingerprint, date),
        ),
    ),
    TraceFormat(
        name="Nsight Systems (SQLite)",
        begins=lambda head: head.startswith(HEAD),
        read=read_nsight,
    ),
    TraceFormat(
        name="Nsight Systems (CSV of cuda_gpu_trace)",
        begins=begins_nsight_csv,
        read=lambda path, fingerprint, date: read_nsight_csv(
            _text(path), str(path), fingerprint, date
        ),
    ),
)


def is_trace(path: Path) -> bool:
    """Returns whether a path is a folder or a file of a known format."""
    return path.is_dir() or (path.is_file() and _format_of(path) is not None)


def read_traces(paths: Iterable[Path]) -> tuple[RankTrace, ...]:
    """Returns the traces in files and folders.

    A folder's files of no known format are left out. A rank that a trace does not say is that of
    its file's name (rank3). Raises ConfigError: none there, not readable,
    too large, or two of one rank.
    """
    traces = tuple(trace for path in _files(paths) for trace in _read(path))
    ranks = [trace.rank for trace in traces if trace.rank is not None]
    for trace in traces:
        if ranks.count(trace.rank or 0) > 1:
            raise ConfigError(
                f"{trace.file}: another file is of rank {trace.rank} too",
                hint="give the traces of one run, one for each rank",
            )
    return traces


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        files = [each for each in sorted(path.iterdir()) if each.is_file()]
        known = [each for each in files if _format_of(each) is not None]
        if not known:
            raise ConfigError(f"{path}: none of its {len(files)} files is a trace", hint=_HINT)
        yield from known


def _read(path: Path) -> tuple[RankTrace, ...]:
    found = _format_of(path)
    if found is None:
        names = ", ".join(each.name for each in FORMATS)
        raise ConfigError(f"{path}: its format is unknown, known are {names}", hint=_HINT)
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()[:FINGERPRINT_DIGITS]
    traces = found.read(path, fingerprint, changed_on(path))
    named = _RANK.search(path.name)
    if named and len(traces) == 1 and traces[0].rank is None:
        return (replace(traces[0], rank=int(named[1])),)
    return traces


def _format_of(path: Path) -> TraceFormat | None:
    head = _body(path, _HEAD_BYTES)
    return next((each for each in FORMATS if each.begins(head)), None)


def _body(path: Path, most_bytes: int) -> bytes:
    """Returns the first bytes of a regular file, unpacked. Raises ConfigError."""
    try:
        if not path.is_file():
            raise ConfigError(f"cannot read {path}: not a file", hint="check the path")
        with path.open("rb") as file:
            is_packed = file.read(len(_GZIP)) == _GZIP
        with gzip.open(path, "rb") if is_packed else path.open("rb") as file:
            return file.read(most_bytes)
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {problem}", hint="check the file") from None
