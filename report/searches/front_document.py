"""The front of step time, peak memory and redundant memory as `--json` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.search.pareto import ParetoFront, ParetoPoint
from parplan.report.json_result import JsonResult, KindedNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class PointSearch:
    """The search that found a point: its objective, and what it was held to.

    max_slowdown   share by which the step may be longer than the fastest
    """

    objective: str
    memory_limit_gib: float | None
    max_slowdown: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRow:
    """A plan of the front.

    plan_file        null where it was not written
    number           of the point, fastest first
    peak_memory_gib  of the fullest GPU
    redundancy_gib   redundant memory over all GPUs
    host_gib         host memory of the fullest node
    mfu              share of the peak FLOP/s of all GPUs
    gap              share by which the search may have missed a better plan
    tie_with         number of the leanest point that is as fast within the error band, if any
    """

    plan_file: str | None
    number: int
    step_time_s: KindedNumber
    peak_memory_gib: float
    redundancy_gib: float
    host_gib: float
    mfu: float
    mesh: Mesh
    found_by: PointSearch
    status: str
    gap: float
    tie_with: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDocument(JsonResult):
    """The plans that no other one beats in step time, peak memory and redundant memory.

    complete            false where the search ended early; then `stopped` says why
    nothing_within_gib  a limit within which nothing fits, null where none was searched
    searches            number of searches behind the points
    elapsed_s           seconds of all searches
    """

    objective: Literal["pareto"] = "pareto"
    complete: bool
    stopped: str | None
    nothing_within_gib: float | None
    searches: int
    elapsed_s: float | None
    points: tuple[FrontRow, ...]


def front_document(
    front: ParetoFront, paths: Sequence[Path] = (), elapsed_s: float | None = None
) -> FrontDocument:
    """Returns the front for `--json`, with the paths of its plan files where there are any."""
    files = tuple(map(str, paths)) or (None,) * len(front.points)
    return FrontDocument(
        complete=front.stopped is None,
        stopped=front.stopped,
        nothing_within_gib=front.nothing_within_gib,
        searches=front.num_searches,
        elapsed_s=None if elapsed_s is None else round(elapsed_s, 3),
        points=tuple(
            _row(front, point, file) for point, file in zip(front.points, files, strict=True)
        ),
    )


def _row(front: ParetoFront, point: ParetoPoint, file: str | None) -> FrontRow:
    plan = point.plan
    search = plan.search
    assert search.front is not None, "a point of a front"
    return FrontRow(
        plan_file=file,
        number=search.front.number,
        step_time_s=KindedNumber(
            value=point.step_time_s, kind=str(plan.predicted.step_time_s.kind)
        ),
        peak_memory_gib=point.peak_memory_gib,
        redundancy_gib=point.redundancy_gib,
        host_gib=point.host_gib,
        mfu=plan.predicted.mfu.value,
        mesh=plan.mesh,
        found_by=PointSearch(
            objective=str(search.objective),
            memory_limit_gib=search.front.memory_limit_gib,
            max_slowdown=search.front.max_slowdown,
        ),
        status=str(search.status),
        gap=search.gap,
        tie_with=front.leaner_tie(point),
    )
