"""`plan models`: the models that come with the planner."""

from __future__ import annotations

import click

from parplan.commands.options.result_options import as_json
from parplan.commands.output import print_listing
from parplan.commands.style import Command


@click.command(cls=Command, epilog="  plan models\n  plan models --json | jq -r '.[].name'")
@as_json
def models(as_json: bool) -> None:
    """List the models that come with the planner, as values of --model."""
    from parplan.report.machines.catalogue_tables import models_document, print_models

    print_listing(models_document, print_models, as_json=as_json)
