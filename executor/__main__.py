"""`torchrun --nproc-per-node N -m executor plan.yaml`: run a plan on the machine's GPUs, or on CPUs through gloo."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from executor import layout
from executor.check import table
from executor.data import TOKEN_TYPES
from executor.foreign.rules import has_even_shards
from executor.train import Options, build_trainer
from planner.plan import Plan, read
from profiles.errors import ConfigError, PlannerError

EXAMPLE = """
\b
Example:
  torchrun --nproc-per-node 8 -m executor plan.yaml --steps 5
  torchrun --nproc-per-node 8 -m executor plan.yaml --data tokens.bin --data-dtype uint16
"""


@click.command(epilog=EXAMPLE, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Optimizer steps to run.")
@click.option("--data", type=click.Path(path_type=Path), help="File of token ids; without it they are random.")
@click.option("--data-dtype", type=click.Choice(sorted(TOKEN_TYPES)), default="uint16", show_default=True, help="Type of the ids.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the initial parameters and the random tokens.")
@click.option("--learning-rate", type=float, default=3e-4, show_default=True, help="Of AdamW.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="auto: GPUs if any.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds until a stuck collective is an error.")
def main(plan_file: Path, device: str, timeout: float, **options: object) -> int:
    """Train the model of PLAN as the plan says; prints loss and speed per step, then predicted against measured bytes."""
    try:
        plan = read(plan_file)
        layout.validate(plan)
        _check_world(plan, plan_file)
        chosen = _device(device)
    except PlannerError as error:
        return _fail(error, speaks=os.environ.get("RANK", "0") == "0")  # every rank meets the same error
    limit = timedelta(seconds=timeout)
    _join(chosen, limit)
    try:
        _train(plan, Options(**options), chosen, limit)
    except PlannerError as error:
        return _fail(error, speaks=True)
    finally:
        dist.destroy_process_group()
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


def _join(device: torch.device, timeout: timedelta) -> None:
    """Join the process group: nccl between GPUs, gloo between CPUs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=_store(world, timeout), rank=rank, world_size=world, timeout=timeout)


def _store(world: int, timeout: timedelta) -> dist.Store:
    """torchrun's store, under a prefix per restart: a restarted rank must not meet the keys of the last try."""
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, timeout=timeout,
        is_master=os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
    return dist.PrefixStore(f"try{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _train(plan: Plan, options: Options, device: torch.device, timeout: timedelta) -> None:
    """Only rank 0 prints."""
    speaks = dist.get_rank() == 0
    trainer = build_trainer(plan, options, device)
    for group in trainer.ranks.groups:
        _set_pg_timeout(timeout, group)  # torch gives a mesh's groups its own default instead
    for result in trainer.run():
        if speaks:
            speed = plan.training.tokens_per_step / result.seconds
            click.echo(f"step {result.step + 1:>4}  loss {result.loss:.6f}  {speed:,.0f} tokens/s")
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, trainer.state_bytes())
    if speaks:
        click.echo(table(rows, compared=has_even_shards(plan)))


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
