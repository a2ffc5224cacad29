"""The commands for what comes after a plan. Everything but click is imported where it is used."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli_options import as_json
from cli_style import Command, option

if TYPE_CHECKING:
    from planner.plan import Plan

CHECK = "Check"
NOT_FITTING = 3  # as where nothing fits
NOT_EQUAL = 2  # the plan does not train as one process does


@click.command("check", cls=Command, epilog=(
    "  plan check plan.yaml\n  plan check plan.yaml --rank 0 --json | jq .verdict\n  plan check plan.yaml --execute"))
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@option(CHECK, "--rank", "ranks", type=click.IntRange(0), multiple=True, metavar="N", help="Only this pipeline rank; may be repeated.")
@option(CHECK, "--execute", is_flag=True, help="Shrink the model and train it, as planned, on up to 8 gloo processes.")
@as_json
def check(plan_file: Path, ranks: tuple[int, ...], execute: bool, as_json: bool) -> int:
    """Run a plan without its GPUs: what it really holds and sends, or whether it trains as one process does.

    Builds one rank of every pipeline stage at full size, on tensors without data, and counts bytes and collectives of a step.
    With --execute, the same plan of a small model of the same structure: losses and gradients against one process.
    Exit code 3 when a stage does not fit its device, 2 when losses or gradients differ.
    """
    from executor.layout import validate
    from planner.plan import read

    plan = read(plan_file)
    validate(plan)
    _require_torch()
    return _execute(plan, as_json=as_json) if execute else _dry_run(plan, ranks, as_json=as_json)


def _require_torch() -> None:
    from profiles.errors import ConfigError

    if importlib.util.find_spec("torch") is None:
        raise ConfigError("plan check runs the executor, which needs torch: it is not installed", hint="pip install 'parplan[torch]'")


def _dry_run(plan: Plan, ranks: tuple[int, ...], *, as_json: bool) -> int:
    from planner.check import check_ranks, priced
    from planner.report.check import check_document, print_check
    from planner.report.progress import count_bar
    from planner.report.text import console
    from profiles.errors import ConfigError

    chosen = sorted(set(ranks)) or list(range(plan.mesh.pp))
    if chosen[-1] >= plan.mesh.pp:
        raise ConfigError(f"--rank {chosen[-1]}: the plan has pipeline ranks 0 to {plan.mesh.pp - 1}", hint="choose one of them")
    today = priced(plan)
    from executor.crew import dry_runs, num_actions

    with count_bar(console(sys.stderr), "checking", num_actions(plan, chosen)) as on_done:
        runs = dry_runs(plan, chosen, on_done)
    checks = check_ranks(today, {run.pipeline_rank: (run.use, run.micro_batches) for run in runs})
    if as_json:
        click.echo(json.dumps(check_document(checks), indent=2))
    else:
        print_check(plan, checks, console(sys.stdout))
    return 0 if all(found.fits for found in checks) else NOT_FITTING


def _execute(plan: Plan, *, as_json: bool) -> int:
    import torch

    from executor import parity
    from executor.layout import validate
    from executor.shrink import shrunk
    from planner.report.parity import Parity, parity_document, print_parity
    from planner.report.text import console

    small = shrunk(plan)
    validate(small)
    torch.set_num_threads(1)  # a fork must not inherit a pool of threads
    with console(sys.stderr).status(f"training {small.mesh} of {small.model.name}, and one process"):
        (found,), expected = parity.run_plans([small]), parity.run_reference(small)
    result = Parity(
        plan=plan, small=small, losses=tuple(zip(found.losses, expected.losses, strict=True)),
        gradients=parity.gradient_errors(found, expected), agree=found.agree,
        as_predicted=all(predicted == measured for predicted, measured in found.states.values()),
        loss_tolerance=parity.LOSS_TOLERANCE, gradient_tolerance=parity.GRADIENT_TOLERANCE)
    if as_json:
        click.echo(json.dumps(parity_document(result), indent=2))
    else:
        print_parity(result, console(sys.stdout))
    return 0 if result.passed else NOT_EQUAL
