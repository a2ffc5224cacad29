"""`plan`: finds the best plan of a request, or the front of its objectives, and writes it."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands import user_modules
from parplan.commands.options import (
    OUTPUT,
    STDOUT,
    PinOptions,
    ResultOptions,
    SearchFlags,
    TargetOptions,
    TraceOptions,
    as_json,
    explain_option,
    objective_options,
    packed_result,
    search_options,
    target_options,
    trace_options,
)
from parplan.commands.output import deliver, require_output, warn_of_solver
from parplan.commands.searching import find, print_unsearched, with_module
from parplan.commands.style import (
    INTERRUPTED,
    Main,
    noticing_ctrl_c,
    option,
    print_json,
    show_version,
)

if TYPE_CHECKING:
    from parplan.planner.search.pareto import ParetoFront
    from parplan.report.plans.summary import SummaryContext


@click.group(
    "plan",
    cls=Main,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND]",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="  plan --model gpt-20b --gpus 64\n  plan --model llama3-70b --gpus 128 --gpu "
    "h100-80gb --objective memory --tp 4,8\n"
    "  plan --model gpt-20b --gpus 64 --objective pareto --plot front.png",
)
@target_options
@trace_options
@objective_options
@search_options
@explain_option
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="plan.yaml",
    show_default=True,
    help="Plan file to write; - for stdout. A front goes to plan-01.yaml, ...",
)
@option(
    OUTPUT,
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for a plot of the front: .png, .svg or .pdf.",
)
@as_json
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_version,
    help="Show the version and exit.",
)
@click.pass_context
@packed_result
def main(
    ctx: click.Context,
    target: TargetOptions,
    tracing: TraceOptions,
    pins: PinOptions,
    flags: SearchFlags,
    result: ResultOptions,
) -> int | None:
    """Find the fastest way to train a model on a number of GPUs, and write it as a plan that runs.

    Needs no GPU: a cost model prices the step times. The plan goes to plan.yaml, its summary to
    the terminal.
    """
    if ctx.invoked_subcommand is not None:
        _require_none_before(ctx)
        return None
    source = user_modules.source_of(target, tracing)
    if source is not None:
        return user_modules.search(source, target, tracing, pins, flags, result)
    if flags.objective == "pareto":
        return _front(target, pins, flags, result)
    return _search(target, pins, flags, result)


def _require_none_before(ctx: click.Context) -> None:
    """Raises UsageError for an option that stands before the name of another command."""
    for param in ctx.command.params:
        name = param.name or ""
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{param.opts[0]} stands before {ctx.invoked_subcommand}: options go after the "
                f"command"
            )


def _search(
    target: TargetOptions, pins: PinOptions, flags: SearchFlags, result: ResultOptions
) -> int:
    from parplan.commands.requests.pins import require_possible
    from parplan.commands.requests.requests import (
        all_assumed,
        offload_assumed,
        request_of,
        require_no_front,
    )

    require_no_front(flags, result.plot)
    require_output(result.output)
    request = request_of(target, pins, flags)
    if flags.explain:
        print_unsearched(request, to_stderr=result.as_json or result.output == STDOUT)
    require_possible(request)
    started_s = time.monotonic()
    plan, interrupts = find(request)
    from parplan.report.plans.summary import SummaryContext

    warn_of_solver(plan)
    context = SummaryContext(
        assumed=(*all_assumed(request, flags), *offload_assumed(request.constraints, plan)),
        elapsed_s=time.monotonic() - started_s,
        interrupted=bool(interrupts),
        profile=target.profile or "",
        plan_file=result.plan_file,
    )
    deliver(plan, context, result.output, as_json=result.as_json)
    return INTERRUPTED if interrupts else 0


def _front(
    target: TargetOptions, pins: PinOptions, flags: SearchFlags, result: ResultOptions
) -> int:
    from parplan.commands.requests.pins import require_possible
    from parplan.commands.requests.requests import all_assumed, request_of, require_front
    from parplan.planner.search.pareto import DEFAULT_POINTS, find_front
    from parplan.report.plans.summary import SummaryContext
    from parplan.report.progress_bars import front_bar
    from parplan.report.text import console

    assert result.output is not None, "the option has a default"
    require_front(flags, result.output, result.plot)
    request = request_of(target, pins, flags)
    if flags.explain:
        print_unsearched(request, to_stderr=result.as_json)
    require_possible(request)
    started_s = time.monotonic()
    num_points = DEFAULT_POINTS if flags.points is None else flags.points
    with (
        noticing_ctrl_c() as interrupts,
        front_bar(console(sys.stderr)) as (on_progress, on_search),
    ):
        front = find_front(request, num_points, on_progress, on_search)
    points = (replace(point, plan=with_module(point.plan, request)) for point in front.points)
    context = SummaryContext(
        assumed=all_assumed(request, flags),
        elapsed_s=time.monotonic() - started_s,
        interrupted=bool(interrupts),
    )
    _deliver_front(replace(front, points=tuple(points)), context, result.output, result)
    return INTERRUPTED if interrupts else 0


def _deliver_front(
    front: ParetoFront, context: SummaryContext, output: Path, result: ResultOptions
) -> None:
    """Writes a plan file for every point, the table and the picture.

    A file that cannot be written does not lose the table.
    """
    from parplan.planner.plan.plan_file import write_plan
    from parplan.planner.search.pareto import plan_paths
    from parplan.report.searches.front_table import front_document, print_front
    from parplan.report.text import console

    paths = plan_paths(output, len(front.points))
    try:
        for point, path in zip(front.points, paths, strict=True):
            write_plan(point.plan, path)
    finally:
        if result.as_json:
            print_json(front_document(front, paths, context.elapsed_s or 0.0))
        else:
            print_front(front, paths, console(sys.stdout), context)
    beyond = plan_paths(output, len(paths) + 1)[-1]
    if beyond.exists():
        click.echo(f"note: {beyond} and what follows is of an earlier front", err=True)
    if result.plot:
        from parplan.report.plots.front_plot import draw_front

        draw_front(front, result.plot)
        click.echo(f"wrote {result.plot}", err=result.as_json)
