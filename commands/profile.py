"""`plan profile`: measures this machine, and shows or compares profiles.

All imports but click's are made where they are used.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.options.option_values import PRECISIONS
from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import OUTPUT
from parplan.commands.output import require_torch
from parplan.commands.style import (
    LONGEST_S,
    Command,
    Number,
    Whole,
    option,
    packs,
    print_json,
    tell,
    wrote_picture,
)
from parplan.profiles.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from parplan.planner.calibration.profiling import Profiled, ProfileRequest
    from parplan.profiles.machines.measurements import Case
    from parplan.profiles.machines.user_profile import UserProfile

WHAT = "What to measure"
HOW = "How"
IMPORT = "Import"
LOOK = "Look at profiles"
LINKS_SHARE = 0.3  # of the budget, where operators and collectives are measured
PROGRAM = "parplan.executor.measuring.measure:measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of `plan profile`."""

    models: tuple[str, ...] = ()
    missing: Path | None = None
    comm: bool | None = None
    precision: str | None = None
    device: str = "auto"
    minutes: float = 10.0
    restart: bool = False
    retry_failed: bool = False
    hang_limit: float = 60.0
    add: tuple[Path, ...] = ()
    nccl_tests: tuple[Path, ...] = ()
    imports: tuple[Path, ...] = ()
    gpu: str | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    show: bool = False
    diff: bool = False
    plot: Path | None = None
    output: Path = Path("profile.yaml")
    as_json: bool = False


@click.command(
    "profile",
    cls=Command,
    epilog=(
        "  plan profile -o mygpu.yaml --model gpt-20b --minutes 10\n  plan profile -o mygpu.yaml "
        "--comm\n"
        "  plan profile -o mygpu.yaml --missing plan.yaml\n  plan profile --show mygpu.yaml "
        "--plot mygpu.png\n"
        "  plan profile --diff before.yaml after.yaml\n  plan --model gpt-20b --gpus 64 --profile "
        "mygpu.yaml"
    ),
)
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@option(
    WHAT,
    "--model",
    "models",
    multiple=True,
    metavar="NAME|PATH",
    help="Model whose shapes to measure; may be repeated. [default: a few that say most]",
)
@option(
    WHAT,
    "--missing",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Measure only the shapes of this plan that its profile lacks.",
)
@option(
    WHAT,
    "--comm/--no-comm",
    default=None,
    help="Measure only collectives, or none. [default: both with 2 devices or more]",
)
@option(
    WHAT,
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Precision of the tensors. [default: bf16 on GPUs, fp32 on CPUs]",
)
@option(
    HOW,
    "--device",
    type=click.Choice(("auto", "cuda", "cpu")),
    default="auto",
    show_default=True,
    help="Device to measure; auto takes GPUs if there are any.",
)
@option(
    HOW,
    "--minutes",
    type=Number(min=0, min_open=True, max=LONGEST_S / 60),
    default=10.0,
    show_default=True,
    metavar="N",
    help="Time budget; the most informative shapes come first.",
)
@option(HOW, "--restart", is_flag=True, help="Discard measurements of earlier runs.")
@option(
    HOW,
    "--retry-failed",
    is_flag=True,
    help="Retry shapes that ran out of memory, crashed or hung.",
)
@option(
    HOW,
    "--hang-limit",
    type=Number(min=1, max=LONGEST_S),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time after which a measurement without an answer is given up.",
)
@option(
    IMPORT,
    "--add",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File of collectives from torchrun -m parplan.profiles.profile_comm, on one node or "
    "several; may be repeated.",
)
@option(
    IMPORT,
    "--nccl-tests",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text file that nccl-tests printed, read instead of measuring; may be repeated.",
)
@option(
    IMPORT,
    "--import",
    "imports",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Profile file of SimuMax, Galvatron (hardware) or AIConfigurator (CSV); may be repeated.",
)
@option(
    IMPORT,
    "--gpu",
    metavar="NAME",
    help="GPU that an imported file is of, if it does not say.",
)
@option(
    IMPORT,
    "--nodes",
    type=Whole("nodes"),
    metavar="N",
    help="Nodes that nccl-tests ran on, if its text does not say.",
)
@option(
    IMPORT,
    "--ranks-per-node",
    type=Whole("ranks_per_node"),
    metavar="N",
    help="GPUs of each node that nccl-tests used, if its text does not say.",
)
@option(LOOK, "--show", is_flag=True, help="Print FILE.")
@option(LOOK, "--diff", is_flag=True, help="Compare FILE with a second one.")
@option(
    LOOK,
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for a plot of the profile: .png, .svg or .pdf.",
)
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="profile.yaml",
    show_default=True,
    help="Profile file to write; an existing one is extended.",
)
@as_json
@packs("options", ProfileOptions)
def profile(files: tuple[Path, ...], options: ProfileOptions) -> int:
    """Measure this machine: operators, memory, links. `plan --profile` plans with the result.

    Every measurement runs in its own process: a measurement that runs out of memory, crashes or
    hangs is recorded and skipped. After any interruption, the same command continues. --show
    prints FILE, --diff compares two files.
    """
    _check(files, options)
    if options.diff:
        return _diff(*files, as_json=options.as_json)
    if options.show:
        return _show(files[0], options)
    return _measure(options)


def _check(files: tuple[Path, ...], options: ProfileOptions) -> None:
    if options.show and options.diff:
        raise click.UsageError(
            "--show prints one profile, --diff compares two: leave out one of them"
        )
    expected, rule = 0, "a measurement takes no file (-o says where to write)"
    if options.diff:
        expected, rule = 2, "--diff compares two files"
    elif options.show:
        expected, rule = 1, "--show prints one file"
    if len(files) != expected:
        raise click.UsageError(f"{rule}, {len(files)} given")


def _diff(first: Path, second: Path, *, as_json: bool) -> int:
    from parplan.profiles.machines.user_profile import read_profile
    from parplan.report.machines.profile_diff import diff_document, print_diff
    from parplan.report.text import console

    before, after = read_profile(first), read_profile(second)
    if as_json:
        print_json(diff_document(before, after))
    else:
        print_diff(before, after, (str(first), str(second)), console(sys.stdout))
    return 0


def _show(path: Path, options: ProfileOptions) -> int:
    from parplan.profiles.machines.user_profile import read_profile
    from parplan.report.plots.scatter_plot import require_plot

    if options.plot is not None:
        require_plot(options.plot)
    _print(read_profile(path), options)
    return 0


def _draw(profile: UserProfile, plot: Path, *, quiet: bool) -> None:
    from parplan.report.plots.profile_plot import draw_profile

    wrote_picture(plot, draw_profile(profile, plot), to_stderr=quiet)


def _measure(options: ProfileOptions) -> int:
    """Measures operators in their own processes, then collectives under torchrun.

    The file is written after each of the two.
    """
    from parplan.profiles.documents.files import require_writable
    from parplan.report.text import console, say

    output: Path = options.output
    require_writable(output, hint="choose another file with -o")
    if options.plot is not None:
        from parplan.report.plots.scatter_plot import require_plot

        require_plot(options.plot)
    others = options.nccl_tests or options.add or options.imports
    profiled = _imported(options) if others else _measured(options)
    for note in profiled.notes:
        tell(f"note: {note}")
    _print(profiled.profile, options)
    if not options.as_json:
        out = console(sys.stdout)
        if profiled.missed:
            say(
                out,
                f"{len(profiled.missed)} shapes were not reached: the same command goes on with "
                f"them",
            )
        say(out, f"wrote {output}; plan with it: plan --model NAME --gpus N --profile {output}")
    return INTERRUPTED if profiled.interrupted else 0


def _measured(options: ProfileOptions) -> Profiled:
    from parplan.planner.calibration.profiling import has_links, measure_links, measure_operators
    from parplan.profiles.profiler.environment import environment
    from parplan.report.progress_bars import line_bar, profile_bar
    from parplan.report.text import console

    require_torch("plan profile measures with torch")
    request, comm = _request(options), options.comm
    num_ranks = environment(request.device).num_devices
    links = comm is True or (
        comm is None
        and num_ranks > 1
        and request.cases is None
        and not has_links(options.output, num_ranks)
    )
    started_s = time.monotonic()
    operators: Profiled | None = None
    if comm is not True:
        share = 1 - LINKS_SHARE if links else 1.0
        with profile_bar(console(sys.stderr)) as on_progress:
            operators = measure_operators(
                replace(request, minutes=share * request.minutes), on_progress
            )
        if not links or operators.interrupted:
            return operators
    left = max(0.2, request.minutes - (time.monotonic() - started_s) / 60)
    with line_bar(console(sys.stderr), "measuring communication") as told:
        communication = measure_links(
            replace(request, restart=comm is True and request.restart), left, told
        )
    return communication if operators is None else replace(operators, profile=communication.profile)


def _imported(options: ProfileOptions) -> Profiled:
    from parplan.planner.calibration.imported_profile import import_files
    from parplan.planner.calibration.profiling import add_records
    from parplan.profiles.profiler.communication import comm_file, nccl_tests

    profiled: Profiled | None = None
    if options.imports:
        profiled = import_files(options.output, options.imports, options.gpu)
    for path in options.add:
        measured = comm_file.read_comm_file(path)
        profiled = add_records(options.output, measured.records, measured.device, str(path))
    if options.nccl_tests:
        records = nccl_tests.read_nccl_tests(
            options.nccl_tests, options.nodes, options.ranks_per_node
        )
        where = ", ".join(map(str, options.nccl_tests))
        profiled = add_records(options.output, records, None, where)
    assert profiled is not None, "one of the three options was given"
    return profiled


def _print(profile: UserProfile, options: ProfileOptions) -> None:
    from parplan.report.machines.profile_document import profile_document
    from parplan.report.machines.profile_tables import print_profile
    from parplan.report.text import console

    if options.as_json:
        print_json(profile_document(profile))
    else:
        print_profile(profile, console(sys.stdout))
    if options.plot is not None:
        _draw(profile, options.plot, quiet=options.as_json)


def _request(options: ProfileOptions) -> ProfileRequest:
    """Returns the measurements that the options ask for. Raises ConfigError."""
    import torch

    from parplan.planner.calibration.profiling import ProfileRequest
    from parplan.profiles.errors import ConfigError
    from parplan.profiles.models.model_catalog import load_model
    from parplan.profiles.models.spec import Precision

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch sees no GPU",
            hint="use --device cpu, or install a torch with CUDA",
        )
    precision = Precision(options.precision or ("bf16" if device == "cuda" else "fp32"))
    return ProfileRequest(
        output=options.output,
        device=device,
        precision=precision,
        program=PROGRAM,
        minutes=options.minutes,
        models=tuple(load_model(name) for name in options.models),
        hang_limit_s=options.hang_limit,
        cases=None
        if options.missing is None
        else _missing(options.missing, options.output, precision),
        restart=options.restart,
        retry_failed=options.retry_failed,
    )


def _missing(path: Path, output: Path, precision: str) -> tuple[Case, ...]:
    """Returns the shapes of a plan's operators that the profile in `output` lacks.

    Without that file, the plan's own profile is meant. Raises ConfigError where the plan has
    another precision than the measurement.
    """
    from parplan.planner.calibration.profile_coverage import missing_cases
    from parplan.planner.plan.plan_file import read_plan
    from parplan.profiles.errors import ConfigError
    from parplan.profiles.machines.user_profile import read_profile

    plan = read_plan(path)
    if plan.training.precision != precision:
        raise ConfigError(
            f"{path}: the plan is in {plan.training.precision}, what is measured in {precision}",
            hint=f"add --precision {plan.training.precision}",
        )
    known = read_profile(output).profile if output.exists() else None
    return missing_cases(plan, known, messages=False)
