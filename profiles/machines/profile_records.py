"""Records of a profile as lines of its file, and back.

A line has its sizes by name and each pass with its curve, its sizes there and its time.

{work: linear, sizes: {m: 2048, n: 6144, k: 2048, bias: 0}, passes: {forward: {curve: forward,
 at: [2048, 6144, 2048], time_us: 51.2, spread: 0.01, repeats: 20}, ...}, saved_bytes: 8388608,
 clock_mhz: 1410.0}
{work: ..., sizes: ..., outcome: out_of_memory, detail: ...,
 passes: {forward: {curve: ..., at: ...}}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from parplan.profiles.documents.plain import Limits
from parplan.profiles.documents.schema import json_schema, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.measurements import (
    Case,
    CaseFigures,
    CaseOutcome,
    CasePass,
    Record,
    Timing,
)

_FORBID = {"extra": "forbid"}
TIME_DIGITS = 6
SPREAD_DIGITS = 3
FIGURE_DIGITS = 6
_Positive = Annotated[float, Limits(gt=0)]
_NotNegative = Annotated[float, Limits(ge=0)]
_Finite = Annotated[float, Limits()]
_Count = Annotated[int, Limits(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Time:
    """A pass: its curve, its sizes there, and its time.

    A pass without a curve has no sizes, and a case that was not measured has no time.
    """

    __pydantic_config__ = _FORBID

    curve: str = ""
    at: tuple[int, ...] = ()
    time_us: _Positive | None = None
    spread: _NotNegative | None = None
    repeats: _Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A record.

    times: times that belong to no pass of the case
    precision: only where it is not that of the file
    """

    __pydantic_config__ = _FORBID

    work: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    precision: str | None = None
    outcome: CaseOutcome = CaseOutcome.MEASURED
    detail: str = ""
    passes: Mapping[str, _Time] = field(default_factory=dict)
    times: Mapping[str, _Time] = field(default_factory=dict)
    saved_bytes: int | None = None
    workspace_bytes: int | None = None
    figures: Mapping[str, _Finite] = field(default_factory=dict)
    clock_mhz: _Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    records: tuple[_Line, ...]


def lines_of(records: Iterable[Record], precision: str | None) -> list[dict[str, Any]]:
    """Returns one document for each record, without empty values and the precision of the file."""
    return [_line(record, precision) for record in records]


def _line(record: Record, precision: str | None) -> dict[str, Any]:
    case = record.case
    measured = record.measured or CaseFigures()
    times = {name: _time(timing) for name, timing in measured.times.items()}
    passes: dict[str, dict[str, Any]] = {
        each.name: {"curve": each.curve, "at": list(each.sizes)} | times.pop(each.name, {})
        for each in case.passes
    }
    body = {
        "work": case.work,
        "sizes": dict(case.sizes),
        "precision": None if case.precision == precision else case.precision,
        "outcome": None if record.outcome is CaseOutcome.MEASURED else record.outcome.value,
        "detail": record.detail,
        "passes": {name: _filled(each) for name, each in passes.items()},
        "times": times,
        "saved_bytes": measured.saved_bytes,
        "workspace_bytes": measured.workspace_bytes,
        "figures": {name: _number(value) for name, value in measured.figures.items()},
        "clock_mhz": measured.clock_mhz,
    }
    return _filled(body)


def _number(value: float) -> float | int:
    """Returns a whole figure as an integer."""
    return int(value) if value == int(value) else value


def _filled(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value not in (None, "", [], {})}


def _time(timing: Timing) -> dict[str, Any]:
    return {"time_us": timing.median_us, "spread": timing.spread, "repeats": timing.repeats}


def rounded_records(records: Iterable[Record]) -> tuple[Record, ...]:
    """Returns the records with times and figures in the digits that a file has."""
    return tuple(
        record
        if record.measured is None
        else replace(record, measured=_rounded_figures(record.measured))
        for record in records
    )


def _rounded_figures(measured: CaseFigures) -> CaseFigures:
    figures = {name: _digits(value, FIGURE_DIGITS) for name, value in measured.figures.items()}
    times = {name: _rounded(timing) for name, timing in measured.times.items()}
    return replace(measured, times=times, figures=figures)


def _rounded(timing: Timing) -> Timing:
    return replace(
        timing,
        median_us=_digits(timing.median_us, TIME_DIGITS),
        spread=_digits(timing.spread, SPREAD_DIGITS),
    )


def _digits(value: float, digits: int) -> float:
    """Returns a value in `digits` digits, but whole numbers, which are bytes, unchanged."""
    return value if value == int(value) else float(f"{value:.{digits}g}")


def records_of_lines(lines: object, precision: str | None, where: str) -> tuple[Record, ...]:
    """Returns the records that documents describe.

    Raises ConfigError with `where` and the key's path.
    """
    parsed = parse(_Lines, {"records": lines}, where).records
    return tuple(
        _record(line, precision, f"{where}: records.{index}") for index, line in enumerate(parsed)
    )


def _record(line: _Line, precision: str | None, where: str) -> Record:
    case_precision = line.precision or precision
    if case_precision is None:
        raise ConfigError(
            f"{where}: precision is missing, here and of the whole file", hint="add precision"
        )
    case = Case(
        work=line.work,
        sizes=tuple(line.sizes.items()),
        precision=case_precision,
        passes=tuple(
            CasePass(name=name, curve=each.curve, sizes=each.at)
            for name, each in line.passes.items()
        ),
    )
    if line.outcome is not CaseOutcome.MEASURED:
        return Record(case=case, outcome=line.outcome, detail=line.detail)
    times = {
        name: _timing(time, f"{where}.{name}")
        for name, time in {**line.passes, **line.times}.items()
        if time.time_us is not None
    }
    measured = CaseFigures(
        times=times,
        saved_bytes=line.saved_bytes,
        workspace_bytes=line.workspace_bytes,
        figures=line.figures,
        clock_mhz=line.clock_mhz,
    )
    return Record(case=case, outcome=line.outcome, measured=measured, detail=line.detail)


def _timing(time: _Time, where: str) -> Timing:
    if time.time_us is None or time.spread is None or time.repeats is None:
        raise ConfigError(
            f"{where}: a time without its spread or repeats", hint="add spread and repeats"
        )
    return Timing(median_us=time.time_us, spread=time.spread, repeats=time.repeats)


def lines_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a file's records."""
    return json_schema(_Lines)
