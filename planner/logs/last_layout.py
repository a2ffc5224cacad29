"""The part of a log that ran as the last configuration that it prints.

A log may hold several starts, and a job may have been started again with other settings: the steps
and the memory of one layout say nothing of another. A configuration begins with the first of its
lines after a step; starts with equal configurations belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from parplan.planner.logs.log_lines import LogLine, read_lines
from parplan.planner.logs.logged_step import is_step
from parplan.planner.logs.printed_arguments import priced_value, prints_argument
from parplan.planner.logs.titan_lines import stated_machine, stated_options

_MOST_KEPT = 20_000  # lines of the settings of one start


@dataclass(slots=True)
class _Stated:
    """The settings that one start prints, by name, with its first line and all lines of them."""

    first_line: int
    settings: dict[str, str] = field(default_factory=dict)
    lines: list[LogLine] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LastLayout:
    """The last configuration of a log.

    first_line   where the steps begin that ran as it
    others       starts before it with another one
    settings     the lines that state it
    """

    first_line: int
    others: int
    settings: tuple[LogLine, ...]

    def lines(self, path: Path) -> Iterator[LogLine]:
        """Yields the lines of a log from there on. Raises ConfigError."""
        return (line for line in read_lines(path) if line.number >= self.first_line)


def last_layout(path: Path) -> LastLayout:
    """Returns where the last configuration of a log begins: at 1 where it prints one at most.

    Raises ConfigError.
    """
    others, known = 0, 0
    first = last = _Stated(1)
    for each in _starts(read_lines(path)):
        if not each.settings:
            continue
        if known and each.settings != last.settings:
            others = known
        if not known or others == known:
            first = each
        last = each
        known += 1
    return LastLayout(first.first_line if others else 1, others, tuple(last.lines))


def _starts(lines: Iterable[LogLine]) -> Iterator[_Stated]:
    stated = _Stated(1)
    stepped = False
    for line in lines:
        text = line.text
        settings = priced_value(text) | stated_options(text)
        if settings and stepped:
            yield stated
            stated, stepped = _Stated(line.number), False
        stated.settings |= settings
        told = settings or prints_argument(text) or stated_machine(text)
        if told and len(stated.lines) < _MOST_KEPT:
            stated.lines.append(line)
        stepped = stepped or (not told and is_step(text))
    yield stated
