"""The distance of a measured value from the expected one."""

from __future__ import annotations

import math


def relative_error(value: float, expected: float) -> float:
    """Returns the relative error; it is infinite, not NaN, when a value is not finite."""
    if value == expected and math.isfinite(value):
        return 0.0
    error = abs(value / expected - 1) if expected else math.inf
    return error if math.isfinite(error) else math.inf
