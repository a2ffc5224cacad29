"""The lines of a log without colours, and without the words that launchers put before them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parplan.profiles.errors import ConfigError

_LONGEST = 4096  # characters of a line that are read; arguments and steps are shorter
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
# torchrun --tee, mpirun --tag-output, srun --label, the names of torchrun's redirected ranks
_RANK = re.compile(
    r"^\s*(?:\[(?P<a>[\w.-]*\d+)\]:|\[\d+,(?P<b>\d+)\]<std(?:out|err)>:|(?P<c>\d+):) ?"
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line with its number and the words that name its rank, "" where nothing does."""

    number: int
    rank: str
    text: str


def read_lines(path: Path) -> Iterator[LogLine]:
    """Yields the lines of a log; each state of a progress bar is one. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline=None) as file:
            for number, line in enumerate(file, 1):
                text = _ESCAPES.sub("", line[:_LONGEST]).rstrip()
                match = _RANK.match(text)
                rank = next(filter(None, match.groups()), "") if match else ""
                yield LogLine(number, rank, text[match.end() :] if match else text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="check its name") from None
