"""The front of step time, peak memory of a device and redundant memory of the cluster, by the
epsilon-constraint method.

One objective is minimised while a limit on another is tightened (Haimes, Lasdon and Wismer 1971,
IEEE Trans. SMC 1(3)):

    fastest            min time                                            the fastest plan of all
    fastest within X   min time   s.t. peak of every device <= X           X from just below that
                       plan's peak to the least
    leanest within Y   min redundancy   s.t. time <= (1 + Y) fastest       Y in SLOWDOWNS, then up
                       to ANY_SLOWDOWN

Of what these find, the plans that no other beats or equals in all three are the front. Where the
host may keep something, the same searches without it come first, so that no point is worse than
without the host; then, with it,

    fastest, fastest within X    X from the least peak without the host to the least with it, at
                                 fewer limits: such a search takes longer
    leanest within Y             at the same Y up to HOST_SLOWDOWN, of the fastest without the host
                                 where there is one (planner/search/least_redundancy_on_host.py)

Proven, each under the closed-form price and within the gap that the point's own search states: no
plan whose peak is within X is faster than the point found within X; no plan within the slowdown Y
is less redundant than the point found within Y; no plan at all fits `nothing_within_gib`, which is
1 MiB below the least peak. So in time and peak alone the true front is between the steps that the
points draw. Not proven: plans between two limits, which are not searched; that no plan with the
same peak and step is less redundant than a point found as fastest; anything about the simulated
step time, in which the points are reported and compared, and which differs from the closed form by
some percent where stages are unequal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parplan.planner.infeasible.shortfall import infeasible_error, least_peak_bytes, limit_bytes
from parplan.planner.objective import Objective
from parplan.planner.plan.derived import host_gib
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import FrontPoint
from parplan.planner.request import SEARCHED_OFFLOAD, OnProgress, Request, SearchOptions
from parplan.planner.search.find_plan import SearchResult, search, search_leaner
from parplan.planner.search.memory_descent import halve_in
from parplan.planner.search.search_session import SearchPrices, SolvedCandidate
from parplan.profiles.errors import ConfigError, OutOfTimeError, SolverError
from parplan.profiles.units import GIB, MIB

ANY_SLOWDOWN = 99.0  # finite for the solver's sake: steps up to 100 times the fastest
SLOWDOWNS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, ANY_SLOWDOWN)
DEFAULT_POINTS, LEAST_POINTS = 16, 3  # three ends: fastest, least peak, least redundant
HOST_SHARE = 3  # of so many memory limits one is searched with the host
# up to which slowdown the leanest is searched with the host: the more time, the more columns
HOST_SLOWDOWN = 0.2
CLOSEST = 0.02  # share by which a memory limit is at least below the peak of the plan before it
GIB_DIGITS = 4
TIME_LIMIT = "the time limit"

OnSearch = Callable[[str, int, int], None]  # what is looked for, searches done, searches planned


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A plan of the front; its `search.front` has the limit of the search that found it."""

    plan: Plan

    @property
    def step_time_s(self) -> float:
        """Simulated, as the plan reports it."""
        return self.plan.predicted.step_time_s.value

    @property
    def peak_memory_gib(self) -> float:
        """Of the fullest device."""
        return max(stage.total for stage in self.plan.predicted.memory_gib)

    @property
    def redundancy_gib(self) -> float:
        """Over all GPUs."""
        return self.plan.predicted.redundancy_gib.total

    @property
    def host_gib(self) -> float:
        """Of the host of the fullest node, no part of the three."""
        return host_gib(self.plan)

    @property
    def values(self) -> tuple[float, float, float]:
        """The three that are minimised: step time, peak memory, redundancy."""
        return self.step_time_s, self.peak_memory_gib, self.redundancy_gib

    def dominates(self, other: ParetoPoint) -> bool:
        """Whether this point is better in one value and worse in none."""
        return self.values != other.values and all(
            mine <= theirs for mine, theirs in zip(self.values, other.values, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoFront:
    """The points, fastest first.

    stopped: why the walk ended before its end, such as `Ctrl-C`, or None for a complete front
    usable_gib: what a plan may fill of a device
    nothing_within_gib: a limit within which nothing fits, None when the walk did not come so far
    num_searches: how many searches found them
    """

    points: tuple[ParetoPoint, ...]
    stopped: str | None
    usable_gib: float
    nothing_within_gib: float | None
    num_searches: int

    @property
    def uses_host(self) -> bool:
        """Whether any point keeps something on the host."""
        return any(point.host_gib for point in self.points)

    def leaner_tie(self, point: ParetoPoint) -> int | None:
        """The number of the leanest point that the prices cannot tell from `point` in step time, or
        None.

        Such a point is inside the error band of the step time and needs no more peak memory and no
        more redundancy: nobody should take `point` for a difference in speed that is not known to
        be there.
        """
        band = point.plan.predicted.error_band
        if band is None:
            return None
        slowest_s = point.step_time_s * (1 + band.time.share)
        ties = [
            (other.redundancy_gib, other.peak_memory_gib, number)
            for number, other in enumerate(self.points, 1)
            if point.step_time_s < other.step_time_s <= slowest_s and _as_lean(other, point)
        ]
        return min(ties)[2] if ties else None


def _as_lean(other: ParetoPoint, point: ParetoPoint) -> bool:
    return (
        other.peak_memory_gib <= point.peak_memory_gib
        and other.redundancy_gib <= point.redundancy_gib
    )


def undominated(plans: Iterable[Plan]) -> tuple[ParetoPoint, ...]:
    """The plans that no other dominates, by step time; of equal ones the first."""
    unique = list(
        {point.values: point for point in map(ParetoPoint, reversed(list(plans)))}.values()
    )
    kept = [point for point in unique if not any(other.dominates(point) for other in unique)]
    return tuple(sorted(kept, key=lambda point: point.values))


def plan_paths(output: Path, count: int) -> tuple[Path, ...]:
    """Where the points of a front go: `plan.yaml` -> `plan-01.yaml`, `plan-02.yaml`, ..."""
    digits = max(2, len(str(count)))
    return tuple(
        output.with_name(f"{output.stem}-{number:0{digits}}{output.suffix}")
        for number in range(1, count + 1)
    )


class _Over(Exception):  # noqa: N818 - not an error: the walk ends with what it has
    """The walk cannot go on, for the reason in its text."""


class _Walk:
    """The searches of one front, one after the other, over the same prices; what they found is kept
    in `found`.
    """

    def __init__(
        self,
        prices: SearchPrices,
        options: SearchOptions,
        planned: int,
        on_progress: OnProgress | None,
        on_search: OnSearch | None,
    ) -> None:
        self.prices, self.options, self.planned = prices, options, planned
        self.on_progress, self.on_search = on_progress, on_search
        self.usable_bytes = limit_bytes(
            prices.price_cache.machine.cluster, prices.price_cache.training.stack, options
        )
        self.found: list[Plan] = []
        self.num_searches = 0
        self.nothing_within_bytes: int | None = None

    def require_time(self) -> None:
        """Raises _Over when there is no time left and a plan is found."""
        if self.options.deadline.is_over and self.found:
            raise _Over(TIME_LIMIT)

    def fastest(self, within_bytes: int | None = None, *, keep: bool = True) -> SearchResult | None:
        """The fastest plan, within `within_bytes` if given; None when nothing fits."""
        options = (
            self.options
            if within_bytes is None
            else replace(self.options, memory_limit_bytes=within_bytes)
        )
        limit_gib = None if within_bytes is None else round(within_bytes / GIB, GIB_DIGITS)
        found = self._look(
            "fastest" if limit_gib is None else f"within {limit_gib:.1f} GiB",
            Objective.THROUGHPUT,
            options,
        )
        if found is None and within_bytes is not None:
            self.nothing_within_bytes = max(within_bytes, self.nothing_within_bytes or 0)
        return found and self._kept(found, keep=keep, memory_limit_gib=limit_gib)

    def leanest(self, slowdown: float, fastest: SolvedCandidate) -> SearchResult | None:
        """The least redundant plan at most `slowdown` slower than `fastest`."""
        found = self._look(
            _lean_name(slowdown),
            Objective.MEMORY,
            replace(self.options, max_slowdown=slowdown),
            fastest,
        )
        return found and self._kept(found, max_slowdown=_stated(slowdown))

    def leaner(self, slowdown: float, found: SearchResult) -> None:
        """Keep the least redundant plan with the host, where it is below `found`: the one without,
        or the fastest with it.
        """
        options = self._announced(
            f"{_lean_name(slowdown)}, with the host", replace(self.options, max_slowdown=slowdown)
        )
        self._kept(
            search_leaner(self.prices, found, options, self.on_progress),
            max_slowdown=_stated(slowdown),
        )

    def _look(
        self,
        name: str,
        objective: Objective,
        options: SearchOptions,
        fastest: SolvedCandidate | None = None,
    ) -> SearchResult | None:
        return search(
            self.prices, objective, self._announced(name, options), self.on_progress, fastest
        )

    def _announced(self, name: str, options: SearchOptions) -> SearchOptions:
        """The options of the next search, which is told of."""
        self.require_time()
        if self.on_search:
            self.on_search(name, self.num_searches, max(self.planned, self.num_searches + 1))
        self.num_searches += 1
        return options

    def _kept(
        self,
        found: SearchResult,
        *,
        keep: bool = True,
        memory_limit_gib: float | None = None,
        max_slowdown: float | None = None,
    ) -> SearchResult:
        """`found` with the limit it was found by; a search that was interrupted, or whose solver
        failed, is the last.
        """
        front = FrontPoint(
            number=1,
            points=1,
            complete=True,
            memory_limit_gib=memory_limit_gib,
            max_slowdown=max_slowdown,
        )
        plan = replace(found.plan, search=replace(found.plan.search, front=front))
        if keep or found.interrupted:
            self.found.append(plan)
        if found.interrupted:
            raise _Over("Ctrl-C")
        if plan.search.solver_failure:
            raise _Over(plan.search.solver_failure)
        return replace(found, plan=plan)


def find_front(
    request: Request,
    num_points: int = DEFAULT_POINTS,
    on_progress: OnProgress | None = None,
    on_search: OnSearch | None = None,
) -> ParetoFront:
    """Returns the front of step time, peak memory and redundancy, at about `num_points` limits.

    The same request gives the same front. Ctrl-C or the deadline ends the walk with the points so
    far; the status and gap of the last point then say how much of it is proven.

    Raises ConfigError when no mesh is legal or `num_points` is less than 3, InfeasibleError when
    nothing fits, SolverError and OutOfTimeError before the first plan.
    """
    if num_points < LEAST_POINTS:
        raise ConfigError(
            f"--points is {num_points}, it must be at least {LEAST_POINTS}",
            hint="a front has three ends",
        )
    slowdowns = _spread(SLOWDOWNS, max(1, num_points * len(SLOWDOWNS) // DEFAULT_POINTS))
    num_limits = num_points - len(slowdowns) - 2
    alone = request.with_offload(())
    walk = _Walk(SearchPrices(alone), request.options, num_points + 1, on_progress, on_search)
    stopped = None
    try:
        first = walk.fastest()
        lean: list[SearchResult | None] = []
        if first is not None:
            least = least_peak_bytes(alone)
            _tighten(walk, _peak_bytes(first.plan), round(least or MIB), num_limits)
            # The last slowdown takes longest.
            lean = [walk.leanest(slowdown, first.fastest) for slowdown in slowdowns]
        offload = request.constraints.offload
        if offload is None:
            offload = () if first else SEARCHED_OFFLOAD
        with_host = request.with_offload(offload)
        if offload:
            _with_host(walk, with_host, slowdowns, lean, num_limits)
        if not walk.found:
            raise infeasible_error(with_host)
        walk.require_time()
    except (_Over, KeyboardInterrupt, OutOfTimeError, SolverError) as reason:
        if not walk.found:
            raise
        stopped = _reason_text(reason)
    return _front(walk, stopped)


def _reason_text(reason: BaseException) -> str:
    if isinstance(reason, KeyboardInterrupt):
        return "Ctrl-C"
    return TIME_LIMIT if isinstance(reason, OutOfTimeError) else str(reason)


def _with_host(
    walk: _Walk,
    request: Request,
    slowdowns: Sequence[float],
    lean: Sequence[SearchResult | None],
    num_limits: int,
) -> None:
    """Adds the points that use the host; `lean` has the plan without it at each slowdown.

    Nothing is added where nothing fits with the host either.
    """
    walk.prices, walk.nothing_within_bytes = SearchPrices(request), None
    walk.planned += (
        sum(slowdown <= HOST_SLOWDOWN for slowdown in slowdowns) + num_limits // HOST_SHARE + 3
    )
    peaks = [_peak_bytes(plan) for plan in walk.found]
    first = walk.fastest()
    if first is None:
        return
    for slowdown, found in zip(slowdowns, lean or [None] * len(slowdowns), strict=True):
        if slowdown <= HOST_SLOWDOWN:
            walk.leaner(slowdown, found or first)
    least = least_peak_bytes(request)
    _tighten(
        walk, min((*peaks, _peak_bytes(first.plan))), round(least or MIB), num_limits // HOST_SHARE
    )


def _lean_name(slowdown: float) -> str:
    return "leanest" if _stated(slowdown) is None else f"leanest within {100 * slowdown:g} %"


def _stated(slowdown: float) -> float | None:
    return slowdown if slowdown != ANY_SLOWDOWN else None


def _front(walk: _Walk, stopped: str | None) -> ParetoFront:
    """What stays of the plans that were found, each numbered in its own record."""
    points, nothing = undominated(walk.found), walk.nothing_within_bytes
    nothing_gib = None if nothing is None else nothing / GIB
    return ParetoFront(
        points=tuple(
            _numbered(point.plan, number, len(points), complete=stopped is None)
            for number, point in enumerate(points, 1)
        ),
        stopped=stopped,
        usable_gib=walk.usable_bytes / GIB,
        nothing_within_gib=nothing_gib,
        num_searches=walk.num_searches,
    )


def _numbered(plan: Plan, number: int, points: int, *, complete: bool) -> ParetoPoint:
    assert plan.search.front is not None, "the walk gave it one"
    front = replace(plan.search.front, number=number, points=points, complete=complete)
    return ParetoPoint(replace(plan, search=replace(plan.search, front=front)))


def _spread(values: Sequence[float], count: int) -> tuple[float, ...]:
    """`count` of the values, or all, evenly spread and with the last."""
    count = min(count, len(values))
    return tuple(
        values[len(values) - 1 - index * len(values) // count] for index in reversed(range(count))
    )


def _peak_bytes(plan: Plan) -> int:
    return round(ParetoPoint(plan).peak_memory_gib * GIB)


def _tighten(walk: _Walk, peak_bytes: int, least_bytes: int, num_limits: int) -> None:
    """The fastest plans within `num_limits` memory limits between `peak_bytes` and `least_bytes`,
    then the least peak.

    Each limit is a share below the peak of the plan found before it, the share that is left over
    evenly, at least CLOSEST.
    """
    for left in range(num_limits, 0, -1):
        within_bytes = int(
            peak_bytes * min((least_bytes / peak_bytes) ** (1 / (left + 1)), 1 - CLOSEST)
        )
        if within_bytes <= least_bytes:
            break
        found = walk.fastest(within_bytes)
        if found is None:
            break
        peak_bytes = _peak_bytes(found.plan)
    _least_peak(walk, least_bytes, peak_bytes)


def _least_peak(walk: _Walk, guess_bytes: int, high_bytes: int) -> None:
    """Keep the fastest plan at the least peak that a search reaches, to 1 MiB: at the guess, else
    by bisection.
    """
    best: Plan | None = None

    def probe(within_bytes: float) -> int | None:
        nonlocal best
        found = walk.fastest(int(within_bytes), keep=False)
        if found is None:
            return None
        best = found.plan
        return _peak_bytes(found.plan)

    guesses = guess_bytes + MIB // 2, guess_bytes - MIB // 2
    try:
        halve_in(
            walk.nothing_within_bytes or 0,
            high_bytes,
            probe,
            guesses,
            enough=lambda high: high - MIB,
        )
    finally:
        if best is not None:
            walk.found.append(best)
