"""The file of `plan --write-lp`: the integer program that certifies the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parplan.commands.options.search_options import SearchFlags
    from parplan.planner.plan.certificate_record import CertifyingProgram
    from parplan.planner.plan.traced_plan import AnyPlan
    from parplan.planner.solver import Problem

OPTION = "--write-lp"
SUFFIXES = (".lp", ".mps")
OTHER_FILE = f"choose another file with {OPTION}"


@dataclass
class ProgramFile:
    """Keeps the certifying programs of a search, and writes that of its plan to a file."""

    path: Path
    _kept: list[tuple[CertifyingProgram, Problem]] = field(default_factory=list)

    def require_possible(self, flags: SearchFlags, output: Path | None) -> None:
        """Raises ConfigError for a file or a search that gets no program."""
        from parplan.planner.objective import Objective
        from parplan.profiles.documents.files import require_writable
        from parplan.profiles.errors import ConfigError

        if self.path.suffix not in SUFFIXES:
            raise ConfigError(
                f"{OPTION} {self.path}: a program is written as {' or '.join(SUFFIXES)}",
                hint=f"name the file {self.path.stem or 'program'}.lp",
            )
        if output is not None and self.path.resolve() == output.resolve():
            raise ConfigError(f"{OPTION} and --output both name {output}", hint=OTHER_FILE)
        beside = {
            f"--objective {flags.objective}": flags.objective != Objective.THROUGHPUT,
            f"--search {flags.method}": flags.method not in (None, "ours"),
            f"--pools {flags.pools}": flags.pools == "data",
        }
        for what, given in beside.items():
            if given:
                raise ConfigError(
                    f"{OPTION} and {what} exclude each other: one program certifies the fastest "
                    "plan of the planner's own search",
                    hint="leave one of them out",
                )
        require_writable(self.path, hint=OTHER_FILE)

    def keep(self, record: CertifyingProgram, problem: Problem) -> None:
        """Receives a certifying program with its record."""
        self._kept.append((record, problem))

    def write(self, plan: AnyPlan) -> Path | None:
        """Writes the program of a plan, and returns the name of an older file that is kept.

        Raises SolverError where no program certifies the plan, and ConfigError.
        """
        from parplan.profiles.documents.files import write_result
        from parplan.profiles.errors import SolverError

        certificate = plan.search.certificate
        wanted = certificate.plan if certificate else None
        programs = [problem for record, problem in self._kept if record == wanted]
        if not programs:
            raise SolverError(
                f"no integer program certifies this plan, so {self.path} was not written",
                hint="give the search more time with --time-limit, or use the other --solver",
            )
        return write_result(programs[-1].text(self.path.suffix), self.path, hint=OTHER_FILE)
