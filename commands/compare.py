"""`plan compare`: a plan beside the strategies of other systems, under the same prices."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from parplan.commands.options import (
    AIM,
    BASELINES,
    PinOptions,
    SearchFlags,
    TargetOptions,
    as_json,
    search_options,
    target_options,
)
from parplan.commands.searching import answer, described_question
from parplan.commands.style import INTERRUPTED, Command, List, option, print_json

# Options that a plan file leaves open.
_WITH_A_PLAN = ("memory_margin", "memory_limit", "baseline", "as_json", "plan_file", "time_limit")


@click.command(
    cls=Command,
    epilog="  plan compare plan.yaml\n  plan compare --model gpt-20b --gpus 64 --baseline "
    "megatron,zero-3\n"
    "  plan compare --model llama2-7b --gpus 16 --baseline all --json | jq '.baselines[] | {name, "
    "slower}'",
)
@click.argument("plan_file", metavar="[PLAN]", type=click.Path(path_type=Path), required=False)
@option(
    BASELINES,
    "--baseline",
    type=List(click.STRING),
    default="megatron",
    show_default=True,
    metavar="NAME,..",
    help="Systems to compare with: megatron (with megatron-defaults and megatron-guide), zero-1, "
    "zero-2, zero-3, fsdp, all.",
)
@target_options
@option(
    AIM,
    "--objective",
    type=click.Choice(("throughput", "memory", "peak")),
    default="throughput",
    show_default=True,
    help="Objective of our plan, if no plan file is given.",
)
@search_options
@as_json
@click.pass_context
def compare(
    ctx: click.Context,
    plan_file: Path | None,
    baseline: tuple[str, ...],
    target: TargetOptions,
    pins: PinOptions,
    flags: SearchFlags,
    as_json: bool,
) -> int:
    """Compare a plan with the strategies of other systems under the same prices.

    Without a plan file, the plan is searched first. The output explains the difference: compute,
    bubble, exposed communication, recompute, and memory by class.
    """
    from parplan.commands.requests.requests import constraints_of, options_of, request_of
    from parplan.planner.baselines.systems import baseline_names
    from parplan.planner.objective import Objective
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.plan_file import read_plan
    from parplan.planner.request import Constraints
    from parplan.planner.search.comparison import compare
    from parplan.report.searches.comparison_tables import comparison_document, print_comparison
    from parplan.report.text import console

    if plan_file:
        _require_alone(ctx)
    names = baseline_names(baseline)
    options, constraints = options_of(flags), constraints_of(pins, target)
    assumed: tuple[str, ...] = ()
    interrupted = False
    if plan_file:
        plan = read_plan(plan_file)
    else:
        request = replace(
            request_of(target),
            objective=Objective(flags.objective),
            constraints=constraints,
            options=options,
        )
        question = described_question(request.until(options.deadline.share(2)), flags)
        ours, interrupted = answer(question)
        assert isinstance(ours, Plan), "the model is described"
        plan, assumed = ours, question.assumed_of(ours)
    comparison = compare(plan, names, options)
    if as_json:
        print_json(comparison_document(comparison))
    else:
        pinned = constraints != Constraints()
        print_comparison(comparison, console(sys.stdout), assumed=assumed, pinned=pinned)
    return INTERRUPTED if interrupted else 0


def _require_alone(ctx: click.Context) -> None:
    """Raises UsageError for an option that a plan file has already decided."""
    for param in ctx.command.params:
        given = ctx.get_parameter_source(param.name or "") is click.core.ParameterSource.COMMANDLINE
        if given and param.name not in _WITH_A_PLAN:
            raise click.UsageError(
                f"{param.opts[0]} and a plan file exclude each other: the plan has decided it", ctx
            )
