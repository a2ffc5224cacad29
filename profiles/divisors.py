"""Divisors of a number: the degrees and batch sizes that divide what there is."""

from __future__ import annotations

from math import isqrt


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of `number`, ascending, by trial up to its root."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))
