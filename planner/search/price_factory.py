"""Makes the prices of one request for each use of the host, for a described model or a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access
from parplan.planner.candidates.never_searched import UnsearchedPart, unsearched_parts
from parplan.planner.host_options.state_locations import has_chunks
from parplan.planner.objective import Prefer
from parplan.planner.request import PlanRequest, Request, host_contents, searched_offload
from parplan.planner.search.block_class_prices import BlockClassPrices
from parplan.planner.search.described_shortfall import infeasible_error, least_peak_bytes
from parplan.planner.search.memory_descent import halve_in
from parplan.planner.search.pooled_class_prices import PooledClassPrices
from parplan.planner.search.pooled_prices import PooledPrices
from parplan.planner.search.search_session import INFINITY, DescribedPrices, SearchPrices
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.off_speed import SpeedFactors, cluster_at
from parplan.profiles.models.transformer import has_unlike_blocks

COARSELY = 0.95  # precision of the least bytes over pools, which only spread the limits of a front
T = TypeVar("T")
Hosted = tuple[Offload, ...]  # what the host may hold
Explain = Callable[[Request], InfeasibleError]


class PriceFactory(ABC):
    """A request whose searches share prices as long as the host may hold the same.

    request     the request; its model is of any kind
    offload     the contents that the host may have, None where the search decides
    searched    the contents that it may have where the search decides
    prefer      the choice among the ties of the fastest plan, None to leave them unpriced
    """

    request: PlanRequest[Any]
    offload: Hosted | None
    searched: Hosted
    prefer: Prefer | None

    @abstractmethod
    def prices(self, offload: Hosted) -> SearchPrices:
        """Returns the prices with some host contents. Raises ConfigError and OutOfTimeError."""

    @abstractmethod
    def least_peak_bytes(self, offload: Hosted) -> float | None:
        """Bytes of the fullest device of the leanest plan, None where no candidate is legal.

        Raises OutOfTimeError.
        """

    def by_operators(self) -> PriceFactory | None:
        """Returns the request whose blocks in chunks are used an operator at a time.

        It is None where the request leaves no chunks, or says how they are used.
        """
        return None

    @abstractmethod
    def unsearched(self) -> tuple[UnsearchedPart, ...]:
        """Returns the parts of a plan that no search tries."""

    @abstractmethod
    def error(self, offload: Hosted) -> InfeasibleError:
        """Returns the error where nothing fits with some host contents."""

    def nothing_fits(self) -> InfeasibleError:
        """Returns the error where nothing fits with all that the host may have."""
        return self.error(self.searched if self.offload is None else self.offload)

    def first_fitting(self, search: Callable[[SearchPrices], T | None]) -> T | None:
        """Returns the first answer of a search, None where nothing fits.

        Where the request leaves offload open, the host is used only if nothing fits without it.
        """
        uses = ((), self.searched) if self.offload is None else (self.offload,)
        for allowed in dict.fromkeys(uses):
            answer = search(self.prices(allowed))
            if answer is not None:
                return answer
        return None


class DescribedFactory(PriceFactory):
    """The prices of a described model; `explain` makes the error where nothing fits."""

    def __init__(self, request: Request, explain: Explain = infeasible_error) -> None:
        self.request, self._explain = request, explain
        self.offload, self.prefer = request.constraints.offload, request.options.prefer
        searched = searched_offload(request.model, request.training)
        self.searched = host_contents(searched, request.training.optimizer)
        self._made: dict[Hosted, SearchPrices] = {}

    def prices(self, offload: Hosted) -> SearchPrices:
        if offload not in self._made:
            self._made[offload] = self._make(self.request.with_offload(offload))
        return self._made[offload]

    def _make(self, request: Request) -> SearchPrices:
        return BlockClassPrices(request) if self._unlike else DescribedPrices(request)

    def least_step_s(self) -> float:
        """Seconds that no plan is below, with as much memory as it likes.

        Raises ConfigError and OutOfTimeError.
        """
        prices = self.prices(self.offload or ())
        return min(prices.step_bound_s(layout, INFINITY) for layout in prices.space.layouts)

    @property
    def _unlike(self) -> bool:
        return has_unlike_blocks(self.request.model, self.request.training)

    def at(self, factors: SpeedFactors) -> DescribedFactory:
        """Returns the request on a machine with other speeds or memory, for its fastest plan.

        A limit of the memory changes with the memory of a device, and ties are left unpriced.
        """
        options, limit = self.request.options, self.request.options.memory_limit_bytes
        if limit is not None:
            options = replace(options, memory_limit_bytes=round(limit * factors.memory))
        cluster = cluster_at(self.request.cluster, factors)
        request = replace(self.request, cluster=cluster, options=options)
        return described_factory(request, self._explain).without_ties()

    def without_ties(self) -> DescribedFactory:
        """Returns the request for the fastest plan, whose ties are left unpriced."""
        other = described_factory(self.request, self._explain)
        other.prefer = None
        return other

    def by_operators(self) -> DescribedFactory | None:
        offload, pins = self.offload, self.request.constraints
        offload = self.searched if offload is None else offload
        if pins.access is not None or not has_chunks(offload):
            return None
        finer = replace(pins, access=(Access.OPERATOR,), offload=offload)
        return described_factory(replace(self.request, constraints=finer), self._explain)

    def least_peak_bytes(self, offload: Hosted) -> float | None:
        return least_peak_bytes(self.request.with_offload(offload))

    def unsearched(self) -> tuple[UnsearchedPart, ...]:
        pins, stack = self.request.constraints, self.request.training.stack
        pools = bool(self.request.cluster.pool_names)
        return unsearched_parts(pins, stack, unlike=self._unlike, pools=pools)

    def error(self, offload: Hosted) -> InfeasibleError:
        return self._explain(self.request.with_offload(offload))


class PooledFactory(DescribedFactory):
    """The prices of a described model on the pools of an unequal cluster."""

    def __init__(self, request: Request, explain: Explain = infeasible_error) -> None:
        super().__init__(request, explain)
        self.searched = ()  # plans over pools keep all states on the devices

    def _make(self, request: Request) -> SearchPrices:
        return PooledClassPrices(request) if self._unlike else PooledPrices(request)

    def least_peak_bytes(self, offload: Hosted) -> float | None:
        """Returns a bound of the least peak: a limit within which no layout may fit."""
        prices = self.prices(offload)

        def may_fit(within: float) -> float | None:
            fits = any(prices.may_fit(layout, within) for layout in prices.space.layouts)
            return within if fits else None

        most = prices.limit_bytes(self.request.options)
        low, _ = halve_in(0.0, most, may_fit, enough=lambda high: COARSELY * high)
        return low

    def error(self, offload: Hosted) -> InfeasibleError:
        return InfeasibleError(
            f"no division of the pipeline over {self.request.cluster.text} fits their memory",
            hint="add nodes to a pool, or pin less",
        )


def described_factory(request: Request, explain: Explain = infeasible_error) -> DescribedFactory:
    """Returns the prices of a request for a described model, on equal nodes or on pools."""
    make = PooledFactory if request.cluster.pool_names else DescribedFactory
    return make(request, explain)
