"""Reads the kernels of Nsight Systems as CSV (`nsys stats --report cuda_gpu_trace --format csv`).

A row is a kernel or a copy with its start, its duration, its device and its name. Nothing says what
launched it, so that the phase of a kernel is not known, and a step ends with its update, which is
known by its name. Each device is one rank. Source: NVIDIA, User Guide of Nsight Systems, the report
cuda_gpu_trace of `nsys stats`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from parplan.profiles.documents.bounded import Hints
from parplan.profiles.documents.numbers import real, without_separators
from parplan.profiles.documents.tables import Cells, table_of
from parplan.profiles.errors import ConfigError
from parplan.profiles.traces.nsight import TOOL
from parplan.profiles.traces.trace_record import (
    MOMENT,
    Phase,
    RankTrace,
    TracedCollective,
    TracedWork,
    WorkClass,
    steps_of,
)
from parplan.profiles.traces.work_classes import class_of, operation_of

_HINT = "write it again: nsys stats --report cuda_gpu_trace --format csv report.nsys-rep"
_SECONDS = {"ns": 1e-9, "us": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(Start|Duration|Total Time) \((\w+)\)")
_DEVICE = re.compile(r"(.*\S)\s+\((\d+)\)$")
_COPY = re.compile(r"\[CUDA mem(cpy|set)[^\]]*\]")
_TO_OR_FROM_HOST = ("Host-to-Device", "Device-to-Host", "HtoD", "DtoH")
HEAD_CHARACTERS = 65536  # the names of the columns are in them


def begins_nsight_csv(head: bytes) -> bool:
    """Returns whether a file begins with a table of `nsys stats`, whichever report it is."""
    line = _header(head.decode("utf-8", errors="replace").splitlines())
    return line is not None


def read_nsight_csv(
    text: str, where: str, fingerprint: str, file_date: str
) -> tuple[RankTrace, ...]:
    """Returns the ranks of a table, one for each device.

    Raises ConfigError: a summary without the start of each kernel, columns that are missing, cells
    that are no numbers, no step.
    """
    start = _header(text[:HEAD_CHARACTERS].splitlines())
    assert start is not None, "the format was recognised by its header"
    names, rows = table_of(text, where, Hints(_HINT, _HINT), first_line=start)
    units = _units(names, where)
    by_device: defaultdict[str, list[TracedWork]] = defaultdict(list)
    for number, cells in enumerate(rows, start + 2):
        if cells["Name"] and cells["Device"]:
            work = _work(cells, units, f"{where}, line {number}")
            by_device[cells["Device"]].append(work)
    return tuple(
        RankTrace(
            file=where,
            tool=TOOL,
            date=file_date,
            fingerprint=fingerprint,
            device=named[1] if (named := _DEVICE.match(device)) else device,
            rank=None,
            world_size=None,
            steps=steps_of(work, (), where, host_is_device=False),
        )
        for device, work in sorted(by_device.items())
    )


def _header(lines: Sequence[str]) -> int | None:
    """Returns the index of the line with the names of the columns; nsys may print others before."""
    return next((index for index, line in enumerate(lines[:20]) if _TIME.search(line)), None)


def _units(names: Sequence[str], where: str) -> dict[str, tuple[str, float]]:
    """Returns the column and the seconds of the unit of `Start` and `Duration`."""
    found = {
        match[1]: (name, _SECONDS[match[2]])
        for name in names
        if (match := _TIME.fullmatch(name)) and match[2] in _SECONDS
    }
    if "Start" not in found:
        raise ConfigError(f"{where}: a summary of kernels, without the start of each", hint=_HINT)
    for name in ("Duration", "Device", "Name"):
        if name not in (*found, *names):
            raise ConfigError(f"{where}: the column {name} is missing", hint=_HINT)
    return found


def _work(cells: Cells, units: Mapping[str, tuple[str, float]], where: str) -> TracedWork:
    start_s, duration_s = (_number(cells, *units[name], where) for name in ("Start", "Duration"))
    name = cells["Name"]
    if _COPY.match(name):
        name = "Memcpy HtoD" if any(word in name for word in _TO_OR_FROM_HOST) else "Memcpy DtoD"
    kind = class_of(name)
    is_collective = kind is WorkClass.COLLECTIVES
    return TracedWork(
        start_s=start_s,
        end_s=start_s + duration_s,
        launched_s=start_s,
        kind=kind,
        phase=Phase.OPTIMIZER if kind is WorkClass.OPTIMIZER else None,
        collective=TracedCollective(operation=operation_of(name)) if is_collective else None,
    )


def _number(cells: Cells, column: str, seconds: float, where: str) -> float:
    return real(without_separators(cells[column]), column, where, MOMENT, _HINT) * seconds
