"""`plan calibrate`: measured runs become a hardware profile."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parplan.commands.options import OUTPUT, STDOUT, as_json
from parplan.commands.output import require_output
from parplan.commands.style import Command, option, print_json


@click.command(
    cls=Command,
    epilog="  plan calibrate run.json -o mygpu.yaml\n  plan calibrate tp1/run.json tp2/run.json "
    "-o mygpu.yaml\n"
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
    help="Profile file to write; - for stdout.",
)
@as_json
def calibrate(runs: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Make a hardware profile from measured runs, for `plan --profile`.

    RUN is the run.json that the executor wrote. Its times give factors for the prices of compute,
    of each kind of communication that the runs exercised, and of the optimizer. Prices that no run
    exercised stay unchanged, and the output says so. Where the plans used curves that `plan
    profile` measured, the new profile keeps these curves beside the factors.
    """
    from parplan.planner.calibration.run_factors import calibrate
    from parplan.planner.runs.run_file import read_run
    from parplan.profiles.documents.files import write_text
    from parplan.profiles.machines.user_profile import profile_to_document, profile_to_yaml
    from parplan.report.runs.calibration_table import print_calibration
    from parplan.report.text import console, say

    require_output(output)
    made = calibrate([read_run(path) for path in runs], [str(path) for path in runs])
    if output == STDOUT:
        click.echo(profile_to_yaml(made), nl=False)
    else:
        write_text(profile_to_yaml(made), output, hint="choose another file with --output")
    if as_json:
        print_json(profile_to_document(made))
        return
    out = console(sys.stderr if output == STDOUT else sys.stdout)
    print_calibration(made, out)
    if output != STDOUT:
        assert made.calibration is not None, "runs give factors"
        # A file with measured curves names the machine itself.
        device = "" if made.cluster else f"--gpu {made.device} "
        how = f"{device}--stack {made.calibration.stack} --profile {output}"
        say(out, f"wrote {output}; plan with it: {how}")
