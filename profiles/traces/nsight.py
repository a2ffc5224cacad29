"""Reads reports of Nsight Systems as SQLite (`nsys export --type sqlite`).

Each process on a device of the report is one rank. A kernel belongs to the backward pass where a
thread of torch's autograd engine (pt_autograd) or a range `backward` launched it, to the update
where a range with `optimizer` did or its name says so, else to the forward pass. A step is a range
of NVTX such as `step 7` or `iteration 7`, or else ends with its update. A report names neither the
ranks nor the bytes of collectives. Source: NVIDIA, SQLite Export Schema Reference of the Nsight
Systems documentation.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from parplan.profiles.errors import ConfigError
from parplan.profiles.traces.host_phases import HostPhases, HostThread, outermost
from parplan.profiles.traces.trace_record import (
    Interval,
    Phase,
    RankTrace,
    TracedCollective,
    TracedWork,
    WorkClass,
    steps_of,
)
from parplan.profiles.traces.work_classes import class_of, operation_of

TOOL = "nsight"
HEAD = b"SQLite format 3\0"
_HINT = "export it again: nsys profile --trace=cuda,nvtx, then nsys export --type sqlite"
_NS = 1e-9
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
_LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
_RANGES = "NVTX_EVENTS"
_THREADS = "ThreadNames"
_NAMES = "StringIds"
_GPUS = "TARGET_INFO_GPU"
_STARTED = "TARGET_INFO_SESSION_START_TIME"
_COLUMNS = {
    _KERNELS: ("start", "end", "deviceId", "correlationId", "globalPid", "demangledName"),
    _LAUNCHES: ("start", "globalTid", "correlationId"),
    _NAMES: ("id", "value"),
    _GPUS: ("id", "name"),
}
_PROCESS_BITS = 24  # of a serialized thread id, below those of the process
_TO_HOST = (1, 2)  # copyKind of copies to the device, and from it
_STEP = re.compile(r"ProfilerStep#|(?:train\w*[ _-]?)?(?:step|iter(?:ation)?)[ _#:=-]*\d+", re.I)
_BACKWARD = re.compile(r"\bbackward\b", re.I)
_UPDATE = re.compile(r"optimi[sz]er", re.I)
_AUTOGRAD = "pt_autograd"


@dataclass(frozen=True, slots=True)
class _DeviceRow:
    """A kernel or a copy in nanoseconds, with the process and the device that it ran on."""

    start: int
    end: int
    process: int
    device: int
    correlation: int
    name: str


def read_nsight(path: Path, fingerprint: str, file_date: str) -> tuple[RankTrace, ...]:
    """Returns the ranks of a report.

    file_date   the date that counts where the report has none
    Raises ConfigError: not readable, tables or columns that are missing, no step.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as report:
            return _ranks(report, str(path), fingerprint, file_date)
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: not readable as SQLite: {error}", hint=_HINT) from None


def _ranks(
    report: sqlite3.Connection, where: str, fingerprint: str, file_date: str
) -> tuple[RankTrace, ...]:
    for table, columns in _COLUMNS.items():
        _require(report, table, columns, where)
    gpus = dict(report.execute(f"SELECT id, name FROM {_GPUS}"))
    launches = {
        (thread >> _PROCESS_BITS, correlation): (thread, start)
        for start, thread, correlation in report.execute(
            f"SELECT start, globalTid, correlationId FROM {_LAUNCHES}"
        )
    }
    by_rank: defaultdict[tuple[int, int], list[_DeviceRow]] = defaultdict(list)
    for row in _device_rows(report):
        by_rank[row.process, row.device].append(row)
    threads, marked = _ranges(report)
    phases = HostPhases(threads, _autograd_threads(report))
    return tuple(
        RankTrace(
            file=where,
            tool=TOOL,
            date=_date(report) or file_date,
            fingerprint=fingerprint,
            device=_device_name(gpus, device, where),
            rank=None,
            world_size=None,
            steps=steps_of(
                [_work(row, launches, phases) for row in rows],
                [(a * _NS, b * _NS) for a, b in outermost(marked.get(process, []))],
                where,
                host_is_device=False,
            ),
        )
        for (process, device), rows in sorted(by_rank.items())
    )


def _columns(report: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in report.execute(f"PRAGMA table_info({table})")}


def _require(report: sqlite3.Connection, table: str, columns: Sequence[str], where: str) -> None:
    present = _columns(report, table)
    if not present:
        raise ConfigError(f"{where}: the table {table} is missing", hint=_HINT)
    for column in columns:
        if column not in present:
            raise ConfigError(f"{where}: the column {table}.{column} is missing", hint=_HINT)


def _device_rows(report: sqlite3.Connection) -> Iterator[_DeviceRow]:
    """Yields kernels, and copies between device and host."""
    kernels = report.execute(
        f"SELECT k.start, k.end, k.globalPid, k.deviceId, k.correlationId, n.value "
        f"FROM {_KERNELS} k LEFT JOIN {_NAMES} n ON k.demangledName = n.id"
    )
    for start, end, process, device, correlation, name in kernels:
        yield _DeviceRow(start, end, process >> _PROCESS_BITS, device, correlation, name or "")
    if "copyKind" not in _columns(report, _COPIES):
        return
    copies = report.execute(
        f"SELECT start, end, globalPid, deviceId, correlationId, copyKind FROM {_COPIES}"
    )
    for start, end, process, device, correlation, kind in copies:
        name = "Memcpy HtoD" if kind in _TO_HOST else "Memcpy DtoD"
        yield _DeviceRow(start, end, process >> _PROCESS_BITS, device, correlation, name)


def _ranges(
    report: sqlite3.Connection,
) -> tuple[dict[Hashable, HostThread], dict[int, list[Interval]]]:
    """Returns ranges of backward passes and updates by thread, and steps by process."""
    threads: dict[Hashable, HostThread] = defaultdict(HostThread)
    steps: defaultdict[int, list[Interval]] = defaultdict(list)
    columns = _columns(report, _RANGES)
    if not {"start", "end", "text", "globalTid"} <= columns:
        return threads, steps
    text = "COALESCE(r.text, n.value)" if "textId" in columns else "r.text"
    join = f"LEFT JOIN {_NAMES} n ON r.textId = n.id" if "textId" in columns else ""
    for start, end, thread, name in report.execute(
        f"SELECT r.start, r.end, r.globalTid, {text} FROM {_RANGES} r {join} "
        "WHERE r.end IS NOT NULL"
    ):
        if not name:
            continue
        if _STEP.match(name):
            steps[thread >> _PROCESS_BITS].append((start, end))
        elif _UPDATE.search(name):
            threads[thread].update.append((start, end))
        elif _BACKWARD.search(name):
            threads[thread].backward.append((start, end))
    return threads, steps


def _autograd_threads(report: sqlite3.Connection) -> frozenset[Hashable]:
    if not {"globalTid", "nameId"} <= _columns(report, _THREADS):
        return frozenset()
    rows = report.execute(
        f"SELECT t.globalTid, n.value FROM {_THREADS} t JOIN {_NAMES} n ON t.nameId = n.id"
    )
    return frozenset(thread for thread, name in rows if name.startswith(_AUTOGRAD))


def _work(
    row: _DeviceRow, launches: dict[tuple[int, int], tuple[int, int]], phases: HostPhases
) -> TracedWork:
    thread, launched = launches.get((row.process, row.correlation), (None, row.start))
    kind = class_of(row.name)
    phase = phases.at(thread, launched) if thread is not None else None
    if kind is WorkClass.OPTIMIZER:
        phase = Phase.OPTIMIZER
    is_collective = kind is WorkClass.COLLECTIVES
    return TracedWork(
        start_s=row.start * _NS,
        end_s=row.end * _NS,
        launched_s=launched * _NS,
        kind=kind,
        phase=phase,
        collective=TracedCollective(operation=operation_of(row.name)) if is_collective else None,
    )


def _device_name(gpus: dict[int, str], device: int, where: str) -> str:
    """Returns the name of a device, whose number is that of the process among its GPUs."""
    if len(set(gpus.values())) == 1:
        return next(iter(gpus.values()))
    if device not in gpus:
        raise ConfigError(f"{where}: {_GPUS} does not name the device {device}", hint=_HINT)
    return gpus[device]


def _date(report: sqlite3.Connection) -> str:
    """Returns the day of the recording, empty where the report does not say it."""
    if "utcEpochNs" not in _columns(report, _STARTED):
        return ""
    started = report.execute(f"SELECT utcEpochNs FROM {_STARTED}").fetchone()
    if started is None:
        return ""
    return datetime.fromtimestamp(started[0] * _NS, UTC).date().isoformat()
