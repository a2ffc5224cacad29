"""The bounded terms of the prices that were fitted to measured steps, with their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parplan.profiles.machines.stack_terms import shipped_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTerm:
    """One fitted value of the software stack or network named `stack`.

    low, high  bounds of the fit, in `unit`
    fitted_on  experiments that the fit used
    rows       number of rows that the fit used
    without    by experiment, the value when its rows are left out
    """

    stack: str
    term: str
    unit: str
    value: float
    low: float
    high: float
    fitted_on: tuple[str, ...]
    rows: int
    without: Mapping[str, float]


def fitted_terms() -> list[FittedTerm]:
    """Returns every fitted term of stacks and networks that the shipped prices use."""
    terms = shipped_terms()
    return [
        FittedTerm(
            stack=name,
            term=term,
            unit=fit.unit,
            value=fit.value,
            low=fit.low,
            high=fit.high,
            fitted_on=fit.fitted_on,
            rows=fit.rows,
            without=fit.without,
        )
        for group in (terms.stacks, terms.links)
        for name, fits in group.items()
        for term, fit in fits.items()
    ]
