"""Searches of requests that differ from one in a single quantity, over its prices and bounds.

A request with a pinned degree, another memory or another batch has the prices of the first one. On
slower links no layout is faster than on the usual ones, and on links that are f times as fast none
takes less than the f-th part. So the bounds of the first search leave out most layouts before they
are priced. The answers are plans without a proof: neither are their ties priced, nor their bounds
raised beyond what their own search needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.branch_and_bound import WORTH_REPLAYING
from parplan.planner.candidates.enumeration import CandidateSpace
from parplan.planner.deadline import Deadline
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints, Request
from parplan.planner.search.block_class_prices import BlockClassPrices
from parplan.planner.search.fastest_layouts import search_fastest
from parplan.planner.search.find_plan import SLACK, is_without_plan
from parplan.planner.search.many_searches import Answer, answer_of
from parplan.planner.search.price_factory import DescribedFactory, described_factory
from parplan.planner.search.replay import replay_best
from parplan.planner.search.search_results import SearchResult, record_of, result_of
from parplan.planner.search.search_session import DescribedPrices, SearchPrices, SearchSession
from parplan.profiles.errors import ConfigError, InfeasibleError

AXES = ("tp", "pp", "cp", "ep")
CLOSE = 1.03  # times the fastest choice up to which others are solved and replayed


class Near(StrEnum):
    """The parts of the first search that another request shares."""

    PRICES = "prices"
    BOUNDS = "bounds"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Way:
    """The way in which another request is near the first one.

    near      the parts of the first search that it shares
    speed     least ratio of its speeds to those of the first request
    meshes    the meshes that are searched, none for all of them
    """

    near: Near
    speed: float = 1.0
    meshes: Collection[Mesh] = ()


class NearSearches(ABC):
    """The search of a request without pins, and of others near it."""

    @abstractmethod
    def first(self) -> Answer:
        """Returns the best plan of the request with its proof, where one fits.

        Raises OutOfTimeError, SolverError and KeyboardInterrupt.
        """

    @abstractmethod
    def answer(self, request: Request, deadline: Deadline, way: Way) -> Answer:
        """Returns the fastest plan of a request near the first one, or why there is none.

        Raises as `first` does.
        """

    @abstractmethod
    def meshes(self) -> Iterable[Mesh]:
        """Returns the meshes of the first search, none before it."""

    @abstractmethod
    def least_s(self, meshes: Iterable[Mesh]) -> float:
        """Returns a bound of the steps on some meshes of the first search, from that search.

        The plans have all states on the devices. Bounds are of the closed form. A simulated step
        may be shorter, by as much as searches allow for (`WORTH_REPLAYING`).
        """

    def least_with(self, axis: str, degree: int) -> float | None:
        """Returns a bound of the steps with a degree of an axis, None where there is no such mesh.

        It is infinite where none of them fits.
        """
        some = [mesh for mesh in self.meshes() if getattr(mesh, axis) == degree]
        return self.least_s(some) if some else None


class NearRequests(NearSearches):
    """The search of every plan that the stack of a request runs."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._first = described_factory(request).without_ties()
        self._is_searched = False

    def first(self) -> Answer:
        answer = answer_of(self._first)
        self._is_searched = answer.plan is not None
        return answer

    def meshes(self) -> Iterable[Mesh]:
        if not self._is_searched:
            return ()
        return {each.mesh for each in self._prices.space.layouts}

    def least_s(self, meshes: Iterable[Mesh]) -> float:
        some, prices = frozenset(meshes), self._prices
        limit = prices.limit_bytes(self.request.options)
        bounds = (prices.least_s(each, limit) for each in prices.space.layouts if each.mesh in some)
        return min(bounds) / WORTH_REPLAYING

    @property
    def _prices(self) -> SearchPrices:
        return self._first.prices(self._first.offload or ())

    def answer(self, request: Request, deadline: Deadline, way: Way) -> Answer:
        request = request.until(deadline)
        if request.cluster.pool_names:
            return answer_of(described_factory(request).without_ties())
        try:
            return Answer(plan=_fastest(_NearFactory(request, self._first, way)))
        except (ConfigError, InfeasibleError) as error:
            return Answer(error=error)


class _NearFactory(DescribedFactory):
    """The prices of a request near the one of another factory."""

    def __init__(self, request: Request, first: DescribedFactory, way: Way) -> None:
        super().__init__(request)
        self._first, self._way = first, way

    def _make(self, request: Request) -> SearchPrices:
        prices = self._shared(request)
        if not self._way.meshes:
            return prices
        return prices.shared_with(request, on_meshes(self._way.meshes, prices.space))

    def _shared(self, request: Request) -> SearchPrices:
        first = self._first.request
        batches = request.training.global_batch_size, first.training.global_batch_size
        other_batch = batches[0] != batches[1]
        # waits for documents depend on the batch, and so do prices of tables on the host
        own = other_batch and (request.constraints.offload or request.training.documents)
        if self._way.near is Near.NOTHING or own:
            return super()._make(request)
        known = self._first.prices(request.constraints.offload or ())
        if self._way.near is Near.BOUNDS:
            return self._bounded(super()._make(request), known)
        assert isinstance(known, DescribedPrices | BlockClassPrices), "the model is described"
        space = known.candidates(request) if other_batch else known.space
        space = within_pins(request.constraints, space)
        return known.shared_with(request, space) if space.layouts else super()._make(request)

    def _bounded(self, prices: SearchPrices, known: SearchPrices) -> SearchPrices:
        limit = known.limit_bytes(self._first.request.options)
        share = min(1.0, 1 / self._way.speed)

        def floor_s(layout: ParallelLayout) -> float:
            return share * known.least_s(layout, limit)

        prices.floor_s = floor_s
        return prices


def on_meshes(meshes: Collection[Mesh], space: CandidateSpace) -> CandidateSpace:
    """Returns the candidates on some meshes."""
    layouts = tuple(layout for layout in space.layouts if layout.mesh in meshes)
    return replace(space, layouts=layouts)


def within_pins(pins: Constraints, space: CandidateSpace) -> CandidateSpace:
    """Returns the candidates whose degrees are pinned."""
    pinned = {axis: degrees for axis in AXES if (degrees := getattr(pins, axis)) is not None}
    if not pinned:
        return space
    layouts = (
        layout
        for layout in space.layouts
        if all(getattr(layout.mesh, axis) in degrees for axis, degrees in pinned.items())
    )
    return replace(space, layouts=tuple(layouts))


def _fastest(factory: DescribedFactory) -> Plan:
    """Returns the fastest plan of a request.

    The host is used only if nothing fits without it, and blocks in chunks are used an operator at a
    time only if nothing else fits. Raises InfeasibleError and errors as `NearRequests.answer` does.
    """
    finer = factory.by_operators()
    result = _search(factory) or (_search(finer) if finer is not None else None)
    if result is None:
        raise factory.nothing_fits()
    assert isinstance(result.plan, Plan), "the model is described"
    return result.plan


def _search(factory: DescribedFactory) -> SearchResult | None:
    options = factory.request.options
    return factory.first_fitting(
        lambda prices: _searched(prices, SearchSession(prices, options, None))
    )


def _searched(prices: SearchPrices, session: SearchSession) -> SearchResult | None:
    """Returns the fastest plan over some prices, None where nothing fits."""
    if not prices.in_reach(session.limit_bytes):
        return None
    outcome, _ = search_fastest(prices.space.layouts, session, CLOSE)
    if outcome.interrupted:
        raise KeyboardInterrupt
    if is_without_plan(outcome):
        return None
    replayed = replay_best(outcome, Objective.THROUGHPUT, session)
    if not replayed:  # the exact schedules of the chunks need more than their closed form says
        slack = session.slack + SLACK
        return _searched(prices, SearchSession(prices, session.options, None, slack))
    best, fastest = replayed[0][0], outcome.solved[0]
    record = record_of(Objective.THROUGHPUT, best, fastest, outcome, prices.space)
    return result_of(replayed, record, fastest, session, interrupted=False)
