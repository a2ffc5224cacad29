"""`plan import`: logs of training runs become rows of a table of measured steps."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parplan.commands.laid_out import LaidOut, plan_of_run_option
from parplan.commands.options.layout_options import LayoutOptions, layout_options
from parplan.commands.options.result_options import STDOUT, as_json
from parplan.commands.options.sections import OUTPUT
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.output import require_output
from parplan.commands.style import Command, option, print_json

LOGS = "Logs"


@click.command(
    "import",
    cls=Command,
    epilog="  plan import train.log --gpu h100-80gb -o steps.csv\n"
    "  plan import slurm-1.out slurm-2.out --config run.sh --gpu h100-80gb -o steps.csv\n"
    "  plan import train.log --model llama3-8b --gpus 8 --gpu h100-80gb --zero 3 --stack nemo\n"
    "  plan validate --steps steps.csv --rows",
)
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@plan_of_run_option
@option(
    LOGS,
    "--warm-up",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    metavar="N",
    help="Iterations after every start that do not count.",
)
@target_options
@layout_options
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="steps.csv",
    show_default=True,
    metavar="FILE",
    help="Table of measured steps that gets the rows; - for stdout. A row of a log with the same "
    "name is replaced, other rows stay.",
)
@as_json
def import_(
    logs: tuple[Path, ...],
    plan_file: Path | None,
    warm_up: int,
    target: TargetOptions,
    by_hand: LayoutOptions,
    output: Path,
    as_json: bool,
) -> None:
    """Read step times and memory from logs, for plan validate and plan calibrate.

    LOG is the output of Megatron-LM, torchtitan, DeepSpeed, NeMo or the Trainer of Hugging Face.
    The configuration comes from --config, from options as plan estimate takes them, or from the log
    itself, where Megatron-LM and torchtitan print theirs. The median step counts. First steps after
    a start or a restart do not.
    """
    from parplan.planner.logs.logged_run import read_log
    from parplan.planner.logs.measured_row import measured_steps
    from parplan.planner.logs.row_file import add_rows, table_text
    from parplan.report.runs.import_table import import_document, print_import
    from parplan.report.text import console, say

    require_output(output)
    laid_out = LaidOut(plan_file, target, by_hand)
    measured = [measured_steps(read_log(log, warm_up), laid_out.plan_of_log(log)) for log in logs]
    rows = [each.row for each in measured]
    if as_json:
        print_json(import_document(measured))
    out = console(sys.stderr if as_json or output == STDOUT else sys.stdout)
    if not as_json:
        print_import(measured, out)
    if output == STDOUT:
        click.echo("" if as_json else table_text(rows), nl=False)
        return
    replaced = add_rows(output, rows)
    again = f", {replaced} of them again" if replaced else ""
    say(
        out,
        f"wrote {len(rows)} rows{again} to {output}; price them: plan validate --steps {output}",
    )
