"""Frozen weights of 8 bits with an fp32 scale for each block of 64 elements (EQUATIONS F2, F3).

A block has its largest absolute value as the number 127, as the int8 baseline of QLoRA does
(Dettmers et al. 2023, arXiv 2305.14314). Blocks lie one after the other in a rank's part of a
weight, row after row. Where the rows of that part are whole blocks, they are those of the whole
weight, and a division by tensor parallelism changes no number. Elsewhere a rank rounds its part by
itself, and its scales are a row of their own for each rank.

torch's quantised products run on inputs of 8 bits too, which is another training; bitsandbytes and
torchao are no dependencies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn import functional

from parplan.costmodels.operators.operator_kernels import SCALED_ELEMENTS
from parplan.executor.models.operators import Linear
from parplan.executor.tensors import local

QUANTISED = ("codes", "scales")  # names of the parameters of a weight in 8 bits
LARGEST = 127.0  # of the codes, which have a sign


class EightBitLinear(Linear):
    """A frozen product whose weight becomes codes and scales, once `quantise` was called.

    Its weight is read in the precision of the input, as a temporary of each pass.
    """

    def quantise(self) -> None:
        """Replaces the weight, as it is placed by then, by `codes` and `scales`."""
        if self.weight is None:
            return
        weight = self.weight
        codes, scales = quantised(local(weight.detach()))
        self.register_parameter("weight", None)
        self.codes = _frozen(_placed(codes, weight))
        self.scales = _frozen(_placed(scales, weight, by_rank=_rows(codes) == 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return super().forward(x)
        out: Tensor = _Product.apply(x, local(self.codes), local(self.scales))
        return out + local(self.bias) if self.adds_bias and self.bias is not None else out


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the int8 codes of a matrix, and fp32 scales by row, or of all in one row."""
    flat = weight.float().reshape(_rows(weight), -1)
    blocks = functional.pad(flat, (0, -flat.shape[1] % SCALED_ELEMENTS))
    blocks = blocks.unflatten(1, (-1, SCALED_ELEMENTS))
    scales = blocks.abs().amax(dim=-1) / LARGEST
    shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = shares.round().flatten(1)[:, : flat.shape[1]].to(torch.int8)
    return codes.reshape(weight.shape).contiguous(), scales


def _rows(weight: Tensor) -> int:
    """Returns the number of rows of a matrix's scales: its own if each has whole blocks, or one."""
    return weight.shape[0] if weight.shape[1] % SCALED_ELEMENTS == 0 else 1


def dequantised(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the matrix of `codes` in `dtype`; each product is rounded once."""
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    flat, out = codes.view(scales.shape[0], -1), weight.view(scales.shape[0], -1)
    whole = flat.shape[1] - flat.shape[1] % SCALED_ELEMENTS
    blocks = flat[:, :whole].unflatten(1, (-1, SCALED_ELEMENTS))
    by_block = scales[:, : blocks.shape[1], None]
    torch.mul(blocks, by_block, out=out[:, :whole].unflatten(1, (-1, SCALED_ELEMENTS)))
    if whole < flat.shape[1]:
        torch.mul(flat[:, whole:], scales[:, -1:], out=out[:, whole:])
    return weight


def quantise_frozen(layer: nn.Module) -> None:
    """Holds the frozen products of `layer` in 8 bits that the plan holds so."""
    for module in layer.modules():
        if isinstance(module, EightBitLinear):
            module.quantise()


@torch.no_grad()
def round_to_8_bits(layer: nn.Module) -> None:
    """Rounds the same weights to numbers of 8 bits, and holds them as they were."""
    for module in layer.modules():
        if isinstance(module, EightBitLinear):
            module.weight.copy_(dequantised(*quantised(module.weight), module.weight.dtype))


class _Product(torch.autograd.Function):
    """x w^T, which saves neither its input nor the weight that it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.weight = codes, scales  # parameters that stay as they are
        return functional.linear(x, dequantised(codes, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ dequantised(*ctx.weight, gradient.dtype), None, None


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _placed(part: Tensor, like: Tensor, *, by_rank: bool = False) -> Tensor:
    """Returns a rank's part of a tensor that is divided as `like` is, or a row for each rank."""
    if not isinstance(like, DTensor):
        return part
    over: tuple[Placement, ...] = like.placements
    if by_rank:
        over = tuple(Shard(0) if each.is_shard() else each for each in over)
    return DTensor.from_local(part, like.device_mesh, over, run_check=False)
