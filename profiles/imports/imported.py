"""The common result of every reader of other planners' profile files, and its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parplan.profiles.documents.numbers import real, whole_of
from parplan.profiles.documents.ranges import POSITIVE, Range
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.measurements import (
    Case,
    CaseFigures,
    CaseOutcome,
    CasePass,
    Record,
    Timing,
)
from parplan.profiles.profiler.communication.comm_cases import timed_case
from parplan.profiles.profiler.communication.group_shapes import Shape
from parplan.profiles.units import US_PER_S

LEAST_S = 1e-8  # no kernel is faster
MOST_S = 1e4
_SIZES = Range(0, 10**15)
SHOWN = 80  # most characters of a value in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedFile:
    """The measurements of one file.

    tool         the planner whose format it is
    driver_name  the driver's name of the device, None where the file does not say it
    num_devices  devices of a node, None where the file does not say them
    left_out     for each kind of rows that has no place in a profile, a line that says why
    """

    tool: str
    records: tuple[Record, ...]
    driver_name: str | None = None
    num_devices: int | None = None
    left_out: tuple[str, ...] = ()


def needed(body: Any, path: str, where: str, tool: str) -> Any:
    """Returns the value at a dotted path of mappings. Raises ConfigError where it is missing."""
    value = body
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ConfigError(f"{where}: {path} is missing", hint=f"give the whole file of {tool}")
        value = value[key]
    return value


def mapping_at(body: Any, path: str, where: str, tool: str) -> Mapping[str, Any]:
    """Returns the mapping at a dotted path. Raises ConfigError for another value."""
    value = needed(body, path, where, tool)
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where}: {path} is {str(value)[:SHOWN]!r}, needed is a mapping",
            hint=f"give the whole file of {tool}",
        )
    return value


def positive(value: Any, name: str, where: str) -> float:
    """Returns a number above zero. Raises ConfigError for all else."""
    return real(value, name, where, POSITIVE)


def whole_size(text: str) -> int | None:
    """Returns the size that a text of digits says, None for another text and for zero."""
    return whole_of(text, _SIZES) or None


def product_record(
    curve: str, size: tuple[int, int, int], seconds: float, precision: str, source: str
) -> Record:
    """Returns a product of (m, n, k) as a point of `forward` or of a gradient's curve."""
    named = tuple(zip(("m", "n", "k"), size, strict=True))
    return _record(f"product_{curve}", named, curve, size, seconds, precision, source)


def attention_record(
    curve: str,
    size: tuple[int, int, int],
    kv_heads: int,
    seconds: float,
    precision: str,
    source: str,
) -> Record:
    """Returns fused causal attention of (heads with batch, sequence, head_dim) as a point."""
    named = (
        *zip(("heads", "seq", "head_dim"), size, strict=True),
        ("kv_heads", kv_heads),
    )
    return _record(f"attention_{curve}", named, curve, size, seconds, precision, source)


def collective_record(
    work: str, num_bytes: int, shape: Shape, seconds: float, precision: str, source: str
) -> Record:
    """Returns a collective or a message; bytes as nccl-tests counts them."""
    case = timed_case(work, num_bytes, shape, precision)
    return _measured(case, "time", seconds, source)


def _record(
    work: str,
    named: tuple[tuple[str, int], ...],
    curve: str,
    size: tuple[int, ...],
    seconds: float,
    precision: str,
    source: str,
) -> Record:
    passes = (CasePass(name="time", curve=curve, sizes=size),)
    case = Case(work=work, sizes=named, precision=precision, passes=passes)
    return _measured(case, "time", seconds, source)


def _measured(case: Case, name: str, seconds: float, source: str) -> Record:
    """Returns the record of a case. Raises ConfigError for a time that no kernel has."""
    if not LEAST_S <= seconds <= MOST_S:
        raise ConfigError(
            f"{source}: {case.key} takes {seconds:.3g} s, needed are {LEAST_S:g} to {MOST_S:g} s",
            hint="correct the value of that shape in the file",
        )
    timing = Timing(median_us=seconds * US_PER_S, spread=0.0, repeats=1)
    return Record(
        case=case,
        outcome=CaseOutcome.MEASURED,
        measured=CaseFigures(times={name: timing}),
        detail=source,
    )
