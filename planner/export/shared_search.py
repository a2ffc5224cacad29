"""Prices of layers that the searches of several launchers in one command share.

Stacks differ in facts that decide what a search tries, and in facts that prices depend on.
Trainings that are alike in the latter share every price.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace

from parplan.costmodels.price_cache import PriceCache
from parplan.planner.infeasible.shortfall import price_cache_of
from parplan.planner.request import Request
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.spec import TrainingSpec


@dataclass
class SharedSearch:
    """The prices that the searches of one command have made."""

    _made: list[PriceCache] = field(default_factory=list)

    def prices(self, request: Request, training: TrainingSpec) -> PriceCache:
        """Returns the prices of a request's model in a training on its machine."""
        request = replace(request, training=training)
        alike = (each for each in self._made if _are_alike(each, request))
        known = next(alike, None)
        if known is None:
            known = price_cache_of(request)
            self._made.append(known)
        if known.training == training:
            return known
        prices = copy(known)  # shares the prices of layers
        prices.training = training
        return prices


def _are_alike(prices: PriceCache, request: Request) -> bool:
    """Returns whether a request has these prices.

    The name of a stack is a fact of its own on a machine whose profile measured steps of a stack.
    """
    ours, theirs = prices.training, request.training
    if prices.machine.profile.in_step is None:
        ours, theirs = _priced_facts(ours), _priced_facts(theirs)
    return (
        ours == theirs
        and prices.model == request.model
        and prices.zero_ranks == request.constraints.zero_ranks
        and prices.machine.cluster == machine_for(request.cluster).cluster
    )


def _priced_facts(training: TrainingSpec) -> TrainingSpec:
    """Returns a training with the facts of its stack that prices depend on."""
    stack = replace(
        training.stack,
        name="",
        source="",
        terms_of="",
        schedules=(),
        recompute=(),
        mesh_orders=(),
        context_forms=(),
        product_formats=(),
        state_precisions=(),
    )
    return replace(training, stack=stack)
