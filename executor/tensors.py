"""Tensors that may be DTensors, their types by precision, collectives, and caches of meshes."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
)

from parplan.profiles.models.spec import Precision
from parplan.profiles.profiler.gpus import is_gpu

DTYPES = {
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.FP32: torch.float32,
}


# The names of torch 2.13, which deprecates the earlier ones.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def as_dtensor(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor unchanged, and a plain tensor as one that is replicated over `mesh`.

    Token ids and targets are plain tensors.
    """
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False)


def placed(
    part: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """Return `part`, where it is, as this rank's part of a DTensor of `shape`.

    `DTensor.from_local` copies a part on the host to a mesh of GPUs: FSDP2 makes its offloaded
    parameters as here.
    """
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(shape, stride, part.dtype))
    return DTensor(part, spec, requires_grad=False)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on `device`.

    To a GPU it is copied from pinned memory while the host goes on; torch reuses that memory when
    the copy is over.
    """
    if not is_gpu(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this rank holds, outside autograd.

    Calls no operator of torch: the result is for inspection, not for computing.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def memory_of(tensor: Tensor) -> int:
    """Return a key that tells the memory of this rank's part from any other living memory.

    A fake tensor has no address.
    """
    return int(part(tensor).untyped_storage()._cdata)


def begin_fork() -> None:
    """Drop the parent's state in a process that was forked to be a rank.

    A gloo group that the garbage collector met here would wait for threads that no fork has, and
    torch's caches by mesh belong to the parent's rank.
    """
    gc.freeze()
    forget_meshes()


def forget_meshes() -> None:
    """Empty torch's caches by mesh."""
    # here, for it loads torch's compiler: a quarter of the time that a rank takes to start
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
