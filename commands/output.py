"""Output of plans of either kind for all commands, and checks before the work.

All imports but click's are made where they are used.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.options.result_options import STDOUT
from parplan.commands.style import print_json, tell, tell_kept

if TYPE_CHECKING:
    from rich.console import Console

    from parplan.costmodels.usage.goodput import Failures
    from parplan.planner.export.launcher_prices import LauncherPrice
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.report.plans.summary_context import SummaryContext


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
            context = replace(context, closing=_closing(plan, output))
    finally:
        if as_json:
            print_plan_json(plan, context.elapsed_s, context.failures)
        else:
            print_plan(plan, console(sys.stdout), context)
        tell_kept(kept)


def _closing(plan: Plan | TracedPlan, output: Path) -> tuple[str, ...]:
    """Returns the lines that name the file and the command that runs it."""
    return f"wrote {output}; run it with", f"  {start_line(plan, shlex.quote(str(output)))}"


def at_launchers(plan: Plan | TracedPlan, *, every: bool) -> tuple[LauncherPrice, ...]:
    """Returns what a plan takes at launchers: at the one of its stack, or at every one.

    A plan that was found for a launcher loses nothing there.
    """
    from parplan.planner.export.launcher_prices import launcher_prices
    from parplan.planner.export.targets import TARGETS, target_of
    from parplan.planner.plan.traced_plan import TracedPlan

    if isinstance(plan, TracedPlan) or (plan.search.launcher and not every):
        return ()
    if every:
        return launcher_prices(plan, TARGETS.values())
    usual = target_of(plan.training.stack.name)
    return launcher_prices(plan, (usual,)) if usual else ()


def start_line(plan: Plan | TracedPlan, path: str) -> str:
    """Returns the command for the program that a plan was priced for.

    It is parplan's executor where no launcher has the stack of the plan, and on CPUs.
    """
    from parplan.executor.placed_layers import torchrun_line
    from parplan.planner.export.targets import target_of
    from parplan.planner.plan.traced_plan import TracedPlan

    target = None if isinstance(plan, TracedPlan) else target_of(plan.training.stack.name)
    if target is None or plan.pools or plan.cluster.device.is_host:
        return torchrun_line(plan, path)
    name = plan.search.launcher or target.name
    return f"plan export {path} --to {name}"


def print_plan(plan: Plan | TracedPlan, out: Console, context: SummaryContext) -> None:
    """Prints the summary of a plan."""
    from parplan.report.plans.summary import print_summary

    print_summary(plan, out, context)


def print_plan_json(
    plan: Plan | TracedPlan, elapsed_s: float | None = None, failures: Failures | None = None
) -> None:
    """Prints the plan as JSON."""
    from parplan.report.plan_documents import plan_document

    print_json(plan_document(plan, elapsed_s, failures))


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
