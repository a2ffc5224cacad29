"""The branches of a shell script that its own variables decide.

A line in a branch that is not taken does not count. Tests of words and of whole numbers are
decided, with the defaults of variables that the script leaves to its caller. Of a test that cannot
be decided all branches count.
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Mapping

Filled = Callable[[str], str]  # a text with the values of its variables

_IF = re.compile(r"^\s*(el)?if\s+(.*?)\s*(?:;\s*then\b.*)?$", re.DOTALL)
_ELSE = re.compile(r"^\s*else\b")
_END = re.compile(r"^\s*fi\b")
_WHOLE = re.compile(r"\bfi\s*$")
_BEFORE = re.compile(r"^\s*(\[\[?\s.*?\s\]\]?)\s*&&\s*(.+)$", re.DOTALL)
_TEST = re.compile(r"^(!\s+)?\[\[?\s+(!\s+)?(.*?)\s+\]\]?$", re.DOTALL)
_WORDS: Mapping[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


class Branches:
    """The `if` blocks around a line, innermost last: whether each is taken, None if unknown."""

    def __init__(self) -> None:
        self._taken: list[bool | None] = []
        self._before: list[bool | None] = []  # whether an earlier branch of the block was taken

    def code_of(self, line: str, filled: Filled) -> str:
        """Returns the part of a line that counts, "" where none does."""
        begins = _IF.match(line)
        if begins and not begins[1]:
            test = holds(begins[2], filled)
            if _WHOLE.search(line):
                return "" if test is False else line
            self._taken.append(test)
            self._before.append(test)
            return ""
        if begins or _ELSE.match(line):
            self._next_branch(holds(begins[2], filled) if begins else True)
            return ""
        if _END.match(line):
            del self._taken[-1:], self._before[-1:]
            return ""
        if False in self._taken:
            return ""
        guarded = _BEFORE.match(line)
        if guarded is None:
            return line
        return "" if holds(guarded[1], filled) is False else guarded[2]

    def _next_branch(self, test: bool | None) -> None:
        if not self._taken:
            return
        before = self._before[-1]
        if before is True:
            self._taken[-1] = False
        else:
            unknown = before is None and test is not False
            self._taken[-1] = None if unknown else test
            self._before[-1] = test if before is False else None


def holds(test: str, filled: Filled) -> bool | None:
    """Returns whether a test of a shell holds, None where the script alone does not say."""
    match = _TEST.match(test.strip())
    if match is None:
        return None
    try:
        words = [filled(word) for word in shlex.split(match[3])]
    except ValueError:
        return None
    result = None if any("$" in word for word in words) else _result(words)
    turned = bool(match[1]) != bool(match[2])
    return result if result is None or not turned else not result


def _result(words: list[str]) -> bool | None:
    match words:
        case ["-n", word]:
            return bool(word)
        case ["-z", word]:
            return not word
        case [left, sign, right] if sign in _WORDS:
            return _WORDS[sign](left, right)
        case [left, sign, right] if sign in _NUMBERS:
            numbers = left.lstrip("-").isdigit() and right.lstrip("-").isdigit()
            return _NUMBERS[sign](int(left), int(right)) if numbers else None
    return None
