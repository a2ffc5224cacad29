"""Divisors of a number, for parallel degrees and batch sizes."""

from __future__ import annotations

from math import isqrt


def divisors(number: int) -> tuple[int, ...]:
    """Returns the divisors of `number`, ascending, by trial up to its root."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))
