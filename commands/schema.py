"""`plan schema`: the JSON Schema of the plan file, of the profile file and of `--json`."""

from __future__ import annotations

import click

from parplan.commands.json_documents import command_schema
from parplan.commands.options.sections import OUTPUT
from parplan.commands.style import Command, option, print_json


@click.command(
    cls=Command,
    epilog="  plan schema > docs/plan.schema.json\n"
    "  plan schema --profile > profile.schema.json\n"
    "  plan schema --of compare > compare.schema.json",
)
@option(OUTPUT, "--profile", is_flag=True, help="Print the schema of the profile file instead.")
@option(
    OUTPUT,
    "--of",
    "command",
    metavar="COMMAND",
    help="Print the schema of what COMMAND prints with --json instead: plan, compare, ....",
)
def schema(profile: bool, command: str | None) -> None:
    """Print the JSON Schema of the plan file, or of a result of --json."""
    from parplan.profiles.machines.user_profile import profile_schema
    from parplan.report.plan_documents import plan_schema

    if profile and command is not None:
        raise click.UsageError("--profile and --of are two schemas: choose one")
    if command is not None:
        print_json(command_schema(command))
    else:
        print_json(profile_schema() if profile else plan_schema())
