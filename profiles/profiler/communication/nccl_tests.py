"""Parses the output of nccl-tests (all_reduce_perf and others, also rccl-tests) into records.

Lines of other programs, and the prefixes of mpirun and srun, are skipped. The collective is that
of the program's name, or else the only one that has the bandwidths of the rows. Columns are found
by the header: older versions have no root or no redop (or leave it blank) and `error` for
`#wrong`; some programs have no in-place half. Sizes are those of nccl-tests since 2019, the larger
of the bytes that a rank sends and receives (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from parplan.profiles.documents.bounded import MAX_LINE, Hints, lines_of, read_text
from parplan.profiles.documents.line_prefixes import without_prefixes
from parplan.profiles.documents.numbers import real, real_of, whole, whole_of
from parplan.profiles.documents.ranges import COUNT, Range
from parplan.profiles.errors import ConfigError, unknown_name_error
from parplan.profiles.machines.measurements import CaseFigures, CaseOutcome, Record, Timing
from parplan.profiles.profiler.communication.comm_cases import (
    ALL_REDUCE,
    PARTED,
    POINT_TO_POINT,
    TIMED,
    timed_case,
)
from parplan.profiles.profiler.communication.group_shapes import Shape

PROGRAMS = {
    "all_reduce": ALL_REDUCE,
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": POINT_TO_POINT,
}
PRECISIONS = {"float": "fp32", "half": "fp16", "bfloat16": "bf16"}
# Bandwidths have two decimals; below this they do not tell numbers of ranks apart.
LEAST_GB_PER_S = 5.0
RATIO_TOLERANCE = 0.01
ITERATIONS = 20  # nccl-tests' default
_ENDED = "Collective test concluded"  # the last line of an output, which names its program
_PROGRAM = re.compile(r"\b([a-z]+(?:_[a-z]+)?)_perf")
_ITERATIONS = re.compile(r"(?<!warmup)(?<!agg) iters: ([0-9]+)")
_RANK = re.compile(r"Rank\s+[0-9]+\s+(?:Group\s+([0-9]+)\s+)?Pid\s+[0-9]+\s+on\s+(\S+)\s+device")
_ROW = re.compile(r"^\s*[0-9]+\s+[0-9]+\s+[a-z][a-z0-9_]*\s")
_TIMESTAMP = re.compile(r"\s[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}$")
_REDUCTIONS = ("sum", "prod", "min", "max", "avg", "mulsum")
_REDUCING = (ALL_REDUCE, "reduce_scatter")
POSITIVE_OR_NONE = Range(0, 1e15)
_HINT = "take the whole output of nccl-tests, with its header"


@dataclass(slots=True)
class _TestHeader:
    """The facts from the lines before a row: program, ranks as (group, host), iterations, columns.

    The columns start at `time`.
    """

    program: str = ""
    is_named: bool = False  # a line after the last row names the program
    ranks: list[tuple[str, str]] = field(default_factory=list)
    iterations: int = ITERATIONS
    columns: list[str] = field(default_factory=list)
    header: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The caller's facts about a text; None for facts that its lines tell."""

    where: str
    nodes: int | None
    ranks_per_node: int | None
    groups: int | None
    collective: str | None


def nccl_tests_records(
    text: str,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    *,
    groups: int | None = None,
    collective: str | None = None,
    where: str = "nccl-tests output",
) -> tuple[Record, ...]:
    """Returns a record of every row, with the times of the variant that torch calls.

    That variant is in place for all-reduce, else out of place. The text is one or more outputs. The
    spread is that between the two halves of a row, because nccl-tests prints means. Unless given,
    the nodes, ranks per node of a group and concurrent groups (NCCL_TESTS_SPLIT) come from the list
    of ranks in the text, and the collective from the program's name in it.

    Raises ConfigError with `where` and the line for rows without a header, other columns, wrong
    results, another number of ranks than given, and facts that neither text nor caller gives.
    """
    if collective is not None and collective not in TIMED:
        raise unknown_name_error("collective", collective, TIMED)
    given = _Given(
        where=where,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        groups=groups,
        collective=collective,
    )
    records = tuple(_records(lines_of(text, where, Hints(_HINT, _HINT)), given))
    if not records:
        raise ConfigError(f"{where}: no row of nccl-tests in it", hint=_HINT)
    return records


def read_nccl_tests(
    paths: Iterable[Path], nodes: int | None = None, ranks_per_node: int | None = None
) -> tuple[Record, ...]:
    """Returns the records of several files.

    Raises ConfigError for an unreadable file and as `nccl_tests_records`.
    """
    records: list[Record] = []
    for path in paths:
        text = read_text(path, hints=Hints(_HINT, _HINT), lossy=True)
        records += nccl_tests_records(text, nodes, ranks_per_node, where=str(path))
    return tuple(records)


@dataclass(slots=True)
class _TestTable:
    """Rows under one header, each with its cells and its place."""

    run: _TestHeader
    rows: list[tuple[list[str], list[dict[str, str]], str]] = field(default_factory=list)


def _records(lines: list[str], given: _Given) -> Iterator[Record]:
    for table in _tables(lines, given):
        place = table.rows[0][2]
        shape = _shape(table.run, given, place)
        work = given.collective or _named_work(table, shape, place)
        shape = _message(shape, place) if work == POINT_TO_POINT else shape
        for head, halves, row_place in table.rows:
            record = _record(head, halves, work, shape, table.run.iterations, row_place)
            if record is not None:
                yield record


def _tables(lines: list[str], given: _Given) -> Iterator[_TestTable]:
    """Yields the rows of one header after another."""
    run = _TestHeader()
    table = _TestTable(run)
    for number, line in enumerate(lines, start=1):
        bare = without_prefixes(line[:MAX_LINE])[1].rstrip()
        if _ROW.match(f"{bare} "):
            place = f"{given.where}, line {number}"
            table.rows.append((*_cells(bare, run, place), place))
            run.is_named = False
            continue
        before = replace(run, ranks=list(run.ranks))
        _note(bare, run)
        if table.rows and run != before:
            yield _TestTable(before, table.rows)
            table = _TestTable(run)
    if table.rows:
        yield _TestTable(run, table.rows)


def _note(line: str, run: _TestHeader) -> None:
    """Stores the facts that a line tells about the rows that follow."""
    program = None if _ENDED in line else _PROGRAM.search(line)
    if program:
        run.program, run.is_named = program[1], True
    if "nThread" in line:  # the first line of every output
        iterations = _ITERATIONS.search(line)
        count = whole_of(iterations[1], COUNT) if iterations else None
        run.iterations = count or ITERATIONS
        run.ranks = []
        run.columns = []
        if not run.is_named:  # the program of the output before
            run.program = ""
    rank = _RANK.search(line)
    if rank:
        run.ranks.append((rank[1] or "0", rank[2]))
    names = line.lstrip("# ").split()
    if names[:3] == ["size", "count", "type"]:
        first = next(
            (index for index, name in enumerate(names) if name.endswith("time")), len(names)
        )
        run.header = first
        run.columns = [name for name in names[first:] if name != "timestamp"]


def _record(
    head: list[str],
    halves: list[dict[str, str]],
    work: str,
    shape: Shape,
    iterations: int,
    place: str,
) -> Record | None:
    """The record of a row, None for a row of zero bytes."""
    size = whole(head[0], "size", place, hint=_HINT)
    if size == 0:
        return None
    for half in halves:
        _check(half, work, shape, place)
    times_us = [_figure(half, "time", place) for half in halves]
    time_us = times_us[-1] if work == ALL_REDUCE else times_us[0]
    timing = Timing(
        median_us=time_us,
        spread=(max(times_us) - min(times_us)) / 2 / time_us,
        repeats=iterations,
    )
    case = timed_case(work, size, shape, PRECISIONS.get(head[2], head[2]))
    return Record(
        case=case, outcome=CaseOutcome.MEASURED, measured=CaseFigures(times={"time": timing})
    )


def _cells(line: str, run: _TestHeader, place: str) -> tuple[list[str], list[dict[str, str]]]:
    """Returns the cells before the first time, and the cells of each half by column.

    A blank redop or root is no cell.
    """
    if not run.columns:
        raise ConfigError(f"{place}: a row before the header with its columns", hint=_HINT)
    if run.columns[0] != "time":
        raise ConfigError(
            f"{place}: {run.columns[0]} is the time of the host, not of the device",
            hint="run it without -C",
        )
    cells = _TIMESTAMP.sub("", line).split()
    head, tail = cells[: -len(run.columns)], cells[-len(run.columns) :]
    if not 3 <= len(head) <= run.header:
        raise ConfigError(
            f"{place}: {len(cells)} cells, the header has {run.header + len(run.columns)} columns",
            hint=_HINT,
        )
    starts = [index for index, name in enumerate(run.columns) if name == "time"]
    ends = [*starts[1:], len(tail)]
    halves = [
        dict(zip(run.columns[start:end], tail[start:end], strict=True))
        for start, end in zip(starts, ends, strict=True)
    ]
    return head, halves


def _check(half: dict[str, str], work: str, shape: Shape, place: str) -> None:
    """Raises ConfigError for wrong results, and for bandwidths of another number of ranks."""
    time_us, algorithm, bus = (_figure(half, name, place) for name in ("time", "algbw", "busbw"))
    if time_us <= 0:
        raise ConfigError(f"{place}: a time of {half['time']} us", hint=_HINT)
    wrong = half.get("#wrong", "0")
    if wrong not in ("0", "N/A"):
        raise ConfigError(
            f"{place}: {wrong} wrong results", hint="correct what makes NCCL wrong first"
        )
    expected = _bus_factors(work, shape.num_ranks)
    if algorithm >= LEAST_GB_PER_S and not any(
        abs(bus / algorithm / factor - 1) <= RATIO_TOLERANCE for factor in expected
    ):
        raise ConfigError(
            f"{place}: busbw is {bus / algorithm:.3g} times algbw, {work} on {shape.num_ranks} "
            f"ranks has {expected[0]:.3g}",
            hint="say which collective and how many nodes and ranks per node it was",
        )


def _figure(half: dict[str, str], name: str, place: str) -> float:
    return real(half.get(name), name, place, POSITIVE_OR_NONE, _HINT)


def _bus_factors(work: str, ranks: int) -> tuple[float, ...]:
    """The ratio busbw / algbw of a ring; until 2020 gathers had 1."""
    if work in PARTED:
        return (ranks - 1) / ranks, 1.0
    return (2 * (ranks - 1) / ranks,) if work == ALL_REDUCE else (1.0,)


def _named_work(table: _TestTable, shape: Shape, place: str) -> str:
    """Returns the collective of a program's name, else that of its rows. Raises ConfigError."""
    program = table.run.program
    if program in PROGRAMS:
        return PROGRAMS[program]
    fitting = () if program else _fitting_works(table, shape.num_ranks)
    if len(fitting) == 1:
        return fitting[0]
    row = f"of {program}_perf" if program else "of no program that is named before it"
    known = [f"{name}_perf" for name, work in PROGRAMS.items() if not fitting or work in fitting]
    raise ConfigError(
        f"{place}: a row {row}, needed one of {', '.join(known)}",
        hint=f"write its name in a line before the first row, such as # {known[0]}",
    )


def _fitting_works(table: _TestTable, num_ranks: int) -> tuple[str, ...]:
    """Returns the collectives that have the operation and the bandwidths of these rows.

    busbw / algbw is 2 (n - 1) / n of an all-reduce, (n - 1) / n of collectives whose ranks have a
    part each, and 1 of a message. A reduction has an operation, such as sum.
    """
    ratios = []
    reduces = False
    for head, halves, _ in table.rows:
        reduces = reduces or any(word in _REDUCTIONS for word in head[3:])
        algorithm, bus = (real_of(halves[0].get(name)) or 0.0 for name in ("algbw", "busbw"))
        if algorithm >= LEAST_GB_PER_S:
            ratios.append(bus / algorithm)
    return tuple(
        work
        for work in PROGRAMS.values()
        if reduces == (work in _REDUCING)
        and ratios
        and all(
            abs(ratio / _bus_factors(work, num_ranks)[0] - 1) <= RATIO_TOLERANCE for ratio in ratios
        )
    )


def _shape(run: _TestHeader, given: _Given, place: str) -> Shape:
    """The shape from the ranks or the caller. Raises ConfigError if they differ or lack it."""
    group_hosts = [host for group, host in run.ranks if group == "0"]
    hosts = len(set(group_hosts))
    nodes = given.nodes or hosts
    if not nodes or not (given.ranks_per_node or group_hosts):
        raise ConfigError(
            f"{place}: neither a list of ranks before it nor a number of nodes",
            hint="say how many nodes and ranks per node",
        )
    ranks_per_node = given.ranks_per_node or len(group_hosts) // nodes
    if group_hosts and nodes * ranks_per_node != len(group_hosts):
        raise ConfigError(
            f"{place}: {len(group_hosts)} ranks in a group on {hosts} hosts, {nodes} nodes of "
            f"{ranks_per_node} ranks were said",
            hint="say as many as there were",
        )
    beside = {group for group, host in run.ranks if group_hosts and host == group_hosts[0]}
    return Shape(
        nodes=nodes, ranks_per_node=ranks_per_node, groups=given.groups or max(1, len(beside))
    )


def _message(shape: Shape, place: str) -> Shape:
    """Checks that a message has two ranks, as the curves of messages do."""
    if shape.num_ranks != 2:
        raise ConfigError(
            f"{place}: sendrecv_perf on {shape.num_ranks} ranks is a ring of messages, needed one "
            "between 2 ranks",
            hint="run it on 2 GPUs of a node, or on one of each of 2 nodes",
        )
    return shape
