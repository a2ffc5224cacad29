"""One rank of a world that measures its communication: its device, groups and agreements."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from parplan.profiles.errors import ConfigError
from parplan.profiles.profiler.communication.group_shapes import Members, World
from parplan.profiles.profiler.gpus import backend_of, is_gpu

CONTROL_FACTOR = 2  # ranks outside a group wait longer for it than it may take


@dataclass(kw_only=True)
class MeasuringRank:
    """The groups of one rank, and its agreements with all others over `control`, a gloo group.

    `timeout` is that of one collective.
    """

    world: World
    rank: int
    device: torch.device
    timeout: timedelta
    control: dist.ProcessGroup
    _groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def speaks(self) -> bool:
        return self.rank == 0

    def groups(self, members: Members, *, fresh: bool = False) -> tuple[dist.ProcessGroup, ...]:
        """Returns the groups of `members`, each made once, or new ones with `fresh`.

        All ranks call this with the same arguments in the same order.
        """
        return tuple(
            (self._made if fresh else self._group)(ranks, self.device.type) for ranks in members
        )

    def barrier(self, members: Members) -> None:
        """Waits for all ranks of those groups; ranks outside them return at once."""
        ranks = tuple(sorted({rank for group in members for rank in group}))
        if len(ranks) == self.world.num_ranks:
            dist.barrier(self.control)
        elif self.rank in ranks:
            dist.barrier(self._group(ranks, "cpu"))

    def make_barrier(self, members: Members) -> None:
        """Makes the group that `barrier` needs, on all ranks."""
        ranks = tuple(sorted({rank for group in members for rank in group}))
        if len(ranks) < self.world.num_ranks:
            self._group(ranks, "cpu")

    def _group(self, ranks: tuple[int, ...], device: str) -> dist.ProcessGroup:
        if (device, ranks) not in self._groups:
            self._groups[device, ranks] = self._made(ranks, device)
        return self._groups[device, ranks]

    def _made(self, ranks: tuple[int, ...], device: str) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=self.timeout, backend=backend_of(device)
        )
        return made

    def decided(self, value: int) -> int:
        """Returns rank 0's `value` on every rank."""
        told = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(told, src=0, group=self.control)
        return int(told.item())

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of every value over all ranks."""
        told = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.control)
        return [float(value) for value in told]

    def any(self, flags: Iterable[bool]) -> list[bool]:
        """Tells for every flag whether any rank raised it."""
        return [value > 0 for value in self.largest([float(flag) for flag in flags])]


def world_of_environment() -> World:
    """Reads the world from torchrun's variables.

    Raises ConfigError without torchrun, and when nodes have different numbers of ranks.
    """
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
        if name not in os.environ
    ]
    if missing:
        raise ConfigError(
            f"not started by torchrun: {', '.join(missing)} not set",
            hint="torchrun --nproc-per-node 2 -m parplan.profiles.profile_comm -o comm.yaml",
        )
    num_ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if num_ranks % local:
        raise ConfigError(
            f"{num_ranks} ranks do not fill nodes of {local}",
            hint="start as many ranks on every node",
        )
    return World(nodes=num_ranks // local, ranks_per_node=local)


def chosen_device(name: str) -> torch.device:
    """This rank's device: its GPU, or the CPU. Raises ConfigError for cuda without enough GPUs."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if local >= count:
        raise ConfigError(
            f"--device {name}: local rank {local}, {count} GPUs on this node",
            hint=f"torchrun --nproc-per-node {max(1, count)}",
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def join_world(world: World, device: torch.device, timeout: timedelta) -> MeasuringRank:
    """Joins the other ranks.

    The default group gets no device, so that no communicator is made before it is measured.
    """
    limit = CONTROL_FACTOR * timeout
    dist.init_process_group(
        f"cpu:gloo,{device.type}:{backend_of(device)}" if is_gpu(device) else "gloo", timeout=limit
    )
    return MeasuringRank(
        world=world,
        rank=dist.get_rank(),
        device=device,
        timeout=timeout,
        control=dist.new_group(timeout=limit, backend="gloo"),
    )
