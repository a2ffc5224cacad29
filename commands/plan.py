"""`plan`: finds the best plan of a request, or the front of its objectives, and writes it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands import user_modules
from parplan.commands.next_command import at_launchers
from parplan.commands.options.failure_options import FailureOptions, failure_options
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.result_options import (
    STDOUT,
    ResultOptions,
    as_json,
    packed_result,
    verbose_option,
)
from parplan.commands.options.search_options import (
    SearchFlags,
    explain_option,
    launcher_option,
    method_options,
    objective_options,
    pools_option,
    search_options,
)
from parplan.commands.options.sections import OUTPUT
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.options.trace_options import TraceOptions, trace_options
from parplan.commands.output import deliver, require_output, warn_of_solver
from parplan.commands.program_file import ProgramFile
from parplan.commands.searching import (
    NO_LAUNCHER,
    Question,
    answer,
    answer_front,
    choosing_spares,
    described_question,
    print_unsearched,
    with_failures,
)
from parplan.commands.style import (
    Main,
    given_options,
    option,
    print_json,
    show_version,
    tell,
    tell_kept,
    wrote_picture,
)
from parplan.profiles.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from parplan.commands.launcher_searches import LauncherQuestion
    from parplan.planner.plan.traced_plan import AnyPlan
    from parplan.planner.search.pareto import ParetoFront
    from parplan.report.plans.summary_context import SummaryContext


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
@launcher_option
@pools_option
@search_options
@method_options
@failure_options
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
@option(
    OUTPUT,
    "--write-lp",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for the integer program that certifies the plan: .lp or .mps, which HiGHS, SCIP and "
    "others read.",
)
@verbose_option
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
    failing: FailureOptions,
    result: ResultOptions,
) -> int | None:
    """Find the fastest way to train a model on a number of GPUs, and write it as a plan that runs.

    Needs no GPU: a cost model prices the step times. The plan goes to plan.yaml, its summary to
    the terminal.
    """
    if ctx.invoked_subcommand is not None:
        _require_none_before(ctx)
        return None
    from parplan.commands.launcher_searches import any_able, launcher_questions
    from parplan.commands.requests.failures import chooses_spares, without_goodput
    from parplan.commands.requests.launchers import (
        launchers_to_search,
        require_described,
        require_fastest,
        with_launcher,
    )
    from parplan.commands.requests.requests import (
        all_assumed,
        is_fastest_alone,
        request_of,
        require_front,
        require_method,
        require_no_front,
        require_shares,
    )

    front = flags.objective == "pareto"
    assert result.output is not None, "the option has a default"
    source = user_modules.source_of(target, tracing)
    require_shares(flags, failures=failing.mtbf is not None)
    choosing = chooses_spares(flags, failing, described=source is None)
    flags = without_goodput(flags, failing)
    require_method(flags, described=source is None)
    if front:
        require_front(flags, result.output, result.plot)
    else:
        require_no_front(flags, result.plot)
        require_output(result.output)
    program_file = None
    if result.write_lp is not None:
        program_file = ProgramFile(result.write_lp)
        program_file.require_possible(flags, result.output)
        flags = replace(flags, on_program=program_file.keep)
    if source is None:
        fastest_alone = is_fastest_alone(flags) and not choosing
        names = launchers_to_search(target, flags, fastest_alone=fastest_alone)
        require_fastest(flags, names, fastest_alone=fastest_alone)
        if flags.launchers is None or len(names) > 1:
            questions = launcher_questions(names, target, pins, flags)
            if len(names) > 1 and (flags.launchers or any_able(questions)):
                again = partial(launcher_questions, target=target, pins=pins, flags=flags)
                return _search_launchers(
                    questions, again, target, flags, failing, result, program_file
                )
            names = names if any_able(questions) else (NO_LAUNCHER,)
        target = with_launcher(target, names[0])
        request = request_of(target, pins, flags, pools=flags.launcher is None)
        if flags.pools == "data":
            from parplan.commands.pool_shares import share_batch

            return share_batch(request, all_assumed(request, flags), result)
        question = described_question(request, flags, names[0])
    else:
        require_described(flags.launchers)
        question = user_modules.traced_question(source, target, tracing, pins, flags)
    question = with_failures(question, failing)
    if choosing:
        question = choosing_spares(question)
    if flags.explain:
        print_unsearched(question, to_stderr=result.as_json or result.output == STDOUT)
    if front:
        return _front(question, target, flags, result)
    return _search(question, target, flags, result, program_file)


def _require_none_before(ctx: click.Context) -> None:
    """Raises UsageError for an option that stands before the name of another command."""
    for param in given_options(ctx):
        raise click.UsageError(
            f"{param.opts[0]} stands before {ctx.invoked_subcommand}: options go after the command"
        )


def _search(
    question: Question,
    target: TargetOptions,
    flags: SearchFlags,
    result: ResultOptions,
    program_file: ProgramFile | None,
) -> int:
    from parplan.report.plans.summary_context import SummaryContext

    plan, interrupted = answer(question)
    warn_of_solver(plan)
    context = SummaryContext(
        assumed=question.assumed_of(plan),
        elapsed_s=time.monotonic() - question.started_s,
        interrupted=interrupted,
        whole=result.verbose,
        profile=target.profile or "",
        plan_file=result.plan_file,
        failures=question.failures,
        launchers=() if result.as_json else at_launchers(plan, every=False),
        ruled=question.factory.request.constraints.recompute_first_stage is not None,
    )
    deliver(plan, context, result.output, as_json=result.as_json)
    _write_program(program_file, plan)
    if flags.explain:
        to_stderr = result.as_json or result.output == STDOUT
        question.explained(plan, to_stderr)
    return INTERRUPTED if interrupted else 0


def _search_launchers(
    questions: list[LauncherQuestion],
    again: Callable[..., list[LauncherQuestion]],
    target: TargetOptions,
    flags: SearchFlags,
    failing: FailureOptions,
    result: ResultOptions,
    program_file: ProgramFile | None,
) -> int:
    """Searches the best plan of each launcher, and writes the fastest or the preferred of them.

    again    asks the same of some launchers once more
    """
    from parplan.commands.launcher_searches import answer_launchers
    from parplan.report.plans.summary_context import SummaryContext

    table, interrupted = answer_launchers(questions, flags)
    plan = table.plan
    (asked,) = (each.question for each in questions if each.launcher == table.chosen)
    assert asked is not None, "the launcher has a plan"
    question = with_failures(asked, failing)
    for each in table.plans:
        warn_of_solver(each)
    context = SummaryContext(
        assumed=question.assumed_of(plan),
        elapsed_s=time.monotonic() - question.started_s,
        interrupted=interrupted,
        whole=result.verbose,
        profile=target.profile or "",
        plan_file=result.plan_file,
        failures=question.failures,
        table=table,
    )
    deliver(plan, context, result.output, as_json=result.as_json)
    _write_program(program_file, plan)
    if flags.explain:
        to_stderr = result.as_json or result.output == STDOUT
        (fresh,) = again((table.chosen,), flags=replace(flags, time_limit=None))
        print_unsearched(fresh.question or question, to_stderr=to_stderr)
        question.explained(plan, to_stderr)
    return INTERRUPTED if interrupted else 0


def _write_program(program_file: ProgramFile | None, plan: AnyPlan) -> None:
    """Writes the program that certifies a plan where the user asked for it."""
    if program_file is not None:
        tell_kept(program_file.write(plan))
        tell(f"wrote {program_file.path}: the program that certifies the plan")


def _front(
    question: Question, target: TargetOptions, flags: SearchFlags, result: ResultOptions
) -> int:
    from parplan.report.plans.summary_context import SummaryContext

    assert result.output is not None, "the option has a default"
    front, interrupted = answer_front(question, flags.points)
    context = SummaryContext(
        assumed=question.assumed_of(front.points[0].plan),
        elapsed_s=time.monotonic() - question.started_s,
        interrupted=interrupted,
        whole=result.verbose,
    )
    _deliver_front(front, context, result.output, result)
    return INTERRUPTED if interrupted else 0


def _deliver_front(
    front: ParetoFront, context: SummaryContext, output: Path, result: ResultOptions
) -> None:
    """Writes a plan file for every point, the table and the picture.

    All plans are written or none. A file that cannot be written does not lose the table.
    """
    from parplan.planner.plan.plan_file import write_plans
    from parplan.planner.search.pareto import plan_paths
    from parplan.report.searches.front_document import front_document
    from parplan.report.searches.front_table import print_front
    from parplan.report.text import console

    paths = plan_paths(output, len(front.points))
    plans = (point.plan for point in front.points)
    kept: Mapping[Path, Path | None] = {}
    try:
        kept = write_plans(dict(zip(paths, plans, strict=True)))
    finally:
        if result.as_json:
            print_json(front_document(front, paths, context.elapsed_s or 0.0))
        else:
            print_front(front, paths, console(sys.stdout), context)
    tell_kept(*kept.values())
    beyond = plan_paths(output, len(paths) + 1)[-1]
    if beyond.exists():
        tell(f"note: {beyond} and the files after it are of an earlier front")
    if result.plot:
        from parplan.report.plots.front_plot import draw_front

        wrote_picture(result.plot, draw_front(front, result.plot), to_stderr=result.as_json)
