"""The one module that names a MILP solver: CBC (bundled with PuLP) or HiGHS, run so that the same
input gives the same answer.

PuLP reports a solve that the time limit cut off as `Optimal`; only `sol_status` tells, and an
infeasible problem still carries values. Both are checked here, once, and so is every point against
the rows: a solver that crashes, does not stop or writes nonsense is a SolverError that quotes the
end of its log, never an answer.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pulp

from parplan.planner.request import SolverName
from parplan.profiles.errors import SolverError
from parplan.profiles.interrupts import signals_later

T = TypeVar("T")
# how long after its limit a CBC that has not stopped is ended; it overruns by tenths of a second
GRACE_S = 5.0
ROW_TOLERANCE = (
    1e-5  # of the largest term of a row: CBC writes eight digits, and its own tolerances are 1e-6
)
GROUP_S = 0.1  # between the first and the last process of a group that a signal reaches, and more
INTEGRALITY = 1e-4
LONGEST_QUOTE = 200  # characters of a line of the log


class Unsolved(Exception):  # noqa: N818 - not an error: the caller keeps its bound
    """The time ran out before any feasible point was found; there may be one."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A feasible point; `proven` when the solver finished, so that it is optimal."""

    objective: float
    proven: bool


class Problem:
    """A minimisation problem: `binary` and `continuous` variables, linear rows named by their
    label.
    """

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
        """Variables and rows."""
        return self._problem.numVariables(), self._problem.numConstraints()

    def minimize(self, expression: Any) -> None:
        self._problem.setObjective(expression)

    def require(self, constraint: Any, label: str) -> None:
        """Add a row. `label` must be unique in the problem."""
        self._problem.addConstraint(constraint, label)
        self._rows[label] = constraint

    def solve(self, solver: SolverName, time_limit_s: float | None = None) -> Solution | None:
        """The best point found, or None when there is none.

        Raises Unsolved when the time ran out before it found any point, SolverError when it is
        missing, crashed, did not stop, or gave what is no answer.
        """
        limit_s = (
            None if time_limit_s is None else max(0.0, time_limit_s)
        )  # HiGHS takes a negative limit for none
        command, started_s = _command(solver, limit_s), time.monotonic()
        try:
            self._problem.solve(command)
        except pulp.PulpSolverError as error:
            lines = str(error).strip().splitlines() or ["for no reason it gave"]
            raise SolverError(f"{solver} failed: {lines[-1]}", hint=_other(solver)) from None
        status, found = self._problem.status, self._problem.sol_status
        if found in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            self._require_kept(solver)
            return Solution(
                float(pulp.value(self._problem.objective)), proven=found == pulp.LpSolutionOptimal
            )
        over = limit_s is not None and time.monotonic() - started_s >= limit_s
        if status == pulp.LpStatusInfeasible and not over:
            return None
        if limit_s is not None and status in (
            pulp.LpStatusNotSolved,
            pulp.LpStatusInfeasible,
        ):  # which CBC calls what it cut off
            raise Unsolved
        ending = command.ending if isinstance(command, _Cbc) else ""
        raise SolverError(
            f"{solver} ended without an answer ({pulp.LpStatus[status].lower()}){ending}",
            hint=_other(solver),
        )

    def _require_kept(self, solver: SolverName) -> None:
        """Raises SolverError when the values break a row or are fractions: what was cut off, or is
        no answer to this problem.
        """
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
    """Whether the values satisfy a row up to rounding: the sum of its terms and its constant is on
    the right side of 0.
    """
    terms = [coefficient * variable.value() for variable, coefficient in row.items()]
    total, slack = (
        float(sum(terms) + row.constant),
        ROW_TOLERANCE * float(max(1.0, abs(row.constant), *map(abs, terms))),
    )
    within_above, within_below = total <= slack, total >= -slack
    if row.sense == pulp.LpConstraintEQ:
        return within_above and within_below
    return within_above if row.sense == pulp.LpConstraintLE else within_below


class _Cbc(pulp.COIN_CMD):  # type: ignore[misc]
    """CBC with PuLP's files and options, and besides: its log is kept for errors, all its files are
    deleted whatever happens, and one that does not stop at its limit is ended.

    ending: the last line of the log, for an error
    """

    ending = ""

    def actualSolve(self, lp: Any, **_: Any) -> int:  # noqa: N802 - PuLP's name
        """Solve `lp`, and give it status and values. Raises SolverError."""
        with tempfile.TemporaryDirectory(prefix="parplan-") as folder:
            problem, solution, log = (
                Path(folder) / name for name in ("problem.mps", "solution.txt", "log.txt")
            )
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
                status, found = self.get_status(str(solution))
            except (OSError, ValueError) as error:
                reason = (
                    f"wrote no solution ({error.strerror})"
                    if isinstance(error, OSError)
                    else str(error)
                )
                raise SolverError(
                    f"cbc failed: {reason}{self.ending}", hint=_other(SolverName.CBC)
                ) from None
        if found in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible) and len(values) < len(
            names
        ):
            raise SolverError(
                f"cbc failed: its solution has {len(values)} of {len(names)} variables{self.ending}",
                hint=_other(SolverName.CBC),
            )
        lp.assignVarsVals({name: values.get(name, 0.0) for name in names})
        lp.assignStatus(status, found)
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


def _run(arguments: Sequence[str], log: Path, limit_s: float | None) -> str | None:
    """Run a program with its output in `log`; None when it ended well, else what happened."""
    overrun = threading.Event()
    with contextlib.ExitStack() as ending:
        with log.open("wb") as stream, signals_later():
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
        watch.start()  # waiting with a timeout would poll, and add up to 50 ms to every solve
        ending.callback(watch.cancel)
        code = process.wait()
        if code == -signal.SIGTERM:
            time.sleep(
                GROUP_S
            )  # one sent to the whole group reaches this process too, and raises KeyboardInterrupt here
    if overrun.is_set():
        return f"it did not stop at its limit of {limit_s:.3g} s"
    if code < 0:
        return f"it was ended by signal {-code}"
    return f"exit code {code}" if code else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that has not ended, as after Ctrl-C."""
    if process.poll() is None:
        process.kill()
        process.wait()


def _ending(log: Path, folder: str) -> str:
    """`; its log ends: ...` with the last line of the log that is not empty, or nothing."""
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
    """The values of the variables in a solution file of CBC: a line each of index, name, value,
    reduced cost.

    names: what each variable is called in the file. Raises ValueError for what is no solution file.
    """
    own = {short: name for name, short in names.items()}
    first, *lines = solution.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    if not first.split():
        raise ValueError("its solution is empty")
    rows = [line.replace("**", " ").split() for line in lines if line.strip()]
    if any(len(row) < 4 for row in rows):
        raise ValueError("its solution breaks off in a line")
    return {own[row[1]]: float(row[2]) for row in rows if row[1] in own}


def weighted(terms: Iterable[tuple[Any, float]]) -> Any:
    """sum of coefficient times variable; a variable may come more than once, of which pulp would
    keep the last.
    """
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
