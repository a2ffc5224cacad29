"""The prices of a search over the pools of an unequal cluster.

A pipeline rank lies on a pool, whose prices its columns have (EQUATIONS I8). All else is the search
of a described model: one program, one branch and bound, one simulator.
"""

from __future__ import annotations

from collections.abc import Iterator

from parplan.costmodels.joined_pools import Prices, prices_on
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import enumerate_candidates, no_candidate_error
from parplan.planner.candidates.lower_bounds import TimeBound, ahead_bounds_s, may_fit
from parplan.planner.candidates.pool_layouts import over_pools
from parplan.planner.candidates.pooled_bounds import pooled_time_bound
from parplan.planner.infeasible.shortfall import limit_bytes, price_cache_of
from parplan.planner.request import Request, SearchOptions
from parplan.planner.search.search_session import DescribedPrices, SearchPrices
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.unequal_cluster import UnequalCluster


class PooledPrices(DescribedPrices):
    """The prices of a described model on the pools of an unequal cluster.

    Raises ConfigError when no mesh is legal, and for what is not searched over pools.
    """

    def __init__(self, request: Request) -> None:
        cluster = pools_of(request)
        require_searched(request)
        space = over_pools(enumerate_candidates(request), cluster)
        if not space.layouts:
            raise no_candidate_error(space, cluster)
        price_cache = price_cache_of(request)
        allowed = request.constraints.resolved(request.training.stack)
        deadline = request.options.deadline
        SearchPrices.__init__(self, space, price_cache, allowed, deadline)
        self.table = MixTable(price_cache, allowed, deadline)
        self._may_fit = {}
        self._tables = {
            pool: MixTable(pool_prices(pool, price_cache, request.options), allowed, deadline)
            for pool in cluster.pool_names
        }

    def table_of(self, layout: ParallelLayout, rank: int) -> MixTable:
        return self._tables[layout.pools[rank]]

    def within(self, limit_bytes: float) -> LayerPriceCache:
        return self.price_cache

    def limit_bytes(self, options: SearchOptions) -> float:
        return largest_limit_bytes(self.price_cache, options)

    def in_reach(self, limit_bytes: float) -> bool:
        return True

    def time_bound(self, layout: ParallelLayout) -> TimeBound:
        """Returns bounds with every layer at its fastest on the pool of its rank."""
        return self._once(("time", layout), lambda: self._time_bound(layout))

    def _time_bound(self, layout: ParallelLayout) -> TimeBound:
        tables = [self._tables[pool] for pool in layout.pools]
        return pooled_time_bound(layout, tables, bubble_share(layout, self.price_cache))

    def closer_bounds_s(self, layout: ParallelLayout, limit_bytes: float) -> Iterator[float]:
        yield from ()

    def ahead_bounds_s(self, layout: ParallelLayout, usual_s: float) -> Iterator[float]:
        if self.table.stage_recompute is None:
            by_pool = (ahead_bounds_s(layout, usual_s, each) for each in self._tables.values())
            yield from map(min, zip(*by_pool, strict=True))

    def longest_rank(self, layout: ParallelLayout, cut_s: float, limit_bytes: float) -> int | None:
        return self.time_bound(layout).longest_rank(layout, cut_s)

    def may_fit(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        """Returns False if the least bytes exceed the limit on the pool with the most memory."""
        self._check()
        return any(may_fit(layout, table, limit_bytes) for table in self._tables.values())


def require_searched(request: Request) -> None:
    """Raises ConfigError for a request that no search over pools answers."""
    pins = request.constraints
    refused = {
        "--offload": bool(pins.offload),
        "the recompute rule of the first stage": pins.recompute_first_stage is not None,
        "weights over data-parallel ranks": bool(
            pins.weights_over_data and True in pins.weights_over_data
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise ConfigError(
                f"{what}: not searched over the pools of cluster {request.cluster.name}",
                hint="leave it out, or plan for one pool",
            )


def pools_of(request: Request) -> UnequalCluster:
    """Returns the unequal cluster of a request."""
    assert isinstance(request.cluster, UnequalCluster), "equal nodes need no pools"
    return request.cluster


def pool_prices(pool: str, whole: Prices, options: SearchOptions) -> Prices:
    """Returns the prices on a pool, with the memory limit of its devices.

    whole: the prices of the unequal cluster
    """
    prices = prices_on(pool, whole)
    prices.sizes = whole.sizes
    prices.most_bytes = limit_bytes(prices.machine.cluster, prices.training.stack, options)
    return prices


def largest_limit_bytes(whole: LayerPriceCache, options: SearchOptions) -> float:
    """Returns the bytes that a plan may fill on a device of the pool with most room."""
    each = (prices_on(pool, whole) for pool in whole.machine.cluster.pool_names)
    return max(limit_bytes(p.machine.cluster, p.training.stack, options) for p in each)
