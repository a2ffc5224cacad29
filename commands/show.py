"""`plan show`: prints the contents of a plan file. All but click is imported where it is used."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parplan.commands import user_modules
from parplan.commands.next_command import at_launchers
from parplan.commands.options.failure_options import FailureOptions, failure_options
from parplan.commands.options.launcher_options import launcher_options
from parplan.commands.options.result_options import as_json
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.output import chosen_ranks, print_plan, print_plan_json
from parplan.commands.style import Command, option, print_json, wrote_picture

_CHUNKS = "Chunks"
_INSTRUCTIONS = "Instructions"


@click.command(
    "show",
    cls=Command,
    epilog=(
        "  plan show plan.yaml\n  plan show plan.yaml --json | jq .predicted.step_time_s\n"
        "  plan show plan.yaml --chunks --plot moments.png\n"
        "  plan show plan.yaml --instructions --rank 0\n  plan show run.json"
    ),
)
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@option(
    _CHUNKS,
    "--chunks",
    is_flag=True,
    help="Print the fullest moments of a GPU instead, for a plan with chunks.",
)
@option(
    _CHUNKS,
    "--rank",
    type=click.IntRange(0),
    metavar="N",
    help="Pipeline rank of that GPU, or of --instructions. [default: the rank that moves most, or "
    "all]",
)
@option(
    _CHUNKS,
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for a plot of every moment: .png, .svg or .pdf.",
)
@option(
    _INSTRUCTIONS,
    "--instructions",
    is_flag=True,
    help="Print what every pipeline rank does in a step instead: passes, sends and receives.",
)
@failure_options
@launcher_options
@as_json
def show(
    plan_file: Path,
    chunks: bool,
    rank: int | None,
    plot: Path | None,
    instructions: bool,
    failing: FailureOptions,
    stated: TargetOptions,
    as_json: bool,
) -> None:
    """Print a plan file: summary, layer plans, chunks, placements and redundancy.

    A launcher's own configuration is read as a plan. For the file of a run, run.json, print
    predictions beside measurements. The line idle is the share of the step in which a pipeline
    stage waits, for its turn in the schedule (the bubble) or for a transfer: the mean, then each
    stage.
    """
    from parplan.commands.launcher_plans import read_plans
    from parplan.commands.requests.failures import failures_of
    from parplan.planner.plan.tower_cost import tower_cost
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.planner.runs.run_file import is_run
    from parplan.report.plans.chunk_tables import print_chunks
    from parplan.report.plans.layer_table import print_layers
    from parplan.report.plans.redundancy_table import print_redundancy
    from parplan.report.plans.summary_context import SummaryContext
    from parplan.report.plans.tower_text import print_tower
    from parplan.report.text import console

    if is_run(plan_file):
        if chunks or instructions or rank is not None or plot is not None:
            wrong = "--instructions" if instructions else "--chunks"
            raise click.UsageError(
                f"{plan_file} is of a run, {wrong} is for plans: give the plan that was run"
            )
        _show_run(plan_file, as_json=as_json)
        return
    if chunks and instructions:
        raise click.UsageError("--chunks and --instructions are two outputs: choose one")
    if instructions and plot is None:
        _show_instructions(plan_file, rank, as_json=as_json)
        return
    if chunks:
        _show_chunks(plan_file, rank, plot, as_json=as_json)
        return
    if rank is not None or plot is not None:
        raise click.UsageError(
            "--plot is for --chunks" if plot else "--rank is for --chunks and --instructions"
        )
    (plan,) = read_plans([plan_file], stated)
    failures, assumed = failures_of(failing, plan.cluster)
    if as_json:
        print_plan_json(plan, failures=failures)
        return
    out = console(sys.stdout)
    context = SummaryContext(
        whole=True,
        plan_file=str(plan_file),
        assumed=assumed,
        failures=failures,
        launchers=at_launchers(plan, every=True),
    )
    print_plan(plan, out, context)
    if isinstance(plan, TracedPlan):
        print_chunks(plan, out)
        return
    print_tower(plan, tower_cost(plan), out)
    print_layers(plan, out)
    print_chunks(plan, out)
    print_redundancy(plan, out)


def _show_run(run_file: Path, *, as_json: bool) -> None:
    from parplan.planner.runs.run_file import read_run
    from parplan.report.runs.run_table import print_record
    from parplan.report.text import console

    run = read_run(run_file)
    if as_json:
        print_json(run)
    else:
        print_record(run, console(sys.stdout))


def _show_instructions(plan_file: Path, rank: int | None, *, as_json: bool) -> None:
    from parplan.executor.placed_layers import plan_instructions
    from parplan.planner.plan.plan_file import read_any_plan
    from parplan.report.plans.instruction_text import instructions_document, print_instructions
    from parplan.report.text import console

    plan = read_any_plan(plan_file)
    ranks = chosen_ranks(plan, () if rank is None else (rank,))
    if as_json:
        print_json(instructions_document(plan, plan_instructions(plan), ranks))
    else:
        print_instructions(plan, plan_instructions(plan), ranks, console(sys.stdout))


def _show_chunks(plan_file: Path, rank: int | None, plot: Path | None, *, as_json: bool) -> None:
    from parplan.planner.plan.chunk_levels import levels
    from parplan.planner.plan.plan_chunks import busiest_rank, rank_chunks_of, require_chunks
    from parplan.planner.plan.plan_file import read_any_plan
    from parplan.planner.plan.plan_strategy import prices_of_plan
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.report.plans.chunk_tables import levels_document, print_levels
    from parplan.report.plots.chunk_plot import draw_levels
    from parplan.report.plots.scatter_plot import require_plot
    from parplan.report.text import console

    if plot:
        require_plot(plot)
    plan = read_any_plan(plan_file)
    rank = busiest_rank(plan) if rank is None else rank
    require_chunks(plan, rank)
    if isinstance(plan, TracedPlan):
        rank_chunks, prices = user_modules.chunks_of_module(plan, plan_file, rank)
    else:
        rank_chunks, prices = rank_chunks_of(plan, rank), prices_of_plan(plan)
    moments = levels(rank_chunks, prices)
    if plot:
        kept = draw_levels(moments, plan, rank, rank_chunks.device_bytes, plot)
    if as_json:
        print_json(levels_document(moments, rank, rank_chunks.device_bytes))
    else:
        print_levels(moments, rank, rank_chunks, console(sys.stdout))
    if plot:
        wrote_picture(plot, kept, to_stderr=as_json)
