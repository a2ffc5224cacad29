"""The progress of a session of measurements, without imports from the rest of the profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionProgress:
    """The progress of a session.

    done, failed    cases with a record, of earlier sessions too; those without figures
    running         keys of the running cases
    expected_s      remaining time by the mean of this session's cases, None before its first
    budget_s        the session's remaining time budget
    """

    done: int
    total: int
    failed: int
    running: tuple[str, ...]
    expected_s: float | None
    budget_s: float


OnProgress = Callable[[SessionProgress], None]
