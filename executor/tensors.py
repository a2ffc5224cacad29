"""Tensors that may or may not be DTensors, their types by precision, and what torch remembers of
them.
"""

from __future__ import annotations

import gc

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from parplan.profiles.models.spec import Precision

DTYPES = {
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.FP32: torch.float32,
}


def as_dtensor(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor as it is; a plain tensor (token ids, targets) as one that every rank of `mesh`
    holds whole.
    """
    return (
        tensor
        if isinstance(tensor, DTensor)
        else DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False)
    )


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """The same outside autograd and without a call of torch: to look at, not to compute with."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def memory_of(tensor: Tensor) -> int:
    """What tells the memory of this rank's part from any other that lives; a fake tensor has no
    address.
    """
    return int(part(tensor).untyped_storage()._cdata)


def begin_fork() -> None:
    """In a process that was forked to be a rank: leave alone, and forget, what its parent did as
    another one.

    A gloo group that the collector finds here would wait for threads that no fork has; and what
    torch remembers by mesh is of the rank that the parent was.
    """
    gc.freeze()
    forget_meshes()


def forget_meshes() -> None:
    """Empty what torch remembers by mesh."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
