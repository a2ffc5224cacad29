"""The launchers whose best plans the prices cannot tell apart, and the choice among them.

The ratio of two plans of one stack has its own measured band (planner/plan/ratio_band.py). No
published run has one model on one machine under two stacks, so that the errors of two stacks count
as independent: with b the bands of both steps,

    band of the ratio = sqrt(b_one^2 + b_other^2)         [derived]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parplan.planner.objective import Prefer
from parplan.planner.plan.corners import SPEEDS, USUAL_SHARE, changes, corners, worst_regrets
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.ratio_band import plan_shape, ratio_share
from parplan.planner.plan.reprice import priced_at
from parplan.planner.plan.ties import Tie, inside_band, preferred
from parplan.planner.plan.traits import family_of
from parplan.profiles.machines.off_speed import SpeedFactors


def ratio_band(one: Plan, other: Plan) -> float:
    """Returns the band of the other plan's step over that of one, as +- a share of the ratio.

    It is 0 where a step has no error band.
    """
    first, second = one.predicted.error_band, other.predicted.error_band
    if first is None or second is None:
        return 0.0
    if family_of(one.training.stack) == family_of(other.training.stack):
        return ratio_share(first, plan_shape(one), plan_shape(other))
    return math.hypot(first.time.share, second.time.share)


def tied(plans: Sequence[Plan]) -> list[int]:
    """Returns the places of the plans that may be as fast as the first, which is the fastest."""
    steps_s = [plan.predicted.step_time_s.value for plan in plans]
    return inside_band(steps_s, [ratio_band(plans[0], plan) for plan in plans])


def preferred_place(plans: Sequence[Plan], prefer: Prefer) -> int:
    """Returns the place of the preferred plan among those that may be as fast as the first."""
    places = tied(plans)
    band = plans[0].predicted.error_band
    if prefer is Prefer.FASTEST or band is None or len(places) == 1:
        return 0
    some = [plans[place] for place in places]
    losses = _worst_losses(some) if prefer is Prefer.ROBUST else [0.0] * len(some)
    ties = [Tie(_peak_gib(plan), loss) for plan, loss in zip(some, losses, strict=True)]
    return places[preferred(prefer, ties, band.memory.share)]


def _peak_gib(plan: Plan) -> float:
    return max(memory.total for memory in plan.predicted.memory_gib)


def _worst_losses(plans: Sequence[Plan]) -> list[float]:
    """Returns the worst regret of each plan where a speed of the machine is off."""
    every = (SpeedFactors(), *corners(USUAL_SHARE, SPEEDS))
    there = [corner for corner in every if changes(corner, plans[0].cluster)]
    return worst_regrets([[priced_at(plan, corner) for plan in plans] for corner in there])
