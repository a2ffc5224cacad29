"""`plan trace`: the predicted timeline of a plan's step."""

from __future__ import annotations

from pathlib import Path

import click

from parplan.commands.options.result_options import STDOUT
from parplan.commands.options.sections import OUTPUT
from parplan.commands.output import require_output
from parplan.commands.style import Command, option, print_lines, tell_kept


@click.command(cls=Command, epilog="  plan trace plan.yaml -o trace.json")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="trace.json",
    show_default=True,
    help="Trace file to write; - for stdout.",
)
def trace(plan_file: Path, output: Path) -> None:
    """Write the predicted timeline of a step as a trace for Perfetto or chrome://tracing."""
    from parplan.planner.plan.plan_file import read_plan
    from parplan.planner.runs.run_account import plan_trace_ranks
    from parplan.profiles.documents.files import write_result
    from parplan.report.chrome_trace import trace_json

    require_output(output)
    text = trace_json(plan_trace_ranks(read_plan(plan_file)))
    if output == STDOUT:
        click.echo(text, nl=False)
        return
    kept = write_result(text, output, hint="choose another file with --output")
    print_lines(f"wrote {output}; open it in https://ui.perfetto.dev")
    tell_kept(kept)
