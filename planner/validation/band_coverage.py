"""Counts the measured steps within their error band, and the runs within their memory margin.

A band shall hold 80 %, a margin all but its risk. Both are made without the rows of the experiment
of a row (planner/plan/conformal.py, planner/plan/oom_risk.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parplan.planner.plan.conformal import ConformalBands
from parplan.planner.plan.error_band import shipped_bands
from parplan.planner.plan.oom_risk import margin_at
from parplan.planner.plan.traits import STACK
from parplan.planner.validation.deviation_table import excess_of
from parplan.planner.validation.priced_rows import PricedRow

RISKS = (0.01, 0.05, 0.1)  # at which the margins are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class BandCoverage:
    """The rows that have a band, the share of them within it, and the median width of the bands.

    by_trait   rows and share within of the rows with each trait
    """

    rows: int
    within: float
    median_share: float
    by_trait: Mapping[str, tuple[int, float]]


def coverage(priced: Iterable[PricedRow]) -> dict[str, BandCoverage]:
    """Returns the coverage of `time` and of `memory`, without a figure that no row has.

    Rows that leave a setting open have no band.
    """
    rows = _stated(priced)
    times, memories = shipped_bands()
    figures = {
        "time": _covered(times, ((row, row.measured_s, row.predicted_s) for row in rows)),
        "memory": _covered(memories, ((row, row.measured_gib, row.predicted_gib) for row in rows)),
    }
    return {name: found for name, found in figures.items() if found is not None}


def overrun(priced: Iterable[PricedRow]) -> dict[float, tuple[int, float]]:
    """Returns the runs that tell it and the share above their margin, at each of `RISKS`.

    The margin of a run is made without its experiment.
    """
    runs = [(row, excess) for row in _stated(priced) if (excess := excess_of(row)) is not None]
    found: dict[float, tuple[int, float]] = {}
    for risk in RISKS if runs else ():
        margins = [margin_at(risk, _family(row), without=row.experiment).share for row, _ in runs]
        above = [
            excess > margin / (1 - margin)
            for (_, excess), margin in zip(runs, margins, strict=True)
        ]
        found[risk] = (len(above), statistics.fmean(above))
    return found


def _stated(priced: Iterable[PricedRow]) -> list[PricedRow]:
    return [row for row in priced if row.reason is None and not row.assumed]


def _family(row: PricedRow) -> str:
    return next(each.removeprefix(STACK) for each in row.traits if each.startswith(STACK))


def _covered(
    bands: ConformalBands, figures: Iterable[tuple[PricedRow, float | None, float | None]]
) -> BandCoverage | None:
    shares: list[float] = []
    within: list[bool] = []
    by_trait: dict[str, list[bool]] = {}
    for row, measured, predicted in figures:
        if measured and predicted:
            shares.append(bands.share(row.traits, without=row.experiment))
            within.append(abs(measured / predicted - 1) <= shares[-1])
            for trait in row.traits:
                by_trait.setdefault(trait, []).append(within[-1])
    if not within:
        return None
    return BandCoverage(
        rows=len(within),
        within=statistics.fmean(within),
        median_share=statistics.median(shares),
        by_trait={
            trait: (len(found), statistics.fmean(found))
            for trait, found in sorted(by_trait.items())
        },
    )
