"""The one reader of numbers from outside: bounded digits, bounded range, no other script's digits.

A number is a text of ASCII digits, such as `8`, `-3`, `1e-5`, or a value that JSON, YAML or SQLite
made of one. `int` and `float` alone take more: 5,000 digits cost seconds or an error of their own,
`1_000` and digits of other scripts are read, and `nan` passes every comparison.
"""

from __future__ import annotations

import math
import re

from parplan.profiles.documents.ranges import REAL, WHOLE, Range
from parplan.profiles.errors import ConfigError, shortened

MAX_DIGITS = 18
_LONGEST = 40  # characters of a number, which has an exponent at most
_WHOLE = re.compile(r"[-+]?[0-9]+")
_REAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
COUNTED = Range(0, WHOLE.high)  # a count or a size
USUAL_HINT = "correct that value"


def whole_of(value: object, bounds: Range = COUNTED) -> int | None:
    """Returns the whole number that a text or a value is; None for all else, and out of range."""
    number: int | None = None
    if type(value) is int:
        number = value
    elif isinstance(value, str) and len(value) <= _LONGEST and _WHOLE.fullmatch(value):
        number = int(value)
    return number if number is not None and number in bounds else None


def real_of(value: object, bounds: Range = REAL) -> float | None:
    """Returns the finite number that a text or a value is; None for all else, and out of range."""
    number: float | None = None
    if type(value) is float or type(value) is int:
        number = _float_of(value)
    elif isinstance(value, str) and len(value) <= _LONGEST and _REAL.fullmatch(value):
        number = float(value)
    return number if number is not None and number in bounds else None


def whole(
    value: object, what: str, where: str, bounds: Range = COUNTED, hint: str = USUAL_HINT
) -> int:
    """Returns the whole number that a text or a value is.

    what: the name of the number in the message
    where: its file, and its line where that is known
    Raises ConfigError for another value and for one out of `bounds`.
    """
    number = whole_of(value, bounds)
    if number is None:
        raise _no_number(value, what, where, f"a whole number {bounds}", hint)
    return number


def real(
    value: object, what: str, where: str, bounds: Range = REAL, hint: str = USUAL_HINT
) -> float:
    """Returns the finite number that a text or a value is. Raises ConfigError as `whole` does."""
    number = real_of(value, bounds)
    if number is None:
        raise _no_number(value, what, where, f"a number {bounds}", hint)
    return number


def without_separators(text: str) -> str:
    """Returns a number's text without the commas between its thousands, which tools print."""
    return text.replace(",", "")


def _float_of(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if math.isfinite(number) else None


def _no_number(value: object, what: str, where: str, needed: str, hint: str) -> ConfigError:
    if isinstance(value, str):
        shown = repr(shortened(value))
    elif isinstance(value, bool | None):
        shown = {None: "nothing", True: "true", False: "false"}[value]
    elif isinstance(value, int) and not -(10**MAX_DIGITS) <= value <= 10**MAX_DIGITS:
        shown = f"an integer of more than {MAX_DIGITS} digits"
    elif isinstance(value, int | float):
        shown = f"{value}"
    else:
        shown = f"a {type(value).__name__}"
    return ConfigError(f"{where}: {what} is {shown}, needed is {needed}", hint=hint)
