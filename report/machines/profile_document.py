"""A profile as `plan profile --json` prints it: FLOP/s, bytes/s, seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from parplan.profiles.machines.curves import CollectiveCurve
from parplan.profiles.machines.measurements import CaseOutcome
from parplan.profiles.machines.speeds import InStep
from parplan.profiles.machines.user_profile import ProfileEnvironment, UserProfile
from parplan.report.json_result import JsonResult
from parplan.report.machines.profile_series import CurveSeries, series_of
from parplan.report.machines.profile_tables import collectives_of, figures_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRow:
    """A curve of an operation, with its rates at the smallest and the largest measured size.

    fitted_points              points that the curve was fitted to
    kind                       measured, interpolated or analytic
    unit                       of the two rates
    first_sizes, last_sizes    sizes of the operation
    median_error, worst_error  shares by which the curve misses its points, null where unknown
    """

    name: str
    points: int
    fitted_points: int
    kind: str
    unit: Literal["bytes_per_s", "flops_per_s"]
    first_sizes: tuple[int, ...]
    first_rate: float
    last_sizes: tuple[int, ...]
    last_rate: float
    median_error: float | None
    worst_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCase:
    """A case that was not measured, and why."""

    case: str
    outcome: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """The memory that a process takes of a device beside its tensors; null was not measured.

    allocator_share   share of the allocated bytes that the allocator reserves beyond them
    """

    allocator_share: float | None
    context_bytes: int | None
    communicator_bytes: int | None
    granularity_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDocument(JsonResult):
    """The tables of a profile.

    cases        number of measured and of failed cases
    figures      largest value of each figure; the end of its name is its unit
    in_step      costs of a step beyond its operators
    contention   seconds that a second of communication costs the compute that it runs under
    """

    device: str
    precision: str | None
    environment: ProfileEnvironment | None
    cases: int
    curves: tuple[CurveRow, ...]
    collectives: tuple[CollectiveCurve, ...]
    failures: tuple[FailedCase, ...]
    figures: Mapping[str, float]
    memory: MemoryFacts
    in_step: InStep | None
    contention: float | None


def profile_document(profile: UserProfile) -> ProfileDocument:
    """Returns the tables for `--json`."""
    return ProfileDocument(
        device=profile.device,
        precision=profile.precision,
        environment=profile.environment,
        cases=len(profile.records),
        curves=tuple(map(_curve_row, series_of(profile))),
        collectives=collectives_of(profile),
        failures=tuple(
            FailedCase(case=each.case.key, outcome=each.outcome.value, detail=each.detail)
            for each in profile.records
            if each.outcome is not CaseOutcome.MEASURED
        ),
        figures=figures_of(profile),
        memory=MemoryFacts(
            allocator_share=profile.allocator_share,
            context_bytes=profile.context_bytes,
            communicator_bytes=profile.communicator_bytes,
            granularity_bytes=profile.granularity_bytes,
        ),
        in_step=profile.profile.in_step if profile.profile else None,
        contention=profile.profile.contention if profile.profile else None,
    )


def _curve_row(series: CurveSeries) -> CurveRow:
    first, last = series.points[0], series.points[-1]
    return CurveRow(
        name=series.name,
        points=len(series.points),
        fitted_points=series.curve.rows,
        kind=str(series.curve.kind),
        unit="bytes_per_s" if series.unit == "GB/s" else "flops_per_s",
        first_sizes=tuple(first.sizes),
        first_rate=first.rate,
        last_sizes=tuple(last.sizes),
        last_rate=last.rate,
        median_error=series.curve.median_error,
        worst_error=series.curve.worst_error,
    )
