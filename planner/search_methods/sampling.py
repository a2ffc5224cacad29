"""Methods that draw points: random search, MCMC, a genetic algorithm, Monte-Carlo tree search."""

from __future__ import annotations

from collections import defaultdict
from math import exp, inf, log, sqrt
from random import Random

from parplan.planner.search_methods.ledger import Ledger
from parplan.planner.search_methods.method_space import MethodSpace, Point

TEMPERATURE = 0.02  # share by which a step is longer that one proposal in e accepts
POPULATION = 40  # points that breed
CHANGED = 0.8  # share of children with a random change
ROLLOUT = 8  # changes that a visit of a leaf tries
EXPLORATION = 0.1  # the weight C of little visited branches
Branch = tuple[int, ...]  # pipeline degree, number of the layout, number of the way
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


def genetic(ledger: Ledger, draw: Random) -> None:
    """Breeds points: the better of two random parents, twice, then a crossover and a change.

    The slowest of the population makes room for each child (a steady-state genetic algorithm:
    Whitley 1989, the GENITOR algorithm).
    """
    space = ledger.space
    people = [fitting_point(ledger, draw) for _ in range(POPULATION)]
    while True:
        mother, father = (
            min(draw.sample(people, 2), key=lambda each: each[1])[0] for _ in range(2)
        )
        child = crossed(mother, father, space, draw)
        if draw.random() < CHANGED:
            child = space.random_change(child, draw)
        step_s = ledger.point_s(child)
        slowest = max(range(POPULATION), key=lambda index: people[index][1])
        if step_s < people[slowest][1]:
            people[slowest] = child, step_s


def crossed(mother: Point, father: Point, space: MethodSpace, draw: Random) -> Point:
    """Returns a point with the layout of one parent and the ways of both, or of the other.

    Ranks up to a random one are of the mother where both have one layout and one split.
    """
    alike = mother.layout == father.layout
    if not alike or list(map(sum, mother.ranks)) != list(map(sum, father.ranks)):
        return space.with_layout(father, mother.layout)
    cut = draw.randint(0, len(mother.ranks))
    return Point(mother.layout, father.ends, (*mother.ranks[:cut], *father.ranks[cut:]))


def tree_search(ledger: Ledger, draw: Random) -> None:
    """Walks a tree from pipeline degree to layout to way, and changes a few choices at its leaf.

    A child is chosen by its upper confidence bound (Kocsis & Szepesvari 2006, UCT):

        r + C sqrt(ln N / n)        r its best reward, n its visits, N those of its parent

    and the reward of a point is the best step over its own.
    """
    space = ledger.space
    visits: defaultdict[Branch, int] = defaultdict(int)
    shortest_s: defaultdict[Branch, float] = defaultdict(lambda: inf)

    def child(branch: Branch, names: list[int]) -> Branch:
        new = [name for name in names if not visits[*branch, name]]
        if new:
            return (*branch, draw.choice(new))

        def bound(name: int) -> float:
            here = (*branch, name)
            explored = sqrt(log(visits[branch]) / visits[here])
            return ledger.step_s / shortest_s[here] + EXPLORATION * explored

        return (*branch, max(names, key=bound))

    while True:
        degree = child((), sorted({layout.mesh.pp for layout in space.layouts}))
        own = [i for i, layout in enumerate(space.layouts) if layout.mesh.pp == degree[0]]
        place = child(degree, own)
        layout = space.layouts[place[1]]
        leaf = child(place, list(range(len(space.ways(layout)))))
        point = space.alike(layout, leaf[2], draw.choice(space.ends(layout)))
        step_s = rolled_out_s(point, ledger, draw)
        for branch in ((), degree, place, leaf):
            visits[branch] += 1
            shortest_s[branch] = min(shortest_s[branch], step_s)


def rolled_out_s(point: Point, ledger: Ledger, draw: Random) -> float:
    """Seconds of the step of a point after a few random changes, of which the shorter are kept."""
    step_s = ledger.point_s(point)
    for _ in range(ROLLOUT):
        changed = draw.choice(list(ledger.space.changes(point)) or [point])
        changed_s = ledger.point_s(changed)
        if changed_s <= step_s:
            point, step_s = changed, changed_s
    return step_s
