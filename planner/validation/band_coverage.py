"""Counts the measured steps within their error band, and the runs within their memory margin.

A band shall hold 80 %, a margin all but its risk. Both are made without the rows of the experiment
of a row (planner/plan/conformal.py, planner/plan/oom_risk.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from parplan.planner.plan.conformal import ConformalBands, Deviating
from parplan.planner.plan.error_band import shipped_bands
from parplan.planner.plan.oom_risk import margin_at
from parplan.planner.plan.ratio_band import GridRun, pairs_of, shipped_ratio_bands
from parplan.planner.plan.traits import STACK
from parplan.planner.validation.deviation_table import excess_of
from parplan.planner.validation.priced_rows import PricedRow

RISKS = (0.01, 0.05, 0.1)  # at which the margins are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class BandCoverage:
    """The rows that have a band, the share of them within it, and the median width of the bands.

    Of ratios, a row is a pair of them.

    by_trait   rows and share within of the rows with each trait
    """

    rows: int
    within: float
    median_share: float
    by_trait: Mapping[str, tuple[int, float]]


def coverage(priced: Iterable[PricedRow]) -> dict[str, BandCoverage]:
    """Returns the coverage of `time`, `memory` and `ratio`, without a figure that no row has.

    A ratio is that of a row to the one of its grid that is predicted to be the fastest.

    Rows that leave a setting open have no band.
    """
    rows = _stated(priced)
    times, memories = shipped_bands()
    figures = {
        "time": _covered(times, _deviating(rows, lambda row: (row.measured_s, row.predicted_s))),
        "memory": _covered(
            memories, _deviating(rows, lambda row: (row.measured_gib, row.predicted_gib))
        ),
        "ratio": _covered(shipped_ratio_bands(), pairs_of(_grid_runs(rows))),
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


def _deviating(
    rows: Iterable[PricedRow], figures: Callable[[PricedRow], tuple[float | None, float | None]]
) -> Iterator[Deviating]:
    for row in rows:
        measured, predicted = figures(row)
        if measured and predicted:
            yield Deviating(row.id, row.experiment, row.traits, measured / predicted - 1)


def _grid_runs(rows: Iterable[PricedRow]) -> Iterator[GridRun]:
    for row in rows:
        if row.time_deviation is not None and row.predicted_s is not None:
            yield GridRun(
                id=row.id,
                experiment=row.experiment,
                grid=row.grid or "",
                traits=row.traits,
                shape=row.shape,
                predicted_s=row.predicted_s,
                deviation=row.time_deviation,
            )


def _covered(bands: ConformalBands, runs: Iterable[Deviating]) -> BandCoverage | None:
    shares: list[float] = []
    within: list[bool] = []
    by_trait: dict[str, list[bool]] = {}
    for run in runs:
        shares.append(bands.share(run.traits, without=run.experiment))
        within.append(abs(run.deviation) <= shares[-1])
        for trait in run.traits:
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
