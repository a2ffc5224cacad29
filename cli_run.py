"""The commands for what comes after a plan: what a run measured, and where its time goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from cli_options import OUTPUT, as_json
from cli_style import Command, option

STDOUT = Path("-")


@click.command(cls=Command, epilog="  plan calibrate run.json -o mygpu.yaml\n  plan calibrate tp1/run.json tp2/run.json -o mygpu.yaml\n"
                                   "  plan --model gpt-20b --gpus 64 --profile mygpu.yaml")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@option(OUTPUT, "-o", "--output", type=click.Path(path_type=Path), default="profile.yaml", show_default=True,
        help="The profile; - for stdout.")
@as_json
def calibrate(runs: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Make a hardware profile of your own from what runs measured: `plan --profile` plans with it.

    RUN is the run.json that the executor wrote. Its times give factors for the prices of compute, of each kind of communication
    that the runs exercised, and of the optimizer; what none exercised stays as it was, and is said so.
    """
    from planner.calibrate import calibrate
    from planner.options import require_writable
    from planner.report.calibration import print_calibration
    from planner.report.text import console, say
    from planner.runs import read
    from profiles.files import write_text
    from profiles.own import to_yaml
    from profiles.schema import document

    if output != STDOUT:
        require_writable(output)
    found = calibrate([read(path) for path in runs], [str(path) for path in runs])
    if output == STDOUT:
        click.echo(to_yaml(found), nl=False)
    else:
        write_text(to_yaml(found), output, hint="choose another file with --output")
    if as_json:
        click.echo(json.dumps(document(found), indent=2))
        return
    out = console(sys.stderr if output == STDOUT else sys.stdout)
    print_calibration(found, out)
    if output != STDOUT:
        say(out, f"wrote {output}; plan with it: --gpu {found.device} --stack {found.calibration.stack} --profile {output}")


@click.command(cls=Command, epilog="  plan trace plan.yaml -o trace.json")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@option(OUTPUT, "-o", "--output", type=click.Path(path_type=Path), default="trace.json", show_default=True,
        help="The trace; - for stdout.")
def trace(plan_file: Path, output: Path) -> None:
    """Write the predicted timeline of a plan's step as a trace that opens in Perfetto or chrome://tracing."""
    from planner.account import plan_trace_ranks
    from planner.plan import read
    from planner.report.trace import trace_json
    from profiles.files import write_text

    text = trace_json(plan_trace_ranks(read(plan_file)))
    if output == STDOUT:
        click.echo(text, nl=False)
        return
    write_text(text, output, hint="choose another file with --output")
    click.echo(f"wrote {output}; open it in https://ui.perfetto.dev")
