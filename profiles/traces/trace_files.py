"""Finds the traces of a run's ranks among files and folders, and reads them by their format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from parplan.profiles.documents.bounded import (
    Hints,
    fingerprint_of,
    start_of,
    text_of,
    unpacked,
)
from parplan.profiles.documents.files import changed_on
from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.ranges import RANKS
from parplan.profiles.errors import ConfigError
from parplan.profiles.traces.kineto import read_kineto
from parplan.profiles.traces.nsight import HEAD, read_nsight
from parplan.profiles.traces.nsight_csv import begins_nsight_csv, read_nsight_csv
from parplan.profiles.traces.trace_record import RankTrace
from parplan.profiles.units import KIB

FINGERPRINT_DIGITS = 16
_HEAD_BYTES = 64 * KIB
_RANK = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
_HINT = "give traces of torch.profiler or nsys export, or a folder with one for each rank"
_HINTS = Hints("check the file, or record fewer steps")


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
    return text_of(unpacked(path, _HINTS), str(path), _HINTS, lossy=True)


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
    ranks = Counter(trace.rank for trace in traces if trace.rank is not None)
    for trace in traces:
        if ranks[trace.rank or 0] > 1:
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
    traces = found.read(path, fingerprint_of(path, FINGERPRINT_DIGITS), changed_on(path))
    if not traces:
        raise ConfigError(f"{path}: it has no kernel of a device", hint=_HINT)
    named = _RANK.search(path.name)
    rank = whole_of(named[1], RANKS) if named else None
    if rank is not None and len(traces) == 1 and traces[0].rank is None:
        return (replace(traces[0], rank=rank),)
    return traces


def _format_of(path: Path) -> TraceFormat | None:
    head = start_of(path, _HEAD_BYTES, _HINTS)
    return next((each for each in FORMATS if each.begins(head)), None)
