"""The command that runs a plan, which a summary prints as the next one.

Imports that take time are made where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.profiles.documents.texts import escaped

if TYPE_CHECKING:
    from parplan.planner.export.launcher_prices import LauncherPrice
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import TracedPlan


def closing_lines(plan: Plan | TracedPlan, output: Path) -> tuple[str, ...]:
    """Returns the lines that name the file of a plan and the command that runs it.

    A plan of no launcher is another one where it runs. The nearest that a program runs is named, or
    nothing where no program runs any.
    """
    from parplan.planner.export.files.quoting import shell_word

    path = shell_word(str(output))
    command = own_command(plan, path)
    if command is not None:
        return f"wrote {escaped(str(output))}{_whose(plan)}; run it with", f"  {command}"
    nearest = next(_nearest_commands(plan, path), None)
    if nearest is None:
        return (f"wrote {escaped(str(output))}, which no launcher that is known runs",)
    stack = plan.training.stack.name
    of_stack = f"a bound for the stack {stack}: no program runs it as it is priced; "
    bound = of_stack if _is_searched(plan) else ""
    return f"wrote {escaped(str(output))}, {bound}the nearest runs with", f"  {nearest}"


def _whose(plan: Plan | TracedPlan) -> str:
    return f" ({plan.search.launcher})" if plan.search.launcher else ""


def _is_searched(plan: Plan | TracedPlan) -> bool:
    from parplan.planner.plan.prediction import Status

    return plan.search.status is not Status.ESTIMATE


def own_command(plan: Plan | TracedPlan, path: str) -> str | None:
    """Returns the command that runs a plan as it is priced, None where there is none."""
    from parplan.executor.placed_layers import torchrun_line
    from parplan.planner.launchers.known_launchers import EXECUTOR
    from parplan.planner.plan.traced_plan import TracedPlan

    if isinstance(plan, TracedPlan):
        return torchrun_line(plan, path)
    launcher = plan.search.launcher
    if launcher not in (None, EXECUTOR):
        return f"plan export {path} --to {launcher}"
    described = launcher == EXECUTOR or plan.training.stack.name == EXECUTOR
    if (described or plan.cluster.device.is_host or plan.pools) and runs_on_executor(plan):
        return torchrun_line(plan, path)
    return None


def _nearest_commands(plan: Plan | TracedPlan, path: str) -> Iterator[str]:
    """Yields the commands of programs that run a plan in their nearest settings within memory."""
    from parplan.executor.placed_layers import torchrun_line

    for each in at_launchers(plan, every=False):
        if not each.refused and not each.missing_bytes:
            yield f"plan export {path} --to {each.name}"
    if runs_on_executor(plan):
        yield torchrun_line(plan, path)


def runs_on_executor(plan: Plan | TracedPlan) -> bool:
    """Returns whether the own executor runs a plan as its file says."""
    from parplan.executor.rules.all_rules import refusals
    from parplan.planner.plan.traced_plan import TracedPlan

    return isinstance(plan, TracedPlan) or not any(refusals(plan))


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
