"""The commands around the run of a plan: a check before it, its data, what it measured. All but
click is imported where it is used.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands import traced_module as cli_module
from parplan.commands.common_options import OUTPUT, as_json
from parplan.commands.output import STDOUT, require_output, require_torch
from parplan.commands.style import Command, option

if TYPE_CHECKING:
    from parplan.planner.plan.plan import Plan

CHECK = "Check"
NOT_FITTING = 3  # as where nothing fits


@click.command(
    "check",
    cls=Command,
    epilog=(
        "  plan check plan.yaml\n  plan check plan.yaml --rank 0 --json | jq .verdict\n  plan check plan.yaml --execute"
    ),
)
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@option(
    CHECK,
    "--rank",
    "ranks",
    type=click.IntRange(0),
    multiple=True,
    metavar="N",
    help="Only this pipeline rank; may be repeated.",
)
@option(
    CHECK,
    "--execute",
    is_flag=True,
    help="Shrink the model and train it, as planned, on up to 8 gloo processes.",
)
@option(
    CHECK,
    "--trust-module",
    is_flag=True,
    help="Import the plan's module also from outside of the current folder and of installed packages: its code runs.",
)
@as_json
def check(
    plan_file: Path, ranks: tuple[int, ...], execute: bool, trust_module: bool, as_json: bool
) -> int:
    """Run a plan without its GPUs: what it really holds and sends, or whether it trains as one
    process does.

    Builds one rank of every pipeline stage at full size, on tensors without data, and counts bytes
    and collectives of a step. With --execute, the same plan of a small model of the same structure:
    losses and gradients against one process. A traced module is not shrunk: its plan is executed as
    it is, on up to 8 processes. A plan that names a module runs that module's code; the command
    says which. Exit code 3 when a stage does not fit its device or holds other bytes than
    predicted, 2 when losses or gradients differ.
    """
    from parplan.executor.rules.all_rules import validate
    from parplan.planner.plan.plan_file import read_any_plan
    from parplan.planner.plan.traced_plan import TracedPlan

    plan = read_any_plan(plan_file)
    if isinstance(plan, TracedPlan):
        cli_module.require_executed(execute=execute)
    else:
        validate(plan)
    require_torch("plan check runs the executor, which needs torch")
    if execute and not isinstance(plan, TracedPlan):
        return _execute(plan, as_json=as_json)
    with cli_module.users_modules():
        cli_module.say_module(plan, plan_file, trust=trust_module)
        if isinstance(plan, TracedPlan):
            return cli_module.check(plan, as_json=as_json)
        return _dry_run(plan, ranks, as_json=as_json)


def _dry_run(plan: Plan, ranks: tuple[int, ...], *, as_json: bool) -> int:
    from parplan.planner.runs.rank_checks import check_ranks, priced
    from parplan.profiles.errors import ConfigError
    from parplan.report.progress_bars import count_bar
    from parplan.report.runs.check_tables import check_document, print_check
    from parplan.report.text import console

    chosen = sorted(set(ranks)) or list(range(plan.mesh.pp))
    if chosen[-1] >= plan.mesh.pp:
        raise ConfigError(
            f"--rank {chosen[-1]}: the plan has pipeline ranks 0 to {plan.mesh.pp - 1}",
            hint="choose one of them",
        )
    today = priced(plan)
    from parplan.executor.checking.dry_run_workers import dry_runs, num_actions

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
        (found,), expected = parity.run_plans([small]), parity.run_reference(small)
    return cli_module.say_parity(plan, small, found, expected, as_json=as_json)


@click.command(
    cls=Command,
    epilog="  plan calibrate run.json -o mygpu.yaml\n  plan calibrate tp1/run.json tp2/run.json -o mygpu.yaml\n"
    "  plan --model gpt-20b --gpus 64 --profile mygpu.yaml",
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="profile.yaml",
    show_default=True,
    help="The profile; - for stdout.",
)
@as_json
def calibrate(runs: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Make a hardware profile of your own from what runs measured: `plan --profile` plans with it.

    RUN is the run.json that the executor wrote. Its times give factors for the prices of compute,
    of each kind of communication that the runs exercised, and of the optimizer; what none exercised
    stays as it was, and is said so. Of plans that were made with what `plan profile` measured, the
    new profile keeps those curves beside the factors.
    """
    from parplan.planner.calibration.run_factors import calibrate
    from parplan.planner.runs.run_file import read_run
    from parplan.profiles.documents.files import write_text
    from parplan.profiles.machines.user_profile import profile_to_document, profile_to_yaml
    from parplan.report.runs.calibration_table import print_calibration
    from parplan.report.text import console, say

    require_output(output)
    found = calibrate([read_run(path) for path in runs], [str(path) for path in runs])
    if output == STDOUT:
        click.echo(profile_to_yaml(found), nl=False)
    else:
        write_text(profile_to_yaml(found), output, hint="choose another file with --output")
    if as_json:
        click.echo(json.dumps(profile_to_document(found), indent=2))
        return
    out = console(sys.stderr if output == STDOUT else sys.stdout)
    print_calibration(found, out)
    if output != STDOUT:
        device = (
            "" if found.cluster else f"--gpu {found.device} "
        )  # a file with measured curves names the machine itself
        say(
            out,
            f"wrote {output}; plan with it: {device}--stack {found.calibration.stack} --profile {output}",
        )


@click.command(cls=Command, epilog="  plan trace plan.yaml -o trace.json")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="trace.json",
    show_default=True,
    help="The trace; - for stdout.",
)
def trace(plan_file: Path, output: Path) -> None:
    """Write the predicted timeline of a plan's step as a trace that opens in Perfetto or
    chrome://tracing.
    """
    from parplan.planner.plan.plan_file import read_plan
    from parplan.planner.runs.run_account import plan_trace_ranks
    from parplan.profiles.documents.files import write_text
    from parplan.report.chrome_trace import trace_json

    require_output(output)
    text = trace_json(plan_trace_ranks(read_plan(plan_file)))
    if output == STDOUT:
        click.echo(text, nl=False)
        return
    write_text(text, output, hint="choose another file with --output")
    click.echo(f"wrote {output}; open it in https://ui.perfetto.dev")


_TOKENS = "Tokens"


@click.command(
    cls=Command,
    epilog="  plan tokenize book.txt -o tokens.bin\n  plan tokenize ~/src --glob '**/*.py' -o code.bin\n"
    "  plan tokenize corpus/ --tokenizer ./llama-3-8b -o corpus.bin",
)
@click.argument(
    "inputs", metavar="INPUT...", type=click.Path(path_type=Path), nargs=-1, required=True
)
@option(
    _TOKENS,
    "--tokenizer",
    default="bytes",
    show_default=True,
    metavar="NAME|PATH",
    help="bytes, or a Hugging Face tokenizer: its folder, or with --download its name on the hub.",
)
@option(
    _TOKENS,
    "--download",
    is_flag=True,
    help="Fetch the tokenizer from the hub. No other command or option uses the network.",
)
@option(
    _TOKENS,
    "--glob",
    "patterns",
    multiple=True,
    default=("*.txt",),
    show_default="*.txt",
    metavar="PATTERN",
    help="Files of an INPUT that is a folder.",
)
@option(
    _TOKENS,
    "--dtype",
    type=click.Choice(("auto", "uint16", "uint32")),
    default="auto",
    show_default=True,
    help="Of an id; auto: the smallest that holds the vocabulary.",
)
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="tokens.bin",
    show_default=True,
    metavar="FILE",
    help="A .bin; what it holds goes beside it as FILE.json.",
)
@as_json
def tokenize(
    inputs: tuple[Path, ...],
    tokenizer: str,
    download: bool,
    patterns: tuple[str, ...],
    dtype: str,
    output: Path,
    as_json: bool,
) -> None:
    """Turn text files into a file of token ids for `python -m parplan.executor --data`.

    Every INPUT is a file or a folder. A file is a document; the tokenizer's end-of-document id
    follows each.
    """
    from parplan.executor.data.tokens import documents, load_tokenizer, write_tokens
    from parplan.profiles.errors import ConfigError
    from parplan.profiles.units import format_bytes

    if len(patterns) > 1:
        raise ConfigError(
            f"--glob is given {len(patterns)} times, it is one pattern for all INPUTs",
            hint="name other files as INPUT",
        )
    found = write_tokens(
        documents(inputs, patterns[0]), output, load_tokenizer(tokenizer, download=download), dtype
    )
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        return
    size = format_bytes(output.stat().st_size)
    click.echo(
        f"wrote {output}: {found.count:,} tokens of {found.documents:,} documents, {size} of {found.dtype}\n"
        f"tokenizer {found.tokenizer}, vocabulary {found.vocab_size:,}: the model needs a vocab_size of {found.largest_id + 1:,} or more"
    )
