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

from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.ranges import WHOLE

Filled = Callable[[str], str]  # a text with the values of its variables

# each is searched once, and its spaces are those of one run, so that a line costs its length
_IF = re.compile(r"\s*(el)?if\s")
_THEN = re.compile(r";\s*then\b")
_ELSE = re.compile(r"^\s*else\b")
_END = re.compile(r"^\s*fi\b")
_WHOLE = re.compile(r"\bfi\s*$")
_OPENING = re.compile(r"\s*\[\[?\s")
_GUARD = re.compile(r"\s\]\]?\s*&&")
_NOT = re.compile(r"!\s")
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
            test = holds(_test_of(line, begins.end()), filled)
            if _WHOLE.search(line):
                return "" if test is False else line
            self._taken.append(test)
            self._before.append(test)
            return ""
        if begins or _ELSE.match(line):
            self._next_branch(holds(_test_of(line, begins.end()), filled) if begins else True)
            return ""
        if _END.match(line):
            del self._taken[-1:], self._before[-1:]
            return ""
        if False in self._taken:
            return ""
        opening = _OPENING.match(line)
        guard = _GUARD.search(line, opening.end() - 1) if opening else None
        rest = line[guard.end() :].lstrip() if guard else ""
        if guard is None or not rest:
            return line
        guarding = line[: guard.end()].removesuffix("&&")
        return "" if holds(guarding, filled) is False else rest

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


def _test_of(line: str, at: int) -> str:
    """Returns the test of an `if` that ends at `at`, without its `then`."""
    then = _THEN.search(line, at)
    return line[at : then.start() if then else len(line)].strip()


def holds(test: str, filled: Filled) -> bool | None:
    """Returns whether a test of a shell holds, None where the script alone does not say."""
    inside, outer = _without_not(test.strip())
    width = 2 if inside.startswith("[[") else 1
    body = inside[width:].removesuffix("]" * width)
    if not inside.startswith("[") or not inside.endswith("]") or body.strip() == body:
        return None
    body, inner = _without_not(body.strip())
    try:
        words = [filled(word) for word in shlex.split(body)]
    except ValueError:
        return None
    result = None if any("$" in word for word in words) else _result(words)
    return result if result is None or outer == inner else not result


def _without_not(text: str) -> tuple[str, bool]:
    """Returns a test without the `!` before it, and whether one is there."""
    negated = bool(_NOT.match(text))
    return (text[1:].lstrip() if negated else text), negated


def _result(words: list[str]) -> bool | None:
    match words:
        case ["-n", word]:
            return bool(word)
        case ["-z", word]:
            return not word
        case [left, sign, right] if sign in _WORDS:
            return _WORDS[sign](left, right)
        case [left, sign, right] if sign in _NUMBERS:
            first, second = whole_of(left, WHOLE), whole_of(right, WHOLE)
            if first is None or second is None:
                return None
            return _NUMBERS[sign](first, second)
    return None
