"""Adafactor over matrices that ranks divide (Shazeer and Stern 2018, arXiv 1804.04235).

torch.optim.Adafactor refuses DTensors whose rows or columns are divided (torch 2.13), so that its
step is written by hand here, over this rank's part: sums over a row, a column or the whole tensor
are added over the ranks that divide it. On whole tensors it computes as torch's does, with torch's
defaults. The factor of rows lies where their rows lie, and that of columns likewise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from parplan.executor.tensors import local

BETA2_DECAY = -0.8
LEAST_RMS = 1e-3  # of the values, which the rate of a tensor is relative to
LARGEST_RMS = 1.0  # of an update


class Adafactor(torch.optim.Optimizer):
    """Adafactor on parts of tensors; a matrix has a factor for each row and each column."""

    def __init__(self, params: Iterable[dict[str, Any]], *, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: nn.Parameter, rate: float, decay: float) -> None:
        state, values = self.state[parameter], local(parameter)
        if not state:
            state.update(_states(parameter))
        state["step"] += 1
        step, gradient = state["step"], local(parameter.grad)
        size = _rms(values, parameter).clamp(min=LEAST_RMS) * (step**-0.5).clamp(max=rate)
        values.mul_(1 - rate * decay)
        least = torch.finfo(values.dtype).eps
        variance = _variance(parameter, gradient, state, least)
        update = variance.clamp_(min=least**2).rsqrt_().mul_(gradient)
        larger = (_rms(update, parameter) / LARGEST_RMS).clamp(min=1.0)
        values.sub_(update * (size / larger))


def _rms(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """Returns the root mean square of a tensor of which this rank has a part."""
    return (_summed(part.square().sum(), parameter) / parameter.numel()).sqrt_()


def _variance(
    parameter: nn.Parameter, gradient: Tensor, state: dict[str, Any], least: float
) -> Tensor:
    """Returns the mean square of each gradient of this rank, a new tensor, after its update."""
    squares, decayed = gradient.square(), state["step"] ** BETA2_DECAY
    if parameter.ndim == 1:
        return _moved(local(state["variance"]), squares, decayed).clone()
    rows = _moved(local(state["row_var"]), _mean(squares, parameter, 1), decayed)
    columns = _moved(local(state["col_var"]), _mean(squares, parameter, 0), decayed)
    mean = _summed(rows.sum(), parameter, 0) / parameter.shape[0]
    return (rows @ columns).div_(mean.clamp_(min=least))


def _moved(moment: Tensor, latest: Tensor, share: Tensor) -> Tensor:
    """Moves a moment towards its latest value; the share is a number on the CPU."""
    return moment.mul_(1 - share).add_(latest * share)


def _mean(squares: Tensor, parameter: nn.Parameter, dim: int) -> Tensor:
    """Returns the means over a dim of the whole matrix."""
    return _summed(squares.sum(dim, keepdim=True), parameter, dim) / parameter.shape[dim]


def _states(parameter: nn.Parameter) -> dict[str, Tensor]:
    step = torch.tensor(0.0)
    if parameter.ndim == 1:
        return {"step": step, "variance": torch.zeros_like(parameter)}
    return {"step": step, "row_var": _factor(parameter, 1), "col_var": _factor(parameter, 0)}


def _factor(parameter: nn.Parameter, dim: int) -> Tensor:
    """Returns zeros of a matrix with `dim` summed up, placed like the matrix over the other dim."""
    part = local(parameter)
    zeros = part.new_zeros([1 if d == dim else n for d, n in enumerate(part.shape)])
    if not isinstance(parameter, DTensor):
        return zeros
    placements = [
        Replicate() if _divides(placement, dim) else placement for placement in parameter.placements
    ]
    shape = torch.Size(1 if d == dim else n for d, n in enumerate(parameter.shape))
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=(1, 1)
    )


def _summed(value: Tensor, parameter: nn.Parameter, dim: int | None = None) -> Tensor:
    """Adds up `value` over the ranks that divide a dim of the parameter, or any dim."""
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if _divides(placement, dim):
                dist.all_reduce(value, group=parameter.device_mesh.get_group(axis))
    return value


def _divides(placement: Placement, dim: int | None) -> bool:
    if placement.is_replicate():
        return False
    return dim is None or getattr(placement, "dim", None) == dim
