"""`torchrun --nproc-per-node N -m executor plan.yaml`: run a plan on the machine's GPUs, or on CPUs through gloo."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _set_pg_timeout

from executor import layout
from executor.check import table
from executor.checkpoint import Checkpoints
from executor.data import TOKEN_TYPES
from executor.progress import Progress
from executor.resume import CheckpointOptions
from executor.train import Options, build_trainer
from executor.watch import SLACK_S, Watch, own_connection
from planner.plan import Plan, read
from profiles.errors import ConfigError, PlannerError

EXAMPLE = """
\b
Example:
  torchrun --nproc-per-node 8 -m executor plan.yaml --steps 5
  torchrun --nproc-per-node 8 -m executor plan.yaml --data tokens.bin --data-dtype uint16
  torchrun --nproc-per-node 8 --max-restarts 3 -m executor plan.yaml --steps 1000 --checkpoint-dir checkpoints
"""


@click.command(epilog=EXAMPLE, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Optimizer steps, those before a resume included.")
@click.option("--data", type=click.Path(path_type=Path), help="File of token ids; without it they are random.")
@click.option("--data-dtype", type=click.Choice(sorted(TOKEN_TYPES)), default="uint16", show_default=True, help="Type of the ids.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the initial parameters and the random tokens.")
@click.option("--learning-rate", type=float, default=3e-4, show_default=True, help="Of AdamW.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="auto: GPUs if any.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True,
              help="Seconds without progress on any rank until the run ends (within 10 more) and names the rank that is behind.")
@click.option("--checkpoint-dir", type=click.Path(path_type=Path), help="Folder for checkpoints, which all nodes share.")
@click.option("--checkpoint-every", type=click.IntRange(min=1), default=100, show_default=True, help="Steps between checkpoints.")
@click.option("--resume", metavar="auto|never|PATH", default="auto", show_default=True,
              help="auto: from the newest checkpoint in --checkpoint-dir, if any; PATH: from that one, of any mesh or plan of the model.")
@click.option("--keep", type=click.IntRange(min=1), default=3, show_default=True, help="Newest checkpoints to keep.")
def main(
    plan_file: Path, device: str, timeout: float, checkpoint_dir: Path | None, checkpoint_every: int, resume: str, keep: int,
    **options: object,
) -> int:
    """Train the model of PLAN as the plan says; prints loss and speed per step, then predicted against measured bytes."""
    try:
        plan = read(plan_file)
        layout.validate(plan)
        _check_world(plan, plan_file)
        chosen = _device(device)
    except PlannerError as error:
        return _fail(error, speaks=os.environ.get("RANK", "0") == "0")  # every rank meets the same error
    checkpoints = CheckpointOptions(directory=checkpoint_dir, every=checkpoint_every, resume=resume, keep=keep)
    return _watched(plan, Options(**options), checkpoints, chosen, timeout)


def _watched(plan: Plan, options: Options, checkpoints: CheckpointOptions, device: torch.device, timeout_s: float) -> int:
    """Train; every way in which that can end gives one error on one rank, and an exit code."""
    limit = timedelta(seconds=timeout_s + 2 * SLACK_S)  # the watch says more than a collective's own timeout
    rank, store = int(os.environ.get("RANK", "0")), _store(plan.mesh.num_ranks, limit)
    progress = Progress()
    watch = Watch(own_connection(store), rank, plan.mesh, progress, timeout_s)
    watch.start()
    try:
        progress.at("joins the other ranks")
        _join(device, store, rank, plan.mesh.num_ranks, limit)
        progress.at("builds its layers")
        _train(plan, options, checkpoints, device, limit, progress)
        dist.destroy_process_group()
    except PlannerError as error:
        code = _fail(error, speaks=watch.claim())
        dist.destroy_process_group()
        return code
    except (RuntimeError, CheckpointException):
        lost = watch.lost()
        if lost is None:
            raise
        return _fail(PlannerError(lost, hint="torchrun's --max-restarts goes on from a checkpoint"), speaks=watch.claim())
    finally:
        watch.stop()
    return 0


def _check_world(plan: Plan, plan_file: Path) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != plan.mesh.num_ranks:
        mesh = plan.mesh
        raise ConfigError(
            f"{plan_file}: the plan needs {mesh.num_ranks} ranks ({mesh}), {world} started",
            hint=f"start it with: {layout.torchrun_line(plan, str(plan_file))}")


def _device(name: str) -> torch.device:
    """This rank's GPU, or the CPU. Raises ConfigError."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch sees no GPU", hint="use --device cpu")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: local rank {local_rank} has no GPU, torch sees {torch.cuda.device_count()}")
    return torch.device("cuda", local_rank)


def _join(device: torch.device, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
    """Join the process group: nccl between GPUs, gloo between CPUs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _store(world: int, timeout: timedelta) -> dist.Store:
    """torchrun's store, under a prefix per restart: a restarted rank must not meet the keys of the last try."""
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, timeout=timeout,
        is_master=os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
    return dist.PrefixStore(f"try{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _train(
    plan: Plan, options: Options, checkpoint_options: CheckpointOptions, device: torch.device, timeout: timedelta, progress: Progress,
) -> None:
    """Only rank 0 prints."""
    speaks = dist.get_rank() == 0
    trainer = build_trainer(plan, options, device, progress)
    for group in trainer.ranks.groups:
        _set_pg_timeout(timeout, group)  # torch gives a mesh's groups its own default instead
    checkpoints = Checkpoints(trainer, checkpoint_options, timeout=timeout, note=_note)
    first = checkpoints.resume()
    for result in trainer.run(first):
        if speaks:
            speed = plan.training.tokens_per_step / result.seconds
            click.echo(f"step {result.step + 1:>4}  loss {result.loss:.6f}  {speed:,.0f} tokens/s")
        checkpoints.after_step(result.step + 1)
    if first >= options.steps:
        checkpoints.note(f"nothing to do: --steps {options.steps}, {first} are done")
        return
    checkpoints.finish(options.steps)
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, trainer.state_bytes())
    if speaks:
        click.echo(table(rows))


def _note(text: str) -> None:
    click.echo(f"note: {text}", err=True)


def _fail(error: PlannerError, *, speaks: bool) -> int:
    if speaks:
        click.echo(f"error: {error.message}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
    return error.exit_code


def run() -> int:
    """The command with its exit code: 0, or that of the error."""
    # the modules never write in place to what a layer returned
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for part in ("pipelining.schedules", "checkpoint.state_dict_loader"):  # they print pages about what they raise as well
        logging.getLogger(f"torch.distributed.{part}").setLevel(logging.CRITICAL)
    try:
        return main(prog_name="python -m executor", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code


if __name__ == "__main__":
    # the default action ends even a rank that waits inside a collective, without a traceback; a shell reports 130
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    # not sys.exit: gloo's threads may still run while the interpreter is torn down, which aborted 1 run in 14 on a busy machine
    os._exit(code)
