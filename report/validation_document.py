"""Errors of predictions against measured steps as `plan validate --json` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parplan.planner.validation.band_coverage import BandCoverage, coverage, overrun
from parplan.planner.validation.fitted_terms import FittedTerm
from parplan.planner.validation.priced_rows import PricedRow
from parplan.planner.validation.scores import SourceScore, score
from parplan.report.json_result import JsonResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedRow:
    """A measured step and its price; a figure is null where it is unknown.

    kind     measured, interpolated or analytic, of the price
    reason   why the row is not priced
    """

    id: str
    predicted_s: float | None
    measured_s: float | None
    predicted_gib: float | None
    measured_gib: float | None
    kind: str | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationDocument(JsonResult):
    """The prices of measured steps; all but `fitted` is null where --fitted stands alone.

    sources    scores by source; errors are shares of the measured value
    bands      by `time`, `memory` and `ratio`, how many measurements the error bands held
    oom_risk   by the risk of --oom-risk, the share of runs that needed more than its margin left
    fitted     with --fitted
    """

    sources: Mapping[str, SourceScore] | None
    bands: Mapping[str, BandCoverage] | None
    oom_risk: Mapping[str, float] | None
    rows: tuple[ValidatedRow, ...] | None
    fitted: tuple[FittedTerm, ...] | None


def validation_document(
    priced: Sequence[PricedRow] | None, fitted: Sequence[FittedTerm] | None = None
) -> ValidationDocument:
    """Returns the output of `plan validate --json`: fractions, seconds and GiB.

    priced   None where --fitted stands alone
    """
    terms = None if fitted is None else tuple(fitted)
    if priced is None:
        return ValidationDocument(sources=None, bands=None, oom_risk=None, rows=None, fitted=terms)
    return ValidationDocument(
        sources=score(priced),
        bands=coverage(priced),
        oom_risk={f"{risk:g}": above for risk, (_, above) in overrun(priced).items()},
        rows=tuple(map(_validated, priced)),
        fitted=terms,
    )


def _validated(row: PricedRow) -> ValidatedRow:
    return ValidatedRow(
        id=row.id,
        predicted_s=row.predicted_s,
        measured_s=row.measured_s,
        predicted_gib=row.predicted_gib,
        measured_gib=row.measured_gib,
        kind=row.kind,
        reason=row.reason,
    )
