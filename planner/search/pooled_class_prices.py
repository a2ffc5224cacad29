"""The prices of a search over pools, for a model whose blocks are of several classes.

The stages of a layout are cut anywhere, as on equal nodes, and each has the prices of its pool
(EQUATIONS I8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import CandidateSpace, enumerate_candidates
from parplan.planner.candidates.part_bounds import RankParts
from parplan.planner.candidates.pool_layouts import over_pools
from parplan.planner.candidates.pooled_bounds import PooledBounds, PooledWholeBounds
from parplan.planner.candidates.range_bounds import CloserBounds, PathBounds, RangeBounds
from parplan.planner.candidates.whole_bounds import WholeBounds
from parplan.planner.request import Request, SearchOptions
from parplan.planner.search.block_class_prices import BlockClassPrices
from parplan.planner.search.node_tables import Books
from parplan.planner.search.pooled_prices import (
    largest_limit_bytes,
    pool_prices,
    pools_of,
    require_searched,
)
from parplan.planner.stage_columns.sequence_table import BlockClassTable


class PooledClassPrices(BlockClassPrices):
    """The prices of a described model with unlike blocks on the pools of an unequal cluster.

    Raises ConfigError when no mesh is legal, and for what is not searched over pools.
    """

    @staticmethod
    def _enumerated(request: Request, price_cache: PriceCache) -> CandidateSpace:
        require_searched(request)
        return over_pools(enumerate_candidates(request), pools_of(request))

    @staticmethod
    def _by_pool(request: Request, books: Books) -> Mapping[str, Books]:
        return {
            pool: {place: pool_prices(pool, book, request.options) for place, book in books.items()}
            for pool in request.cluster.pool_names
        }

    def limit_bytes(self, options: SearchOptions) -> float:
        return largest_limit_bytes(self.price_cache, options)

    def in_reach(self, limit_bytes: float) -> bool:
        return True

    def bounds(self, layout: ParallelLayout, limit_bytes: float) -> PathBounds:
        return self._pooled(RangeBounds, layout, limit_bytes)

    def closer(self, layout: ParallelLayout, limit_bytes: float) -> PathBounds:
        """Returns the bounds with the recompute that a limit enforces.

        A rank with several stages takes no less than each of them.
        """
        return self._pooled(CloserBounds, layout, limit_bytes)

    def _pooled(
        self, kind: type[RangeBounds], layout: ParallelLayout, limit_bytes: float
    ) -> PathBounds:
        def make() -> PathBounds:
            given = self._given(layout)
            by_pool = {
                pool: machine.bounds(kind, layout, limit_bytes, given)
                for pool, machine in self._machines.items()
            }
            return PooledBounds(by_pool, bubble_share(layout, self.price_cache))

        return self._recent((kind, layout, limit_bytes), make)

    def step_bound_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        share = bubble_share(layout, self.price_cache)
        return self._once(
            ("passes", layout), lambda: self._over_pools(layout).passes_s(layout, share)
        )

    def may_fit(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        return self._over_pools(layout).may_fit(layout, limit_bytes)

    def closer_bounds_s(self, layout: ParallelLayout, limit_bytes: float) -> Iterator[float]:
        yield self.memory_bound_s(layout, limit_bytes)

    def _over_pools(self, layout: ParallelLayout) -> PooledWholeBounds:
        """Returns the bounds before any range of layers."""

        def make() -> PooledWholeBounds:
            by_pool = {}
            for pool, machine in self._machines.items():
                table = machine.table(layout)
                assert isinstance(table, BlockClassTable)
                by_pool[pool] = WholeBounds(table)
            return PooledWholeBounds(by_pool)

        return self._once(("whole", layout.states_on_host, layout.tower), make)

    def _parts(
        self, layout: ParallelLayout, rank: int, cut_s: float, limit_bytes: float
    ) -> RankParts:
        """Returns the given contents of a rank with several chunks, none above the cut."""
        given = self._given(layout)
        assert given is not None, "several chunks a rank are given"
        if self.closer(layout, limit_bytes).least_s >= cut_s:
            return RankParts((), complete=True)
        contents = tuple((given[stage],) for stage in layout.stages_of(rank))
        return RankParts((contents,), complete=True)
