"""Options for the results of a command and the code that it may run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parplan.commands.options.sections import OUTPUT
from parplan.commands.style import option, packs

STDOUT = Path("-")  # the value of --output that writes to stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """Destinations of the results."""

    output: Path | None = None
    plot: Path | None = None
    write_lp: Path | None = None
    as_json: bool = False
    verbose: bool = False

    @property
    def plan_file(self) -> str:
        """The name of the plan file, empty where the plan goes to stdout or nowhere."""
        return "" if self.output in (None, STDOUT) else str(self.output)


as_json = option(OUTPUT, "--json", "as_json", is_flag=True, help="Print only JSON on stdout.")
verbose_option = option(
    OUTPUT,
    "-v",
    "--verbose",
    is_flag=True,
    help="Print everything: all defaults, every stage and runner-up, redundancy, notes.",
)
packed_result = packs("result", ResultOptions)
trust_module_option = option(
    OUTPUT,
    "--trust-module",
    is_flag=True,
    help="Run the code of the plan's module even if it lies outside the current folder and the "
    "installed packages.",
)
