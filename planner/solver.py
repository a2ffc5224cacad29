"""The one module that names a MILP solver: CBC (bundled with PuLP) or HiGHS, run so that the same input gives the same answer.

PuLP reports a solve that the time limit cut off as `Optimal`; only `sol_status` tells, and an infeasible problem still
carries values. Both are checked here, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pulp

from planner.request import SolverName
from profiles.errors import SolverError

T = TypeVar("T")


class Unsolved(Exception):  # noqa: N818 - not an error: the caller keeps its bound
    """The time ran out before any feasible point was found; there may be one."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A feasible point; `proven` when the solver finished, so that it is optimal."""

    objective: float
    proven: bool


class Problem:
    """A minimisation problem: `binary` and `continuous` variables, linear rows named by their label."""

    def __init__(self, name: str) -> None:
        self._problem = pulp.LpProblem(name, pulp.LpMinimize)

    def binary(self, name: str) -> Any:
        return self._problem.add_variable(name, cat=pulp.LpBinary)

    def integer(self, name: str, upper: int) -> Any:
        return self._problem.add_variable(name, lowBound=0, upBound=upper, cat=pulp.LpInteger)

    def continuous(self, name: str, lower: float = 0.0) -> Any:
        return self._problem.add_variable(name, lowBound=lower)

    @property
    def size(self) -> tuple[int, int]:
        """Variables and rows."""
        return self._problem.numVariables(), self._problem.numConstraints()

    def minimize(self, expression: Any) -> None:
        self._problem.setObjective(expression)

    def require(self, constraint: Any, label: str) -> None:
        """Add a row. `label` must be unique in the problem."""
        self._problem.addConstraint(constraint, label)

    def solve(self, solver: SolverName, time_limit_s: float | None = None) -> Solution | None:
        """The best point found, or None when there is none.

        Raises Unsolved when the time ran out before it found any point, SolverError when it is missing or crashed.
        """
        limit_s = None if time_limit_s is None else max(0.0, time_limit_s)  # HiGHS takes a negative limit for none
        try:
            self._problem.solve(_command(solver, limit_s))
        except pulp.PulpSolverError as error:
            raise SolverError(f"{solver} failed: {str(error).strip().splitlines()[-1]}", hint=_other(solver)) from None
        status, found = self._problem.status, self._problem.sol_status
        if found in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return Solution(float(pulp.value(self._problem.objective)), proven=found == pulp.LpSolutionOptimal)
        if status == pulp.LpStatusInfeasible:
            return None
        if time_limit_s is not None and status == pulp.LpStatusNotSolved:
            raise Unsolved
        raise SolverError(f"{solver} ended without an answer ({pulp.LpStatus[status].lower()})", hint=_other(solver))


def weighted(terms: Iterable[tuple[Any, float]]) -> Any:
    """sum of coefficient times variable; a variable may come more than once, of which pulp would keep the last."""
    total: dict[Any, float] = {}
    for variable, coefficient in terms:
        total[variable] = total.get(variable, 0.0) + coefficient
    return pulp.LpAffineExpression(total)


def chosen(options: Mapping[T, Any]) -> T:
    """The option whose binary variable is largest: solvers return 0.9999999 for 1."""
    return max(options, key=lambda option: float(options[option].value() or 0.0))


def _command(solver: SolverName, time_limit_s: float | None) -> Any:
    if solver is SolverName.HIGHS:
        command = pulp.HiGHS(msg=False, timeLimit=time_limit_s, threads=1, gapRel=0.0)
    else:
        command = pulp.COIN_CMD(
            path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, timeLimit=time_limit_s, gapRel=0.0,  # -threads 1 stalls 10 s, once in 1,000
            options=["randomCbcSeed 1", "randomSeed 1"])
    if not command.available():
        raise SolverError(f"{solver} is not installed", hint=_other(solver))
    return command


def _other(solver: SolverName) -> str:
    return "pip install highspy and use --solver highs" if solver is SolverName.CBC else "use --solver cbc, which comes with PuLP"
