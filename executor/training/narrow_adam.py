"""AdamW whose moments have fewer bits than the values that it updates: 16 or 8.

torch.optim.AdamW keeps moments in the type of their parameter alone. Here the moments of one tensor
after the other are read in fp32, updated by torch's own AdamW, and rounded when they are stored, as
in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) for bf16.

In 8 bits (Dettmers et al. 2022, arXiv 2110.02861) each row of a matrix is cut into blocks of 256
elements, a block has the largest absolute value as an fp32 scale, and a moment is the nearest of
256 numbers between -1 and 1, or 0 and 1, that are dense near zero (that paper's dynamic tree).
torch has none, and neither bitsandbytes nor torchao is a dependency. Blocks end with their row,
unlike those of bitsandbytes, so that a division of rows changes no number. Vectors and small
matrices keep moments without 8 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim._functional import adamw

from parplan.costmodels.operators.optimizers import BLOCK_ELEMENTS, LEAST_8BIT_ELEMENTS
from parplan.executor.tensors import local

EPSILON = 1e-8  # torch.optim.AdamW's default
EXPONENT_BITS = 7
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether a moment has a sign


class NarrowAdam(torch.optim.Optimizer):
    """AdamW with rounded moments.

    moments     type of moments that have no 8 bits; None for that of their parameter
    in_8_bits   whether those of large matrices have 8 bits
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        moments: torch.dtype | None = None,
        in_8_bits: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "betas": betas})
        self._moments, self._in_8_bits = moments, in_8_bits

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
                state.update(self._zeros(name, parameter))
        wide = values.float()
        moments = [_read(name, state, values.shape) for name in MOMENTS]
        adamw(
            [wide],
            [local(parameter.grad).float()],
            *([moment] for moment in moments),
            [],
            [state["step"]],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=EPSILON,
            maximize=False,
        )
        if wide is not values:
            values.copy_(wide)
        for name, moment in zip(MOMENTS, moments, strict=True):
            _write(name, state, moment)

    def _zeros(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns a moment of zeros: plain, or codes with the scales of their blocks."""
        small = parameter.ndim == 1 or parameter.numel() < LEAST_8BIT_ELEMENTS
        if small or not self._in_8_bits:
            return {name: torch.zeros_like(parameter, dtype=self._moments)}
        part = local(parameter)
        zero = _numbers(signed=MOMENTS[name]).index(0.0)
        codes = torch.full_like(part, zero, dtype=torch.uint8)
        blocks = -(-part.shape[1] // BLOCK_ELEMENTS)
        scales = part.new_zeros(part.shape[0], blocks, dtype=torch.float32)
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
    """Returns a moment in fp32; one that has fewer bits is a new tensor."""
    scales = state.get(f"{name}_scale")
    if scales is None:
        return local(state[name]).float()
    numbers = torch.tensor(_numbers(signed=MOMENTS[name]), device=local(scales).device)
    whole = _blocks(numbers[local(state[name]).int()]) * local(scales).unsqueeze(-1)
    return whole.flatten(1)[:, : shape[1]].contiguous()


def _write(name: str, state: dict[str, Tensor], moment: Tensor) -> None:
    """Stores a moment, rounded to its type or to codes and scales."""
    scales = state.get(f"{name}_scale")
    if scales is None:
        if moment is not local(state[name]):
            local(state[name]).copy_(moment)
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
