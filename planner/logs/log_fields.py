"""Figures in the lines of a log, found from left to right in one pass.

A kind of line is a sequence of parts, each after the one before it: a figure behind its words,
words alone, or an expression whose repetitions are all bounded. The first place where a part stands
counts and is never given up for a later one, so that a line of any content costs its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FIGURE = r"[0-9]{1,24}(?:,[0-9]{3}){0,8}(?:\.[0-9]{0,24})?(?:[eE][+-]?[0-9]{1,3})?"
_TRIES = 16  # places of the same words in one line
_FIGURE = re.compile(rf" *({FIGURE})")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFigure:
    """A number behind words: `elapsed time per iteration (ms): 2500.0 |`.

    name       of the quantity, empty of words alone
    words      the words before it, of which the first that a line has counts
    ends       the text that follows the number
    never      a text before the words with which they are those of another line
    may_lack   the number need not be there, and may stand before other parts
    """

    name: str = ""
    words: tuple[str, ...]
    ends: str = ""
    never: str = ""
    may_lack: bool = False


Part = LogFigure | re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A kind of line.

    mark   a text that every such line has, by which most other lines are told at once
    """

    mark: str
    parts: tuple[Part, ...]


def found_in(text: str, pattern: Pattern) -> dict[str, str] | None:
    """Returns the figures of a line by their names, None for a line of another kind."""
    if pattern.mark not in text:
        return None
    found: dict[str, str] = {}
    at = 0
    for part in pattern.parts:
        if isinstance(part, re.Pattern):
            match = part.search(text, at)
            if match is None:
                return None
            found |= {name: figure for name, figure in match.groupdict().items() if figure}
            at = match.end()
            continue
        place = next(_places(text, part, at), None)
        if place is not None:
            figure, end = place
            if part.name:
                found[part.name] = figure
            at = at if part.may_lack else end
        elif not part.may_lack:
            return None
    return found


def _places(text: str, part: LogFigure, at: int) -> Iterator[tuple[str, int]]:
    """Yields the numbers behind a part's words, each with its end."""
    for words in part.words:
        begin = text.find(words, at)
        for _ in range(_TRIES):
            if begin < 0:
                break
            end = begin + len(words)
            number = _FIGURE.match(text, end) if part.name else None
            other = bool(part.never) and text.endswith(part.never, 0, begin)
            if not other and not part.name:
                yield "", end
            elif not other and number and text.startswith(part.ends, number.end()):
                yield number[1], number.end()
            begin = text.find(words, end)
