"""One path that only GPUs have: its name, its check and the places of the source that it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parplan.planner.plan.plan import Plan
from parplan.profiles.profiler.gpus import gpu, is_gpu


class RefusedError(Exception):
    """The device or its software has no such path; the message says what is missing."""


class WrongError(Exception):
    """Numbers of the device differ from those of the CPU by more than they may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank that runs the paths, beside `world` - 1 others.

    plans    the plans that are trained, by the names of their paths
    folder   for checkpoints, the same on all ranks
    real     True for a GPU and the CPU, whose times mean something; False for a stand-in
    """

    device: torch.device
    rank: int
    world: int
    folder: Path
    plans: Mapping[str, Plan] = field(default_factory=dict)
    real: bool = True

    @property
    def on_gpu(self) -> bool:
        return is_gpu(self.device)

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.on_gpu:
            gpu(self.device).synchronize(self.device)

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """Returns normal numbers on the CPU, the same on every rank."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The outcome of a path that ran and was right; `slow` says what took too long, if anything."""

    says: str
    slow: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPath:
    """A path that only GPUs have.

    checks   what is compared, for the list of `plan doctor --list`
    run      raises RefusedError or WrongError
    covers   its places of the source, as executor/doctor/gpu_places.py names them
    ranks    the fewest ranks that it needs
    """

    name: str
    checks: str
    run: Callable[[Place], Checked]
    covers: tuple[str, ...] = ()
    ranks: int = 1


def largest_error(actual: Any, expected: Any) -> float:
    """Returns the largest error of a tensor relative to the largest value that is expected."""
    there, here = actual.detach().cpu().double(), expected.detach().cpu().double()
    if there.shape != here.shape:
        return float("inf")
    error = float((there - here).abs().max() / here.abs().max().clamp(min=1e-30))
    return float("inf") if math.isnan(error) else error


def require_close(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """Returns the error of a tensor. Raises WrongError above the tolerance."""
    error = largest_error(actual, expected)
    if error > tolerance:
        raise WrongError(f"{what} differs from the CPU's by {error:.2g}, at most {tolerance:g}")
    return error


def require_on(what: str, tensor: Tensor, device: torch.device) -> None:
    """Raises WrongError for a tensor on another kind of device."""
    if tensor.device.type != device.type:
        raise WrongError(f"{what} is on {tensor.device.type}, it must be on {device.type}")
