"""Counts the measured steps within the error band of their prediction, which shall be 80 %.

The band of a row is made without the rows of its experiment (planner/plan/conformal.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parplan.planner.plan.conformal import ConformalBands
from parplan.planner.plan.error_band import shipped_bands
from parplan.planner.validation.priced_rows import PricedRow


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
    rows = [row for row in priced if row.reason is None and not row.assumed]
    times, memories = shipped_bands()
    figures = {
        "time": _covered(times, ((row, row.measured_s, row.predicted_s) for row in rows)),
        "memory": _covered(memories, ((row, row.measured_gib, row.predicted_gib) for row in rows)),
    }
    return {name: found for name, found in figures.items() if found is not None}


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
