"""Methods that climb by the best change at hand: greedy search."""

from __future__ import annotations

from math import inf
from random import Random

from parplan.planner.search_methods.costs_by_way import promising
from parplan.planner.search_methods.ledger import Ledger
from parplan.planner.search_methods.method_space import Point


def greedy(ledger: Ledger, draw: Random) -> None:
    """Takes the fastest point whose blocks all run alike, and improves it by single changes."""
    space = ledger.space
    best, best_s = None, inf
    for costs in promising(ledger):
        for way in range(len(costs.ways)):
            for zero in space.zeros(costs.layout):
                point = space.alike(costs.layout, way, (zero, zero))
                step_s = ledger.point_s(point)
                if step_s < best_s:
                    best, best_s = point, step_s
    if best is not None:
        climb(best, best_s, ledger)


def climb(point: Point, step_s: float, ledger: Ledger) -> None:
    """Takes the best change of a point, again and again until none makes its step shorter."""
    while True:
        priced = [(ledger.point_s(change), change) for change in ledger.space.changes(point)]
        best_s, best = min(priced, key=lambda each: each[0], default=(inf, point))
        if best_s >= step_s:
            return
        point, step_s = best, best_s
