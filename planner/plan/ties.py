"""The choice among ties: plans of which the prices cannot say that the fastest is faster.

Their ratio to the fastest lies inside its error band (ratio_band.py), so another property may
decide:

    leanest   least memory on the fullest device. Peaks that the error band of the memory cannot
              tell apart count as equal
    robust    least worst loss. The loss of tie i in scenario s, where a speed of the machine is
              20 % off, is T_i(s) / min_j T_j(s) - 1 over the ties j
              (planner/search/preference.py)

The fastest of equals is taken. [derived]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parplan.planner.objective import Prefer
from parplan.profiles.machines.off_speed import SpeedFactors

OFF = (0.8, 1.25)  # a speed that is 20 % off, below and above
SCENARIOS = tuple(
    SpeedFactors(**{speed: factor})
    for speed in ("compute", "inside_node", "across_nodes")
    for factor in OFF
)
LOSS_DIGITS = 6  # decimals of a loss, against another order of summation
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


def worst_losses(scenarios: Iterable[Sequence[float]]) -> list[float]:
    """Returns the worst loss of every tie; a scenario has the steps of all of them."""
    losses = ([step_s / min(steps_s) - 1 for step_s in steps_s] for steps_s in scenarios)
    return [round(max(of_tie), LOSS_DIGITS) for of_tie in zip(*losses, strict=True)]


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


def reason_for(prefer: Prefer, ties: Sequence[Tie], chosen: int) -> str:
    """Returns the reason for a preferred tie, for the plan file and the summary."""
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
    off = f"it loses at most {100 * tie.worst_loss:.1f} % where a speed is 20 % off"
    return f"{off}, the fastest {100 * fastest.worst_loss:.1f} %" if chosen else off
