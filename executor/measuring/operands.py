"""Operands of one case on one device, with normal values as large as in training."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from parplan.executor.models.initial_values import INIT_STD
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.profiler.gpus import gpu, is_gpu
from parplan.profiles.units import GIB, KIB

# Of an activation's gradient; a product of two is not denormal in 16 bits.
GRADIENT_STD = 1e-3
_MEMORY = Path("/proc/meminfo")

Module = TypeVar("Module", bound=nn.Module)


@dataclass(slots=True)
class Maker:
    """Makes the tensors of one copy of a case's operands and counts their bytes.

    Raises MemoryError if the host has no room for them.
    """

    device: torch.device
    dtype: torch.dtype
    made: list[Tensor] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.made)

    def normal(
        self, *shape: int, std: float = 1.0, learned: bool = False, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return normal values; `learned` makes a leaf that requires a gradient."""
        tensor = self._empty(shape, dtype or self.dtype).normal_(0.0, std)
        return tensor.requires_grad_(learned)

    def gradient(self, *shape: int) -> Tensor:
        return self.normal(*shape, std=GRADIENT_STD)

    def zeros_like(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return self._empty(tuple(like.shape), dtype).zero_()

    def numbers(self, below: int, *shape: int) -> Tensor:
        """Return random integers from 0, as token ids or targets."""
        return self._empty(shape, torch.int64).random_(below)

    def module(self, module: Module) -> Module:
        """Fill `module`, which was made on the device "meta", and set it to training mode.

        Matrices are normal, weights of norms one and biases zero, in the maker's precision.
        """
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                self.parameters.append(nn.Parameter(self._filled(name, tuple(parameter.shape))))
                part.register_parameter(name, self.parameters[-1])
        return module.train()

    def _filled(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) > 1:
            return self.normal(*shape, std=INIT_STD)
        return self._empty(shape, self.dtype).fill_(0.0 if name == "bias" else 1.0)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device.type == "cpu":
            _require_room(torch.Size(shape).numel() * dtype.itemsize)
        self.made.append(torch.empty(shape, dtype=dtype, device=self.device))
        return self.made[-1]


def _require_room(n_bytes: int) -> None:
    """Raise MemoryError if the host has less memory.

    Linux grants memory that it does not have and later kills some process.
    """
    free = free_host_bytes()
    if free is not None and n_bytes > free:
        raise MemoryError(
            f"{n_bytes / GIB:.1f} GiB of operands, the host has {free / GIB:.1f} GiB free"
        )


def free_host_bytes() -> int | None:
    """Return the free bytes of the host, or None if the system does not report them."""
    if not _MEMORY.exists():
        return None
    fields = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * KIB


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last-level cache; 32 MiB if the system does not report them."""
    if is_gpu(device):
        return int(gpu(device).get_device_properties(device).L2_cache_size)
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((_kibibytes(path.read_text().strip()) for path in caches), default=32 * KIB) * KIB


def _kibibytes(text: str) -> int:
    return int(text.rstrip("KMG")) * {"K": 1, "M": KIB, "G": KIB * KIB}.get(text[-1], 1)


def model_spec(**sizes: Any) -> ModelSpec:
    """Return a model of the given sizes; every other size is 1."""
    ones = dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_hidden_size",
            "vocab_size",
        ),
        1,
    )
    return ModelSpec(name="case", **{**ones, "max_seq_length": 1, "vocab_multiple": 1, **sizes})


def resident_bytes() -> int | None:
    """Return the resident bytes of this process, or None if the system does not report them."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else None
