"""The terms of the prices that were fitted to measured steps: few, bounded, each with the rows it
was fitted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parplan.profiles.machines.stack_terms import shipped_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTerm:
    """One fitted value of one software stack or network (`stack` names it).

    low, high: the bounds it was kept in, in `unit`; fitted_on: the sources whose rows the fit saw;
    rows: how many;
    without: the value when all rows of one source are left out, by source
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
    """Every fitted term that the shipped prices use: of stacks and networks."""
    terms = shipped_terms()
    return [
        FittedTerm(
            stack=name,
            term=term,
            unit=one.unit,
            value=one.value,
            low=one.low,
            high=one.high,
            fitted_on=one.fitted_on,
            rows=one.rows,
            without=one.without,
        )
        for group in (terms.stacks, terms.links)
        for name, found in group.items()
        for term, one in found.items()
    ]
