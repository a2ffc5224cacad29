"""Candidates that a solver leaves without an answer, and a wrong `infeasible` of a solver.

Neither may pass for a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TypeVar

from parplan.planner.solver import Unsolved
from parplan.planner.stage_columns.stage_column import StageColumn, alike_ends
from parplan.profiles.errors import SolverError

T = TypeVar("T")
MOST_FAILURES = 3  # without an answer in between: the solver, not the candidate, is broken


class GaveUp(Exception):  # noqa: N818 - not an error where a plan was found
    """The solver failed on one candidate after another: the search ends with its best plan."""


@dataclass(slots=True)
class Unanswered:
    """The candidates that ended without an answer: their bounds stay open.

    failures   the errors of a solver that crashed, hung or gave an invalid answer
    in_a_row   number of failures since its last answer
    """

    bounds: list[float] = field(default_factory=list)
    failures: list[SolverError] = field(default_factory=list)
    in_a_row: int = 0

    def attempt(self, solve: Callable[[], T | None], bound: float) -> T | None:
        """Returns the result of `solve`, or None when it ends without an answer. Raises GaveUp."""
        try:
            answer = solve()
        except Unsolved:
            self.bounds.append(bound)
            return None
        except SolverError as error:
            self.bounds.append(bound)
            self.failures.append(error)
            self.in_a_row += 1
            if self.in_a_row == MOST_FAILURES:
                raise GaveUp from None
            return None
        if answer is not None:
            self.in_a_row = 0
        return answer


def failure_text(failures: Sequence[SolverError]) -> str | None:
    """Returns the plan's text on a solver that failed, or None when it did not."""
    if not failures:
        return None
    candidates = "1 candidate" if len(failures) == 1 else f"{len(failures)} candidates"
    return (
        f"the solver failed on {candidates}, which nothing is proven about: {failures[-1].message}"
    )


def can_place(options: Sequence[Sequence[StageColumn]], num_layers: int, *, tied: bool) -> bool:
    """Returns whether one column a rank can hold `num_layers` blocks.

    Then the throughput master is feasible. `tied`: the first and the last rank must be
    alike (C7). Bit n of `reachable`: n blocks can be held.
    """
    ends = (0, len(options) - 1) if tied and len(options) > 1 else ()
    for alike in alike_ends(options, ends):
        reachable = 1
        for columns in alike:
            counts = {column.num_blocks for column in columns}
            reachable = reduce(or_, (reachable << count for count in counts), 0)
        if reachable >> num_layers & 1:
            return True
    return False
