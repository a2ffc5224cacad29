"""Scores of predicted against measured steps, for each source of rows.

The functions are pure and take priced rows. With p a predicted and m a measured value of a row:

    e = p / m - 1            relative error, positive when the prediction is too slow or too large
    mape = mean |e|          median = median |e|          bias = mean e
    tau-b = (C - D) / sqrt((n0 - n1) (n0 - n2))
                             C, D concordant and discordant pairs of a grid's n rows,
                             n0 = n (n - 1) / 2, n1 and n2 the pairs tied in p and in m
    regret@k = min m of the k rows that p ranks fastest / min m of the grid - 1

tau-b: Kendall 1945, Biometrika 33(3), doi:10.1093/biomet/33.3.239. A grid is the rows of one
workload on one machine (`PricedRow.grid`); tau and regret of a source are means over its grids,
each counted once. Every figure is a fraction, and None where no row defines it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from parplan.planner.validation.priced_rows import PricedRow

SMALLEST_GRID = 3  # configurations; the order of fewer says little


@dataclass(frozen=True, slots=True, kw_only=True)
class GridScore:
    """The ranking quality of one grid; `best_s` is the measured time of its fastest row."""

    key: str
    rows: int
    best_s: float
    kendall_tau: float | None
    regret_at_1: float
    regret_at_3: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScore:
    """The scores of one source, in the order in which they are printed and written as JSON.

    unpriced       number of rows by reason
    oom_recall     share of the rows out of memory that were predicted not to fit
    oom_precision  share of the rows predicted not to fit that ran out of memory
    """

    rows: int
    priced: int
    unpriced: Mapping[str, int]
    mape_time: float | None
    median_time: float | None
    bias_time: float | None
    kendall_tau: float | None
    regret_at_1: float | None
    regret_at_3: float | None
    mape_memory: float | None
    bias_memory: float | None
    oom_recall: float | None
    oom_precision: float | None


def score(priced: Iterable[PricedRow]) -> dict[str, SourceScore]:
    """Returns the score of every source, in the order in which the sources first appear."""
    by_source: dict[str, list[PricedRow]] = {}
    for row in priced:
        by_source.setdefault(row.source, []).append(row)
    return {source: _score_of(rows) for source, rows in by_source.items()}


def _score_of(rows: Sequence[PricedRow]) -> SourceScore:
    times = [row.error for row in rows if row.error is not None]
    memories = [row.memory_error for row in rows if row.memory_error is not None]
    grids = grid_scores(rows)
    return SourceScore(
        rows=len(rows),
        priced=sum(row.reason is None for row in rows),
        unpriced=unpriced(rows),
        mape_time=_mean(map(abs, times)),
        median_time=statistics.median(map(abs, times)) if times else None,
        bias_time=_mean(times),
        kendall_tau=_mean(grid.kendall_tau for grid in grids if grid.kendall_tau is not None),
        regret_at_1=_mean(grid.regret_at_1 for grid in grids),
        regret_at_3=_mean(grid.regret_at_3 for grid in grids),
        mape_memory=_mean(map(abs, memories)),
        bias_memory=_mean(memories),
        oom_recall=oom_recall(rows),
        oom_precision=oom_precision(rows),
    )


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.fmean(listed) if listed else None


def unpriced(rows: Iterable[PricedRow]) -> dict[str, int]:
    """Counts the rows that were not priced by reason, the most frequent first."""
    return dict(Counter(row.reason for row in rows if row.reason is not None).most_common())


def grid_scores(rows: Iterable[PricedRow]) -> list[GridScore]:
    """Returns the grids with at least three configurations that were timed and priced.

    Repeats of a run have equal prices, so distinct predictions count the configurations of a grid.
    """
    grids: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.grid is not None and row.predicted_s is not None and row.measured_s is not None:
            grids.setdefault(row.grid, []).append((row.predicted_s, row.measured_s))
    return [
        _grid_score(key, pairs)
        for key, pairs in grids.items()
        if len({p for p, _ in pairs}) >= SMALLEST_GRID
    ]


def _grid_score(key: str, pairs: Sequence[tuple[float, float]]) -> GridScore:
    predicted, measured = zip(*pairs, strict=True)
    return GridScore(
        key=key,
        rows=len(pairs),
        best_s=min(measured),
        kendall_tau=kendall_tau(predicted, measured),
        regret_at_1=regret(predicted, measured, 1),
        regret_at_3=regret(predicted, measured, 3),
    )


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Kendall's tau-b of two orders, -1 to 1; None if an order is all ties.

    It takes O(n^2), for grids of some hundred rows.
    """
    balance = ranked_p = ranked_m = 0
    for (p, m), (other_p, other_m) in combinations(zip(predicted, measured, strict=True), 2):
        sign_p, sign_m = _sign(p, other_p), _sign(m, other_m)
        balance += sign_p * sign_m
        ranked_p += abs(sign_p)
        ranked_m += abs(sign_m)
    return balance / math.sqrt(ranked_p * ranked_m) if ranked_p and ranked_m else None


def _sign(a: float, b: float) -> int:
    return (a > b) - (a < b)


def regret(predicted: Sequence[float], measured: Sequence[float], k: int) -> float:
    """Slowdown of the best of the `k` predicted fastest rows against the best row of the grid.

    Ties count against the prediction.
    """
    ranked = sorted(zip(predicted, measured, strict=True), key=lambda row: (row[0], -row[1]))
    return min(m for _, m in ranked[:k]) / min(measured) - 1


def oom_recall(rows: Iterable[PricedRow]) -> float | None:
    """Share of the priced rows out of memory that were predicted not to fit."""
    return _mean(
        row.predicted_fits is False
        for row in rows
        if row.out_of_memory and row.predicted_fits is not None
    )


def oom_precision(rows: Iterable[PricedRow]) -> float | None:
    """Share of the rows predicted not to fit, with a known outcome, that ran out of memory."""
    return _mean(
        row.out_of_memory
        for row in rows
        if row.predicted_fits is False and row.out_of_memory is not None
    )
