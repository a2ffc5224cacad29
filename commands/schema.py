"""`plan schema`: the JSON Schema of the plan file and of the profile file."""

from __future__ import annotations

import click

from parplan.commands.options.sections import OUTPUT
from parplan.commands.style import Command, option, print_json


@click.command(
    cls=Command,
    epilog="  plan schema > docs/plan.schema.json\n  plan schema --profile > profile.schema.json",
)
@option(OUTPUT, "--profile", is_flag=True, help="Print the schema of the profile file instead.")
def schema(profile: bool) -> None:
    """Print the JSON Schema of the plan file."""
    from parplan.profiles.machines.user_profile import profile_schema
    from parplan.report.plan_documents import plan_schema

    print_json(profile_schema() if profile else plan_schema())
