"""Methods that draw points at random: random search, and MCMC in the shape of FlexFlow."""

from __future__ import annotations

from math import exp, inf
from random import Random

from parplan.planner.search_methods.ledger import Ledger
from parplan.planner.search_methods.method_space import Point

TEMPERATURE = 0.02  # share by which a step is longer that one proposal in e accepts
PATIENCE = 400  # proposals without a better step, after which a chain starts again


def random_search(ledger: Ledger, draw: Random) -> None:
    """Draws points until the budget is spent."""
    while True:
        ledger.point_s(ledger.space.random_point(draw))


def fitting_point(ledger: Ledger, draw: Random) -> tuple[Point, float]:
    """Draws points until one fits, and returns it with its step."""
    while True:
        point = ledger.space.random_point(draw)
        step_s = ledger.point_s(point)
        if step_s < inf:
            return point, step_s


def mcmc(ledger: Ledger, draw: Random) -> None:
    """Walks from point to point by random changes (Jia et al. 2018, arXiv 1807.05358, section 6).

    A change from a step t to a step t' is accepted with probability

        min(1, exp((t - t') / (T t)))                   T = `TEMPERATURE`

    and a chain ends after `PATIENCE` changes without a better step, as FlexFlow's ends.
    """
    while True:
        point, step_s = fitting_point(ledger, draw)
        best_s, since = step_s, 0
        while since < PATIENCE:
            changed = ledger.space.random_change(point, draw)
            changed_s = ledger.point_s(changed)
            since += 1
            if draw.random() < exp(min(0.0, (step_s - changed_s) / (TEMPERATURE * step_s))):
                point, step_s = changed, changed_s
            if step_s < best_s:
                best_s, since = step_s, 0
