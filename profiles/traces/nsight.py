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
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parplan.profiles.traces.host_phases import HostPhases, HostThread, outermost
from parplan.profiles.traces.sqlite_report import (
    IDENTITY,
    SqliteReport,
    opened_report,
    optional_whole,
)
from parplan.profiles.traces.trace_record import (
    MOMENT,
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
_TIMES = ("start", "end")
_ON_DEVICE = (*_TIMES, "globalPid", "deviceId", "correlationId")
_OF_RANGE = (*_TIMES, "globalTid", "text")
_COLUMNS = {
    _KERNELS: (*_ON_DEVICE, "demangledName"),
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
    Raises ConfigError: not readable, tables or columns that are missing, cells that are no numbers,
    no step.
    """
    with opened_report(path, _HINT) as report:
        return _ranks(report, fingerprint, file_date)


def _ranks(report: SqliteReport, fingerprint: str, file_date: str) -> tuple[RankTrace, ...]:
    for table, columns in _COLUMNS.items():
        report.require(table, columns)
    names = _texts(report, _NAMES, "id", "value")
    gpus = _texts(report, _GPUS, "id", "name")
    launches = _launches(report)
    by_rank: defaultdict[tuple[int, int], list[_DeviceRow]] = defaultdict(list)
    for row in (*_kernels(report, names), *_copies(report)):
        by_rank[row.process, row.device].append(row)
    threads, marked = _ranges(report, names)
    phases = HostPhases(threads, _autograd_threads(report, names))
    date = _date(report) or file_date
    return tuple(
        RankTrace(
            file=report.where,
            tool=TOOL,
            date=date,
            fingerprint=fingerprint,
            device=_device_name(gpus, device, report),
            rank=None,
            world_size=None,
            steps=steps_of(
                [_work(row, launches, phases) for row in rows],
                [(a * _NS, b * _NS) for a, b in outermost(marked.get(process, []))],
                report.where,
                host_is_device=False,
            ),
        )
        for (process, device), rows in sorted(by_rank.items())
    )


def _texts(report: SqliteReport, table: str, key: str, value: str) -> dict[int, str]:
    """Returns the texts of a table by their number; rows without either are left out."""
    rows = report.rows(table, (key, value))
    return {number: text for number, text in rows if type(number) is int and isinstance(text, str)}


def _launches(report: SqliteReport) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns the thread and the moment of each launch, by its process and its number."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for start, thread, correlation in report.rows(
        _LAUNCHES, ("start", "globalTid", "correlationId")
    ):
        thread_id = report.whole(thread, f"{_LAUNCHES}.globalTid")
        number = report.whole(correlation, f"{_LAUNCHES}.correlationId")
        moment = report.whole(start, f"{_LAUNCHES}.start", MOMENT)
        found[thread_id >> _PROCESS_BITS, number] = thread_id, moment
    return found


def _kernels(report: SqliteReport, names: Mapping[int, str]) -> Iterator[_DeviceRow]:
    for *cells, name in report.rows(_KERNELS, (*_ON_DEVICE, "demangledName")):
        yield _device_row(report, _KERNELS, cells, names.get(name, ""))


def _copies(report: SqliteReport) -> Iterator[_DeviceRow]:
    """Yields copies between device and host, and inside the device."""
    if not {*_ON_DEVICE, "copyKind"} <= report.columns(_COPIES):
        return
    for *cells, kind in report.rows(_COPIES, (*_ON_DEVICE, "copyKind")):
        name = "Memcpy HtoD" if kind in _TO_HOST else "Memcpy DtoD"
        yield _device_row(report, _COPIES, cells, name)


def _device_row(report: SqliteReport, table: str, cells: list[Any], name: str) -> _DeviceRow:
    """Returns a row of the columns _ON_DEVICE. Raises ConfigError for cells that are no numbers."""
    start, end, process, device, correlation = (
        report.whole(cell, f"{table}.{column}", MOMENT if column in _TIMES else IDENTITY)
        for cell, column in zip(cells, _ON_DEVICE, strict=True)
    )
    return _DeviceRow(start, end, process >> _PROCESS_BITS, device, correlation, name)


def _ranges(
    report: SqliteReport, names: Mapping[int, str]
) -> tuple[dict[Hashable, HostThread], dict[int, list[Interval]]]:
    """Returns ranges of backward passes and updates by thread, and steps by process."""
    threads: dict[Hashable, HostThread] = defaultdict(HostThread)
    steps: defaultdict[int, list[Interval]] = defaultdict(list)
    columns = report.columns(_RANGES)
    if not {*_OF_RANGE} <= columns:
        return threads, steps
    named = ("textId",) if "textId" in columns else ()
    for *cells, text, number in (
        (*row, *([None] * (1 - len(named)))) for row in report.rows(_RANGES, (*_OF_RANGE, *named))
    ):
        name = text if isinstance(text, str) and text else names.get(number, "")
        moments = [optional_whole(cell, MOMENT) for cell in cells[:2]]
        start, end, thread = *moments, optional_whole(cells[2])
        if not name or start is None or end is None or thread is None:  # a mark has no end
            continue
        if _STEP.match(name):
            steps[thread >> _PROCESS_BITS].append((start, end))
        elif _UPDATE.search(name):
            threads[thread].update.append((start, end))
        elif _BACKWARD.search(name):
            threads[thread].backward.append((start, end))
    return threads, steps


def _autograd_threads(report: SqliteReport, names: Mapping[int, str]) -> frozenset[Hashable]:
    if not {"globalTid", "nameId"} <= report.columns(_THREADS):
        return frozenset()
    rows = report.rows(_THREADS, ("globalTid", "nameId"))
    return frozenset(thread for thread, name in rows if names.get(name, "").startswith(_AUTOGRAD))


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


def _device_name(gpus: Mapping[int, str], device: int, report: SqliteReport) -> str:
    """Returns the name of a device, whose number is that of the process among its GPUs."""
    if len(set(gpus.values())) == 1:
        return next(iter(gpus.values()))
    if device not in gpus:
        raise report.wrong(f"{_GPUS} does not name the device {device}")
    return gpus[device]


def _date(report: SqliteReport) -> str:
    """Returns the day of the recording, empty where the report does not say it."""
    if "utcEpochNs" not in report.columns(_STARTED):
        return ""
    for (started,) in report.rows(_STARTED, ("utcEpochNs",)):
        moment = optional_whole(started, MOMENT)
        return (
            "" if moment is None else datetime.fromtimestamp(moment * _NS, UTC).date().isoformat()
        )
    return ""
