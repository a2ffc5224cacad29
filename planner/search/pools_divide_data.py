"""Pools of an unequal cluster that divide the batch: each trains whole replicas on its share.

A pool runs the best plan of its own for its share of the global batch: mesh, stages, recompute and
ZeRO are its own, and every collective of that plan stays inside the pool. Once a step the pools add
their gradients over the joins, exposed after the slowest pool, in a ring of the P pools
(EQUATIONS P10):

    T = max_p T_p(b_p) + 2 (P - 1) (alpha + G / (P W)),    sum_p b_p = B

T_p is the step of the search on pool p with b_p sequences, G the bytes of all gradients, alpha and
W those of the slowest join. Shares are multiples of a grain. Few of them are all tried. Of many,
the shares in proportion to the pools' speeds are found first, and then grains move from the slowest
pool to others as long as that helps: such shares are not proven the best. The memory objective has
the least redundant plan of each pool at the shares of the fastest, within the slowdown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from parplan.costmodels.joined_pools import gradient_exchange_s
from parplan.planner.infeasible.shortfall import price_cache_of
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import BatchShare, Plan
from parplan.planner.request import Request
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.largest_model import SearchWatch
from parplan.planner.search.many_searches import answer_of
from parplan.planner.search.pareto import TIME_LIMIT
from parplan.planner.search.price_factory import described_factory
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError
from parplan.profiles.machines.unequal_cluster import UnequalCluster
from parplan.profiles.units import gib

GRAINS = 64  # parts of the batch that a share has a number of
FEW = 8  # grains up to which all shares are tried
ROUNDS = 3  # of shares in proportion to the speeds
MOVES = (1, 2)  # grains that move at once
FAR_MOVES = (4, 8, 16)  # from the slowest pool too, as near shares may divide over no mesh
INFINITY = float("inf")
Shares = tuple[int, ...]  # sequences by pool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShare:
    """The sequences of a step that a pool trains, and its plan for them."""

    pool: str
    sequences: int
    plan: Plan

    @property
    def step_s(self) -> float:
        """Seconds of the pool's step, without the exchange with other pools."""
        return self.plan.predicted.step_time_s.value


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedBatch:
    """The shares of all pools, and the seconds in which they add their gradients.

    copies_gib   GiB of the copies of the states that pools hold beyond one of all
    all_tried    True if every share was tried, so that these are proven the best
    stopped      cause of an early end, such as `Ctrl-C`; None where the search ended by itself
    """

    shares: tuple[PoolShare, ...]
    exchange_s: float
    copies_gib: float
    all_tried: bool
    stopped: str | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step, that of the slowest pool and the exchange."""
        return max(share.step_s for share in self.shares) + self.exchange_s

    @property
    def redundant_gib(self) -> float:
        """Redundant GiB of all GPUs."""
        held = (share.plan.predicted.redundancy_gib.total for share in self.shares)
        return sum(held) + self.copies_gib


def divide_batch(request: Request, watch: SearchWatch | None = None) -> DividedBatch:
    """Returns the shares and plans of pools that divide the batch of a request.

    Ctrl-C, which `watch` notices, and the deadline end the searches with the best shares so far.
    Raises ConfigError for another objective than throughput and memory and for fewer sequences than
    pools, InfeasibleError where no share fits, KeyboardInterrupt and OutOfTimeError before the
    first shares, and errors of the searches.
    """
    cluster = request.cluster
    assert isinstance(cluster, UnequalCluster), "equal nodes need no pools"
    if request.objective not in (Objective.THROUGHPUT, Objective.MEMORY):
        raise ConfigError(
            f"--objective {request.objective}: pools divide the batch for throughput and memory",
            hint="use one of these",
        )
    batch, pools = request.training.global_batch_size, len(cluster.pools)
    if batch < pools:
        raise ConfigError(
            f"--global-batch-size is {batch}: each of {pools} pools that divide it has a sequence",
            hint="let the pools divide the pipeline, or state a larger batch",
        )
    searches = _PoolSearches(request, cluster, watch or SearchWatch())
    best, all_tried = searches.best_shares()
    price_cache = price_cache_of(request)
    exchange_s = gradient_exchange_s(cluster, price_cache)
    slowest_s = searches.step_s(best)
    if slowest_s == INFINITY:
        raise InfeasibleError(
            f"no {'' if all_tried else 'tried '}shares of {batch} sequences fit the pools of "
            f"{cluster.text}, with whole replicas on each",
            hint="let the pools divide the pipeline, or add nodes",
        )
    slowdown = request.options.max_slowdown
    if request.objective is Objective.MEMORY:
        slowest_s = (slowest_s + exchange_s) * (1 + slowdown) - exchange_s
    firsts = itertools.accumulate(best, initial=0)
    shares = tuple(
        PoolShare(
            pool=pool,
            sequences=share,
            plan=replace(
                searches.final(pool, share, slowest_s),
                batch_share=BatchShare(first=first, of=searches.batch),
            ),
        )
        for pool, share, first in zip(cluster.by_name, best, firsts, strict=False)
    )
    return DividedBatch(
        shares=shares,
        exchange_s=exchange_s,
        copies_gib=(len(best) - 1) * gib(sum(price_cache.ideal_states(1))),
        all_tried=all_tried,
        stopped=searches.stopped,
    )


class _PoolSearches:
    """The searches of every pool, each share of it once."""

    def __init__(self, request: Request, cluster: UnequalCluster, watch: SearchWatch) -> None:
        self.request, self.watch = request, watch
        self.pools = cluster.by_name
        self.deadline = request.options.deadline
        self.batch = request.training.global_batch_size
        self.grain = max(1, self.batch // GRAINS)
        self.plans: dict[tuple[str, int], Plan | None] = {}

    def _request(self, pool: str, sequences: int) -> Request:
        training = replace(self.request.training, global_batch_size=sequences)
        cluster = self.pools[pool].cluster
        return replace(
            self.request, cluster=cluster, training=training, objective=Objective.THROUGHPUT
        )

    def plan(self, pool: str, sequences: int) -> Plan | None:
        """Returns the fastest plan of a pool for a share, None where it has none.

        Raises KeyboardInterrupt and OutOfTimeError.
        """
        key = pool, sequences
        if key not in self.plans:
            request = self._request(*key)
            if any(self._answered()):
                self.deadline.require_left()
            else:
                unplanned = set(self.pools) - {name for name, _ in self.plans}
                request = request.until(self.deadline.share(max(1, len(unplanned))))
            factory = described_factory(request, _unexplained)
            self.plans[key] = answer_of(factory, self.watch).plan
        return self.plans[key]

    def _answered(self) -> Iterator[Shares]:
        """Yields the shares for which every pool has a plan."""
        sizes = [
            [share for (name, share), plan in self.plans.items() if name == pool and plan]
            for pool in self.pools
        ]
        yield from (shares for shares in itertools.product(*sizes) if sum(shares) == self.batch)

    @property
    def stopped(self) -> str | None:
        """The cause of an early end, None where there was none."""
        if self.watch.interrupted():
            return "Ctrl-C"
        return TIME_LIMIT if self.deadline.is_over else None

    def pool_s(self, pool: str, sequences: int) -> float:
        """Seconds of the step of a pool, infinite where nothing fits."""
        plan = self.plan(pool, sequences)
        return INFINITY if plan is None else plan.predicted.step_time_s.value

    def step_s(self, shares: Shares) -> float:
        """Seconds of the slowest pool."""
        return max(itertools.starmap(self.pool_s, zip(self.pools, shares, strict=True)))

    def final(self, pool: str, sequences: int, slowest_s: float) -> Plan:
        """Returns the plan of a pool by the objective of the request, within `slowest_s`."""
        fastest = self.plan(pool, sequences)
        assert fastest is not None, "the shares fit"
        if self.request.objective is Objective.THROUGHPUT or self.stopped:
            return fastest
        room = max(0.0, slowest_s / fastest.predicted.step_time_s.value - 1)
        request = replace(
            self._request(pool, sequences),
            objective=Objective.MEMORY,
            options=replace(self.request.options, max_slowdown=room),
        )
        try:
            return find_plan(request)
        except (KeyboardInterrupt, OutOfTimeError):
            return fastest

    def best_shares(self) -> tuple[Shares, bool]:
        """Returns the best shares that were tried, and whether all were.

        Raises KeyboardInterrupt and OutOfTimeError before the first shares.
        """
        try:
            return self._best_shares()
        except (KeyboardInterrupt, OutOfTimeError):
            answered = tuple(self._answered())
            if not answered:
                raise
            return min(answered, key=self.step_s), False

    def _best_shares(self) -> tuple[Shares, bool]:
        if self.batch // self.grain <= FEW:
            return min(self._all_shares(), key=self.step_s), True
        best = self._by_speed()
        while (better := min(self._moved(best), key=self.step_s, default=best)) != best:
            if self.step_s(better) >= self.step_s(best):
                break
            best = better
        return best, False

    def _all_shares(self) -> Iterator[Shares]:
        sizes = range(self.grain, self.batch, self.grain)
        for shares in itertools.product(sizes, repeat=len(self.pools) - 1):
            last = self.batch - sum(shares)
            if last > 0:
                yield (*shares, last)

    def _by_speed(self) -> Shares:
        """Returns shares in proportion to the speeds that the pools have at such shares."""
        gpus = [pool.cluster.num_gpus for pool in self.pools.values()]
        best = tried = self._rounded([float(count) for count in gpus])
        for _ in range(ROUNDS):
            seconds = list(itertools.starmap(self.pool_s, zip(self.pools, tried, strict=True)))
            best = min(best, tried, key=self.step_s)
            if INFINITY in seconds:
                break
            speeds = [share / time_s for share, time_s in zip(tried, seconds, strict=True)]
            tried = self._rounded(speeds)
        return min(best, tried, key=self.step_s)

    def _rounded(self, weights: list[float]) -> Shares:
        """Returns shares of whole grains nearest to the weights, at least one grain each."""
        whole = sum(weights)
        shares = [
            max(1, round(self.batch * weight / whole / self.grain)) * self.grain
            for weight in weights
        ]
        widest = max(range(len(shares)), key=shares.__getitem__)
        shares[widest] += self.batch - sum(shares)
        return tuple(shares)

    def _moved(self, shares: Shares) -> Iterator[Shares]:
        """Yields the shares with a few grains moved between two pools."""
        seconds = list(itertools.starmap(self.pool_s, zip(self.pools, shares, strict=True)))
        slowest = seconds.index(max(seconds))
        for here, there in itertools.permutations(range(len(shares)), 2):
            for grains in (*MOVES, *(FAR_MOVES if here == slowest else ())):
                moved = list(shares)
                moved[here] -= grains * self.grain
                moved[there] += grains * self.grain
                if moved[here] > 0:
                    yield tuple(moved)


def _unexplained(request: Request) -> InfeasibleError:
    return InfeasibleError(f"nothing fits {request.cluster.name}")
