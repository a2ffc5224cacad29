"""The front of step time, device peak and redundant memory, by the epsilon-constraint method.

One objective is minimised while a limit on another is tightened (Haimes, Lasdon and Wismer 1971,
IEEE Trans. SMC 1(3)):

    fastest            min time                                            the fastest plan of all
    fastest within X   min time   s.t. peak of every device <= X           X from just below that
                       plan's peak to the least
    leanest within Y   min redundancy   s.t. time <= (1 + Y) fastest       Y in SLOWDOWNS, then up
                       to ANY_SLOWDOWN

The front is the set of these plans that no other plan beats or equals in all three values. Where
the host may hold something, the same searches run without it first, so that no point is worse than
without the host. Then, with it,

    fastest, fastest within X    X from the least peak without the host to the least with it, at
                                 fewer limits: such a search takes longer
    leanest within Y             at the same Y up to HOST_SLOWDOWN, of the fastest without the host
                                 where there is one (planner/search/least_redundancy_on_host.py)

Three statements are proven, each under the closed-form price and within the gap that the point's
own search states: no plan whose peak is within X is faster than the point found within X; no plan
within the slowdown Y is less redundant than the point found within Y; no plan at all fits
`nothing_within_gib`, which is 1 MiB below the least peak. So in time and peak alone the true front
is between the steps that the points draw. Three things are not proven: plans between two limits,
which are not searched; that no plan with the same peak and step is less redundant than a point
found as fastest; and anything about the simulated step time, in which the points are reported and
compared, and which differs from the closed form by some percent where stages are unequal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parplan.planner.objective import Objective
from parplan.planner.plan.derived import host_gib
from parplan.planner.plan.prediction import FrontPoint
from parplan.planner.plan.ratio_band import plan_shape, ratio_share
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.planner.request import ANY_SLOWDOWN, OnProgress, SearchOptions
from parplan.planner.search.find_plan import search
from parplan.planner.search.leaner_with_host import search_leaner
from parplan.planner.search.memory_descent import halve_in
from parplan.planner.search.price_factory import Hosted, PriceFactory
from parplan.planner.search.search_results import SearchResult
from parplan.planner.search.search_session import SearchPrices, SolvedCandidate
from parplan.profiles.displayed import Displayed
from parplan.profiles.errors import ConfigError, OutOfTimeError, SolverError
from parplan.profiles.units import GIB, MIB

SLOWDOWNS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, ANY_SLOWDOWN)
DEFAULT_POINTS, LEAST_POINTS = 16, 3  # three ends: fastest, least peak, least redundant
HOST_SHARE = 3  # one memory limit in three is searched with the host
# Largest slowdown of the leanest plan with the host: more time means more columns.
HOST_SLOWDOWN = 0.2
CLOSEST = 0.02  # least share by which a memory limit is below the peak of the plan before it
GIB_DIGITS = 4
TIME_LIMIT = "the time limit"

OnSearch = Callable[[str, int, int], None]  # name of the search, searches done, searches planned


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A plan of the front; its `search.front` has the limit of its search."""

    plan: AnyPlan

    @property
    def step_time_s(self) -> float:
        """Simulated step time, as the plan reports it."""
        return self.plan.predicted.step_time_s.value

    @property
    def peak_memory_gib(self) -> float:
        """Peak memory of the fullest device."""
        return max(stage.total for stage in self.plan.predicted.memory_gib)

    @property
    def redundancy_gib(self) -> float:
        """Redundant memory over all GPUs."""
        return self.plan.predicted.redundancy_gib.total

    @property
    def host_gib(self) -> float:
        """Host memory of the fullest node, which is not minimised."""
        return host_gib(self.plan)

    @property
    def values(self) -> tuple[float, float, float]:
        """The three minimised values: step time, peak memory, redundancy."""
        return self.step_time_s, self.peak_memory_gib, self.redundancy_gib

    def dominates(self, point: ParetoPoint) -> bool:
        """Returns True if this point is better than `point` in one value and worse in none."""
        return self.values != point.values and all(
            mine <= theirs for mine, theirs in zip(self.values, point.values, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoFront(Displayed):
    """The points, fastest first.

    stopped: cause of an early end, such as `Ctrl-C`; None for a complete front
    usable_gib: memory that a plan may fill on a device
    nothing_within_gib: a limit within which nothing fits; None when the walk ended before it
    num_searches: number of searches behind the points
    """

    points: tuple[ParetoPoint, ...]
    stopped: str | None
    usable_gib: float
    nothing_within_gib: float | None
    num_searches: int

    @property
    def uses_host(self) -> bool:
        """True if any point has host bytes."""
        return any(point.host_gib for point in self.points)

    def leaner_tie(self, point: ParetoPoint) -> int | None:
        """Returns the number of the leanest point with the step time of `point`, if any.

        Its ratio to that of `point` is inside the error band, and it needs no more peak memory and
        no more redundancy. So `point` is not certain to be faster.
        """
        band = point.plan.predicted.error_band
        if band is None:
            return None
        shape = plan_shape(point.plan)
        ties = [
            (rival.redundancy_gib, rival.peak_memory_gib, number)
            for number, rival in enumerate(self.points, 1)
            if 0
            < rival.step_time_s / point.step_time_s - 1
            <= ratio_share(band, shape, plan_shape(rival.plan))
            and _as_lean(rival, point)
        ]
        return min(ties)[2] if ties else None


def _as_lean(rival: ParetoPoint, point: ParetoPoint) -> bool:
    return (
        rival.peak_memory_gib <= point.peak_memory_gib
        and rival.redundancy_gib <= point.redundancy_gib
    )


def undominated(plans: Iterable[AnyPlan]) -> tuple[ParetoPoint, ...]:
    """Returns the plans that no other dominates, by step time; among equal plans the first."""
    unique = list(
        {point.values: point for point in map(ParetoPoint, reversed(list(plans)))}.values()
    )
    best = [point for point in unique if not any(rival.dominates(point) for rival in unique)]
    return tuple(sorted(best, key=lambda point: point.values))


def plan_paths(output: Path, count: int) -> tuple[Path, ...]:
    """File names of the points of a front: `plan.yaml` -> `plan-01.yaml`, `plan-02.yaml`, ..."""
    digits = max(2, len(str(count)))
    return tuple(
        output.with_name(f"{output.stem}-{number:0{digits}}{output.suffix}")
        for number in range(1, count + 1)
    )


class _Over(Exception):  # noqa: N818 - not an error: the walk ends with what it has
    """The walk cannot go on, for the reason in its text."""


class _Walk:
    """The searches of one front, one by one, over the same prices, with the plans found so far."""

    def __init__(
        self,
        prices: SearchPrices,
        options: SearchOptions,
        planned: int,
        on_progress: OnProgress | None,
        on_search: OnSearch | None,
    ) -> None:
        self.prices, self.options = prices, options
        self.planned = planned
        self.on_progress, self.on_search = on_progress, on_search
        self.usable_bytes = prices.limit_bytes(options)
        self.plans: list[AnyPlan] = []
        self.num_searches = 0
        self.nothing_within_bytes: int | None = None

    def require_time(self) -> None:
        """Raises _Over when the time is over and there is a plan."""
        if self.options.deadline.is_over and self.plans:
            raise _Over(TIME_LIMIT)

    def fastest(self, within_bytes: int | None = None, *, keep: bool = True) -> SearchResult | None:
        """Returns the fastest plan, within `within_bytes` if given; None when nothing fits."""
        options = (
            self.options
            if within_bytes is None
            else replace(self.options, memory_limit_bytes=within_bytes)
        )
        limit_gib = None if within_bytes is None else round(within_bytes / GIB, GIB_DIGITS)
        result = self._look(
            "fastest" if limit_gib is None else f"within {limit_gib:.1f} GiB",
            Objective.THROUGHPUT,
            options,
        )
        if result is None and within_bytes is not None:
            self.nothing_within_bytes = max(within_bytes, self.nothing_within_bytes or 0)
        return result and self._kept(result, keep=keep, memory_limit_gib=limit_gib)

    def leanest(self, slowdown: float, fastest: SolvedCandidate) -> SearchResult | None:
        """Returns the least redundant plan at most `slowdown` slower than `fastest`."""
        result = self._look(
            _lean_name(slowdown),
            Objective.MEMORY,
            replace(self.options, max_slowdown=slowdown),
            fastest,
        )
        return result and self._kept(result, max_slowdown=_stated(slowdown))

    def leaner(self, slowdown: float, reference: SearchResult) -> None:
        """Stores the least redundant plan with the host, if it is below `reference`.

        reference: the least redundant plan without the host, or the fastest with it
        """
        options = self._announced(
            f"{_lean_name(slowdown)}, with the host", replace(self.options, max_slowdown=slowdown)
        )
        self._kept(
            search_leaner(self.prices, reference, options, self.on_progress),
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
        self.require_time()
        if self.on_search:
            self.on_search(name, self.num_searches, max(self.planned, self.num_searches + 1))
        self.num_searches += 1
        return options

    def _kept(
        self,
        result: SearchResult,
        *,
        keep: bool = True,
        memory_limit_gib: float | None = None,
        max_slowdown: float | None = None,
    ) -> SearchResult:
        """Stores a result with its limit, and returns it.

        Raises _Over after an interrupted search or one whose solver failed.
        """
        front = FrontPoint(
            number=1,
            points=1,
            complete=True,
            memory_limit_gib=memory_limit_gib,
            max_slowdown=max_slowdown,
        )
        plan = replace(result.plan, search=replace(result.plan.search, front=front))
        if keep or result.interrupted:
            self.plans.append(plan)
        if result.interrupted:
            raise _Over("Ctrl-C")
        if plan.search.solver_failure:
            raise _Over(plan.search.solver_failure)
        return replace(result, plan=plan)


def find_front(
    factory: PriceFactory,
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
    options = factory.request.options
    walk = _Walk(factory.prices(()), options, num_points + 1, on_progress, on_search)
    stopped = None
    try:
        first = walk.fastest()
        lean: list[SearchResult | None] = []
        if first is not None:
            least = factory.least_peak_bytes(())
            _tighten(walk, _peak_bytes(first.plan), round(least or MIB), num_limits)
            # The last slowdown takes longest.
            lean = [walk.leanest(slowdown, first.fastest) for slowdown in slowdowns]
        offload = factory.offload
        if offload is None:
            offload = () if first else factory.searched
        if offload:
            _with_host(walk, factory, offload, slowdowns, lean, num_limits)
        if not walk.plans:
            raise factory.error(offload)
        walk.require_time()
    except (_Over, KeyboardInterrupt, OutOfTimeError, SolverError) as reason:
        if not walk.plans:
            raise
        stopped = _reason_text(reason)
    return _front(walk, stopped)


def _reason_text(reason: BaseException) -> str:
    if isinstance(reason, KeyboardInterrupt):
        return "Ctrl-C"
    return TIME_LIMIT if isinstance(reason, OutOfTimeError) else str(reason)


def _with_host(
    walk: _Walk,
    factory: PriceFactory,
    offload: Hosted,
    slowdowns: Sequence[float],
    lean: Sequence[SearchResult | None],
    num_limits: int,
) -> None:
    """Adds the points that use the host; `lean` has the plan without it at each slowdown.

    Nothing is added where nothing fits with the host either.
    """
    walk.prices, walk.nothing_within_bytes = factory.prices(offload), None
    walk.planned += (
        sum(slowdown <= HOST_SLOWDOWN for slowdown in slowdowns) + num_limits // HOST_SHARE + 3
    )
    peaks = [_peak_bytes(plan) for plan in walk.plans]
    first = walk.fastest()
    if first is None:
        return
    for slowdown, without in zip(slowdowns, lean or [None] * len(slowdowns), strict=True):
        if slowdown <= HOST_SLOWDOWN:
            walk.leaner(slowdown, without or first)
    least = factory.least_peak_bytes(offload)
    _tighten(
        walk, min((*peaks, _peak_bytes(first.plan))), round(least or MIB), num_limits // HOST_SHARE
    )


def _lean_name(slowdown: float) -> str:
    return "leanest" if _stated(slowdown) is None else f"leanest within {100 * slowdown:g} %"


def _stated(slowdown: float) -> float | None:
    return slowdown if slowdown != ANY_SLOWDOWN else None


def _front(walk: _Walk, stopped: str | None) -> ParetoFront:
    points, nothing = undominated(walk.plans), walk.nothing_within_bytes
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


def _numbered(plan: AnyPlan, number: int, points: int, *, complete: bool) -> ParetoPoint:
    assert plan.search.front is not None, "the walk gave it one"
    front = replace(plan.search.front, number=number, points=points, complete=complete)
    return ParetoPoint(replace(plan, search=replace(plan.search, front=front)))


def _spread(values: Sequence[float], count: int) -> tuple[float, ...]:
    """`count` of the values, or all of them, evenly spread and with the last."""
    count = min(count, len(values))
    return tuple(
        values[len(values) - 1 - index * len(values) // count] for index in reversed(range(count))
    )


def _peak_bytes(plan: AnyPlan) -> int:
    return round(ParetoPoint(plan).peak_memory_gib * GIB)


def _tighten(walk: _Walk, peak_bytes: int, least_bytes: int, num_limits: int) -> None:
    """Searches the fastest plans within `num_limits` limits above `least_bytes`, then the least.

    Each limit is a share below the peak of the plan before it: an even part of the remaining
    distance, at least CLOSEST.
    """
    for left in range(num_limits, 0, -1):
        within_bytes = int(
            peak_bytes * min((least_bytes / peak_bytes) ** (1 / (left + 1)), 1 - CLOSEST)
        )
        if within_bytes <= least_bytes:
            break
        result = walk.fastest(within_bytes)
        if result is None:
            break
        peak_bytes = _peak_bytes(result.plan)
    _least_peak(walk, least_bytes, peak_bytes)


def _least_peak(walk: _Walk, guess_bytes: int, high_bytes: int) -> None:
    """Stores the fastest plan at the least peak that a search reaches, to 1 MiB.

    The guess is tried first, then bisection.
    """
    best: AnyPlan | None = None

    def probe(within_bytes: float) -> int | None:
        nonlocal best
        result = walk.fastest(int(within_bytes), keep=False)
        if result is None:
            return None
        best = result.plan
        return _peak_bytes(result.plan)

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
            walk.plans.append(best)
