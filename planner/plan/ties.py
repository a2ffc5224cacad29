"""The choice among ties: plans of which the prices cannot say that the fastest is faster.

Their ratio to the fastest lies inside its error band (ratio_band.py), so another property may
decide:

    leanest   least memory on the fullest device. Peaks that the error band of the memory cannot
              tell apart count as equal
    robust    least worst loss: the worst regret among the ties where a speed of the machine is
              off by a share, 20 % by default (planner/plan/corners.py)

The fastest of equals is taken. [derived]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parplan.planner.objective import Prefer
from parplan.planner.plan.corners import USUAL_SHARE

ALONE = "no other plan is inside the error band of the ratio to the fastest"
UNKNOWN = "the error band of the step time is unknown, so no plan counts as fast as the fastest"


@dataclass(frozen=True, slots=True)
class Tie:
    """A plan that may be the fastest: the peak of its fullest device, and its worst loss."""

    peak_gib: float
    worst_loss: float


def inside_band(steps_s: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Returns the indices of the steps that are longer than the first by their share at most."""
    return [
        index
        for index, (step_s, share) in enumerate(zip(steps_s, shares, strict=True))
        if step_s <= steps_s[0] * (1 + share)
    ]


def preferred(prefer: Prefer, ties: Sequence[Tie], memory_share: float) -> int:
    """Returns the index of the preferred tie.

    ties: the fastest first
    memory_share: error band of the memory
    """
    if prefer is Prefer.FASTEST:
        return 0
    if prefer is Prefer.ROBUST:
        return min(range(len(ties)), key=lambda index: ties[index].worst_loss)
    least_gib = min(tie.peak_gib for tie in ties)
    return next(
        index for index, tie in enumerate(ties) if tie.peak_gib * (1 - memory_share) <= least_gib
    )


def reason_for(prefer: Prefer, ties: Sequence[Tie], chosen: int, share: float = USUAL_SHARE) -> str:
    """Returns the reason for a preferred tie, for the plan file and the summary.

    share: share by which a speed is off
    """
    fastest, tie = ties[0], ties[chosen]
    if len(ties) == 1:
        return ALONE
    if prefer is Prefer.FASTEST:
        return f"it is the fastest of {len(ties)} ties"
    if prefer is Prefer.LEANEST:
        return (
            f"its fullest device holds {tie.peak_gib:.1f} GiB, that of the fastest "
            f"{fastest.peak_gib:.1f}"
            if chosen
            else "no tie is leaner by more than the error band of the memory"
        )
    off = f"it loses at most {100 * tie.worst_loss:.1f} % where a speed is {100 * share:g} % off"
    return f"{off}, the fastest {100 * fastest.worst_loss:.1f} %" if chosen else off
