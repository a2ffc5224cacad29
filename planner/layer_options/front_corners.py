"""Corners of time and saved bytes that no choice for the operators of a block is below.

At a price of a saved byte, the least sum of seconds and priced bytes over all choices is a line
that no point of their front is below. It takes the walk of the fastest layer, without any label
(planner/layer_options/layer_front.py). The lines of a few prices leave a region whose corners stand
for the front in a bound: every choice costs no less than some average of two neighbours
(EQUATIONS I5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from parplan.planner.dominance import Array, Ints
from parplan.planner.layer_options.layer_front import Allowed, least_times_of_sizes_s
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.layer_options.layer_problem import LayerProblem, StrategyCosts

# prices of a saved byte, in units of that of full recompute
PRICES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class FrontCorners:
    """Seconds of a micro-batch and saved bytes by corner, the fastest first."""

    time_s: Array
    saved_bytes: Array

    @classmethod
    def none(cls) -> FrontCorners:
        """Returns no corner."""
        return cls(np.zeros(0), np.zeros(0))

    def beside(self, options: Sequence[LayerOption]) -> FrontCorners:
        """Returns the corners with some more points."""
        return FrontCorners(
            np.concatenate([self.time_s, [option.time_s for option in options]]),
            np.concatenate([self.saved_bytes, [option.saved_bytes for option in options]]),
        )


def front_corners(
    problem: LayerProblem,
    kept: Sequence[Sequence[Ints]],
    variants: Sequence[Allowed],
    prices: Sequence[float],
) -> list[list[FrontCorners | None]]:
    """Returns by micro-batch size and variant the corners, None without a solution.

    problem    its costs have the size as their first axis
    kept       by size and operator, the numbers of the options to choose from
    prices     seconds of a micro-batch for a saved byte, ascending and above zero
    """
    weights = np.array([(1.0, 0.0), *((1.0, price) for price in prices), (0.0, 1.0)])
    least = least_times_of_sizes_s(
        _at_prices(problem, weights), [each for each in kept for _ in weights], variants
    )
    of_sizes = (least[n : n + len(weights)] for n in range(0, len(least), len(weights)))
    return [
        [_corners(lines, weights[:-1, 1]) for lines in zip(*of_size, strict=True)]
        for of_size in of_sizes
    ]


def _at_prices(problem: LayerProblem, weights: Array) -> LayerProblem:
    """Returns the problem of sizes and weights of seconds and bytes, as the first axis of costs."""

    def priced(costs: StrategyCosts) -> StrategyCosts:
        shape = (1, -1, *[1] * (np.ndim(costs.time_s) - 1))
        of_time, of_bytes = (weights[:, column].reshape(shape) for column in (0, 1))
        values = of_time * np.asarray(costs.time_s)[:, None]
        values = values + of_bytes * np.asarray(costs.saved_bytes)[:, None]
        return replace(costs, time_s=values.reshape(-1, *values.shape[2:]))

    return replace(
        problem,
        costs=tuple(map(priced, problem.costs)),
        links=tuple(replace(link, costs=priced(link.costs)) for link in problem.links),
    )


def _corners(lines: Sequence[float | None], prices: Array) -> FrontCorners | None:
    """Returns the corners of lines `seconds + price bytes`, of which the last is bytes alone.

    The lines are the least of one set, so that neighbours meet in the order of their prices.
    """
    found = [line for line in lines if line is not None]
    if len(found) < len(lines):
        return None
    values, least_bytes = np.array(found[:-1]), found[-1]
    saved = np.append(np.diff(values) / np.diff(prices), least_bytes)
    return FrontCorners(time_s=values - prices * saved, saved_bytes=saved)
