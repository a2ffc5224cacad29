"""`plan diff`: what differs between two plans, or between a plan and the best of other hardware."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.compare import side_of
from parplan.commands.options.machine_options import gpu_options
from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import OUTPUT, WHAT
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.style import Command, Whole, option, packs, print_json

if TYPE_CHECKING:
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import AnyPlan
    from parplan.planner.request import Request


@click.command(
    cls=Command,
    epilog="  plan diff plan.yaml --gpu h200-141gb\n  plan diff plan.yaml --gpus 128\n"
    "  plan diff yesterday.yaml today.yaml --json | jq '.baselines[0].slower'",
)
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.argument("other_file", metavar="[OTHER]", required=False, type=click.Path(path_type=Path))
@gpu_options
@option(
    WHAT,
    "--global-batch-size",
    type=Whole("global_batch_size"),
    metavar="N",
    help="Sequences in a step. [default: the plan's]",
)
@option(
    WHAT,
    "--seq-length",
    type=Whole("seq_length"),
    metavar="N",
    help="Tokens in a sequence. [default: the plan's]",
)
@option(OUTPUT, "-v", "--verbose", is_flag=True, help="Print the memory by class as well.")
@as_json
@packs("target", TargetOptions)
def diff(
    plan_file: Path,
    other_file: Path | None,
    target: TargetOptions,
    verbose: bool,
    as_json: bool,
) -> None:
    """Say what differs between a plan and another, or the best one of another machine or batch.

    Without a second plan, the request of the first one is searched again with the options that are
    given, without the pins that the plan was found with. A launcher's configuration that states its
    machine may stand for a plan.
    """
    from parplan.commands.launcher_plans import read_plans
    from parplan.planner.request import SearchOptions
    from parplan.planner.search.comparison import plans_side_by_side
    from parplan.report.searches.comparison_document import comparison_document
    from parplan.report.searches.comparison_tables import print_comparison
    from parplan.report.text import console

    files = (plan_file,) if other_file is None else (plan_file, other_file)
    plans = read_plans(files, TargetOptions())
    names = [file.name for file in files]
    if other_file is None:
        plans.append(_searched(plans[0], plan_file, target))
        names.append(f"{plans[1].cluster.num_gpus} x {plans[1].cluster.device.name}")
    elif target != TargetOptions():
        raise click.UsageError("options of a machine or a batch are for a diff with one plan")
    comparison = plans_side_by_side(list(map(side_of, names, plans)), SearchOptions())
    if as_json:
        print_json(comparison_document(comparison))
    else:
        print_comparison(comparison, console(sys.stdout), by_class=verbose)


def _searched(plan: AnyPlan, path: Path, target: TargetOptions) -> Plan:
    """Returns the best plan of a plan's request with other options. Raises ConfigError."""
    from parplan.commands.launcher_plans import described_plan
    from parplan.planner.search.find_plan import find_plan
    from parplan.report.progress_bars import progress_bar
    from parplan.report.text import console

    if target == TargetOptions():
        raise click.UsageError("name a second plan, or another machine: --gpu, --gpus or --cluster")
    hint = "plan the module again for the other machine, and name both plans"
    request = _request(described_plan(plan, path, hint=hint), target)
    with progress_bar(console(sys.stderr)) as on_progress:
        return find_plan(request, on_progress)


def _request(plan: Plan, target: TargetOptions) -> Request:
    """Returns the request of a plan with the machine and the batch of options."""
    from parplan.commands.requests.machine import cluster_of
    from parplan.planner.search.what_if import request_of_plan
    from parplan.profiles.machines.machine_catalog import with_gpus

    cluster, gpus = plan.cluster, target.gpus or plan.cluster.num_gpus
    if target.gpu or target.cluster:
        cluster, _ = cluster_of(target if target.cluster else replace(target, gpus=gpus), None)
    else:
        cluster = with_gpus(cluster, gpus, target.gpus_per_node)
    cluster.device.peak(plan.training.precision)
    training = replace(
        plan.training,
        global_batch_size=target.global_batch_size or plan.training.global_batch_size,
        seq_length=target.seq_length or plan.training.seq_length,
    )
    return replace(request_of_plan(plan), cluster=cluster, training=training)
