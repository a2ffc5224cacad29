"""Words of a shell script with the values of its variables, read once from left to right.

The forms are `$NAME`, `${NAME}`, `${NAME:-word}` and `$((A * B))`, also inside one another. A form
that is not known, and a word whose value would be longer than a word of a launcher, stay as they
stand: variables that hold one another double at each step, and would fill the memory.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping

from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.ranges import WHOLE

MAX_WORD = 16_384  # characters of a word, or of a line, with its values
_MAX_FORM = 1000  # characters of one form
_DEEPEST = 8  # forms inside one another
_NAME = re.compile(r"[A-Za-z_]\w{0,200}", re.ASCII)
_OPERATORS = {"*": operator.mul, "/": operator.floordiv, "%": operator.mod}
_TOKEN = re.compile(r"\s{0,20}([0-9]{1,18}|[A-Za-z_]\w{0,200}|[-+*/%()])", re.ASCII)


def filled(text: str, variables: Mapping[str, str], depth: int = 0) -> str:
    """Returns a text with the values of its variables, those that are known."""
    parts: list[str] = []
    at = size = 0
    while at < len(text):
        dollar = text.find("$", at)
        end = len(text) if dollar < 0 else dollar
        parts.append(text[at:end])
        at = end
        if dollar >= 0:
            value, at = _value_at(text, dollar, variables, depth)
            parts.append(value)
            size += len(value)
        if size > MAX_WORD:
            return text
    return "".join(parts)


def _value_at(text: str, at: int, variables: Mapping[str, str], depth: int) -> tuple[str, int]:
    """Returns the value of the form that begins at a dollar sign, and the place of its end.

    A form that is not known is the sign alone.
    """
    if depth < _DEEPEST and text.startswith("$((", at):
        end = _closing(text, at + 1, "(", ")")
        total = None if end is None else _total(text[at + 3 : end - 2], variables, depth)
        if end is not None and total is not None:
            return f"{total}", end
    braced = text.startswith("${", at)
    name = _NAME.match(text, at + 1 + braced)
    if name is None:
        return "$", at + 1
    if not braced:
        return variables.get(name[0], f"${name[0]}"), name.end()
    end = _closing(text, at + 1, "{", "}")
    if end is None:
        return "$", at + 1
    rest = text[name.end() : end - 1]
    default = rest.removeprefix(":").removeprefix("-")
    if rest and default == rest.removeprefix(":"):  # another form, such as ${NAME##*/}
        return "$", at + 1
    known = variables.get(name[0])
    if known is not None:
        return known, end
    if not rest or depth >= _DEEPEST:
        return text[at:end], end
    return filled(default, variables, depth + 1), end


def _closing(text: str, at: int, opens: str, closes: str) -> int | None:
    """Returns the place after the bracket that closes the one at `at`, None without one near."""
    level = 0
    for place in range(at, min(len(text), at + _MAX_FORM)):
        if text[place] == opens:
            level += 1
            if level > _DEEPEST:
                return None
        elif text[place] == closes:
            level -= 1
            if not level:
                return place + 1
    return None


def _total(text: str, variables: Mapping[str, str], depth: int) -> int | None:
    """Returns the value of an expression of whole numbers, None for any other."""
    plain = filled(text, variables, depth + 1).strip()
    tokens: list[str] = []
    at = 0
    while at < len(plain):
        token = _TOKEN.match(plain, at)
        if token is None or len(tokens) >= _MAX_FORM:
            return None
        tokens.append(variables.get(token[1], token[1]))
        at = token.end()
    sums = _ShellSum(tokens)
    total = sums.total(0)
    return None if sums.tokens else total


class _ShellSum:
    """An expression of whole numbers, of which the first tokens are taken one after another."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]

    def total(self, depth: int) -> int | None:
        value = self._product(depth)
        while value is not None and self.tokens and self.tokens[-1] in "+-":
            sign = 1 if self.tokens.pop() == "+" else -1
            other = self._product(depth)
            value = None if other is None else whole_of(value + sign * other, WHOLE)
        return value

    def _product(self, depth: int) -> int | None:
        value = self._factor(depth)
        while value is not None and self.tokens and self.tokens[-1] in "*/%":
            sign = self.tokens.pop()
            other = self._factor(depth)
            if other is None or (sign != "*" and not other):
                return None
            value = {"*": value * other, "/": value // (other or 1), "%": value % (other or 1)}[
                sign
            ]
            value = whole_of(value, WHOLE)
        return value

    def _factor(self, depth: int) -> int | None:
        if not self.tokens or depth > _DEEPEST:
            return None
        token = self.tokens.pop()
        if token == "-":
            value = self._factor(depth + 1)
            return None if value is None else -value
        if token != "(":
            return whole_of(token, WHOLE)
        value = self.total(depth + 1)
        closed = bool(self.tokens) and self.tokens.pop() == ")"
        return value if closed else None
