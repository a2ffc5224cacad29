"""`plan check`: a plan runs without its GPUs, or trains beside one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands import user_modules
from parplan.commands.options.launcher_options import launcher_options
from parplan.commands.options.result_options import as_json, trust_module_option
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.output import chosen_ranks, require_torch
from parplan.commands.style import Command, option, print_json, print_lines

if TYPE_CHECKING:
    from parplan.planner.export.launcher_file import LauncherFile
    from parplan.planner.plan.plan import Plan

CHECK = "Check"


@click.command(
    "check",
    cls=Command,
    epilog=(
        "  plan check plan.yaml\n  plan check plan.yaml --rank 0 --json | jq .verdict\n  plan "
        "check plan.yaml --execute\n  plan check plan-a100-80gb.yaml plan-h100-80gb.yaml\n  plan "
        "check train.sh --gpu h100-80gb"
    ),
)
@click.argument(
    "plan_files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@option(
    CHECK,
    "--rank",
    "ranks",
    type=click.IntRange(0),
    multiple=True,
    metavar="N",
    help="Check only this pipeline rank; may be repeated.",
)
@option(
    CHECK,
    "--execute",
    is_flag=True,
    help="Shrink the model and train it as planned on up to 8 gloo processes a plan.",
)
@launcher_options
@trust_module_option
@as_json
def check(
    plan_files: tuple[Path, ...],
    ranks: tuple[int, ...],
    execute: bool,
    stated: TargetOptions,
    trust_module: bool,
    as_json: bool,
) -> int:
    """Run a plan without its GPUs, or train its model and compare with one process.

    Builds one rank of every pipeline stage at full size, on tensors without data, and counts the
    bytes of device and host and the collectives of a step. A plan with chunks is priced again
    instead, with the bytes that its chunks move, and compared with its file. With --execute, a
    small model of the same structure is trained as planned, and its losses and gradients are
    compared with one process. A launcher's own configuration is priced, and compared with the
    memory of its devices, and the single changes that gain most are listed; options name the
    machine that it does not state. A traced module is traced again, compared with the shards of the
    plan, and priced again. With --execute it is not shrunk: its plan is executed unchanged, on up
    to 8 processes. Several plans are those of pools that divide the batch: they must be one job,
    each is checked, and with --execute they train together. A plan that names a module runs that
    module's code; the command says which. Exit code 3 when a stage does not fit its device, or what
    it keeps on the host does not fit there, or when it holds other bytes than predicted; 2 when
    losses or gradients differ.
    """
    from parplan.commands.launcher_plans import launcher_file, require_nothing_stated
    from parplan.executor.rules.all_rules import validate
    from parplan.planner.plan.plan_file import read_any_plan
    from parplan.planner.plan.traced_plan import TracedPlan

    if len(plan_files) > 1:
        if as_json or ranks:
            raise click.UsageError("--json and --rank are for one plan: check each by itself")
        require_nothing_stated(plan_files[0], stated)
        return _check_pools(plan_files, execute=execute)
    (plan_file,) = plan_files
    file = launcher_file(plan_file)
    if file is not None:
        if execute or ranks:
            raise click.UsageError(
                f"{plan_file} is a launcher's configuration, which is priced alone: make a plan "
                f"of it with plan read, to run it with --execute or --rank"
            )
        return _check_launcher(file, stated, as_json=as_json)
    require_nothing_stated(plan_file, stated)
    plan = read_any_plan(plan_file)
    if not isinstance(plan, TracedPlan):
        validate(plan)
    require_torch("plan check runs the executor, which needs torch")
    if execute and not isinstance(plan, TracedPlan):
        return _execute(plan, as_json=as_json)
    with user_modules.users_modules():
        user_modules.say_module(plan, plan_file, trust=trust_module)
        if execute and isinstance(plan, TracedPlan):
            return user_modules.execute(plan, as_json=as_json)
        chosen = chosen_ranks(plan, ranks)
        if isinstance(plan, TracedPlan):
            return user_modules.dry_check(plan, chosen, as_json=as_json)
        if plan.chunks is not None:
            return _check_chunks(plan, chosen, as_json=as_json)
        return _dry_run(plan, chosen, as_json=as_json)


def _check_pools(plan_files: tuple[Path, ...], *, execute: bool) -> int:
    """Checks the plans of pools that divide the batch, one by one or as they train together.

    Raises ConfigError for plans that are no job together.
    """
    from parplan.executor.rules.all_rules import validate
    from parplan.executor.rules.pool_rules import joined_plans
    from parplan.planner.plan.plan_file import read_plan

    plans = [read_plan(file) for file in plan_files]
    for plan in plans:
        validate(plan)
    joined = joined_plans(list(zip(map(str, plan_files), plans, strict=True)))
    require_torch("plan check runs the executor, which needs torch")
    if execute:
        return _execute_pools(plan_files, joined)
    codes = []
    for file, plan in zip(plan_files, joined, strict=True):
        _say_pool(file, plan)
        codes.append(_dry_run(plan, chosen_ranks(plan, ()), as_json=False))
    return max(codes)


def _say_pool(file: Path, plan: Plan) -> None:
    share, own = plan.whole_batch, plan.training.global_batch_size
    print_lines(f"{file}: sequences {share.first} to {share.first + own - 1} of {share.of}")


def _execute_pools(plan_files: tuple[Path, ...], plans: tuple[Plan, ...]) -> int:
    """Trains small models of the plans of pools together, and compares each with one process."""
    import torch

    from parplan.executor.checking import parity
    from parplan.executor.checking.shrunk_plan import shrunk_pools
    from parplan.executor.rules.all_rules import validate
    from parplan.executor.rules.pool_rules import joined_plans

    alone = shrunk_pools(plans)
    for plan in alone:
        validate(plan)
    small = joined_plans([(f"the small plan of pool {k}", plan) for k, plan in enumerate(alone)])
    torch.set_num_threads(1)  # a fork must not inherit a pool of threads
    outcomes = parity.run_pools(small)
    expected = parity.run_reference(small[0])
    codes = []
    for file, plan, of_pool, outcome in zip(plan_files, plans, small, outcomes, strict=True):
        _say_pool(file, plan)
        codes.append(user_modules.say_parity(plan, of_pool, outcome, expected, as_json=False))
    return max(codes)


def _check_launcher(file: LauncherFile, stated: TargetOptions, *, as_json: bool) -> int:
    """Prices a launcher's configuration, and says what does not fit and what gains most."""
    from parplan.commands.launcher_plans import completed_file, launcher_plan
    from parplan.planner.export.advice import advice
    from parplan.report.plans.launcher_check import check_document, print_check, shortages
    from parplan.report.text import console

    plan, _ = launcher_plan(file, stated)
    file = completed_file(file, stated)
    settings = file.settings(plan.model, plan.cluster.num_gpus)
    advised = advice(plan, settings, file.target, file.given)
    unknown = (file.unknown_text,) if file.unknown_text else ()
    remarks = (*unknown, *file.remarks(plan))
    if as_json:
        print_json(check_document(plan, advised, remarks))
    else:
        print_check(plan, advised, remarks, str(file.path), console(sys.stdout))
    return user_modules.NOT_FITTING if shortages(plan) else 0


def _check_chunks(plan: Plan, chosen: list[int], *, as_json: bool) -> int:
    """Prices the plan again, with the schedule of its chunks, and compares it with its file."""
    from parplan.planner.plan.reprice import reprice
    from parplan.report.runs import chunk_check_table
    from parplan.report.runs.traced_check_table import shortage
    from parplan.report.text import console

    today = reprice(plan).plan
    if as_json:
        print_json(chunk_check_table.chunk_check_document(plan, today, chosen))
    else:
        chunk_check_table.print_chunk_check(plan, today, chosen, console(sys.stdout))
    return user_modules.NOT_FITTING if shortage(today, chosen) else 0


def _dry_run(plan: Plan, chosen: list[int], *, as_json: bool) -> int:
    from parplan.planner.runs.rank_checks import check_ranks, repriced_today
    from parplan.report.progress_bars import count_bar
    from parplan.report.runs.check_document import dry_run_document
    from parplan.report.runs.check_tables import print_check
    from parplan.report.text import console

    today = repriced_today(plan)
    from parplan.executor.checking.dry_run_workers import dry_runs, num_actions

    with count_bar(console(sys.stderr), "checking", num_actions(plan, chosen)) as on_done:
        runs = dry_runs(plan, chosen, on_done)
    checks = check_ranks(today, {run.pipeline_rank: (run.use, run.micro_batches) for run in runs})
    if as_json:
        print_json(dry_run_document(checks))
    else:
        print_check(plan, checks, console(sys.stdout))
    return 0 if all(rank_check.fits for rank_check in checks) else user_modules.NOT_FITTING


def _execute(plan: Plan, *, as_json: bool) -> int:
    import torch

    from parplan.executor.checking import parity
    from parplan.executor.checking.shrunk_plan import shrunk
    from parplan.executor.rules.all_rules import validate
    from parplan.report.text import console

    small = shrunk(plan)
    validate(small)
    torch.set_num_threads(1)  # a fork must not inherit a pool of threads
    with console(sys.stderr).status(
        f"training {small.mesh} of {small.model.name}, and one process"
    ):
        outcome = parity.run_plans([small])[0]
        expected = parity.run_reference(small)
    return user_modules.say_parity(plan, small, outcome, expected, as_json=as_json)
