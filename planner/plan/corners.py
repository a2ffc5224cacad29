"""Corners: machines of which one figure is off by a share, and the regret of plans there.

A figure is off by a share s where the true one is s below the priced one, or the priced one is s
below the true one: it is (1 - s) or 1 / (1 - s) of what was priced. Each corner has one figure off
in one direction.

The regret of plan i in corner c is T_i(c) / min_j T_j(c) - 1 over the plans j that fit there. It is
infinite where plan i does not fit and another plan does. A corner in which no plan fits tells no
plans apart and is left out. The machine as it is priced counts as a corner too. [derived: minimax
regret, Savage 1951, doi:10.1080/01621459.1951.10500768]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.off_speed import SpeedFactors

USUAL_SHARE = 0.2
SPEEDS = ("compute", "inside_node", "across_nodes")
FIGURES = (*SPEEDS, "memory")
REGRET_DIGITS = 6  # decimals of a regret, against another order of summation


def corners(share: float, figures: Iterable[str] = FIGURES) -> tuple[SpeedFactors, ...]:
    """Returns the corners in which one of the figures is off by `share`, first below."""
    ends = (1 - share, 1 / (1 - share))
    return tuple(SpeedFactors(**{figure: end}) for figure in figures for end in ends)


def changes(corner: SpeedFactors, cluster: Cluster) -> bool:
    """Returns False for a corner of links that the cluster has not."""
    inside = corner.inside_node != 1.0 and cluster.most_gpus_per_node == 1
    across = corner.across_nodes != 1.0 and cluster.nodes == 1
    return not inside and not across


def figure_of(corner: SpeedFactors) -> tuple[str, float]:
    """Returns the figure that is off in a corner, and its factor."""
    return next((name, getattr(corner, name)) for name in FIGURES if getattr(corner, name) != 1.0)


def regrets(steps_s: Sequence[float | None]) -> list[float]:
    """Returns the regret of each plan in one corner; a step is None where the plan does not fit."""
    best_s = min((step_s for step_s in steps_s if step_s is not None), default=None)
    if best_s is None:
        return [0.0] * len(steps_s)
    return [math.inf if step_s is None else step_s / best_s - 1 for step_s in steps_s]


def worst_regrets(by_corner: Iterable[Sequence[float | None]]) -> list[float]:
    """Returns the worst regret of every plan; a corner has the steps of all of them."""
    each = map(regrets, by_corner)
    return [round(max(of_plan), REGRET_DIGITS) for of_plan in zip(*each, strict=True)]
