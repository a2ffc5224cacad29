"""Records of a profile as lines of its file, and back: sizes by name, each pass with its curve, its
place there and its time.

{work: linear, sizes: {m: 2048, n: 6144, k: 2048, bias: 0}, passes: {forward: {curve: forward, at:
[2048, 6144, 2048],
 time_us: 51.2, spread: 0.01, repeats: 20}, ...}, saved_bytes: 8388608, clock_mhz: 1410.0}
{work: ..., sizes: ..., outcome: out_of_memory, detail: ..., passes: {forward: {curve: ..., at:
...}}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

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
TIME_DIGITS, SPREAD_DIGITS, FIGURE_DIGITS = 6, 3, 6
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Time:
    """A pass: its curve and the sizes there, none where it is no curve's; no time where the case
    was not measured.
    """

    __pydantic_config__ = _FORBID

    curve: str = ""
    at: tuple[int, ...] = ()
    time_us: _Positive | None = None
    spread: _NotNegative | None = None
    repeats: _Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A record. `times` are of no pass of its case; precision: only where it is not the file's."""

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
    """One document a record; empty values and the precision of the file are left out."""
    return [_line(record, precision) for record in records]


def _line(record: Record, precision: str | None) -> dict[str, Any]:
    case, measured = record.case, record.measured or CaseFigures()
    times = {name: _time(timing) for name, timing in measured.times.items()}
    passes: dict[str, dict[str, Any]] = {
        one.name: {"curve": one.curve, "at": list(one.sizes)} | times.pop(one.name, {})
        for one in case.passes
    }
    body = {
        "work": case.work,
        "sizes": dict(case.sizes),
        "precision": None if case.precision == precision else case.precision,
        "outcome": None if record.outcome is CaseOutcome.MEASURED else record.outcome.value,
        "detail": record.detail,
        "passes": {name: _filled(one) for name, one in passes.items()},
        "times": times,
        "saved_bytes": measured.saved_bytes,
        "workspace_bytes": measured.workspace_bytes,
        "figures": {name: _number(value) for name, value in measured.figures.items()},
        "clock_mhz": measured.clock_mhz,
    }
    return _filled(body)


def _number(value: float) -> float | int:
    """Whole figures without a decimal."""
    return int(value) if value == int(value) else value


def _filled(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value not in (None, "", [], {})}


def _time(timing: Timing) -> dict[str, Any]:
    return {"time_us": timing.median_us, "spread": timing.spread, "repeats": timing.repeats}


def rounded_records(records: Iterable[Record]) -> tuple[Record, ...]:
    """Records with times and figures to the digits that repeats can tell apart, as a file is to
    keep them.
    """
    return tuple(
        record
        if record.measured is None
        else replace(
            record,
            measured=replace(
                record.measured,
                times={name: _rounded(timing) for name, timing in record.measured.times.items()},
                figures={
                    name: _digits(value, FIGURE_DIGITS)
                    for name, value in record.measured.figures.items()
                },
            ),
        )
        for record in records
    )


def _rounded(timing: Timing) -> Timing:
    return replace(
        timing,
        median_us=_digits(timing.median_us, TIME_DIGITS),
        spread=_digits(timing.spread, SPREAD_DIGITS),
    )


def _digits(value: float, digits: int) -> float:
    """Whole numbers, which are counts of bytes, stay as they are."""
    return value if value == int(value) else float(f"{value:.{digits}g}")


def records_of_lines(lines: object, precision: str | None, where: str) -> tuple[Record, ...]:
    """The records that documents describe. Raises ConfigError with `where` and the key's path."""
    found = parse(_Lines, {"records": lines}, where).records
    return tuple(
        _record(line, precision, f"{where}: records.{index}") for index, line in enumerate(found)
    )


def _record(line: _Line, precision: str | None, where: str) -> Record:
    own = line.precision or precision
    if own is None:
        raise ConfigError(
            f"{where}: precision is missing, here and of the whole file", hint="add precision"
        )
    case = Case(
        work=line.work,
        sizes=tuple(line.sizes.items()),
        precision=own,
        passes=tuple(
            CasePass(name=name, curve=one.curve, sizes=one.at) for name, one in line.passes.items()
        ),
    )
    if line.outcome is not CaseOutcome.MEASURED:
        return Record(case=case, outcome=line.outcome, detail=line.detail)
    times = {
        name: _timing(one, f"{where}.{name}")
        for name, one in {**line.passes, **line.times}.items()
        if one.time_us is not None
    }
    measured = CaseFigures(
        times=times,
        saved_bytes=line.saved_bytes,
        workspace_bytes=line.workspace_bytes,
        figures=line.figures,
        clock_mhz=line.clock_mhz,
    )
    return Record(case=case, outcome=line.outcome, measured=measured, detail=line.detail)


def _timing(one: _Time, where: str) -> Timing:
    if one.time_us is None or one.spread is None or one.repeats is None:
        raise ConfigError(
            f"{where}: a time without its spread or repeats", hint="add spread and repeats"
        )
    return Timing(median_us=one.time_us, spread=one.spread, repeats=one.repeats)


def lines_schema() -> dict[str, Any]:
    """The JSON Schema of a file's records."""
    return json_schema(_Lines)
