"""One line of a log: the step and the memory that it prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parplan.planner.logs.log_fields import found_in
from parplan.planner.logs.log_formats import FORMATS, LogFormat
from parplan.planner.logs.log_lines import LogLine
from parplan.profiles.documents.numbers import real_of, whole_of, without_separators
from parplan.profiles.units import GB, GIB, MIB

_UNITS = {"bytes": 1, "mib": MIB, "gib": GIB, "gb": GB}
_COUNTS = ("iteration", "total", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A line of a step, as it was printed.

    quantity   the group of the pattern that says its time, with `value` in that unit
    batch      sequences of the step, None where the line does not say them
    total      number of the last step, None where the line does not say it
    """

    line: LogLine
    iteration: int
    total: int | None
    quantity: str
    value: float
    batch: int | None


def is_step(text: str) -> bool:
    """Returns whether a line is that of a step of any launcher."""
    return any(found_in(text, pattern) for form in FORMATS for pattern in form.steps)


def step_of(line: LogLine, form: LogFormat) -> LoggedStep | None:
    """Returns the step of a line, None of one that is of no step."""
    found = next(filter(None, (found_in(line.text, each) for each in form.steps)), None)
    if found is None:
        return None
    counts = {name: _count(found.pop(name, "")) for name in _COUNTS}
    found = {name: text for name, text in found.items() if not _is_memory(name)}
    ((quantity, text),) = found.items()
    value = real_of(without_separators(text)) or 0.0
    if value <= 0:  # the clock of the first steps had not started
        return None
    return LoggedStep(
        line=line,
        iteration=counts["iteration"],
        total=counts["total"] or None,
        quantity=quantity,
        value=value,
        batch=counts["batch"] or None,
    )


def _count(text: str) -> int:
    return whole_of(without_separators(text)) or 0


def memory_of(line: LogLine, form: LogFormat) -> Iterator[tuple[str, float]]:
    """Yields the kinds of memory of a line with their bytes."""
    for pattern in form.memory:
        for name, text in (found_in(line.text, pattern) or {}).items():
            size = real_of(without_separators(text))
            if _is_memory(name) and size is not None:
                kind, _, unit = name.rpartition("_")
                yield kind, size * _UNITS[unit]


def _is_memory(name: str) -> bool:
    return name.rpartition("_")[2] in _UNITS
