"""`plan calibrate`: measured runs become a hardware profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.laid_out import LaidOut, plan_of_run_option
from parplan.commands.options.layout_options import LayoutOptions, layout_options
from parplan.commands.options.result_options import STDOUT, as_json
from parplan.commands.options.sections import OUTPUT
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.output import require_output
from parplan.commands.style import Command, option, print_json, tell_kept

if TYPE_CHECKING:
    from parplan.planner.calibration.measured_run import MeasuredRun
    from parplan.planner.calibration.trace_measured import MeasuredTraces


@click.command(
    cls=Command,
    epilog="  plan calibrate run.json -o mygpu.yaml\n  plan calibrate tp1/run.json tp2/run.json "
    "-o mygpu.yaml\n"
    "  plan calibrate traces/ --plan plan.yaml -o mygpu.yaml\n"
    "  plan calibrate trace.json --model llama3-8b --gpus 8 --gpu h100-80gb --tp 2 --zero 1\n"
    "  plan calibrate train.log --gpu h100-80gb -o mygpu.yaml\n"
    "  plan --model gpt-20b --gpus 64 --profile mygpu.yaml",
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@plan_of_run_option
@target_options
@layout_options
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
def calibrate(
    runs: tuple[Path, ...],
    plan_file: Path | None,
    target: TargetOptions,
    by_hand: LayoutOptions,
    output: Path,
    as_json: bool,
) -> None:
    """Make a hardware profile from measured runs, for `plan --profile`.

    RUN is the run.json that the executor wrote. Beside the --plan or the options of its run it is a
    trace of a step of any framework (files of torch.profiler, packed or not, or of Nsight Systems
    as SQLite or CSV, or a folder with those of several ranks), a file with times of layers of Metis
    or Galvatron, or a log as `plan import` reads it, which tells one factor of the whole step. Its
    times give factors for the prices of compute, of each kind of communication that the runs
    exercised, and of the optimizer. Prices that no run exercised stay unchanged, and the output
    says so. Where the plans used curves that `plan profile` measured, the new profile keeps them
    beside the factors.
    """
    from parplan.planner.calibration.run_factors import calibrate
    from parplan.profiles.documents.files import write_result
    from parplan.profiles.machines.user_profile import profile_to_document, profile_to_yaml
    from parplan.report.runs.calibration_table import print_calibration
    from parplan.report.runs.trace_table import print_traces
    from parplan.report.text import console, say

    require_output(output)
    measured, traced = _measured(runs, LaidOut(plan_file, target, by_hand))
    made = calibrate(measured)
    if output == STDOUT:
        click.echo(profile_to_yaml(made), nl=False)
    else:
        kept = write_result(profile_to_yaml(made), output, hint="choose another file with --output")
        tell_kept(kept)
    if as_json:
        print_json(profile_to_document(made))
        return
    out = console(sys.stderr if output == STDOUT else sys.stdout)
    if traced is not None:
        print_traces(traced, out)
    print_calibration(made, out)
    if output != STDOUT:
        assert made.calibration is not None, "runs give factors"
        # A file with measured curves names the machine itself.
        device = "" if made.cluster else f"--gpu {made.device} "
        how = f"{device}--stack {made.calibration.stack} --profile {output}"
        say(out, f"wrote {output}; plan with it: {how}")


def _measured(
    paths: tuple[Path, ...], laid_out: LaidOut
) -> tuple[list[MeasuredRun], MeasuredTraces | None]:
    """Returns the runs in files, of which all traces are of one run."""
    from parplan.planner.calibration.layer_measured import is_layer_profile, measured_by_layers
    from parplan.planner.calibration.log_measured import measured_by_log
    from parplan.planner.calibration.measured_run import run_measured
    from parplan.planner.calibration.trace_measured import measured_by_traces
    from parplan.planner.logs.logged_run import is_log, read_log
    from parplan.planner.runs.run_file import read_run
    from parplan.profiles.traces.trace_files import is_trace, read_traces

    traces = [path for path in paths if is_trace(path)]
    layers = [path for path in paths if path not in traces and is_layer_profile(path)]
    logs = [path for path in paths if path not in (*traces, *layers) and is_log(path)]
    runs = [path for path in paths if path not in (*traces, *layers, *logs)]
    measured = [run_measured(read_run(path), str(path)) for path in runs]
    measured += [measured_by_layers(path, laid_out.plan_of(path)) for path in layers]
    measured += [measured_by_log(read_log(path), laid_out.plan_of_log(path)) for path in logs]
    if traces:
        traced = measured_by_traces(read_traces(traces), laid_out.plan_of(traces[0]))
        return [*measured, traced.run], traced
    if not layers and not logs:
        laid_out.require_no_plan()
    return measured, None
