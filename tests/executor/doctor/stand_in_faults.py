"""Paths with the faults that the stand-in must find: each was in the executor once."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from parplan.executor.doctor.path import Checked, GpuPath, Place, require_close, require_on
from parplan.executor.memory.host_copies import HostCopies
from parplan.executor.tensors import placed


def mixed(place: Place) -> Checked:
    torch.ones(3, device=place.device) + torch.ones(3)
    return Checked(says="a sum of two devices")


def not_awaited(place: Place) -> Checked:
    """Reads a copy before it has waited for it."""
    x = place.normal(8)
    copy, _ = HostCopies(place.device).copy(x.to(place.device), to_host=True)
    require_close("a copy", copy, x, 0.0)
    return Checked(says="a copy that was not waited for")


def moved_by_dtensor(place: Place) -> Checked:
    """Places columns of the host by from_local, and then in place."""
    mesh = init_device_mesh(place.device.type, (1,))
    columns = torch.ones(4, 2)
    kept = placed(columns, mesh, (Shard(1),), columns.shape, columns.stride())
    require_on("columns in place", kept._local_tensor, torch.device("cpu"))
    moved = DTensor.from_local(columns, mesh, (Shard(1),), run_check=False)
    require_on("columns by from_local", moved._local_tensor, torch.device("cpu"))
    return Checked(says="columns of the host stay there")


def in_group(place: Place) -> Checked:
    dist.all_reduce(torch.ones(3))
    return Checked(says="a tensor of the host in a group of GPUs")


EXPECTED = {
    "mixed": "MixedDevicesError",
    "not awaited": "differs from the CPU's by inf",
    "moved by DTensor": "columns by from_local is on standin",
    "in group": "a tensor of the CPU in a group of GPUs",
}
PATHS = tuple(
    GpuPath(name=name, checks="a fault", run=run)
    for name, run in zip(EXPECTED, (mixed, not_awaited, moved_by_dtensor, in_group), strict=True)
)


def _first(_: Place) -> Checked:
    return Checked(says="first")


def _hangs(place: Place) -> Checked:
    if place.rank == 1:
        time.sleep(600)
    return Checked(says="rank 0 is done")


def _dies(place: Place) -> Checked:
    if place.rank == 0:
        os._exit(7)
    return Checked(says="rank 1 is done")


def _last(_: Place) -> Checked:
    return Checked(says="last")


HANGING = tuple(
    GpuPath(name=run.__name__, checks="a fault", run=run) for run in (_first, _hangs, _dies, _last)
)
