"""Collectives that the executor really sends for one transition, in both passes.

`python -m tests.helpers.redistributions` prints the table of meshes of 2, 4, 2 x 2 and 2 x 2 x 2
gloo ranks.
"""

from __future__ import annotations

import itertools
import logging
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.executor.sharding.moves import moved

PLACEMENTS = (Replicate(), Shard(0), Shard(1), Shard(2), Partial())
SHAPE = (8, 8, 8)  # [batch, sequence, feature]: every mesh here divides every dim

_NAMES = {
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter_tensor": "reduce-scatter",
    "shard_dim_alltoall": "all-to-all",
}

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over the ranks of mesh axis `axis`.

    `input_elements` is what each rank hands in.
    """

    name: str
    axis: int
    input_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A change from placements to placements, one for each mesh axis.

    `gradient` is where the gradient of the result is.
    """

    source: Placements
    target: Placements
    gradient: Placements


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The collectives of the forward and of the backward pass, in order.

    `gradient` is where the gradient of the source ends.
    """

    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    gradient: Placements


class _Record(TorchDispatchMode):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.axes = {mesh.get_group(axis).group_name: axis for axis in range(mesh.ndim)}
        self.found: list[Collective] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = _NAMES.get(func.overloadpacket.__name__)
        if name and func.namespace in ("_c10d_functional", "_dtensor"):
            group = next(
                arg
                for arg in (*reversed(args), *(kwargs or {}).values())
                if getattr(arg, "group_name", arg) in self.axes
            )
            self.found.append(
                Collective(name, self.axes[getattr(group, "group_name", group)], args[0].numel())
            )
        return func(*args, **(kwargs or {}))


def transitions(num_axes: int) -> list[Transition]:
    """Every pair that the executor can meet on a mesh of so many axes: the target is never Partial.

    The gradient of the result is where the result is, or a partial sum on the axes where the result
    is whole: what an operator that reads it whole and is divided itself hands back.
    """
    actual = []
    for source in itertools.product(PLACEMENTS, repeat=num_axes):
        for target in itertools.product(PLACEMENTS[:-1], repeat=num_axes):
            partial = tuple(
                Partial() if placement.is_replicate() else placement for placement in target
            )
            actual += [
                Transition(source=source, target=target, gradient=gradient)
                for gradient in dict.fromkeys((target, partial))
            ]
    return actual


def sent(transition: Transition, mesh: DeviceMesh) -> Sent:
    """The collectives of this rank for `transition` of a tensor of SHAPE; collective."""
    part = torch.ones(_local_shape(transition.source, mesh), device=mesh.device_type)
    source = DTensor.from_local(part, mesh, transition.source, run_check=False).requires_grad_()
    with _Record(mesh) as forward:
        result = moved(source, transition.target, transition.gradient)
    with _Record(mesh) as backward:
        result.backward(torch.ones_like(result))
    return Sent(
        forward=tuple(forward.found),
        backward=tuple(backward.found),
        gradient=source.grad.placements,
    )


def _local_shape(placements: Placements, mesh: DeviceMesh) -> list[int]:
    shape = list(SHAPE)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] //= mesh.size(axis)
    return shape


def measure(mesh_shape: tuple[int, ...], actual: Sequence[Transition]) -> dict[Transition, Sent]:
    """Collectives that rank 0 of a new world of gloo ranks sends for each transition."""
    world = int(torch.tensor(mesh_shape).prod())
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, args=(world, mesh_shape, list(actual), folder), nprocs=world, start_method="fork"
        )
        return dict(
            zip(actual, torch.load(Path(folder) / "sent.pt", weights_only=False), strict=True)
        )


def on_accelerator(
    mesh_shape: tuple[int, ...], actual: Sequence[Transition]
) -> dict[Transition, Sent]:
    """Collectives that would be sent between GPUs.

    There Shard -> Shard is one all-to-all. The process group moves no data.
    """
    world = int(torch.tensor(mesh_shape).prod())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        mesh = init_device_mesh("cpu", mesh_shape)
        # torch.distributed.tensor._collective_utils.shard_dim_alltoall takes the path of
        # accelerators when this is set
        with mock.patch(
            "torch.distributed.tensor._collective_utils.local_tensor_mode", return_value=True
        ):
            return {transition: sent(transition, mesh) for transition in actual}
    finally:
        dist.destroy_process_group()


def _rank(
    rank: int, world: int, mesh_shape: tuple[int, ...], actual: list[Transition], folder: str
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", mesh_shape)
    results = [sent(transition, mesh) for transition in actual]
    if rank == 0:
        torch.save(results, f"{folder}/sent.pt")
    dist.destroy_process_group()


def line(transition: Transition, what: Sent) -> str:
    """One row of the table."""
    forward = f"{_short(transition.source):<6} -> {_short(transition.target):<6}"
    backward = f"{_steps(what.backward)} -> {_short(what.gradient)}"
    return (
        f"{forward} {_steps(what.forward):<58}"
        f" | gradient {_short(transition.gradient):<6} {backward}"
    )


def _short(placements: Placements) -> str:
    return "".join(
        "R" if p.is_replicate() else "P" if p.is_partial() else f"S{p.dim}" for p in placements
    )


def _steps(collectives: tuple[Collective, ...]) -> str:
    return ", ".join(f"{c.name}@{c.axis}({c.input_elements})" for c in collectives) or "nothing"


def main() -> None:
    logging.getLogger("torch").setLevel(logging.ERROR)  # it warns of every Shard -> Shard on CPUs
    for shape in ((2,), (4,), (2, 2), (2, 2, 2)):
        actual = (
            transitions(len(shape))
            if len(shape) < 3
            else random.Random(0).sample(transitions(3), 60)
        )
        print(f"mesh {shape}")
        accelerator = on_accelerator(shape, actual)
        for transition, what in measure(shape, actual).items():
            print(line(transition, what))
            if what != accelerator[transition]:
                print(f"{'on GPUs':<16} {line(transition, accelerator[transition])[17:]}")


if __name__ == "__main__":
    main()
