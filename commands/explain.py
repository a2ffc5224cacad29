"""`plan explain`: a plan in sentences, or the strategies of every operator with their prices."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from parplan.commands.options.layout_options import degree, micro_batch_option, zero_option
from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import LAYOUT
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.style import INTERRUPTED, Command, given_options, option, print_json
from parplan.commands.worker_pool import in_processes

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
    as_json: bool,
) -> None:
    """Say in sentences why a plan is the best, what holds it back, and where the choice flips.

    Without a plan file, list the strategies of every operator with their prices, and why others
    are rejected. A plan is explained by further searches with one change each; the pins that it was
    found with are not in its file.
    """
    if plan_file is not None:
        require_no_others(click.get_current_context(), "plan_file", "as_json")
        _explain_plan(plan_file, as_json=as_json)
        return
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


def _explain_plan(plan_file: Path, *, as_json: bool) -> None:
    from parplan.commands.launcher_plans import described_plan, read_plans
    from parplan.planner.plan.reprice import reprice
    from parplan.planner.search.what_if import questions_about, reply_to
    from parplan.report.plans.explanation_document import explanation_document
    from parplan.report.plans.explanation_text import print_explanation
    from parplan.report.text import console

    (plan,) = read_plans((plan_file,), TargetOptions())
    plan = reprice(described_plan(plan, plan_file, hint="use the plan of a described model")).plan
    found, interrupted = in_processes(partial(reply_to, plan), questions_about(plan), "questions")
    if not found:
        raise KeyboardInterrupt
    replies = dict(found)
    if as_json:
        print_json(explanation_document(plan, replies))
    else:
        print_explanation(plan, replies, console(sys.stdout))
        if interrupted:
            click.echo("\nstopped early (Ctrl-C): the questions without an answer are left out")
    if interrupted:
        sys.exit(INTERRUPTED)
