"""The prices of a search over a described model whose blocks are of several classes.

Its layers are cut into stages anywhere, as those of a traced module are. With several virtual
stages a rank the cuts are given: the stages hold equal numbers of blocks, or one less on the first
and the last, as where all blocks are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Self

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.candidates.context_forms import without_beaten_forms
from parplan.planner.candidates.enumeration import (
    CandidateSpace,
    enumerate_candidates,
    no_candidate_error,
)
from parplan.planner.candidates.tower_divisions import with_tower_divisions
from parplan.planner.candidates.whole_bounds import WholeBounds
from parplan.planner.infeasible.shortfall import price_cache_of
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.request import Constraints, Request
from parplan.planner.search.node_tables import Books
from parplan.planner.search.sequence_prices import SequencePrices
from parplan.planner.stage_columns.block_counts import shorter_ends
from parplan.planner.stage_columns.sequence_table import BlockClassTable
from parplan.planner.stage_columns.stage_contents import Range
from parplan.profiles.errors import ConfigError


class BlockClassPrices(SequencePrices):
    """The prices of a described model whose blocks are of several classes.

    Raises ConfigError when no mesh is legal, OutOfTimeError at the end of the deadline.
    """

    price_cache: PriceCache

    def __init__(self, request: Request) -> None:
        _require_searched(request.constraints, request.model.name)
        price_cache = price_cache_of(request)
        num_blocks = request.model.num_blocks
        super().__init__(
            self._space(request, price_cache),
            price_cache,
            request.constraints.resolved(request.training.stack),
            request.options.deadline,
            lambda layout: given_cuts(layout, num_blocks),
            self._assembled,
            BlockClassTable,
            partial(self._by_pool, request),
        )

    def _space(self, request: Request, price_cache: PriceCache) -> CandidateSpace:
        space = _with_hosts(self._enumerated(request, price_cache), request)
        space = with_tower_divisions(space, request.model, request.training.stack)
        if not space.layouts:
            raise no_candidate_error(space, request.cluster)
        return space

    def candidates(self, request: Request) -> CandidateSpace:
        """Returns the candidates of a request with another batch at these prices.

        Raises ConfigError when no mesh is legal, OutOfTimeError at the end of the deadline.
        """
        return self._space(request, self.price_cache)

    def shared_with(self, request: Request, space: CandidateSpace) -> Self:
        shared = super().shared_with(request, space)
        shared._assembler = shared._assembled
        return shared

    @staticmethod
    def _enumerated(request: Request, price_cache: PriceCache) -> CandidateSpace:
        """Returns the candidates, each with all states on the devices and one way of a tower."""
        deadline = request.options.deadline
        return without_beaten_forms(enumerate_candidates(request), price_cache, deadline)

    @staticmethod
    def _by_pool(request: Request, books: Books) -> Mapping[str, Books]:
        """Returns the prices on each pool of the cluster."""
        return {"": books}

    def may_fit(self, layout: ParallelLayout, limit_bytes: float) -> bool:
        return self._whole(layout).may_fit(layout, limit_bytes)

    def step_bound_s(self, layout: ParallelLayout, limit_bytes: float) -> float:
        return self._once(("passes", layout), lambda: self._whole(layout).passes_s(layout))

    def closer_bounds_s(self, layout: ParallelLayout, limit_bytes: float) -> Iterator[float]:
        for hidden in (True, False):
            yield self._whole(layout).within_s(layout, limit_bytes, hidden=hidden)
        yield from super().closer_bounds_s(layout, limit_bytes)

    def _whole(self, layout: ParallelLayout) -> WholeBounds:
        """Returns the bounds before any range of layers."""
        table = self._table(layout)
        assert isinstance(table, BlockClassTable)
        return self._once(("whole", table), lambda: WholeBounds(table))

    def _assembled(self, strategy: Strategy, price: StepPrice, record: SearchRecord) -> Plan:
        layout = strategy.layout
        prices = self.price_cache.with_states(on_host=layout.states_on_host)
        return assemble(strategy, price, record, prices.with_tower(layout.tower))


def _require_searched(pins: Constraints, name: str) -> None:
    """Raises ConfigError for pins of choices that are searched only where blocks are alike."""
    for option, pinned in (
        ("--zero-by-operator", pins.zero_by_operator),
        ("--weights-over-data", True in (pins.weights_over_data or ())),
        ("--chunk-access", pins.access is not None),
    ):
        if pinned:
            raise ConfigError(
                f"the blocks of {name} are of several classes, and {option} is searched where "
                "they are alike",
                hint=f"leave out {option}",
            )


def _with_hosts(space: CandidateSpace, request: Request) -> CandidateSpace:
    """Returns the candidates, and where that is allowed the same with their states on the hosts."""
    if Offload.STATES not in (request.constraints.offload or ()):
        return space
    layouts = ((layout, replace(layout, states_on_host=True)) for layout in space.layouts)
    return replace(space, layouts=tuple(chain.from_iterable(layouts)))


def given_cuts(layout: ParallelLayout, num_blocks: int) -> tuple[Range, ...] | None:
    """Returns the layers of each virtual stage, None where the search cuts.

    Blocks that equal stages leave over are on stages in the middle, whose ranks have no embedding.
    """
    if layout.virtual_stages == 1:
        return None
    stages = layout.num_virtual_stages
    fewer = 2 if shorter_ends(layout, num_blocks) else 0
    each, over = divmod(num_blocks + fewer, stages)
    counts = [each] * stages
    first = (stages - over) // 2
    counts[first : first + over] = [each + 1] * over
    # the embedding and the head are layers of the first and the last stage
    counts[0] += 1 - fewer // 2
    counts[-1] += 1 - fewer // 2
    return tuple(pairwise(accumulate(counts, initial=0)))
