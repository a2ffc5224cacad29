"""Functions of a number, or of each number of an array: the formulas of prices take both.

An array has the sizes of many operators at once. A number stays a Python number, which is several
times faster than an array of one.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

LARGEST_IN_ARRAYS = 2**62
# An array of that many numbers takes as long one by one, and each is what it is alone: numpy's
# logarithms differ from Python's in their last digit.
FEW = 32
Number: TypeAlias = Any  # a number, or an array of numbers that broadcast with each other


def smaller_of(first: Number, second: Number) -> Number:
    """Returns the smaller of two numbers, or of each pair."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.minimum(first, second)
    return min(first, second)


def larger_of(first: Number, second: Number) -> Number:
    """Returns the larger of two numbers, or of each pair."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.maximum(first, second)
    return max(first, second)


def chosen(condition: Number, first: Number, second: Number) -> Number:
    """Returns `first` where the condition holds, `second` elsewhere."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, first, second)
    return first if condition else second


def addable(number: Number) -> Number:
    """Returns a number that can be added to an array of whole numbers, a vast one as a float."""
    return float(number) if isinstance(number, int) and number >= LARGEST_IN_ARRAYS else number


def anywhere(condition: Number) -> bool:
    """Returns True if the condition holds for the number, or for one of the array."""
    return bool(condition.any()) if isinstance(condition, np.ndarray) else bool(condition)


def gcd(first: Number, second: Number) -> Number:
    """Returns the greatest common divisor of two integers, or of each pair."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.gcd(first, second)
    return math.gcd(first, second)


def log(value: Number) -> Number:
    """Returns the natural logarithm."""
    if isinstance(value, np.ndarray):
        return _one_by_one(math.log, value) if value.size <= FEW else np.log(value)
    return math.log(value)


def exp(value: Number) -> Number:
    """Returns the exponential."""
    if isinstance(value, np.ndarray):
        return _one_by_one(math.exp, value) if value.size <= FEW else np.exp(value)
    return math.exp(value)


def _one_by_one(function: Callable[[float], float], values: Number) -> Number:
    return np.array([function(value) for value in values.ravel().tolist()]).reshape(values.shape)


def sqrt(value: Number) -> Number:
    """Returns the square root."""
    return np.sqrt(value) if isinstance(value, np.ndarray) else math.sqrt(value)


def key_of(number: Number) -> Hashable:
    """Returns a key of a number, or of all numbers of an array."""
    return tuple(number.ravel().tolist()) if isinstance(number, np.ndarray) else number


def interpolated(at: Number, knots: Sequence[float], values: Sequence[float]) -> Number:
    """Returns the value at `at` on the straight lines between knots, which ascend.

    Beyond the knots it is the value of the nearest.
    """
    if isinstance(at, np.ndarray):
        if at.size > FEW:
            return np.interp(at, knots, values)
        return _one_by_one(lambda each: float(interpolated(each, knots, values)), at)
    if at <= knots[0]:
        return values[0]
    if at >= knots[-1]:
        return values[-1]
    i = bisect.bisect_right(knots, at) - 1
    slope = (values[i + 1] - values[i]) / (knots[i + 1] - knots[i])
    return slope * (at - knots[i]) + values[i]
