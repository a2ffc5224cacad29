"""`plan schemes`: every scheme of parallel training over all GPUs of a request."""

from __future__ import annotations

import sys

import click

from parplan.commands.options.layout_options import micro_batch_option
from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import LAYOUT, OUTPUT
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.style import Command, option, print_json


@click.command(
    cls=Command,
    epilog="  plan schemes --model gpt-20b --gpus 64\n"
    "  plan schemes --model llama3-8b --gpus 16 --micro-batch-size 4 --formulas",
)
@target_options
@micro_batch_option
@option(
    LAYOUT,
    "--local-steps",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    metavar="N",
    help="Steps between two sums of local SGD.",
)
@option(
    OUTPUT,
    "--formulas",
    is_flag=True,
    help="Print the formulas and their sources; --json has both.",
)
@as_json
def schemes(
    target: TargetOptions, micro_batch_size: int, local_steps: int, formulas: bool, as_json: bool
) -> None:
    """Price each scheme of parallel training by itself, over all GPUs or as many as can run it.

    GPUs that divide the model share micro-batches of --micro-batch-size sequences; with the other
    schemes every GPU has its own. Schemes that no search uses are marked, and so are schemes that
    change convergence.
    """
    from parplan.commands.requests.requests import request_of
    from parplan.planner.schemes.every_scheme import priced_schemes
    from parplan.report.plans.scheme_table import print_formulas, print_schemes, schemes_document
    from parplan.report.text import console

    request = request_of(target)
    if formulas and not as_json:
        print_formulas(console(sys.stdout))
        return
    priced = list(priced_schemes(request, micro_batch_size, local_steps))
    if as_json:
        print_json(schemes_document(priced))
    else:
        print_schemes(priced, request, console(sys.stdout))
