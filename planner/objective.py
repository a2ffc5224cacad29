"""The objectives of a search."""

from __future__ import annotations

from enum import StrEnum


class Objective(StrEnum):
    THROUGHPUT = "throughput"
    MEMORY = "memory"
    PEAK = "peak"
