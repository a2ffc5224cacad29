"""Recompute ahead of the gradient in the closed form of a step (EQUATIONS P5).

    T = (M - a - e) max_s t_s + e max_s n_s + a sum_s u_s + max_s tail_s

t_s is the whole pass of rank s, n_s the pass without its recompute, u_s the part of it in the
ramps, where only one rank works. Without recompute ahead e = 0 and n = u = t. With it (a = 1) a
rank recomputes in the ramp while it waits, so u_s is n_s, but

    early recompute      e = 0    u of the last rank is t: it waits for nobody
    last-no-recompute    e = 1
    SCP                  e = 2    u of rank P - 2 is n + max(0, r - max(0, b - f)), r, b, f its
                         recompute, backward and forward

On equal ranks, the last of the last two without recompute, this is the table of EQUATIONS P4: e
passes of the slowest rank have their recompute hidden. T is never below the time of the same ranks
without any recompute, (M - 1) max n + sum n. [derived]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from parplan.costmodels.schedules.schedule import AHEAD, Schedule

_HIDDEN = {Schedule.LAST_NO_RECOMPUTE: 1, Schedule.SCP: 2}
_Seconds = TypeVar("_Seconds", float, npt.NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class HiddenRecompute:
    """e of a schedule with recompute ahead (`hidden`), and n and u by rank."""

    hidden: int
    plain_s: Sequence[float]
    ramp_s: Sequence[float]


def hidden_passes(schedule: Schedule) -> int:
    """e: the number of passes of the slowest rank whose recompute is hidden."""
    return _HIDDEN.get(schedule, 0)


def plain_and_ramp(
    schedule: Schedule,
    rank: int,
    num_ranks: int,
    time_s: _Seconds,
    recompute_s: _Seconds,
    longer_s: _Seconds,
) -> tuple[_Seconds, _Seconds]:
    """Returns n and u of a rank, for one pass or for an array of them.

    longer_s: its backward pass less its forward pass
    """
    if schedule not in AHEAD or (schedule is Schedule.EARLY_RECOMPUTE and rank == num_ranks - 1):
        return time_s, time_s
    plain_s = time_s - recompute_s
    if schedule is not Schedule.SCP or rank != num_ranks - 2:
        return plain_s, plain_s
    return plain_s, plain_s + _positive(recompute_s - _positive(longer_s))


def _positive(value_s: _Seconds) -> _Seconds:
    return (value_s + abs(value_s)) / 2
