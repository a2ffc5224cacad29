"""The integer programs of a search, as its plan file records them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parplan.planner.request import SolverName

_FORBID = {"extra": "forbid"}


class Certified(StrEnum):
    """The choices among which a certifying program finds the best.

    `columns` are ways to run each pipeline rank of the plan's layout. `settings` are what a
    launcher can say of that layout.
    """

    COLUMNS = "columns"
    SETTINGS = "settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyingProgram:
    """The integer program that certifies the choice of the plan in its layout.

    The program and the search find the best choice of one layout in two ways. They agree where the
    gap is 0.0.

    over           the choices that are its binary variables
    variables      number of its variables
    rows           number of its rows
    optimum_s      closed form of its optimum, None for the least redundant memory
    optimum_gib    redundant GiB of its optimum, None for the shortest step
    gap            share by which its optimum is below the choice of the search
    """

    __pydantic_config__ = _FORBID

    over: Certified
    variables: int
    rows: int
    optimum_s: float | None = None
    optimum_gib: float | None = None
    gap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """All integer programs of a search, and the one that certifies its plan.

    solver      the solver of all programs
    programs    number of programs that were solved: for bounds, choices, blocks and to certify
    variables   number of their variables
    rows        number of their rows
    layouts     number of layouts that no rule leaves out
    closed      number of them that bounds close, so that they have no choice of their own
    plan        the program that certifies the plan, None where none was solved
    """

    __pydantic_config__ = _FORBID

    solver: SolverName
    programs: int
    variables: int
    rows: int
    layouts: int
    closed: int
    plan: CertifyingProgram | None = None
