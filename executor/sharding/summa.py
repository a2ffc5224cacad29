"""Products, norms and table lookups over a grid of tensor-parallel ranks (EQUATIONS T7).

A rank has the batch of its row and the features of its column: activations are [batch of the row,
sequence, features of the column], in plain tensors. A weight [outputs, inputs] has the outputs of
the column and the inputs of the row, and is gathered over the column before it is used, as the
input is over the row. Only parts are saved: both are gathered again in the backward pass, whose
gradients are partial sums that are reduce-scattered where they were gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from parplan.executor.tensors import GATHER, SCATTER

ROWS, COLUMNS = "tp_rows", "tp_columns"


@dataclass(frozen=True, slots=True)
class Grid:
    """The tensor-parallel ranks of a replica; `mesh` has the axes `ROWS` and `COLUMNS`."""

    mesh: DeviceMesh

    @property
    def row(self) -> dist.ProcessGroup:
        """The ranks of this rank's row, which have other columns."""
        return self.mesh.get_group(COLUMNS)

    @property
    def column(self) -> dist.ProcessGroup:
        """The ranks of this rank's column, which have other rows."""
        return self.mesh.get_group(ROWS)

    def of_row(self, batch: Tensor) -> Tensor:
        """Returns the sequences of this rank's row, of those of all ranks."""
        return batch.chunk(self.mesh[ROWS].size())[self.mesh.get_local_rank(ROWS)]


def gathered(part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns the parts of all ranks of a group, one after the other along a dim."""
    ranks = dist.get_world_size(group)
    parts = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    GATHER(parts, part.contiguous(), group=group)
    return torch.cat(parts.chunk(ranks), dim)


def scattered(summand: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's part along a dim of the sum of the tensors of a group."""
    parts = summand.chunk(dist.get_world_size(group), dim)
    part = summand.new_empty(parts[0].shape)
    SCATTER(part, torch.cat(parts), group=group)
    return part


class GridProduct(torch.autograd.Function):
    """x W^T + bias: [batch, sequence, inputs of the column] to as many outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        return functional.linear(gathered(x, -1, grid.row), gathered(weight, 1, grid.column), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grid: Grid = ctx.grid
        by_input = gradient @ gathered(weight, 1, grid.column)
        of_input = scattered(by_input, -1, grid.row)
        rows = gradient.flatten(0, -2)
        by_weight = rows.t() @ gathered(x, -1, grid.row).flatten(0, -2)
        of_weight = scattered(by_weight, 1, grid.column)
        return of_input, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class GridNorm(torch.autograd.Function):
    """A norm of tokens whose features are on the ranks of a row, `width` in all.

    With `centred` it is a LayerNorm, otherwise an RMSNorm. The sums of a token are in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        width: int,
        grid: Grid,
        centred: bool,
    ) -> Tensor:
        wide = x.float()
        sums = [wide.sum(-1), wide.square().sum(-1)][0 if centred else 1 :]
        *means, square = (_sums(sums, grid) / width).split(1, dim=-1)
        variance = square - sum(mean.square() for mean in means)
        inverse = (variance + epsilon).rsqrt()
        ctx.save_for_backward(x, weight, inverse, *means)
        ctx.grid, ctx.width = grid, width
        normed = _less(wide, means) * inverse * weight.float()
        return (normed if bias is None else normed + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse, *means = ctx.saved_tensors
        normed, given = _less(x.float(), means) * inverse, gradient.float()
        by_normed = given * weight.float()
        sums = [by_normed.sum(-1), (by_normed * normed).sum(-1)][0 if means else 1 :]
        *shifts, along = (_sums(sums, ctx.grid) / ctx.width).split(1, dim=-1)
        by_input = _less(by_normed, shifts) - normed * along
        of_weight = (given * normed).flatten(0, -2).sum(0).to(weight.dtype)
        of_bias = given.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return (inverse * by_input).to(x.dtype), of_weight, of_bias, None, None, None, None


def _less(x: Tensor, shifts: Sequence[Tensor]) -> Tensor:
    """Returns `x` less the mean of each token, if the norm has one."""
    return x - shifts[0] if shifts else x


def _sums(parts: list[Tensor], grid: Grid) -> Tensor:
    """Returns sums of each token over the ranks of a row, [batch, sequence, sums]."""
    sums = torch.stack(parts, dim=-1)
    dist.all_reduce(sums, group=grid.row)
    return sums


class GridLookup(torch.autograd.Function):
    """The rows of a table [vocabulary of the column, features of the row] of token ids.

    ids [batch of the row, sequence] -> [batch of the row, sequence, features of the column].
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, grid: Grid) -> Tensor:
        index = ids - len(weight) * grid.mesh.get_local_rank(COLUMNS)
        held = (index >= 0) & (index < len(weight))
        index = index.clamp(0, len(weight) - 1)
        ctx.save_for_backward(index, held)
        ctx.grid, ctx.held_rows = grid, len(weight)
        rows = functional.embedding(index, gathered(weight, 1, grid.column))
        return scattered(rows * held.unsqueeze(-1), -1, grid.row)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        index, held = ctx.saved_tensors
        whole = gathered(gradient, -1, ctx.grid.row)
        by_row = (whole * held.unsqueeze(-1)).flatten(0, -2)
        by_weight = whole.new_zeros((ctx.held_rows, whole.shape[-1]))
        by_weight.index_add_(0, index.flatten(), by_row)
        return None, scattered(by_weight, 1, ctx.grid.column), None
