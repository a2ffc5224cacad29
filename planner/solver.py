"""The one module that names a MILP solver: CBC (bundled with PuLP) or HiGHS.

It runs the solver so that the same input gives the same answer. PuLP reports a solve that the time
limit cut off as `Optimal`; only `sol_status` tells, and an infeasible problem still has values.
Both are checked here, and every point is checked against the rows. A solver that crashes, does not
stop or writes nonsense is a SolverError with the end of its log, never an answer.
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pulp

from parplan.planner.request import SolverName
from parplan.profiles.errors import SolverError
from parplan.profiles.interrupts import deferred_signals

T = TypeVar("T")
GRACE_S = 5.0  # after its limit, before CBC is ended; it overruns by tenths of a second
# Of the largest term of a row: CBC writes eight digits, and its tolerances are 1e-6.
ROW_TOLERANCE = 1e-5
GROUP_S = 0.1  # more than a signal takes to reach all processes of a group
INTEGRALITY = 1e-4
LONGEST_QUOTE = 200  # characters of a line of the log


class Unsolved(Exception):  # noqa: N818 - not an error: the caller keeps its bound
    """The time ran out before any feasible point was found; there may be one."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A feasible point; `proven` when the solver finished, so that it is optimal."""

    objective: float
    proven: bool


@dataclass(slots=True)
class ProgramCount:
    """The programs that were solved so far, with their variables and rows."""

    programs: int = 0
    variables: int = 0
    rows: int = 0


_COUNTS: ContextVar[tuple[ProgramCount, ...]] = ContextVar("counts of programs", default=())


@contextlib.contextmanager
def counted_programs(*, apart: bool = False) -> Iterator[ProgramCount]:
    """Yields a count of the programs solved inside of it, also for the counts around it.

    apart: the counts around it leave the programs out, until `count_programs` adds them
    """
    count = ProgramCount()
    before = _COUNTS.set((count,) if apart else (*_COUNTS.get(), count))
    try:
        yield count
    finally:
        _COUNTS.reset(before)


def count_programs(solved: ProgramCount) -> None:
    """Adds programs that were solved, now or before for another search, to all counts."""
    for count in _COUNTS.get():
        count.programs += solved.programs
        count.variables += solved.variables
        count.rows += solved.rows


class Problem:
    """A minimisation problem: variables, and linear rows named by their label."""

    def __init__(self, name: str) -> None:
        self._problem = pulp.LpProblem(name, pulp.LpMinimize)
        self._binaries: list[Any] = []
        self._rows: dict[str, Any] = {}

    def binary(self, name: str) -> Any:
        self._binaries.append(self._problem.add_variable(name, cat=pulp.LpBinary))
        return self._binaries[-1]

    def integer(self, name: str, upper: int) -> Any:
        return self._problem.add_variable(name, lowBound=0, upBound=upper, cat=pulp.LpInteger)

    def continuous(self, name: str, lower: float = 0.0) -> Any:
        return self._problem.add_variable(name, lowBound=lower)

    @property
    def size(self) -> tuple[int, int]:
        """Returns the numbers of variables and rows."""
        return self._problem.numVariables(), self._problem.numConstraints()

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the variables."""
        return tuple(variable.name for variable in self._problem.variables())

    def text(self, suffix: str) -> str:
        """Returns the problem as a file of a solver, with `suffix` `.lp` or `.mps`."""
        write = {".lp": self._problem.writeLP, ".mps": self._problem.writeMPS}[suffix]
        with tempfile.TemporaryDirectory(prefix="parplan-") as folder:
            path = Path(folder, f"problem{suffix}")
            write(str(path))
            return path.read_text(encoding="utf-8")

    def minimize(self, expression: Any) -> None:
        self._problem.setObjective(expression)

    def require(self, constraint: Any, label: str) -> None:
        """Adds a row. `label` must be unique in the problem."""
        self._problem.addConstraint(constraint, label)
        self._rows[label] = constraint

    def solve(self, solver: SolverName, time_limit_s: float | None = None) -> Solution | None:
        """Returns the best point, or None when the problem is infeasible.

        Raises Unsolved when the time ran out before any point was found, SolverError when the
        solver is missing, crashed, did not stop, or gave no valid answer.
        """
        # HiGHS takes a negative limit for none
        limit_s = None if time_limit_s is None else max(0.0, time_limit_s)
        command = _command(solver, limit_s)
        started_s = time.monotonic()
        try:
            self._problem.solve(command)
        except pulp.PulpSolverError as error:
            lines = str(error).strip().splitlines() or ["for no reason it gave"]
            raise SolverError(f"{solver} failed: {lines[-1]}", hint=_other(solver)) from None
        status = self._problem.status
        sol_status = self._problem.sol_status
        if sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            self._require_kept(solver)
            count_programs(ProgramCount(1, *self.size))
            return Solution(
                float(pulp.value(self._problem.objective)),
                proven=sol_status == pulp.LpSolutionOptimal,
            )
        over = limit_s is not None and time.monotonic() - started_s >= limit_s
        if status == pulp.LpStatusInfeasible and not over:
            count_programs(ProgramCount(1, *self.size))
            return None
        # CBC reports a solve that it cut off as either of these
        if limit_s is not None and status in (pulp.LpStatusNotSolved, pulp.LpStatusInfeasible):
            raise Unsolved
        ending = command.ending if isinstance(command, _Cbc) else ""
        raise SolverError(
            f"{solver} ended without an answer ({pulp.LpStatus[status].lower()}){ending}",
            hint=_other(solver),
        )

    def _require_kept(self, solver: SolverName) -> None:
        """Raises SolverError when the values break a row or binary variables are fractions."""
        broken = [label for label, row in self._rows.items() if not _keeps(row)]
        broken += [
            z.name for z in self._binaries if min(abs(z.value()), abs(z.value() - 1)) > INTEGRALITY
        ]
        if broken:
            raise SolverError(
                f"{solver} gave an answer that breaks {len(broken)} rows, such as {broken[0]}",
                hint=_other(solver),
            )


def _keeps(row: Any) -> bool:
    """Returns whether the values satisfy a row up to rounding."""
    terms = [coefficient * variable.value() for variable, coefficient in row.items()]
    total = float(sum(terms) + row.constant)
    slack = ROW_TOLERANCE * float(max(1.0, abs(row.constant), *map(abs, terms)))
    within_above = total <= slack
    within_below = total >= -slack
    if row.sense == pulp.LpConstraintEQ:
        return within_above and within_below
    return within_above if row.sense == pulp.LpConstraintLE else within_below


class _Cbc(pulp.COIN_CMD):  # type: ignore[misc]
    """CBC with the files and options of PuLP.

    Its log is saved for errors, its files are always deleted, and a process that does not stop at
    its limit is ended.

    ending   the last line of the log, for an error
    """

    ending = ""

    def actualSolve(self, lp: Any, **_: Any) -> int:  # noqa: N802 - PuLP's name
        """Solves `lp`, and sets its status and values. Raises SolverError."""
        with tempfile.TemporaryDirectory(prefix="parplan-") as folder:
            problem = Path(folder, "problem.mps")
            solution = Path(folder, "solution.txt")
            log = Path(folder, "log.txt")
            _, names, _, _ = lp.writeMPS(str(problem), rename=1)
            failed = _run(
                [self.path, str(problem), *self._arguments(), "-solution", str(solution)],
                log,
                self.timeLimit,
            )
            self.ending = _ending(log, folder)
            try:
                if failed:
                    raise ValueError(failed)
                values = _values(solution, names)
                status, sol_status = self.get_status(str(solution))
            except (OSError, ValueError) as error:
                reason = (
                    f"wrote no solution ({error.strerror})"
                    if isinstance(error, OSError)
                    else str(error)
                )
                raise SolverError(
                    f"cbc failed: {reason}{self.ending}", hint=_other(SolverName.CBC)
                ) from None
        feasible = sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        if feasible and len(values) < len(names):
            raise SolverError(
                f"cbc failed: its solution has {len(values)} of {len(names)} variables"
                f"{self.ending}",
                hint=_other(SolverName.CBC),
            )
        lp.assignVarsVals({name: values.get(name, 0.0) for name in names})
        lp.assignStatus(status, sol_status)
        return int(status)

    def _arguments(self) -> list[str]:
        limit = [] if self.timeLimit is None else ["-sec", str(self.timeLimit)]
        options = [f"-{option}" for option in [*self.options, *self.getOptions()]]
        return [
            *limit,
            *(part for option in options for part in option.split()),
            "-solve",
            "-printingOptions",
            "all",
        ]


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS in this process, which keeps the model of a problem between its solves.

    A `Problem` only gets another objective or further rows once it was solved. These are passed on,
    and the last basis and point start the next solve.
    """

    def createAndConfigureSolver(self, lp: Any) -> None:  # noqa: N802 - PuLP's name
        """Makes the model of `lp`, or sets the limit of the one that is kept."""
        if lp.solverModel is None or lp.solverModel.getNumCol() != lp.numVariables():
            super().createAndConfigureSolver(lp)
            return
        limit_s = math.inf if self.timeLimit is None else float(self.timeLimit)
        lp.solverModel.setOptionValue("time_limit", limit_s)

    def buildSolverModel(self, lp: Any) -> None:  # noqa: N802 - PuLP's name
        """Passes what the model lacks: all of `lp`, or its objective and its new rows."""
        model = lp.solverModel
        if not model.getNumCol():
            super().buildSolverModel(lp)
            return
        for variable in lp.variables():
            model.changeColCost(variable.index, lp.objective.get(variable, 0.0))
        rows = list(lp.constraints())
        for index in range(model.getNumRow(), len(rows)):
            row = rows[index]
            row.index = index
            lower, upper = row.getLb(), row.getUb()
            model.addRow(
                -math.inf if lower is None else lower,
                math.inf if upper is None else upper,
                len(row),
                [variable.index for variable in row],
                list(row.values()),
            )


def _run(arguments: Sequence[str], log: Path, limit_s: float | None) -> str | None:
    """Runs a program with its output in `log`; returns its failure, or None when it ended well."""
    overrun = threading.Event()
    with contextlib.ExitStack() as ending:
        with log.open("wb") as stream, deferred_signals():
            try:
                process = subprocess.Popen(
                    arguments, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
                )
            except OSError as error:
                return f"{arguments[0]} cannot be run ({error.strerror})"
            ending.callback(_end, process)

        def end() -> None:
            overrun.set()
            process.kill()

        watch = threading.Timer(
            threading.TIMEOUT_MAX if limit_s is None else limit_s + GRACE_S, end
        )
        watch.daemon = True
        # a wait with a timeout would poll, and add up to 50 ms to every solve
        watch.start()
        ending.callback(watch.cancel)
        code = process.wait()
        if code == -signal.SIGTERM:
            # A signal to the whole group also reaches this process: it raises KeyboardInterrupt.
            time.sleep(GROUP_S)
    if overrun.is_set():
        return f"it did not stop at its limit of {limit_s:.3g} s"
    if code < 0:
        return f"it was ended by signal {-code}"
    return f"exit code {code}" if code else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that is still running, as after Ctrl-C."""
    if process.poll() is None:
        process.kill()
        process.wait()


def _ending(log: Path, folder: str) -> str:
    """Returns `; its log ends: ...` with the last non-empty line of the log, or nothing."""
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    if not lines:
        return ""
    line = "".join(c for c in lines[-1].replace(f"{folder}/", "") if c.isprintable())
    return f"; its log ends: {line[:LONGEST_QUOTE]}"


def _values(solution: Path, names: Mapping[str, str]) -> dict[str, float]:
    """Returns the values of the variables in a solution file of CBC.

    A line has index, name, value and reduced cost. `names` maps each variable to its name in the
    file. Raises ValueError for a file that is no solution.
    """
    variables = {short: name for name, short in names.items()}
    first, *lines = solution.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    if not first.split():
        raise ValueError("its solution is empty")
    rows = [line.replace("**", " ").split() for line in lines if line.strip()]
    if any(len(row) < 4 for row in rows):
        raise ValueError("its solution breaks off in a line")
    return {variables[row[1]]: float(row[2]) for row in rows if row[1] in variables}


def weighted(terms: Iterable[tuple[Any, float]]) -> Any:
    """Returns the sum of coefficient times variable; pulp alone drops repeated variables."""
    total: dict[Any, float] = {}
    for variable, coefficient in terms:
        total[variable] = total.get(variable, 0.0) + coefficient
    return pulp.LpAffineExpression(total)


def chosen(options: Mapping[T, Any]) -> T:
    """Returns the option whose binary variable is largest: solvers return 0.9999999 for 1."""
    return max(options, key=lambda option: float(options[option].value() or 0.0))


def _command(solver: SolverName, time_limit_s: float | None) -> Any:
    if solver is SolverName.HIGHS:
        command = _Highs(msg=False, timeLimit=time_limit_s, threads=1, gapRel=0.0)
    else:
        command = _Cbc(
            path=pulp.PULP_CBC_CMD.pulp_cbc_path,
            msg=False,
            timeLimit=time_limit_s,
            gapRel=0.0,  # -threads 1 stalls 10 s, once in 1,000
            options=["randomCbcSeed 1", "randomSeed 1"],
        )
    if not command.available():
        raise SolverError(f"{solver} is not installed", hint=_other(solver))
    return command


def _other(solver: SolverName) -> str:
    return (
        "pip install highspy and use --solver highs"
        if solver is SolverName.CBC
        else "use --solver cbc, which comes with PuLP"
    )
