"""Searches of a launcher's settings for requests that differ from one in a single quantity.

A request with a pinned degree or another memory of its GPUs has the candidates and the prices of
the first one; every other request is searched anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.candidates.branch_and_bound import WORTH_REPLAYING
from parplan.planner.deadline import Deadline
from parplan.planner.export.best_settings import SettingsSearch, as_said, best_settings
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.shared_search import SharedSearch
from parplan.planner.launchers.known_launchers import LAUNCHERS
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Request
from parplan.planner.search.many_searches import Answer
from parplan.planner.search.near_requests import (
    Near,
    NearSearches,
    Way,
    on_meshes,
    within_pins,
)
from parplan.profiles.errors import ConfigError, InfeasibleError


class NearSettings(NearSearches):
    """The search of a launcher's settings for a request without pins, and for others near it.

    Raises ConfigError for a request that the launcher cannot say.
    """

    def __init__(self, request: Request, target: Target) -> None:
        self._target, self._shared = target, SharedSearch()
        self._request = as_said(request, target)
        self._search: SettingsSearch | None = None

    def first(self) -> Answer:
        try:
            self._search = SettingsSearch(self._request, self._target, None, self._shared)
            return Answer(plan=self._search.plan())
        except (ConfigError, InfeasibleError) as error:
            return Answer(error=error)

    def answer(self, request: Request, deadline: Deadline, way: Way) -> Answer:
        try:
            return Answer(plan=self._plan(request.until(deadline), way))
        except (ConfigError, InfeasibleError) as error:
            return Answer(error=error)

    def least_s(self, meshes: Iterable[Mesh]) -> float:
        assert self._search is not None, "the first search has its meshes"
        some, search = frozenset(meshes), self._search
        bounds = (search.bound_s(each) for each in search.layouts if each.mesh in some)
        return min(bounds) / WORTH_REPLAYING

    def meshes(self) -> Iterable[Mesh]:
        return () if self._search is None else {each.mesh for each in self._search.layouts}

    def _plan(self, request: Request, way: Way) -> Plan:
        batch = request.training.global_batch_size
        other_batch = batch != self._request.training.global_batch_size
        if self._search is None or way.near is not Near.PRICES or other_batch:
            return best_settings(request, self._target, shared=self._shared)
        known = self._search.session.prices
        space = within_pins(request.constraints, known.space)
        if way.meshes:
            space = on_meshes(way.meshes, space)
        if not space.layouts:
            return best_settings(request, self._target, shared=self._shared)
        ours = replace(self._request, constraints=request.constraints, options=request.options)
        shared = known.shared_with(request, space)
        return SettingsSearch(ours, self._target, None, self._shared, shared).plan()


def near_settings(plan: Plan, request: Request) -> NearSettings | None:
    """Returns the searches of the launcher that a plan belongs to.

    It is None for a plan of the own executor or of no launcher, whose space is all that its stack
    runs. Raises ConfigError for a request that the launcher cannot say.
    """
    launcher = LAUNCHERS.get(plan.search.launcher or "")
    target = launcher.target if launcher else None
    return None if target is None else NearSettings(request, target)
