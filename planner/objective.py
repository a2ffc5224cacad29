"""The objectives of a search, and the preferences among plans that it cannot tell apart."""

from __future__ import annotations

from enum import StrEnum


class Objective(StrEnum):
    THROUGHPUT = "throughput"
    MEMORY = "memory"
    PEAK = "peak"


class Prefer(StrEnum):
    """The plan to take among those inside the error band of the fastest.

    `leanest` has the least memory on its fullest device, and `robust` loses least when a speed of
    the machine is 20 % off (planner/plan/ties.py).
    """

    FASTEST = "fastest"
    LEANEST = "leanest"
    ROBUST = "robust"
