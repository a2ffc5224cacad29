"""A rank's GPU as torch knows it: its runtime and the backend of its collectives.

Everything that only a GPU has is reached through `gpu(device)`, which is torch.cuda for an NVIDIA
or AMD GPU. A stand-in for a GPU, as tests use one (executor/doctor/stand_in.py), gives torch a
runtime of its own under another name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_WITHOUT_GPU = ("cpu", "meta")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def is_gpu(device: torch.device | str) -> bool:
    """Returns True if tensors of `device` lie in memory that the host does not compute on."""
    return torch.device(device).type not in _WITHOUT_GPU


def gpu(device: torch.device | str) -> Any:
    """Returns torch's module of streams, events, memory and random numbers of a GPU."""
    return torch.get_device_module(torch.device(device).type)


def backend_of(device: torch.device | str) -> str:
    """Returns the backend of collectives on a device."""
    kind = torch.device(device).type
    return _BACKENDS.get(kind) or dist.get_default_backend_for_device(kind)


def own_gpu(device: torch.device) -> torch.device | None:
    """Returns the GPU that a process group is bound to, None on the CPU.

    Without it torch guesses a GPU from the rank for barriers and for objects that are gathered.
    """
    if not is_gpu(device):
        return None
    return torch.device(device.type, gpu(device).current_device())


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the device of the tensors that `group` exchanges: this process's GPU, or the CPU."""
    kind = dist.Backend.backend_capability.get(dist.get_backend(group), ["cpu"])[0]
    return own_gpu(torch.device(kind)) or torch.device(kind)


def forked_random(*devices: torch.device | str, enabled: bool = True) -> Any:
    """Returns a context that restores the generators of the CPU and of `devices` at its end.

    torch forks those of all GPUs of a machine unless it is told which: a rank would then open a
    context on the GPUs of other ranks.
    """
    gpus = [torch.device(each) for each in devices if is_gpu(each)]
    numbers = [gpu(each).current_device() if each.index is None else each.index for each in gpus]
    kind = gpus[0].type if gpus else "cuda"
    return torch.random.fork_rng(numbers, enabled=enabled, device_type=kind)


@contextmanager
def host_random(seed: int) -> Iterator[None]:
    """Surrounds work that draws from the CPU's generator alone, and restores it.

    torch.manual_seed would seed the generators of GPUs too, which draw the dropout of a run.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
