"""Output of plans of either kind for all commands, and checks before the work.

All imports but click's are made where they are used.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.next_command import closing_lines
from parplan.commands.options.result_options import STDOUT
from parplan.commands.style import print_json, tell, tell_kept

if TYPE_CHECKING:
    from rich.console import Console

    from parplan.costmodels.usage.goodput import Failures
    from parplan.planner.launchers.best_of_each import LauncherTable
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.report.plans.summary_context import SummaryContext


PROJECT_FILE = "parplan.yaml"  # the settings of a project: commands/user_settings.py


def require_output(output: Path | None) -> None:
    """Raises ConfigError before the search when a result could not be written to `output`."""
    from parplan.profiles.documents.files import require_writable
    from parplan.profiles.errors import ConfigError

    if output == STDOUT:
        if sys.__stdout__ is None:
            raise ConfigError(
                "--output - is stdout, which is closed", hint="choose a file with --output"
            )
    elif output is not None:
        if output.name == PROJECT_FILE:
            raise ConfigError(
                f"--output {output} has the name of a project's settings file",
                hint="choose another name with --output",
            )
        require_writable(output)


def require_new(path: Path, *, force: bool, other: str) -> None:
    """Raises ConfigError where a file is at `path`, unless `force` says to replace it.

    other   a hint to choose another file
    """
    from parplan.profiles.errors import ConfigError

    if path.exists() and not force:
        raise ConfigError(f"{path} exists", hint=f"{other}, or overwrite it with --force")


def deliver(
    plan: Plan | TracedPlan, context: SummaryContext, output: Path | None, *, as_json: bool
) -> None:
    """Writes the plan to `output` and its summary to the terminal.

    A file that cannot be written does not lose the summary.
    """
    from parplan.planner.plan.plan_file import plan_to_yaml, write_plan
    from parplan.report.text import console

    if output == STDOUT and not as_json:
        click.echo(plan_to_yaml(plan), nl=False)
        print_plan(plan, console(sys.stderr), context)
        return
    kept = None
    try:
        if output is not None and output != STDOUT:
            kept = write_plan(plan, output)
            context = replace(context, closing=closing_lines(plan, output))
    finally:
        if as_json:
            print_plan_json(plan, context.elapsed_s, context.failures, context.table)
        else:
            print_plan(plan, console(sys.stdout), context)
        tell_kept(kept)


def print_plan(plan: Plan | TracedPlan, out: Console, context: SummaryContext) -> None:
    """Prints the summary of a plan."""
    from parplan.report.plans.summary import print_summary

    print_summary(plan, out, context)


def print_plan_json(
    plan: Plan | TracedPlan,
    elapsed_s: float | None = None,
    failures: Failures | None = None,
    table: LauncherTable | None = None,
) -> None:
    """Prints the plan as JSON, with the other launchers of its request where there are any."""
    from parplan.report.plan_documents import plan_document

    print_json(plan_document(plan, elapsed_s, failures, table))


def chosen_ranks(plan: Plan | TracedPlan, ranks: Sequence[int]) -> list[int]:
    """Returns the pipeline ranks of --rank, all by default. Raises ConfigError."""
    from parplan.profiles.errors import ConfigError

    chosen = sorted(set(ranks)) or list(range(plan.mesh.pp))
    if chosen[-1] >= plan.mesh.pp:
        raise ConfigError(
            f"--rank {chosen[-1]}: the plan has pipeline ranks 0 to {plan.mesh.pp - 1}",
            hint="choose one of them",
        )
    return chosen


def warn_of_solver(plan: Plan | TracedPlan) -> None:
    """Prints a warning on stderr about a solver that failed during the search."""
    if plan.search.solver_failure:
        tell(f"warning: {plan.search.solver_failure}")


def print_listing(
    listing: Callable[[], object], show_table: Callable[[Console], None], *, as_json: bool
) -> None:
    """Prints a listing as JSON, or as a table."""
    from parplan.report.text import console

    if as_json:
        print_json(listing())
    else:
        show_table(console(sys.stdout))


def require_torch(what: str) -> None:
    """Raises ConfigError, which says that `what` needs torch, where torch is not installed."""
    from parplan.profiles.errors import ConfigError

    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"{what}: it is not installed", hint="pip install 'parplan[torch]'")
