"""`plan clusters`: the GPUs that come with the planner."""

from __future__ import annotations

import click

from parplan.commands.options.result_options import as_json
from parplan.commands.output import print_listing
from parplan.commands.style import Command


@click.command(cls=Command, epilog="  plan clusters\n  plan clusters --json")
@as_json
def clusters(as_json: bool) -> None:
    """List the GPUs that come with the planner, each in its usual node, as values of --gpu."""
    from parplan.report.machines.catalogue_tables import clusters_document, print_clusters

    print_listing(clusters_document, print_clusters, as_json=as_json)
