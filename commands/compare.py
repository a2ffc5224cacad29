"""`plan compare`: a plan beside the strategies of other systems, under the same prices."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands import user_modules
from parplan.commands.options.launcher_options import vocab_size_option
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.result_options import as_json, trust_module_option
from parplan.commands.options.search_options import SearchFlags, launcher_option, search_options
from parplan.commands.options.sections import AIM, BASELINES
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.searching import answer, described_question
from parplan.commands.style import Command, List, given_options, option, print_json
from parplan.profiles.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from parplan.planner.plan.traced_plan import AnyPlan
    from parplan.planner.request import SearchOptions
    from parplan.planner.search.comparison import ComparedPlan, Comparison

# Options that a plan file leaves open.
_WITH_A_PLAN = (
    "memory_margin",
    "oom_risk",
    "memory_limit",
    "baseline",
    "as_json",
    "plan_files",
    "time_limit",
    "trust_module",
    # what a launcher's file leaves open
    *("model", "seq_length", "vocab_size"),
    *("gpus", "gpu", "gpus_per_node", "cluster", "host_memory", "profile", "force_profile"),
)
DEFAULT = "megatron"


@click.command(
    cls=Command,
    epilog="  plan compare plan.yaml\n  plan compare plan.yaml train.sh --gpu h100-80gb\n"
    "  plan compare --model gpt-20b --gpus 64 --baseline "
    "megatron,zero-3\n"
    "  plan compare --model llama2-7b --gpus 16 --baseline all --json | jq '.baselines[] | {name, "
    "slower}'",
)
@click.argument("plan_files", metavar="[FILE]...", type=click.Path(path_type=Path), nargs=-1)
@option(
    BASELINES,
    "--baseline",
    type=List(click.STRING),
    default=DEFAULT,
    show_default=True,
    metavar="NAME,..",
    help="Systems to compare with: megatron (with megatron-defaults and megatron-guide), "
    "deepspeed-3d, torchtitan, merak, zero-1, zero-2, zero-3, fsdp, all. A traced plan: zero-0 to "
    "zero-3, 1f1b, 1f1b-recompute, by default all.",
)
@target_options
@vocab_size_option
@option(
    AIM,
    "--objective",
    type=click.Choice(("throughput", "memory", "peak")),
    default="throughput",
    show_default=True,
    help="Objective of our plan, if no plan file is given.",
)
@launcher_option
@search_options
@trust_module_option
@as_json
@click.pass_context
def compare(
    ctx: click.Context,
    plan_files: tuple[Path, ...],
    baseline: tuple[str, ...],
    target: TargetOptions,
    pins: PinOptions,
    flags: SearchFlags,
    trust_module: bool,
    as_json: bool,
) -> int:
    """Compare a plan with the strategies of other systems under the same prices, or with plans.

    Of two and more files the first is set beside the others. A file is a plan or a launcher's own
    configuration, whose machine --gpu and --gpus name where it does not. Without a file, the plan
    is searched first. The output explains the difference: compute, bubble, exposed communication,
    recompute, and memory by class. The plan of a traced module is
    compared with data parallelism and with plain pipelines of the same module, which is traced.
    """
    from parplan.commands.requests.launchers import one_launcher, with_launcher
    from parplan.commands.requests.requests import constraints_of, options_of, request_of
    from parplan.planner.baselines.systems import baseline_names
    from parplan.planner.launchers.compare_described import compare
    from parplan.planner.objective import Objective
    from parplan.planner.plan.plan import Plan
    from parplan.report.searches.comparison_document import comparison_document
    from parplan.report.searches.comparison_tables import print_comparison
    from parplan.report.text import console

    options, constraints = options_of(flags), constraints_of(pins, target)
    assumed: tuple[str, ...] = ()
    interrupted = False
    if plan_files:
        _require_alone(ctx)
        names_given = _given_names(ctx, baseline)
        comparison = _of_files(plan_files, target, names_given, options, trust=trust_module)
    else:
        names = baseline_names(baseline)
        launcher = one_launcher(flags.launchers)
        target = with_launcher(target, launcher)
        request = replace(
            request_of(target, pools=flags.launcher is None),
            objective=Objective(flags.objective),
            constraints=constraints,
            options=options,
        )
        question = described_question(request.until(options.deadline.share(2)), flags, launcher)
        plan, interrupted = answer(question)
        assert isinstance(plan, Plan), "the model is described"
        assumed = question.assumed_of(plan)
        comparison = compare(plan, names, options)
    if as_json:
        print_json(comparison_document(comparison))
    else:
        pinned = not plan_files and constraints != constraints_of(PinOptions(), target)
        print_comparison(comparison, console(sys.stdout), assumed=assumed, pinned=pinned)
    return INTERRUPTED if interrupted else 0


def _given_names(ctx: click.Context, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Returns the baselines of the command line, None where it names none."""
    return names if any(param.name == "baseline" for param in given_options(ctx)) else None


def _of_files(
    files: tuple[Path, ...],
    target: TargetOptions,
    names: tuple[str, ...] | None,
    options: SearchOptions,
    *,
    trust: bool,
) -> Comparison:
    """Compares the plan of a file with baselines of its kind, or with others.

    Raises ConfigError.
    """
    from parplan.commands.launcher_plans import read_plans
    from parplan.planner.baselines.systems import baseline_names
    from parplan.planner.launchers.compare_described import compare
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.planner.search.comparison import plans_side_by_side
    from parplan.planner.traced.compare_traced import ALL, compare_traced, traced_baseline_names

    plans = read_plans(files, target)
    if len(plans) > 1:
        if names is not None:
            raise click.UsageError("--baseline is for one plan: give one file")
        for file, plan in zip(files, plans, strict=True):
            if isinstance(plan, TracedPlan):
                user_modules.say_module(plan, file, trust=trust)
        return plans_side_by_side([*map(side_of, _names(files), plans)], options)
    (plan,) = plans
    if not isinstance(plan, TracedPlan):
        return compare(plan, baseline_names(names or (DEFAULT,)), options)
    chosen = traced_baseline_names(names or (ALL,))
    user_modules.say_module(plan, files[0], trust=trust)
    return compare_traced(plan, user_modules.traced_again(plan), chosen, options)


def _names(files: tuple[Path, ...]) -> tuple[str, ...]:
    """Returns the names of files, with their folders where the names are not enough."""
    short = tuple(file.name for file in files)
    if len(set(short)) == len(files):
        return short
    return tuple(map(str, files))


def side_of(name: str, plan: AnyPlan) -> ComparedPlan:
    """Returns a plan at the prices of today, that of a module after it is traced again."""
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.reprice import reprice
    from parplan.planner.search.comparison import side
    from parplan.planner.traced.traced_strategy import reprice_traced

    if isinstance(plan, Plan):
        today = reprice(plan)
        return side(name, today.plan, today.strategy, today.price)
    traced = reprice_traced(plan, user_modules.traced_again(plan))
    return side(name, traced.plan, traced.strategy, traced.price)


def _require_alone(ctx: click.Context) -> None:
    """Raises UsageError for an option that a plan file has already decided."""
    for param in given_options(ctx):
        if param.name not in _WITH_A_PLAN:
            raise click.UsageError(
                f"{param.opts[0]} and a plan file exclude each other: the plan has decided it", ctx
            )
