"""The command that runs a plan: `torchrun --nproc-per-node N -m parplan.executor plan.yaml`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from parplan.commands.style import (
    LONGEST_S,
    Command,
    Number,
    fail,
    option,
    packs,
    print_lines,
    run_command,
    tell_kept,
)
from parplan.commands.user_modules import chunk_schedulers_of
from parplan.costmodels.chunks.measured_bytes import WARM_UP_SHARE
from parplan.executor import launch
from parplan.executor.checkpoint.resume import CheckpointOptions
from parplan.executor.data.tokens import TOKEN_TYPES
from parplan.executor.rules.all_rules import validate
from parplan.executor.rules.pool_rules import plans_of_run
from parplan.executor.rules.traced_rules import validate_traced_plan
from parplan.executor.run_options import LARGEST_SEED, LearningRateSchedule, Options
from parplan.executor.run_plan import (
    RunReport,
    RunSetting,
    device_of,
    pool_place,
    require_world,
    run_plan,
)
from parplan.executor.training.compiled import validate_compiled
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import read_any_plan
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.runs.run_account import trace_ranks
from parplan.planner.runs.run_file import RunFile, write_run
from parplan.profiles.documents.files import require_writable, write_result
from parplan.profiles.errors import ConfigError, PlannerError
from parplan.profiles.models.module_trust import trusted_module_note
from parplan.report.chrome_trace import trace_json
from parplan.report.runs.run_table import print_run
from parplan.report.text import console, say

PROGRAM = "python -m parplan.executor"
EXAMPLE = (
    "  torchrun --nproc-per-node 8 -m parplan.executor plan.yaml --steps 5\n"
    "  torchrun --nproc-per-node 8 -m parplan.executor plan.yaml --data tokens.bin --steps 1000 "
    "--lr-schedule cosine --warmup-steps 50\n"
    "  torchrun --nproc-per-node 8 -m parplan.executor plan-a100-80gb.yaml plan-h100-80gb.yaml\n"
    "  torchrun --nproc-per-node 8 --max-restarts 3 -m parplan.executor plan.yaml --steps 1000 "
    "--checkpoint-dir checkpoints"
)
DATA = "Data"
OPTIMIZER = "Optimizer"
CHECKPOINTS = "Checkpoints"
RUN = "Run"
_OTHER_TRACE = "choose another file with --trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """The options of a run besides those of its training."""

    device: str = "auto"
    timeout: float = 600.0
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 100
    resume: str = "auto"
    keep: int = 3
    run_json: Path | None = None
    trace: Path | None = None
    trust_module: bool = False


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files that rank 0 writes at the end: the run, and a trace if one is wanted.

    prints   whether the terminal gets the run too, which is so for one pool among several
    """

    run: Path
    trace: Path | None
    prints: bool = True

    def of_pool(self, plan_file: Path, *, prints: bool) -> RunFiles:
        """Returns the files of one pool among several, whose names end with that of its plan."""
        named = [
            None if file is None else file.with_stem(f"{file.stem}-{plan_file.stem}")
            for file in (self.run, self.trace)
        ]
        assert named[0] is not None, "a run has a file"
        return RunFiles(named[0], named[1], prints)

    def require_writable(self, *, record: bool) -> None:
        """Raises ConfigError for files that cannot be written, before the run and not after it."""
        if not record and self.trace is not None:
            raise ConfigError(
                "--trace needs what --no-record leaves out", hint="leave out one of them"
            )
        if record:
            require_writable(self.run, hint="choose another file with --run-json, or --no-record")
        if self.trace is not None:
            require_writable(self.trace, hint=_OTHER_TRACE)

    def write(self, run: RunFile) -> None:
        """Writes the files and prints the predictions beside the measurements.

        Raises ConfigError.
        """
        if self.prints:
            print_run(run, console(sys.stdout))
        kept = write_run(run, self.run)
        say(console(sys.stdout), f"wrote {self.run}")
        tell_kept(kept)
        if self.trace is not None:
            kept = write_result(trace_json(trace_ranks(run)), self.trace, hint=_OTHER_TRACE)
            say(console(sys.stdout), f"wrote {self.trace}; open it in https://ui.perfetto.dev")
            tell_kept(kept)


@click.command(
    cls=Command, epilog=EXAMPLE, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.argument(
    "plan_files", metavar="PLAN...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@option(
    DATA,
    "--data",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File of token ids: a .bin of `plan tokenize`, or a flat .npy. Without it tokens are "
    "random.",
)
@option(
    DATA,
    "--data-dtype",
    type=click.Choice(sorted(TOKEN_TYPES)),
    metavar="TYPE",
    help="Integer type of a .bin without a .json beside it: uint16 or uint32. [default: uint16]",
)
@option(
    DATA,
    "--shuffle/--no-shuffle",
    default=True,
    show_default=True,
    help="Shuffle the sequences of the file by the seed.",
)
@option(
    OPTIMIZER,
    "--learning-rate",
    type=Number(),
    default=3e-4,
    show_default=True,
    metavar="RATE",
    help="Learning rate.",
)
@option(
    OPTIMIZER,
    "--lr-schedule",
    type=click.Choice([schedule.value for schedule in LearningRateSchedule]),
    default="constant",
    show_default=True,
    metavar="NAME",
    help="Decay of the rate until --steps: constant, cosine or linear.",
)
@option(
    OPTIMIZER,
    "--warmup-steps",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Steps over which the rate rises.",
)
@option(
    OPTIMIZER,
    "--min-learning-rate",
    type=Number(),
    default=0.0,
    show_default=True,
    metavar="RATE",
    help="Final rate of cosine and linear.",
)
@option(
    OPTIMIZER,
    "--weight-decay",
    type=Number(),
    default=0.01,
    show_default=True,
    metavar="SHARE",
    help="Weight decay of matrices; vectors have none.",
)
@option(
    OPTIMIZER,
    "--betas",
    type=Number(),
    nargs=2,
    default=(0.9, 0.999),
    show_default=True,
    metavar="B1 B2",
    help="Betas of AdamW; the first is the momentum of SGD.",
)
@option(
    OPTIMIZER,
    "--clip-gradients",
    type=Number(),
    default=1.0,
    show_default=True,
    metavar="NORM",
    help="Scale gradients down to this norm over the whole model; 0 for never.",
)
@option(
    CHECKPOINTS,
    "--checkpoint-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the checkpoints, shared by all nodes.",
)
@option(
    CHECKPOINTS,
    "--checkpoint-every",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="Steps from one checkpoint to the next.",
)
@option(
    CHECKPOINTS,
    "--resume",
    metavar="auto|never|PATH",
    default="auto",
    show_default=True,
    help="Checkpoint to start from: auto takes the newest in --checkpoint-dir, if any; PATH may be "
    "of any mesh or plan of the model.",
)
@option(
    CHECKPOINTS,
    "--keep",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Newest checkpoints to keep.",
)
@option(
    RUN,
    "--steps",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="Optimizer steps, including steps before a resume.",
)
@option(
    RUN,
    "--seed",
    type=click.IntRange(0, LARGEST_SEED),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the initial parameters, the order of the data and the random tokens.",
)
@option(RUN, "--compile", is_flag=True, help="Compile every block with torch.compile.")
@option(
    RUN,
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device to train on; auto takes GPUs if there are any.",
)
@option(
    RUN,
    "--run-json",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for the measurements. [default: run.json beside PLAN]",
)
@option(
    RUN,
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for a trace of the last step, predicted and measured; https://ui.perfetto.dev "
    "opens it.",
)
@option(
    RUN,
    "--no-record",
    "record",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Measure only step times and write no file.",
)
@option(
    RUN,
    "--trace-memory",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Measure in the first N steps the memory that is outside of chunks, moment by moment, and "
    "schedule the chunks anew with it.",
)
@option(
    RUN,
    "--trace-share",
    type=Number(),
    default=WARM_UP_SHARE,
    show_default=True,
    metavar="SHARE",
    help="Share of the chunks' budget that they may fill in these steps, if they can run in it.",
)
@option(
    RUN,
    "--allow-non-finite",
    is_flag=True,
    help="Continue after a loss or gradient that is not finite, which otherwise ends the run.",
)
@option(
    RUN,
    "--trust-module",
    is_flag=True,
    help="Run the code of the plan's module even if it lies outside the current folder and the "
    "installed packages.",
)
@option(
    RUN,
    "--timeout",
    type=Number(min=1, max=LONGEST_S),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Time without progress on any rank after which the run ends (within 10 s more) and names "
    "the rank that is behind.",
)
@packs("trained", Options)
@packs("flags", RunFlags)
def main(plan_files: tuple[Path, ...], trained: Options, flags: RunFlags) -> int:
    """Train the model of PLAN as the plan says.

    Prints loss, gradient norm and speed of each step, then predicted against measured bytes. A
    PLAN that names a module runs that module's code; the command says which. Several PLANs are
    those of pools that divide the batch (plan --pools data), in the order of the pools: the ranks
    of the first pool come first.
    """
    plans = _read(plan_files, trained)  # every rank meets the same error
    require_world(plans, plan_files)
    pool = pool_place(plans).pool
    plan, plan_file = plans[pool], plan_files[pool]
    device = device_of(flags.device)
    for each in plans:
        if trained.compile and isinstance(each, Plan):
            validate_compiled(each, device)
    files = _run_files(plan_files, flags)
    if launch.is_rank_0():
        for of_pool in files:
            of_pool.require_writable(record=trained.record)
    imported = trusted_module_note(plan.module, str(plan_file), trust=flags.trust_module)
    if imported is not None and launch.is_rank_0():
        _note(imported)
    checkpoints = CheckpointOptions(
        directory=flags.checkpoint_dir,
        every=flags.checkpoint_every,
        resume=flags.resume,
        keep=flags.keep,
    )
    setting = RunSetting(
        checkpoints=checkpoints,
        device=device,
        timeout_s=flags.timeout,
        schedulers=chunk_schedulers_of(plan, traces=trained.trace_memory > 0),
    )
    report = RunReport(line=print_lines, note=_note, fail=_fail, recorded=files[pool].write)
    return run_plan(plans, trained, setting, report)


def _run_files(plan_files: Sequence[Path], flags: RunFlags) -> list[RunFiles]:
    """Returns the files of the run, or those of each pool where there are several.

    Raises ConfigError for pools that would write the same file.
    """
    files = [
        RunFiles(flags.run_json or plan_file.with_name("run.json"), flags.trace)
        for plan_file in plan_files
    ]
    if len(files) == 1:
        return files
    of_pools = [
        each.of_pool(plan_file, prints=number == 0)
        for number, (each, plan_file) in enumerate(zip(files, plan_files, strict=True))
    ]
    written = [file for each in of_pools for file in (each.run, each.trace) if file is not None]
    for file in written:
        if written.count(file) > 1:
            raise ConfigError(
                f"{' '.join(map(str, plan_files))}: two pools would write {file}",
                hint="give the plan files different names",
            )
    return of_pools


def _read(plan_files: Sequence[Path], trained: Options) -> tuple[Plan | TracedPlan, ...]:
    """Returns the plans in files, which must be able to run, alone or as pools.

    Raises ConfigError.
    """
    plans = [read_any_plan(file) for file in plan_files]
    for plan in plans:
        if isinstance(plan, TracedPlan):
            validate_traced_plan(plan, trained)
        else:
            validate(plan)
    return plans_of_run(list(zip(map(str, plan_files), plans, strict=True)))


def _note(text: str) -> None:
    print_lines(f"note: {text}", err=True)


def _fail(error: PlannerError, speaks: bool) -> int:
    hint = error.hint or f"{PROGRAM} --help lists the options"
    return fail(error.message, hint, error.exit_code, speaks=speaks)


def run() -> int:
    """Returns the exit code of the command: 0, or the code of its error."""
    # The modules never write in place to a tensor that a layer returned.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for part in ("pipelining.schedules", "checkpoint.state_dict_loader"):
        # These loggers also print pages about the errors that they raise.
        logging.getLogger(f"torch.distributed.{part}").setLevel(logging.CRITICAL)
    return run_command(main, speaks=launch.is_rank_0(), prog_name=PROGRAM)
