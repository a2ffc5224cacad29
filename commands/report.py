"""`plan report`: plans as one HTML page. All but click is imported where it is used."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.compare import DEFAULT
from parplan.commands.export import TARGET
from parplan.commands.options.result_options import STDOUT
from parplan.commands.options.sections import BASELINES, OUTPUT
from parplan.commands.output import require_output
from parplan.commands.style import Command, List, option

if TYPE_CHECKING:
    from parplan.planner.export.fields.launcher import Target
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import AnyPlan
    from parplan.report.page.reported_plan import ReportedPlan, Snippet

NONE = "none"
ALL = "all"


@click.command(
    "report",
    cls=Command,
    epilog="  plan report plan.yaml\n  plan report fast.yaml lean.yaml -o both.html\n"
    "  plan report plan.yaml --baseline all -o - > report.html",
)
@click.argument(
    "plan_files", metavar="PLAN [PLAN..]", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@option(
    BASELINES,
    "--baseline",
    type=List(click.STRING),
    default=DEFAULT,
    show_default=True,
    metavar="NAME,..",
    help="Systems to set beside each plan, as plan compare names them; none for no search.",
)
@option(
    TARGET,
    "--to",
    type=List(click.STRING),
    metavar="NAME,..",
    help="Launchers whose exports the page has, as plan export names them, all or none. [default: "
    "the first that runs the stack of the plan]",
)
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="report.html",
    show_default=True,
    help="Page to write; - for stdout.",
)
def report(
    plan_files: tuple[Path, ...],
    baseline: tuple[str, ...],
    to: tuple[str, ...] | None,
    output: Path,
) -> None:
    """Write plans as one HTML page that needs no network; several stand side by side.

    The page shows the mesh, the timeline, memory, step time, redundancy, runners-up, baselines,
    assumptions, and commands to copy. It is priced again for the timeline and the baselines.
    """
    from parplan.profiles.documents.files import write_text
    from parplan.report.page.chart_library import chart_library, require_page_libraries

    require_output(output)
    require_page_libraries()
    with chart_library() as library:  # its process works while all else is imported
        page = _page(plan_files, baseline, to, library)
    if output == STDOUT:
        click.echo(page, nl=False)
        return
    write_text(page, output, hint="choose another file with --output")
    click.echo(f"wrote {output}; open it in a browser")


def _page(
    plan_files: Sequence[Path],
    baseline: tuple[str, ...],
    to: tuple[str, ...] | None,
    library: Callable[[], str],
) -> str:
    from parplan.commands.launcher_plans import read_plans
    from parplan.commands.options.target_options import TargetOptions
    from parplan.planner.baselines.systems import baseline_names
    from parplan.profiles.machines.unequal_cluster import require_equal
    from parplan.report.page.html_page import render_page

    baselines = () if baseline == (NONE,) else baseline_names(baseline)
    targets = _targets(to)
    read = list(zip(plan_files, read_plans(plan_files, TargetOptions()), strict=True))
    for _, plan in read:
        require_equal(plan.cluster, "plan report")
    plans = [_reported(path, plan, baselines, targets) for path, plan in read]
    return render_page(plans, library())


def _targets(to: tuple[str, ...] | None) -> Sequence[Target] | None:
    """Returns the launchers of --to, None where it is not given. Raises ConfigError."""
    from parplan.planner.export.targets import TARGETS, target_named

    if to is None:
        return None
    if to == (NONE,):
        return ()
    return tuple(TARGETS.values()) if to == (ALL,) else tuple(map(target_named, to))


def _reported(
    path: Path, plan: AnyPlan, baselines: Sequence[str], targets: Sequence[Target] | None
) -> ReportedPlan:
    """Returns a plan with all that its page computes again."""
    from parplan.executor.placed_layers import torchrun_line
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.profiles.errors import ConfigError
    from parplan.report.page.reported_plan import ReportedPlan, Snippet

    run = Snippet(
        title="Run with parplan's executor", text=torchrun_line(plan, shlex.quote(str(path)))
    )
    missing = (
        "The plan of a traced module has no timeline, no baselines and no exports here: they need "
        "the module."
    )
    if not isinstance(plan, TracedPlan):
        try:
            return _priced(path, plan, baselines, (run, *_exported(path, plan, targets)))
        except ConfigError as error:
            missing = f"There is no timeline, and there are no baselines and no exports: {error}."
    return ReportedPlan(name=str(path), plan=plan, snippets=(run,), missing=(missing,))


def _priced(
    path: Path, plan: Plan, baselines: Sequence[str], snippets: tuple[Snippet, ...]
) -> ReportedPlan:
    """Returns a plan with its timeline and its baselines. Raises ConfigError without a price."""
    from parplan.costmodels.usage.rank_traffic import rank_traffic
    from parplan.planner.plan.reprice import reprice
    from parplan.planner.request import SearchOptions
    from parplan.planner.runs.held_activations import held_activations
    from parplan.planner.runs.timelines import predicted_timeline
    from parplan.planner.search.comparison import compare
    from parplan.report.page.reported_plan import ReportedPlan

    today = reprice(plan)
    timeline = predicted_timeline(today.strategy, today.price_cache)
    return ReportedPlan(
        name=str(path),
        plan=plan,
        timeline=timeline,
        held=held_activations(today.strategy, today.price_cache, timeline),
        sent=tuple(
            rank_traffic(today.strategy, rank, today.price_cache) for rank in range(plan.mesh.pp)
        ),
        comparison=compare(plan, baselines, SearchOptions()) if baselines else None,
        snippets=snippets,
    )


def _exported(path: Path, plan: Plan, targets: Sequence[Target] | None) -> Iterator[Snippet]:
    """Yields the command of each export and its files; a plan that has none says why.

    Programs that an export copies are left out.
    """
    from parplan.planner.export.exported import export_plan
    from parplan.planner.export.targets import TARGETS
    from parplan.profiles.errors import ConfigError
    from parplan.profiles.units import gib
    from parplan.report.page.reported_plan import Snippet

    stack = plan.training.stack.name
    usual = [target for target in TARGETS.values() if stack in target.stacks][:1]
    for target in usual if targets is None else targets:
        try:
            export = export_plan(plan, target, path.name)
        except ConfigError as error:
            yield Snippet(title=f"Export to {target.name}: not possible", text=str(error))
            continue
        lost = tuple(
            f"{part.what} ({part.step_s:+.3f} s, {gib(part.peak_bytes):+.1f} GiB)"
            for part in export.losses
        )
        yield Snippet(
            title=f"Export to {target.name}",
            text=f"plan export {shlex.quote(str(path))} --to {target.name}",
            lost=lost,
            files={file: text for file, text in export.files.items() if not file.endswith(".py")},
        )
