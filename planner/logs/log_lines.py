"""The lines of a log without colours, and without the words that launchers put before them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parplan.profiles.documents import bounded
from parplan.profiles.documents.bounded import Hints
from parplan.profiles.documents.line_prefixes import without_prefixes

_HINTS = Hints("check its name", "give the log of one run")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,40}[ -/]{0,9}[@-~]|\x1b\][^\x07\x1b]{0,200}\x07")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line with its number and the words that name its rank, "" where nothing does."""

    number: int
    rank: str
    text: str


def read_lines(path: Path) -> Iterator[LogLine]:
    """Yields the lines of a log; each state of a progress bar is one. Raises ConfigError."""
    for number, line in enumerate(bounded.read_lines(path, _HINTS), 1):
        text = _ESCAPES.sub("", line) if "\x1b" in line else line
        rank, bare = without_prefixes(text.rstrip())
        yield LogLine(number, rank, bare)
