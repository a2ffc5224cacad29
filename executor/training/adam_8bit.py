"""AdamW whose moments have 8 bits (Dettmers et al. 2022, arXiv 2110.02861).

torch has none, and neither bitsandbytes nor torchao is a dependency, so that this is the smallest
one: each row of a matrix is cut into blocks of 256 elements, a block has the largest absolute value
as an fp32 scale, and a moment is the nearest of 256 numbers between -1 and 1, or 0 and 1, that are
dense near zero (that paper's dynamic tree). Blocks end with their row, unlike those of
bitsandbytes, so that a division of rows changes no number. Vectors and small matrices keep moments
in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from parplan.costmodels.operators.optimizers import BLOCK_ELEMENTS, LEAST_8BIT_ELEMENTS
from parplan.executor.tensors import local

EPSILON = 1e-8  # torch.optim.AdamW's default
EXPONENT_BITS = 7
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether a moment has a sign


class Adam8bit(torch.optim.Optimizer):
    """AdamW with moments of one byte and block scales; small tensors have fp32 moments."""

    def __init__(
        self, params: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, values = self.state[parameter], local(parameter)
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state.update(_zeros(name, parameter))
        state["step"] += 1
        step, gradient = state["step"], local(parameter.grad)
        (beta1, beta2), rate = group["betas"], group["lr"]
        mean, square = (_read(name, state, values.shape) for name in MOMENTS)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        values.mul_(1 - rate * group["weight_decay"])
        scale = (square / (1 - beta2**step)).sqrt_().add_(EPSILON)
        values.sub_(mean / scale * (rate / (1 - beta1**step)))
        for name, moment in zip(MOMENTS, (mean, square), strict=True):
            _write(name, state, moment)


def _zeros(name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Returns a moment of zeros: fp32, or codes with the scales of their blocks."""
    if parameter.ndim == 1 or parameter.numel() < LEAST_8BIT_ELEMENTS:
        return {name: torch.zeros_like(parameter)}
    part = local(parameter)
    zero = _numbers(signed=MOMENTS[name]).index(0.0)
    codes = torch.full_like(part, zero, dtype=torch.uint8)
    scales = part.new_zeros(part.shape[0], -(-part.shape[1] // BLOCK_ELEMENTS))
    return {name: _placed(codes, parameter), f"{name}_scale": _placed(scales, parameter)}


def _placed(part: Tensor, like: nn.Parameter) -> Tensor:
    """Returns a rank's part of a tensor that is divided as `like` is."""
    if not isinstance(like, DTensor):
        return part
    columns = part.shape[1] * (like.shape[1] // max(1, local(like).shape[1]))
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size((like.shape[0], columns)),
        stride=(columns, 1),
    )


def _read(name: str, state: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """Returns a moment in fp32; one that has 8 bits is a new tensor."""
    scales = state.get(f"{name}_scale")
    if scales is None:
        return local(state[name])
    numbers = torch.tensor(_numbers(signed=MOMENTS[name]), device=local(scales).device)
    whole = _blocks(numbers[local(state[name]).int()]) * local(scales).unsqueeze(-1)
    return whole.flatten(1)[:, : shape[1]].contiguous()


def _write(name: str, state: dict[str, Tensor], moment: Tensor) -> None:
    """Stores a moment as codes and scales, if it has 8 bits."""
    scales = state.get(f"{name}_scale")
    if scales is None:
        return
    numbers = torch.tensor(_numbers(signed=MOMENTS[name]), device=moment.device)
    blocks = _blocks(moment)
    largest = blocks.abs().amax(dim=-1)
    shares = blocks / largest.clamp(min=torch.finfo(moment.dtype).tiny).unsqueeze(-1)
    codes = torch.bucketize(shares, (numbers[1:] + numbers[:-1]) / 2)
    local(scales).copy_(largest)
    local(state[name]).copy_(codes.flatten(1)[:, : moment.shape[1]])


def _blocks(matrix: Tensor) -> Tensor:
    """Returns the rows of a matrix in blocks, the last of a row filled up with zeros."""
    missing = -matrix.shape[1] % BLOCK_ELEMENTS
    return functional.pad(matrix, (0, missing)).unflatten(1, (-1, BLOCK_ELEMENTS))


@functools.cache
def _numbers(*, signed: bool) -> tuple[float, ...]:
    """Returns the 256 numbers that a code stands for, ascending.

    There are 2^e of them in each decade 10^(e - 6), or 2^(e + 1) without a sign, and 0 and 1.
    """
    found = [0.0, 1.0]
    for exponent in range(EXPONENT_BITS):
        count = 2 ** (exponent + (0 if signed else 1))
        middles = (0.1 + 0.9 * (number + 0.5) / count for number in range(count))
        decade = [middle * 10.0 ** (exponent - EXPONENT_BITS + 1) for middle in middles]
        found += [*decade, *(-number for number in decade)] if signed else decade
    return tuple(sorted(found))
