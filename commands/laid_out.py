"""The plan of a run of another program, which the user names by a file or by options.

All imports of the planner are made where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.launcher_plans import launcher_file, launcher_plan
from parplan.commands.options.layout_options import LayoutOptions
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.style import option
from parplan.profiles.errors import ConfigError

if TYPE_CHECKING:
    from parplan.planner.plan.plan import Plan

OTHER_RUNS = "Runs of other programs"
plan_of_run_option = option(
    OTHER_RUNS,
    "--plan",
    "--config",
    "plan_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Plan of the run, or its launcher's own file; `plan estimate -o` writes a plan.",
)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """The user's words for the plan of runs of other programs: its file, or its options."""

    plan_file: Path | None
    target: TargetOptions
    by_hand: LayoutOptions

    def plan_of(self, run: Path) -> Plan:
        """Returns the plan of a run that does not say it. Raises ConfigError."""
        from parplan.commands.requests.layouts import choices_of, layout_of, with_limit
        from parplan.commands.requests.requests import request_of
        from parplan.planner.search.estimate import estimate_plan

        if self.plan_file is not None:
            return self._plan_of_file(self.plan_file)
        if self.target.model is None:
            raise ConfigError(
                f"{run}: it does not say the model and the layout of its run",
                hint="give --plan FILE, or the options of plan estimate: --model NAME --gpus N ..",
            )
        request = with_limit(request_of(self.target), self.by_hand)
        layout = layout_of(request, self.by_hand)
        return estimate_plan(request, layout, choices_of(request, self.by_hand))

    def plan_of_log(self, log: Path) -> Plan:
        """Returns the plan of a log, which may print its own configuration. Raises ConfigError."""
        from parplan.planner.logs.log_configuration import configuration_of_log

        printed = None if self.plan_file else configuration_of_log(log)
        return self.plan_of(log) if printed is None else launcher_plan(printed, self.target)[0]

    def _plan_of_file(self, plan_file: Path) -> Plan:
        """Returns the plan in a file, or that of the launcher's configuration in it."""
        from parplan.planner.plan.plan_file import read_plan

        file = launcher_file(plan_file)
        if file is not None:
            return launcher_plan(file, self.target)[0]
        self.require_no_model(f"--plan {plan_file} holds the model")
        return read_plan(plan_file)

    def require_no_plan(self) -> None:
        """Raises ConfigError where a plan is given and every run holds its own."""
        if self.plan_file is not None:
            raise ConfigError(
                f"--plan {self.plan_file}: a run.json holds its plan", hint="leave --plan out"
            )
        self.require_no_model("a run.json holds its plan")

    def require_no_model(self, why: str) -> None:
        """Raises ConfigError where a model is given."""
        if self.target.model is not None:
            raise ConfigError(f"--model {self.target.model}: {why}", hint="leave --model out")
