"""`plan calibrate`: measured runs become a hardware profile."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.layout_options import layout_options
from parplan.commands.options import (
    OUTPUT,
    STDOUT,
    LayoutOptions,
    TargetOptions,
    as_json,
    target_options,
)
from parplan.commands.output import require_output
from parplan.commands.style import Command, option, print_json
from parplan.profiles.errors import ConfigError

if TYPE_CHECKING:
    from parplan.planner.calibration.measured_run import MeasuredRun
    from parplan.planner.calibration.trace_measured import MeasuredTraces
    from parplan.planner.plan.plan import Plan


@click.command(
    cls=Command,
    epilog="  plan calibrate run.json -o mygpu.yaml\n  plan calibrate tp1/run.json tp2/run.json "
    "-o mygpu.yaml\n"
    "  plan calibrate traces/ --plan plan.yaml -o mygpu.yaml\n"
    "  plan calibrate trace.json --model llama3-8b --gpus 8 --gpu h100-80gb --tp 2 --zero 1\n"
    "  plan --model gpt-20b --gpus 64 --profile mygpu.yaml",
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@option(
    "Runs of other programs",
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Plan file of the run that a trace or times of layers are of; `plan estimate -o` writes "
    "it.",
)
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
    as SQLite or CSV, or a folder with those of several ranks), or a file with times of layers of
    Metis or Galvatron. Its times give factors for the prices of compute, of each kind of communication that
    the runs exercised, and of the optimizer. Prices that no run exercised stay unchanged, and the
    output says so. Where the plans used curves that `plan profile` measured, the new profile keeps
    them beside the factors.
    """
    from parplan.planner.calibration.run_factors import calibrate
    from parplan.profiles.documents.files import write_text
    from parplan.profiles.machines.user_profile import profile_to_document, profile_to_yaml
    from parplan.report.runs.calibration_table import print_calibration
    from parplan.report.runs.trace_table import print_traces
    from parplan.report.text import console, say

    require_output(output)
    measured, traced = _measured(runs, _LaidOut(plan_file, target, by_hand))
    made = calibrate(measured)
    if output == STDOUT:
        click.echo(profile_to_yaml(made), nl=False)
    else:
        write_text(profile_to_yaml(made), output, hint="choose another file with --output")
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


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """The user's words for the plan of runs of other programs: its file, or its options."""

    plan_file: Path | None
    target: TargetOptions
    by_hand: LayoutOptions

    def plan_of(self, run: Path) -> Plan:
        """Returns the plan of a run that does not say it. Raises ConfigError."""
        from parplan.commands.requests.layouts import choices_of, layout_of, with_limit
        from parplan.commands.requests.requests import request_of
        from parplan.planner.plan.plan_file import read_plan
        from parplan.planner.search.estimate import estimate_plan

        if self.plan_file is not None:
            self.require_no_model(f"--plan {self.plan_file} holds the model")
            return read_plan(self.plan_file)
        if self.target.model is None:
            raise ConfigError(
                f"{run}: it does not say the model and the layout of its run",
                hint="give --plan PLAN, or the options of plan estimate: --model NAME --gpus N ..",
            )
        request = with_limit(request_of(self.target), self.by_hand)
        layout = layout_of(request, self.by_hand)
        return estimate_plan(request, layout, choices_of(request, self.by_hand))

    def require_no_plan(self) -> None:
        """Raises ConfigError where a plan is given and every run holds its own."""
        if self.plan_file is not None:
            raise ConfigError(
                f"--plan {self.plan_file}: a run.json holds its plan", hint="leave --plan out"
            )
        self.require_no_model("a run.json holds its plan")

    def require_no_model(self, why: str) -> None:
        """Raises ConfigError where a model is given."""
        if self.target.model is not None:
            raise ConfigError(f"--model {self.target.model}: {why}", hint="leave --model out")


def _measured(
    paths: tuple[Path, ...], laid_out: _LaidOut
) -> tuple[list[MeasuredRun], MeasuredTraces | None]:
    """Returns the runs in files, of which all traces are of one run."""
    from parplan.planner.calibration.layer_measured import is_layer_profile, measured_by_layers
    from parplan.planner.calibration.measured_run import run_measured
    from parplan.planner.calibration.trace_measured import measured_by_traces
    from parplan.planner.runs.run_file import read_run
    from parplan.profiles.traces.trace_files import is_trace, read_traces

    traces = [path for path in paths if is_trace(path)]
    layers = [path for path in paths if path not in traces and is_layer_profile(path)]
    runs = [path for path in paths if path not in (*traces, *layers)]
    measured = [run_measured(read_run(path), str(path)) for path in runs]
    measured += [measured_by_layers(path, laid_out.plan_of(path)) for path in layers]
    if traces:
        traced = measured_by_traces(read_traces(traces), laid_out.plan_of(traces[0]))
        return [*measured, traced.run], traced
    if not layers:
        laid_out.require_no_plan()
    return measured, None
