"""`torchrun --nproc-per-node N -m parplan.executor plan.yaml`: run a plan on the machine's GPUs, or
on CPUs through gloo.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _set_pg_timeout

from parplan.commands.style import LONGEST_S, Command, Number, fail, option, run_command
from parplan.executor import launch
from parplan.executor import placed_layers as layout
from parplan.executor.checkpoint.checkpoints import Checkpoints
from parplan.executor.checkpoint.resume import CheckpointOptions
from parplan.executor.data.tokens import TOKEN_TYPES
from parplan.executor.rules.all_rules import validate
from parplan.executor.rules.external_rules import has_even_shards
from parplan.executor.rules.traced_rules import validate_traced_plan
from parplan.executor.run_options import LARGEST_SEED, LearningRateSchedule, Options
from parplan.executor.traced.traced_trainer import TracedTrainer, build_traced_trainer, opened_of
from parplan.executor.training.compiled import validate_compiled
from parplan.executor.training.train import StepResult, build_trainer
from parplan.executor.watch.rank_progress import RankProgress
from parplan.executor.watch.run_recorder import RunFiles, collect
from parplan.executor.watch.state_bytes import table
from parplan.executor.watch.watch import SLACK_S, Watch, own_connection
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import read_any_plan
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.documents.files import explained_file_errors
from parplan.profiles.errors import ConfigError, PlannerError, RunError
from parplan.profiles.models.module_trust import trusted_note

PROGRAM = "python -m parplan.executor"
EXAMPLE = (
    "  torchrun --nproc-per-node 8 -m parplan.executor plan.yaml --steps 5\n"
    "  torchrun --nproc-per-node 8 -m parplan.executor plan.yaml --data tokens.bin --steps 1000 --lr-schedule cosine --warmup-steps 50\n"
    "  torchrun --nproc-per-node 8 --max-restarts 3 -m parplan.executor plan.yaml --steps 1000 --checkpoint-dir checkpoints"
)


DATA, OPTIMIZER, CHECKPOINTS, RUN = "Data", "Optimizer", "Checkpoints", "Run"


@click.command(
    cls=Command, epilog=EXAMPLE, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@option(
    DATA,
    "--data",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Token ids: a .bin, which `plan tokenize` writes, or a flat .npy. Without it they are random.",
)
@option(
    DATA,
    "--data-dtype",
    type=click.Choice(sorted(TOKEN_TYPES)),
    metavar="TYPE",
    help="uint16 or uint32, of a .bin with no .json beside it. [default: uint16]",
)
@option(
    DATA,
    "--shuffle/--no-shuffle",
    default=True,
    show_default=True,
    help="Take the file's sequences in an order of the seed's.",
)
@option(
    OPTIMIZER,
    "--learning-rate",
    type=Number(),
    default=3e-4,
    show_default=True,
    metavar="RATE",
    help="Of AdamW.",
)
@option(
    OPTIMIZER,
    "--lr-schedule",
    type=click.Choice([schedule.value for schedule in LearningRateSchedule]),
    default="constant",
    show_default=True,
    metavar="NAME",
    help="constant, cosine or linear: how the rate falls until --steps.",
)
@option(
    OPTIMIZER,
    "--warmup-steps",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Steps it rises over.",
)
@option(
    OPTIMIZER,
    "--min-learning-rate",
    type=Number(),
    default=0.0,
    show_default=True,
    metavar="RATE",
    help="Where cosine and linear end.",
)
@option(
    OPTIMIZER,
    "--weight-decay",
    type=Number(),
    default=0.01,
    show_default=True,
    metavar="SHARE",
    help="Of matrices, not of vectors.",
)
@option(
    OPTIMIZER,
    "--betas",
    type=Number(),
    nargs=2,
    default=(0.9, 0.999),
    show_default=True,
    metavar="B1 B2",
    help="Of AdamW.",
)
@option(
    OPTIMIZER,
    "--clip-gradients",
    type=Number(),
    default=1.0,
    show_default=True,
    metavar="NORM",
    help="Scale gradients down to this norm over the whole model; 0: never.",
)
@option(
    CHECKPOINTS,
    "--checkpoint-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where they go; all nodes share it.",
)
@option(
    CHECKPOINTS,
    "--checkpoint-every",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="Steps from one to the next.",
)
@option(
    CHECKPOINTS,
    "--resume",
    metavar="auto|never|PATH",
    default="auto",
    show_default=True,
    help="auto: from the newest in --checkpoint-dir, if any; PATH: from that one, of any mesh or plan of the model.",
)
@option(
    CHECKPOINTS,
    "--keep",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Newest ones to keep.",
)
@option(
    RUN,
    "--steps",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="Optimizer steps, those before a resume included.",
)
@option(
    RUN,
    "--seed",
    type=click.IntRange(0, LARGEST_SEED),
    default=0,
    show_default=True,
    metavar="N",
    help="Of the initial parameters, the order of the data and the random tokens.",
)
@option(RUN, "--compile", is_flag=True, help="Compile every block with torch.compile.")
@option(
    RUN,
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: GPUs if any.",
)
@option(
    RUN,
    "--run-json",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write what was measured. [default: run.json beside PLAN]",
)
@option(
    RUN,
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a trace of the last step, predicted and measured: open it in https://ui.perfetto.dev.",
)
@option(
    RUN,
    "--no-record",
    "record",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Measure step times only, write no file.",
)
@option(
    RUN,
    "--allow-non-finite",
    is_flag=True,
    help="Go on after a loss or gradient that is not finite, which ends a run otherwise.",
)
@option(
    RUN,
    "--trust-module",
    is_flag=True,
    help="Import the plan's module also from outside of the current folder and of installed packages: its code runs.",
)
@option(
    RUN,
    "--timeout",
    type=Number(min=1, max=LONGEST_S),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Without progress on any rank until the run ends (within 10 more) and names the rank that is behind.",
)
def main(
    plan_file: Path,
    device: str,
    timeout: float,
    checkpoint_dir: Path | None,
    checkpoint_every: int,
    resume: str,
    keep: int,
    run_json: Path | None,
    trace: Path | None,
    trust_module: bool,
    **options: object,
) -> int:
    """Train the model of PLAN as the plan says; prints loss, gradient norm and speed per step, then
    predicted against measured bytes.

    A PLAN that names a module runs that module's code; the command says which.
    """
    plan, trained = read_any_plan(plan_file), Options(**options)  # every rank meets the same error
    if isinstance(plan, TracedPlan):
        validate_traced_plan(plan, trained)
    else:
        validate(plan)
    _check_world(plan, plan_file)
    chosen = _device(device)
    if trained.compile and isinstance(plan, Plan):
        validate_compiled(plan, chosen)
    files = RunFiles(run_json or plan_file.with_name("run.json"), trace)
    if launch.is_rank_0():
        files.require_writable(record=trained.record)
    imported = trusted_note(plan.module, str(plan_file), trust=trust_module)
    if imported is not None and launch.is_rank_0():
        _note(imported)
    checkpoints = CheckpointOptions(
        directory=checkpoint_dir, every=checkpoint_every, resume=resume, keep=keep
    )
    return _watched(plan, trained, checkpoints, chosen, timeout, files)


def _watched(
    plan: Plan | TracedPlan,
    options: Options,
    checkpoints: CheckpointOptions,
    device: torch.device,
    timeout_s: float,
    files: RunFiles,
) -> int:
    """Train; every way in which that can end gives one error on one rank, and an exit code."""
    limit = timedelta(
        seconds=timeout_s + 2 * SLACK_S
    )  # the watch says more than a collective's own timeout
    rank, store = launch.rank(), launch.open_store(limit)
    progress = RankProgress()
    watch = Watch(own_connection(store), rank, plan.mesh, progress, timeout_s)
    watch.start()
    try:
        progress.at("joins the other ranks")
        _join(device, store, rank, plan.mesh.num_ranks, limit)
        progress.at("builds its layers")
        with explained_file_errors():
            _train(plan, options, checkpoints, device, limit, progress, files)
        dist.destroy_process_group()
    except PlannerError as error:
        code = _fail(error, speaks=watch.claim())
        dist.destroy_process_group()
        return code
    except (RuntimeError, CheckpointException):
        lost = watch.lost()
        if lost is None:
            raise
        return _fail(
            RunError(lost, hint="torchrun's --max-restarts goes on from a checkpoint"),
            speaks=watch.claim(),
        )
    finally:
        watch.stop()
    return 0


def _check_world(plan: Plan | TracedPlan, plan_file: Path) -> None:
    world = launch.world()
    if world != plan.mesh.num_ranks:
        mesh = plan.mesh
        raise ConfigError(
            f"{plan_file}: the plan needs {mesh.num_ranks} ranks ({mesh}), {world} started",
            hint=f"start it with: {layout.torchrun_line(plan, str(plan_file))}",
        )


def _device(name: str) -> torch.device:
    """This rank's GPU, or the CPU. Raises ConfigError."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch sees no GPU", hint="use --device cpu")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    local_rank = launch.local_rank()
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name}: local rank {local_rank} has no GPU, torch sees {torch.cuda.device_count()}"
        )
    return torch.device("cuda", local_rank)


def _join(
    device: torch.device, store: dist.Store, rank: int, world: int, timeout: timedelta
) -> None:
    """Join the process group: nccl between GPUs, gloo between CPUs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _train(
    plan: Plan | TracedPlan,
    options: Options,
    checkpoint_options: CheckpointOptions,
    device: torch.device,
    timeout: timedelta,
    progress: RankProgress,
    files: RunFiles,
) -> None:
    """Only rank 0 prints."""
    speaks = dist.get_rank() == 0
    if isinstance(plan, TracedPlan):
        trainer = _module_trainer(plan, options, device, progress)
    else:
        trainer = build_trainer(plan, options, device, progress)
    for group in trainer.ranks.groups:
        _set_pg_timeout(timeout, group)  # torch gives a mesh's groups its own default instead
    checkpoints = Checkpoints(trainer, checkpoint_options, timeout=timeout, note=_note)
    first = checkpoints.resume()
    try:
        for result in trainer.run(first):
            if speaks:
                click.echo(_step_line(plan, options, result))
            checkpoints.after_step(result.step + 1)
    except PlannerError:
        checkpoints.settle()  # what is being written is what the next run goes on from
        raise
    if first >= options.steps:
        checkpoints.note(f"nothing to do: --steps {options.steps}, {first} are done")
        return
    checkpoints.finish(options.steps)
    rows, own = [None] * dist.get_world_size(), trainer.state_bytes()
    dist.all_gather_object(rows, own)
    run = collect(plan, trainer.recorder, own, device, trainer.moved(), trainer.on_host_bytes)
    if speaks:
        click.echo(table(rows, compared=isinstance(plan, TracedPlan) or has_even_shards(plan)))
    if run is not None:
        files.write(run)


def _module_trainer(
    plan: TracedPlan, options: Options, device: torch.device, progress: RankProgress
) -> TracedTrainer:
    opened = opened_of(plan, options.seed)
    if opened.note and dist.get_rank() == 0:
        _note(opened.note)
    return build_traced_trainer(plan, options, device, progress, opened)


def _step_line(plan: Plan | TracedPlan, options: Options, result: StepResult) -> str:
    norm = f"grad norm {result.gradient_norm:.4g}"
    if result.skipped:
        norm += f" skipped, loss scale {result.loss_scale:g}"
    elif 0 < options.clip_gradients < result.gradient_norm:
        norm += f" clipped to {options.clip_gradients:g}"
    rate = f"  lr {result.learning_rate:.2e}" if options.lr_varies else ""
    speed = plan.training.tokens_per_step / result.seconds
    unit = plan.traced.unit if isinstance(plan, TracedPlan) else "tokens"
    return f"step {result.step + 1:>4}  loss {result.loss:.6f}  {norm}{rate}  {speed:,.0f} {unit}/s"


def _note(text: str) -> None:
    click.echo(f"note: {text}", err=True)


def _fail(error: PlannerError, *, speaks: bool) -> int:
    return fail(
        error.message,
        error.hint or f"{PROGRAM} --help lists the options",
        error.exit_code,
        speaks=speaks,
    )


def run() -> int:
    """The command with its exit code: 0, or that of the error."""
    # the modules never write in place to what a layer returned
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for part in (
        "pipelining.schedules",
        "checkpoint.state_dict_loader",
    ):  # they print pages about what they raise as well
        logging.getLogger(f"torch.distributed.{part}").setLevel(logging.CRITICAL)
    return run_command(main, speaks=launch.is_rank_0(), prog_name=PROGRAM)


if __name__ == "__main__":
    # the default action ends even a rank that waits inside a collective, without a traceback; a
    # shell reports 130
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # not sys.exit: gloo's threads may still run while the interpreter is torn down, which aborted 1
    # run in 14 on a busy machine
    os._exit(run())
