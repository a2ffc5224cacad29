"""What a session of measurements says of itself while it runs; whoever shows it needs nothing else
of the profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionProgress:
    """Where a session is.

    done, failed    cases with a record, those of earlier sessions among them; and of them those
                    without figures
    running         keys of the cases at work
    expected_s      how long the rest takes, by the mean of this session's cases; None before its
                    first is finished
    budget_s        how much of the session's time is left
    """

    done: int
    total: int
    failed: int
    running: tuple[str, ...]
    expected_s: float | None
    budget_s: float


OnProgress = Callable[[SessionProgress], None]
