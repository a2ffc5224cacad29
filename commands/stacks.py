"""`plan stacks`: the software stacks that come with the planner."""

from __future__ import annotations

import click

from parplan.commands.options.result_options import as_json
from parplan.commands.output import print_listing
from parplan.commands.style import Command


@click.command(
    cls=Command, epilog="  plan stacks\n  plan stacks --json | jq '.stacks[] | {name, time_band}'"
)
@as_json
def stacks(as_json: bool) -> None:
    """List the software stacks that come with the planner, with the error of their prices.

    Any of them is a value of --stack.
    """
    from parplan.report.machines.catalogue_tables import print_stacks, stacks_document

    print_listing(stacks_document, print_stacks, as_json=as_json)
