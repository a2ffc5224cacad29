"""`plan explain`: a plan in sentences, or the strategies of every operator with their prices."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from parplan.commands.options.layout_options import degree, micro_batch_option, zero_option
from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import LAYOUT, SEARCH
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.style import (
    LONGEST_S,
    Command,
    Number,
    given_options,
    noticing_ctrl_c,
    option,
    print_json,
)
from parplan.profiles.interrupts import INTERRUPTED

AXIS, GRID = "tensor-parallel axis", "rows and the columns of the tensor-parallel grid"


@click.command(
    cls=Command,
    epilog="  plan explain plan.yaml\n"
    "  plan explain --model gpt-20b --gpus 64 --tp 8 --operator fc1\n"
    "  plan explain --model llama3-8b --gpus 8 --tp 2 --micro-batch-size 2 --json | jq "
    "'.[].rejected'",
)
@click.argument("plan_file", metavar="[PLAN]", required=False, type=click.Path(path_type=Path))
@target_options
@degree("tp", "Tensor parallel degree.", default=8)
@degree("tp-rows", "Rows of the grid of tensor parallel ranks: above 1 products lie in 2-D.")
@micro_batch_option
@zero_option("ZeRO stage of the states.")
@option(
    LAYOUT,
    "--weights-over-data",
    is_flag=True,
    help="List those of a block over dp and tp, where both may divide weights.",
)
@option(LAYOUT, "--operator", metavar="NAME", help="Operator to list. [default: all]")
@option(
    SEARCH,
    "--time-limit",
    type=Number(max=LONGEST_S),
    metavar="SECONDS",
    help="Time after which no further question about a plan file is asked. [default: none up to "
    "2,048 GPUs, else twice the CPU time of the plan's own search, or 7 s]",
)
@as_json
def explain(
    plan_file: Path | None,
    target: TargetOptions,
    tp: int,
    tp_rows: int,
    micro_batch_size: int,
    zero: int,
    weights_over_data: bool,
    operator: str | None,
    time_limit: float | None,
    as_json: bool,
) -> None:
    """Say in sentences why a plan is the best, what holds it back, and where the choice flips.

    Without a plan file, list the strategies of every operator with their prices, and why others
    are rejected. A plan is explained by further searches with one change each; the pins that it was
    found with are not in its file. Of changes that there was no time for it says bounds, or names
    them.
    """
    if plan_file is not None:
        require_no_others(click.get_current_context(), "plan_file", "time_limit", "as_json")
        _explain_plan(plan_file, time_limit, as_json=as_json)
        return
    if time_limit is not None:
        raise click.UsageError("--time-limit is for a plan file: name one, or leave it out")
    if target.model is None:
        raise click.UsageError("a plan file is missing, or the --model of the operators to list")
    from parplan.commands.requests.layouts import layout_prices
    from parplan.commands.requests.requests import request_of
    from parplan.planner.layer_options.operator_strategies import operator_strategies
    from parplan.report.plans.format_notes import format_notes
    from parplan.report.plans.strategy_table import print_strategies, strategies_document
    from parplan.report.text import console

    layout, price_cache = layout_prices(request_of(target), tp, micro_batch_size, tp_rows)
    layout = replace(layout, weights_over_data=weights_over_data and layout.mesh.dp > 1)
    strategies = list(operator_strategies(layout, zero, price_cache, operator))
    if as_json:
        print_json(strategies_document(strategies))
    else:
        axes = GRID if tp_rows > 1 else AXIS
        if layout.weights_over_data:
            axes = f"data-parallel and the {AXIS}"
        capability = price_cache.machine.cluster.device.compute_capability
        notes = format_notes(price_cache.training, capability)
        print_strategies(strategies, console(sys.stdout), f"{axes} of {layout.mesh}", notes)


def require_no_others(ctx: click.Context, *names: str) -> None:
    """Raises UsageError for an option beside those that a plan file leaves a meaning."""
    for param in given_options(ctx):
        if param.name not in names:
            raise click.UsageError(
                f"{param.opts[0]} is for the strategies of operators: leave out the plan file"
            )


def _explain_plan(plan_file: Path, time_limit: float | None, *, as_json: bool) -> None:
    from parplan.commands.launcher_plans import described_plan, read_plans
    from parplan.planner.deadline import deadline_after
    from parplan.planner.launchers.near_settings import near_settings
    from parplan.planner.plan.reprice import reprice
    from parplan.planner.search.asked_plan import CTRL_C, replies_about
    from parplan.planner.search.largest_model import SearchWatch
    from parplan.planner.search.what_if import request_of_plan
    from parplan.report.plans.explanation_document import explanation_document
    from parplan.report.plans.explanation_text import print_explanation
    from parplan.report.progress_bars import front_bar
    from parplan.report.text import console

    deadline = deadline_after(time_limit)
    (plan,) = read_plans((plan_file,), TargetOptions())
    plan = reprice(described_plan(plan, plan_file, hint="use the plan of a described model")).plan
    searches = near_settings(plan, request_of_plan(plan).until(deadline))
    with noticing_ctrl_c() as interrupts, front_bar(console(sys.stderr), "questions") as (_, begin):
        watch = SearchWatch(on_search=begin, interrupted=lambda: bool(interrupts))
        replies = replies_about(plan, deadline, watch, searches)
    if as_json:
        print_json(explanation_document(plan, replies))
    else:
        print_explanation(plan, replies, console(sys.stdout))
    if replies.stopped == CTRL_C:
        sys.exit(INTERRUPTED)
