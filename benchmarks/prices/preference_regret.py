"""Regret of the preferences among ties (planner/plan/ties.py), on grids of measured steps.

In each grid of published runs of one workload on one machine, the configurations that are predicted
to fit stand for the candidates of a search. Each preference chooses among those whose ratio to the
one predicted fastest is inside its error band:

    regret = measured step of the choice / least measured step of the grid - 1

A choice that was measured out of memory is counted, and the preference chooses again without it.
The margin and the band of the memory are those of the shipped terms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from parplan.planner.objective import Prefer
from parplan.planner.plan.corners import SPEEDS, USUAL_SHARE, corners, worst_regrets
from parplan.planner.plan.error_band import stack_band
from parplan.planner.plan.ratio_band import differences, shipped_ratio_bands
from parplan.planner.plan.ties import Tie, inside_band, preferred
from parplan.planner.validation.priced_rows import PricedRow, price_row
from parplan.planner.validation.row_cells import Row
from parplan.planner.validation.row_stack import stack_name
from parplan.planner.validation.scores import SMALLEST_GRID
from parplan.planner.validation.step_table import price_table

SCENARIOS = corners(USUAL_SHARE, SPEEDS)


@dataclass(frozen=True, eq=False)
class GridRow:
    """A row of a grid with its price."""

    row: Row
    priced: PricedRow

    @property
    def predicted_s(self) -> float:
        assert self.priced.predicted_s is not None, "a row of a grid is priced"
        return self.priced.predicted_s

    @property
    def peak_gib(self) -> float:
        assert self.priced.predicted_total_gib is not None, "a row of a grid is priced"
        return self.priced.predicted_total_gib

    @property
    def measured_s(self) -> float:
        """The measured step, infinite where the run was out of memory."""
        return self.priced.measured_s or math.inf

    @cached_property
    def off_speed_s(self) -> tuple[float, ...]:
        """The predicted steps on machines with a speed that is 20 % off."""
        return tuple(
            GridRow(self.row, price_row(self.row, speeds=speeds)).predicted_s
            for speeds in SCENARIOS
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The choice of one preference in a grid.

    regret         of the choice, or of the first one that ran
    peak_gib       its predicted peak
    out_of_memory  number of choices before it that were measured out of memory
    """

    regret: float
    peak_gib: float
    out_of_memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPreferences:
    """The choices of all preferences in one grid.

    fitting   number of its configurations that are predicted to fit
    ties      number of those inside the error band of the fastest
    """

    key: str
    configurations: int
    fitting: int
    ties: int
    best_s: float
    chosen: Mapping[Prefer, Chosen]


def grid_preferences(rows: Sequence[Row], time_share: float | None = None) -> list[GridPreferences]:
    """Returns the choices in every grid in which a timed configuration is predicted to fit.

    A grid has at least three configurations with different prices that were timed or were out of
    memory.

    time_share: error band of the ratio of two steps, None for that of measured pairs
    """
    grids: dict[str, list[GridRow]] = {}
    for row, priced in zip(rows, price_table(rows), strict=True):
        outcome = priced.measured_s is not None or priced.out_of_memory
        if priced.grid is not None and priced.predicted_s is not None and outcome:
            grids.setdefault(priced.grid, []).append(GridRow(row, priced))
    return [
        choices_of(key, grid, time_share)
        for key, grid in grids.items()
        if len({entry.predicted_s for entry in grid}) >= SMALLEST_GRID
        and any(entry.priced.predicted_fits and entry.measured_s < math.inf for entry in grid)
    ]


def choices_of(
    key: str, grid: Sequence[GridRow], time_share: float | None = None
) -> GridPreferences:
    """Returns the choices in one grid; of equal predictions the slower measurement counts."""
    fitting = sorted(
        (entry for entry in grid if entry.priced.predicted_fits),
        key=lambda entry: (entry.predicted_s, -entry.measured_s),
    )
    band = stack_band(stack_name(fitting[0].row))
    best_s = min(entry.measured_s for entry in grid)
    return GridPreferences(
        key=key,
        configurations=len(grid),
        fitting=len(fitting),
        ties=len(_inside(fitting, time_share)),
        best_s=best_s,
        chosen={
            prefer: _chosen(prefer, fitting, band.memory.share, time_share, best_s)
            for prefer in Prefer
        },
    )


def _inside(fitting: Sequence[GridRow], time_share: float | None) -> list[GridRow]:
    steps_s = [entry.predicted_s for entry in fitting]
    fastest, bands = fitting[0].priced, shipped_ratio_bands()
    shares = [
        bands.share((*fastest.traits, *differences(fastest.shape, entry.priced.shape)))
        if time_share is None
        else time_share
        for entry in fitting
    ]
    return [fitting[index] for index in inside_band(steps_s, shares)]


def _chosen(
    prefer: Prefer,
    fitting: Sequence[GridRow],
    memory_share: float,
    time_share: float | None,
    best_s: float,
) -> Chosen:
    """Returns the first choice that ran; `fitting` has the one predicted fastest first."""
    left = list(fitting)
    choice = _preferred(prefer, _inside(left, time_share), memory_share)
    while choice.priced.out_of_memory:
        left.remove(choice)
        choice = _preferred(prefer, _inside(left, time_share), memory_share)
    return Chosen(
        regret=choice.measured_s / best_s - 1,
        peak_gib=choice.peak_gib,
        out_of_memory=len(fitting) - len(left),
    )


def _preferred(prefer: Prefer, entries: Sequence[GridRow], memory_share: float) -> GridRow:
    losses = [0.0] * len(entries)
    if prefer is Prefer.ROBUST and len(entries) > 1:
        as_priced = [entry.predicted_s for entry in entries]
        losses = worst_regrets((as_priced, *zip(*(e.off_speed_s for e in entries), strict=True)))
    ties = [Tie(entry.peak_gib, loss) for entry, loss in zip(entries, losses, strict=True)]
    return entries[preferred(prefer, ties, memory_share)]


def mean_regrets(grids: Sequence[GridPreferences]) -> dict[Prefer, float]:
    """Returns the mean regret of each preference; each grid counts once."""
    return {
        prefer: statistics.fmean(grid.chosen[prefer].regret for grid in grids) for prefer in Prefer
    }


def least_regret(grids: Sequence[GridPreferences]) -> Prefer:
    """Returns the preference with the least mean regret, of equals the simplest."""
    means = mean_regrets(grids)
    return min(Prefer, key=lambda prefer: means[prefer])
