"""A policy gradient: points are drawn from a policy that learns from their steps.

It is the shape of device placement by reinforcement learning (Mirhoseini et al. 2017, arXiv
1706.04972, section 3), with a table of weights in place of a network. The policy is a product of
choices, each of which takes i with probability

    p_i = exp(f_i w) / sum_j exp(f_j w)                f_i features of i, w weights

and the weights follow the gradient of the expected reward (Williams 1992, REINFORCE):

    w += RATE (r - mean r) / std r  (f_i - sum_j p_j f_j)           r = - log(step)

Mean and deviation are of one batch of points. A point that does not fit has a reward below all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from random import Random

import numpy as np

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array
from parplan.planner.search_methods.ledger import Ledger
from parplan.planner.search_methods.method_space import Counts, MethodSpace, Point, moved, one_way

RATE = 2.0
BATCH = 16  # points of a step of the gradient
PATIENCE = 25  # batches without a better step, after which a policy starts again
MISFIT = 0.5  # reward by which a point that does not fit is below the least of its batch
SHARES = (0.0, 0.25, 0.5)  # of the blocks of a rank, in its second way
TILTS = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 3.0, 4.0)  # blocks of a later rank


class Choice:
    """One choice of a policy.

    features    of each value, by row
    """

    def __init__(self, features: Array) -> None:
        self.features = features
        self.weights = np.zeros(features.shape[1])
        self._odds: dict[tuple[int, ...], tuple[Array, Array]] = {}

    def odds(self, allowed: tuple[int, ...] = ()) -> tuple[Array, Array]:
        """Returns the probabilities of all values up to each, and the mean of their features.

        allowed    the values that may be drawn, all if empty
        """
        if allowed not in self._odds:
            logits = self.features @ self.weights
            if allowed:
                hidden = np.full(len(logits), -np.inf)
                hidden[list(allowed)] = logits[list(allowed)]
                logits = hidden
            odds = np.exp(logits - logits.max())
            odds /= odds.sum()
            self._odds[allowed] = np.cumsum(odds), odds @ self.features
        return self._odds[allowed]

    def drawn(self, draw: Random, allowed: tuple[int, ...] = ()) -> tuple[int, Array]:
        """Returns a random value, and the gradient of the logarithm of its probability."""
        summed, mean = self.odds(allowed)
        value = int(np.searchsorted(summed, draw.random() * summed[-1], side="right"))
        return value, self.features[value] - mean

    def move(self, step: Array) -> None:
        """Adds a step to the weights."""
        self.weights += step
        self._odds.clear()


class Policy:
    """The choices that make a point: a layout, its ends, and for both parts of its ranks the ways.

    A part is a pool of unequal nodes, else half of the pipeline.
    """

    def __init__(self, space: MethodSpace, draw: Random) -> None:
        self.space, self.draw = space, draw
        every = sorted({way for layout in space.layouts for way in space.ways(layout)})
        self.ways = {way: number for number, way in enumerate(every)}
        self.zeros = sorted({zero for _, zero in every})
        self.parts = max(2, *(len(set(layout.pools)) for layout in space.layouts))
        self.layout = Choice(layout_features(space.layouts))
        self.first, self.last = (Choice(np.eye(len(self.zeros))) for _ in range(2))
        self.main, self.second = (self._of_parts(len(every)) for _ in range(2))
        self.share, self.tilt = self._of_parts(len(SHARES)), Choice(np.eye(len(TILTS)))
        self.taken: list[tuple[Choice, Array]] = []

    def _of_parts(self, values: int) -> list[Choice]:
        return [Choice(np.eye(values)) for _ in range(self.parts)]

    def _drawn(self, choice: Choice, allowed: Iterable[int] = ()) -> int:
        value, score = choice.drawn(self.draw, tuple(allowed))
        self.taken.append((choice, score))
        return value

    def point(self) -> tuple[Point, list[tuple[Choice, Array]]]:
        """Returns a point, and the scores of all its choices."""
        self.taken = []
        space = self.space
        layout = space.layouts[self._drawn(self.layout)]
        ends = space.ends(layout)
        first = self._zero(self.first, sorted({end[0] for end in ends}))
        last = self._zero(self.last, [end[1] for end in ends if end[0] == first])
        ways = space.ways(layout)
        allowed = [self.ways[way] for way in ways]
        place = {number: index for index, number in enumerate(allowed)}
        drawn = [
            (
                place[self._drawn(self.main[part], allowed)],
                place[self._drawn(self.second[part], allowed)],
                SHARES[self._drawn(self.share[part])],
            )
            for part in range(self.parts)
        ]
        tilt = 1.0 if layout.equal_ranks or layout.mesh.pp == 1 else TILTS[self._drawn(self.tilt)]
        ranks: list[Counts] = []
        parts = list(parts_of(layout))
        for part, count in zip(parts, tilted_split(layout, tilt, space), strict=True):
            here, there, share = drawn[part]
            counts = one_way(count, here, len(ways))
            ranks.append(moved(counts, here, there, int(share * count)))
        return Point(layout, (first, last), tuple(ranks)), self.taken

    def _zero(self, choice: Choice, zeros: Sequence[int]) -> int:
        return self.zeros[self._drawn(choice, [self.zeros.index(zero) for zero in zeros])]


def parts_of(layout: ParallelLayout) -> Iterator[int]:
    """Yields the part of each pipeline rank: its pool by name, else its half of the pipeline."""
    names = sorted(set(layout.pools))
    for rank in range(layout.mesh.pp):
        yield names.index(layout.pools[rank]) if names else int(2 * rank >= layout.mesh.pp)


def tilted_split(layout: ParallelLayout, tilt: float, space: MethodSpace) -> Sequence[int]:
    """Returns the blocks of each rank, with `tilt` blocks in later parts for one in the first."""
    equal = space.equal_split(layout)
    weights = np.array([tilt if part else 1.0 for part in parts_of(layout)])
    if tilt == 1.0 or len(set(weights)) == 1:
        return equal
    ends = np.round(np.cumsum(weights) / weights.sum() * (space.num_blocks - len(weights)))
    return [int(count) + 1 for count in np.diff(ends, prepend=0.0)]


def layout_features(layouts: Sequence[ParallelLayout]) -> Array:
    """Returns a row of ones and zeros for each layout, a column for each value that it may have."""
    described = [
        {
            ("pp", each.mesh.pp),
            ("tp", each.mesh.tp),
            ("ep", each.mesh.ep * each.mesh.etp),
            ("micro-batch", each.micro_batch_size),
            ("virtual stages", each.virtual_stages),
            ("schedule", each.schedule),
            ("sequence parallel", each.sequence_parallel),
            ("pools", each.pools[:1]),
        }
        for each in layouts
    ]
    columns = sorted(set().union(*described), key=str)
    return np.array([[float(name in each) for name in columns] for each in described])


def policy_gradient(ledger: Ledger, draw: Random) -> None:
    """Learns a policy by batches of points, and starts again where it finds nothing better."""
    while True:
        policy = Policy(ledger.space, draw)
        since, best_s = 0, inf
        while since < PATIENCE:
            drawn = [policy.point() for _ in range(BATCH)]
            steps_s = np.array([ledger.point_s(point) for point, _ in drawn])
            learn([taken for _, taken in drawn], rewards_of(steps_s))
            since = 0 if steps_s.min() < best_s else since + 1
            best_s = min(best_s, float(steps_s.min()))


def rewards_of(steps_s: Array) -> Array:
    """Returns the rewards of a batch, with mean 0 and deviation 1; zeros where all are equal."""
    fitting = np.isfinite(steps_s)
    if not fitting.any():
        return np.zeros(len(steps_s))
    rewards = -np.log(np.where(fitting, steps_s, 1.0))
    rewards = np.where(fitting, rewards, rewards[fitting].min() - MISFIT)
    deviation = rewards.std()
    return np.asarray((rewards - rewards.mean()) / deviation if deviation else 0 * rewards)


def learn(batch: Sequence[Sequence[tuple[Choice, Array]]], rewards: Array) -> None:
    """Moves the weights of every choice along the gradient of the reward."""
    for taken, reward in zip(batch, rewards, strict=True):
        for choice, score in taken:
            choice.move(RATE / len(batch) * reward * score)
