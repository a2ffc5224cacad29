"""Methods that climb by changes of one point: greedy search, and bottleneck alleviation."""

from __future__ import annotations

from math import inf
from random import Random

from parplan.planner.search_methods.costs_by_way import LayoutCosts, promising
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


def alleviation(ledger: Ledger, draw: Random) -> None:
    """Alleviates the bottleneck of a point again and again, in the shape of Aceso.

    The bottleneck is the slowest pipeline rank, of which blocks get another way or go to a
    neighbour (Liu et al. 2024, EuroSys, doi:10.1145/3627703.3629554, section 3). Where no change of
    it helps, the next slowest rank is tried. Every layout starts from its fastest point whose
    blocks run alike.
    """
    for costs in promising(ledger):
        point = costs.fastest_alike
        if point is None:
            continue
        step_s, better = ledger.point_s(point), True
        while better:
            better = False
            for rank in slowest_ranks(point, costs):
                changes = ledger.space.changes_of(point, rank)
                priced = [(ledger.point_s(change), change) for change in changes]
                best_s, best = min(priced, key=lambda each: each[0], default=(inf, point))
                if best_s < step_s:
                    point, step_s = best, best_s
                    better = True
                    break


def slowest_ranks(point: Point, costs: LayoutCosts) -> list[int]:
    """Returns the ranks of a point, the slowest first."""
    ranks = range(len(point.ranks))
    cost_s = [
        float(costs.block_s(rank) @ point.ranks[rank]) + costs.ends_s(rank, point.ends)
        for rank in ranks
    ]
    return sorted(ranks, key=lambda rank: -cost_s[rank])
