"""`plan report`: plans as one HTML page. All but click is imported where it is used."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.compare import DEFAULT
from parplan.commands.options.result_options import STDOUT
from parplan.commands.options.sections import BASELINES, OUTPUT
from parplan.commands.output import require_output
from parplan.commands.style import Command, List, option

if TYPE_CHECKING:
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import AnyPlan
    from parplan.report.page.reported_plan import ReportedPlan, Snippet

NONE = "none"


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
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="report.html",
    show_default=True,
    help="Page to write; - for stdout.",
)
def report(plan_files: tuple[Path, ...], baseline: tuple[str, ...], output: Path) -> None:
    """Write plans as one HTML page that needs no network; several stand side by side.

    The page shows the mesh, the timeline, memory, step time, redundancy, runners-up, baselines,
    assumptions, and commands to copy. It is priced again for the timeline and the baselines.
    """
    from parplan.commands.launcher_plans import read_plans
    from parplan.commands.options.target_options import TargetOptions
    from parplan.profiles.documents.files import write_text
    from parplan.report.page.chart_theme import require_page_libraries
    from parplan.report.page.html_page import chart_library, render_page

    require_output(output)
    require_page_libraries()
    baselines = () if baseline == (NONE,) else baseline
    read = zip(plan_files, read_plans(plan_files, TargetOptions()), strict=True)
    plans = [_reported(path, plan, baselines) for path, plan in read]
    page = render_page(plans, chart_library())
    if output == STDOUT:
        click.echo(page, nl=False)
        return
    write_text(page, output, hint="choose another file with --output")
    click.echo(f"wrote {output}; open it in a browser")


def _reported(path: Path, plan: AnyPlan, baselines: tuple[str, ...]) -> ReportedPlan:
    """Returns a plan with all that its page computes again."""
    from parplan.executor.placed_layers import torchrun_line
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.report.page.reported_plan import ReportedPlan, Snippet

    run = Snippet(
        title="Run with parplan's executor", text=torchrun_line(plan, shlex.quote(str(path)))
    )
    if not isinstance(plan, TracedPlan):
        return _described(path, plan, baselines, run)
    return ReportedPlan(
        name=str(path),
        plan=plan,
        snippets=(run,),
        missing=(
            "The plan of a traced module has no timeline, no baselines and no exports here: "
            "they need the module.",
        ),
    )


def _described(path: Path, plan: Plan, baselines: tuple[str, ...], run: Snippet) -> ReportedPlan:
    from parplan.planner.baselines.systems import baseline_names
    from parplan.planner.plan.reprice import reprice
    from parplan.planner.request import SearchOptions
    from parplan.planner.runs.held_activations import held_activations
    from parplan.planner.runs.timelines import predicted_timeline
    from parplan.planner.search.comparison import compare
    from parplan.report.page.reported_plan import ReportedPlan

    today = reprice(plan)
    timeline = predicted_timeline(today.strategy, today.price_cache)
    names = baseline_names(baselines) if baselines else ()
    return ReportedPlan(
        name=str(path),
        plan=plan,
        timeline=timeline,
        held=held_activations(today.strategy, today.price_cache, timeline),
        comparison=compare(plan, names, SearchOptions()) if names else None,
        snippets=(run, *_exported(path, plan)),
    )


def _exported(path: Path, plan: Plan) -> Iterator[Snippet]:
    """Yields the command of each export and its files; a plan that has none says why.

    Programs that an export copies are left out.
    """
    from parplan.planner.export.exported import export_plan
    from parplan.planner.export.targets import TARGETS
    from parplan.profiles.errors import ConfigError
    from parplan.profiles.units import gib
    from parplan.report.page.reported_plan import Snippet

    for name, target in TARGETS.items():
        try:
            export = export_plan(plan, target, path.name)
        except ConfigError as error:
            yield Snippet(title=f"Export to {name}: not possible", text=str(error))
            continue
        lost = tuple(
            f"{part.what} ({part.step_s:+.3f} s, {gib(part.peak_bytes):+.1f} GiB)"
            for part in export.losses
        )
        yield Snippet(
            title=f"Export to {name}",
            text=f"plan export {shlex.quote(str(path))} --to {name}",
            lost=lost,
            files={file: text for file, text in export.files.items() if not file.endswith(".py")},
        )
