"""`plan report`: plans as one HTML page. All but click is imported where it is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.compare import DEFAULT
from parplan.commands.export import TARGET
from parplan.commands.options.result_options import STDOUT, trust_module_option
from parplan.commands.options.sections import BASELINES, OUTPUT, SEARCH
from parplan.commands.output import require_output
from parplan.commands.style import (
    LONGEST_S,
    Command,
    List,
    Number,
    option,
    print_lines,
    tell_kept,
)
from parplan.profiles.documents.texts import escaped
from parplan.profiles.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from parplan.planner.deadline import Deadline
    from parplan.planner.export.fields.launcher import Target
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
    from parplan.report.page.reported_plan import ReportedPlan, Snippet

BASELINES_CPU_S = 8.0  # of all baselines beside a plan on many GPUs
SLOWEST = "megatron"  # the baseline that is searched last where time is limited
NONE = "none"
ALL = "all"


@click.command(
    "report",
    cls=Command,
    epilog="  plan report plan.yaml\n  plan report fast.yaml lean.yaml -o both.html\n"
    "  plan report plan.yaml --front --time-limit 60\n"
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
    SEARCH,
    "--front",
    is_flag=True,
    help="Search the front of step time and memory around the plan, and draw it in place of the "
    "runners-up.",
)
@option(
    SEARCH,
    "--time-limit",
    type=Number(max=LONGEST_S),
    metavar="SECONDS",
    help="Time after which the search of --front stops, with the points so far, and no further "
    "baseline is searched. [default: none, for baselines on more than 2,048 GPUs 8 s of CPU time]",
)
@option(
    OUTPUT,
    "--trace",
    is_flag=True,
    help="Import and trace the module of a traced plan again, for its timeline, its memory over "
    "the step and its baselines.",
)
@trust_module_option
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
    front: bool,
    time_limit: float | None,
    trace: bool,
    trust_module: bool,
    output: Path,
) -> None:
    """Write plans as one HTML page that needs no network; several stand side by side.

    The page shows the mesh, the timeline, memory, step time, redundancy, runners-up, baselines,
    assumptions, and commands to copy. It is priced again for the timeline and the baselines. The
    plan files of one front are drawn as the front.
    """
    from parplan.profiles.documents.files import write_result
    from parplan.report.page.chart_library import chart_library, require_page_libraries
    from parplan.report.page.html_page import render_page

    _require_one_front(plan_files, front=front)
    if time_limit is not None and not front and baseline == (NONE,):
        raise click.UsageError(
            "--time-limit is for baselines and --front: add one, or leave --time-limit out"
        )
    require_output(output)
    require_page_libraries()
    with chart_library() as library:  # its process works while all else is imported
        plans = _plans(plan_files, baseline, to, time_limit, trace=trace, trust=trust_module)
        interrupted = False
        if front:
            plans[0], interrupted = _with_front(plans[0], time_limit)
        page = render_page(plans, library())
    if output == STDOUT:
        click.echo(page, nl=False)
    else:
        kept = write_result(page, output, hint="choose another file with --output")
        print_lines(f"wrote {output}; open it in a browser")
        tell_kept(kept)
    if interrupted:
        sys.exit(INTERRUPTED)


def _require_one_front(plan_files: Sequence[Path], *, front: bool) -> None:
    """Raises UsageError for --front of several plans."""
    if front and len(plan_files) > 1:
        raise click.UsageError(
            f"--front searches around one plan, there are {len(plan_files)}: give one, or leave "
            "--front out"
        )


def _with_front(reported: ReportedPlan, time_limit: float | None) -> tuple[ReportedPlan, bool]:
    """Returns a plan with the front around it, and True where Ctrl-C ended the search early.

    Raises ConfigError for the plan of a traced module, and the errors of the search.
    """
    from parplan.commands.launcher_plans import described_plan
    from parplan.commands.options.search_options import SearchFlags
    from parplan.commands.requests.requests import FRONT, options_of
    from parplan.commands.searching import answer_front, described_question
    from parplan.planner.search.what_if import request_of_plan

    plan = described_plan(reported.plan, Path(reported.name), hint="leave --front out")
    flags = SearchFlags(objective=FRONT, time_limit=time_limit)
    request = replace(request_of_plan(plan), options=options_of(flags))
    front, interrupted = answer_front(described_question(request, flags), flags.points)
    return replace(reported, front=front), interrupted


def _plans(
    plan_files: Sequence[Path],
    baseline: tuple[str, ...],
    to: tuple[str, ...] | None,
    time_limit: float | None,
    *,
    trace: bool,
    trust: bool,
) -> list[ReportedPlan]:
    from parplan.commands import user_modules
    from parplan.commands.launcher_plans import read_plans
    from parplan.commands.options.target_options import TargetOptions
    from parplan.planner.baselines.systems import baseline_names
    from parplan.planner.plan.traced_plan import TracedPlan

    baselines = () if baseline == (NONE,) else baseline_names(baseline)
    targets = _targets(to)
    read = list(zip(plan_files, read_plans(plan_files, TargetOptions()), strict=True))
    plans = []
    for path, plan in read:
        if trace and isinstance(plan, TracedPlan):
            user_modules.say_module(plan, path, trust=trust)
            plans.append(_traced(path, plan, baselines))
        else:
            plans.append(_reported(path, plan, baselines, targets, time_limit))
    return plans


def _targets(to: tuple[str, ...] | None) -> Sequence[Target] | None:
    """Returns the launchers of --to, None where it is not given. Raises ConfigError."""
    from parplan.planner.export.targets import TARGETS, target_named

    if to is None:
        return None
    if to == (NONE,):
        return ()
    return tuple(TARGETS.values()) if to == (ALL,) else tuple(map(target_named, to))


def _reported(
    path: Path,
    plan: AnyPlan,
    baselines: Sequence[str],
    targets: Sequence[Target] | None,
    time_limit: float | None,
) -> ReportedPlan:
    """Returns a plan with all that its page computes again."""
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.profiles.errors import ConfigError
    from parplan.report.page.reported_plan import ReportedPlan

    run = _run_line(path, plan)
    missing = (
        "The plan of a traced module has no timeline, no memory over the step and no baselines "
        "here: they need the module, which plan report --trace imports. It has no exports."
    )
    if not isinstance(plan, TracedPlan):
        try:
            snippets = run, *_exported(path, plan, targets)
            return _priced(path, plan, baselines, snippets, time_limit)
        except ConfigError as error:
            missing = f"There is no timeline, and there are no baselines and no exports: {error}."
    return ReportedPlan(name=escaped(str(path)), plan=plan, snippets=(run,), missing=(missing,))


def _run_line(path: Path, plan: AnyPlan) -> Snippet:
    from parplan.executor.placed_layers import torchrun_line
    from parplan.planner.export.files.quoting import shell_word
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.report.page.reported_plan import Snippet

    title, file = "Run with parplan's executor", shell_word(str(path))
    if isinstance(plan, TracedPlan) or plan.batch_share is None:
        return Snippet(title=title, text=torchrun_line(plan, file))
    # the nodes of the other pools are not in this file
    return Snippet(
        title=f"{title}: one job of the plan files of all pools",
        text=f"torchrun --nnodes ALL_NODES ... -m parplan.executor {file} OTHER_POOLS.yaml",
    )


def _traced(path: Path, plan: TracedPlan, baselines: Sequence[str]) -> ReportedPlan:
    """Returns the plan of a module that is traced again, with its timeline and its baselines.

    The baselines are those of `baselines` that a traced plan has, or all of these. Raises
    ConfigError where the module cannot be traced or is another one now.
    """
    from parplan.commands.user_modules import traced_again
    from parplan.planner.request import SearchOptions
    from parplan.planner.runs.held_activations import held_activations
    from parplan.planner.runs.timelines import predicted_timeline
    from parplan.planner.traced.compare_traced import ALL, compare_traced, traced_baseline_names
    from parplan.planner.traced.traced_strategy import reprice_traced
    from parplan.report.page.reported_plan import ReportedPlan

    model = traced_again(plan)
    today = reprice_traced(plan, model)
    timeline = predicted_timeline(today.strategy, today.price_cache)
    known = traced_baseline_names((ALL,))
    names = tuple(name for name in known if name in baselines) or known
    return ReportedPlan(
        name=escaped(str(path)),
        plan=plan,
        timeline=timeline,
        held=held_activations(today.strategy, today.price_cache, timeline),
        comparison=compare_traced(plan, model, names, SearchOptions()) if baselines else None,
        snippets=(_run_line(path, plan),),
        missing=("The plan of a traced module has no exports.",),
    )


def _priced(
    path: Path,
    plan: Plan,
    baselines: Sequence[str],
    snippets: tuple[Snippet, ...],
    time_limit: float | None,
) -> ReportedPlan:
    """Returns a plan with its timeline and its baselines. Raises ConfigError without a price."""
    from parplan.costmodels.usage.rank_traffic import rank_traffic
    from parplan.planner.deadline import NEVER
    from parplan.planner.launchers.compare_described import compare
    from parplan.planner.plan.reprice import reprice
    from parplan.planner.request import SearchOptions
    from parplan.planner.runs.held_activations import held_activations
    from parplan.planner.runs.timelines import predicted_timeline
    from parplan.report.page.reported_plan import ReportedPlan

    today = reprice(plan)
    timeline = predicted_timeline(today.strategy, today.price_cache)
    deadline = _baselines_deadline(plan, time_limit)
    names = baselines if deadline is NEVER else sorted(baselines, key=SLOWEST.__eq__)
    comparison = compare(plan, names, SearchOptions(deadline=deadline)) if names else None
    unpriced = comparison.unpriced if comparison else ()
    missing = (
        f"There was no time for the baselines {', '.join(unpriced)}: plan report --time-limit "
        "SECONDS gives them more.",
    )
    return ReportedPlan(
        name=escaped(str(path)),
        plan=plan,
        timeline=timeline,
        held=held_activations(today.strategy, today.price_cache, timeline),
        sent=tuple(
            rank_traffic(today.strategy, rank, today.price_cache) for rank in range(plan.mesh.pp)
        ),
        comparison=comparison,
        snippets=snippets,
        missing=missing if unpriced else (),
    )


def _baselines_deadline(plan: Plan, time_limit: float | None) -> Deadline:
    """Returns the end of the searches for baselines. Raises ConfigError."""
    from parplan.planner.deadline import MANY_GPUS, cpu_deadline, cpu_s, deadline_after

    if time_limit is not None or plan.cluster.num_gpus <= MANY_GPUS:
        return deadline_after(time_limit)
    return cpu_deadline(cpu_s() + BASELINES_CPU_S)


def _exported(path: Path, plan: Plan, targets: Sequence[Target] | None) -> Iterator[Snippet]:
    """Yields the command of each export and its files; a plan that has none says why.

    Programs that an export copies are left out.
    """
    from parplan.planner.export.exported import export_plan
    from parplan.planner.export.files.quoting import shell_word
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
            text=f"plan export {shell_word(str(path))} --to {target.name}",
            lost=lost,
            files={file: text for file, text in export.files.items() if not file.endswith(".py")},
        )
