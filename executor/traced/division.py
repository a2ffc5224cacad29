"""The division of a recorded program over the tensor-parallel ranks, as the plan has it.

The plan names the index by which each operator of a shard is divided; an operator that it does not
name is whole, and a view follows the tensor that it views. Parameters are DTensors, divided by the
index of the first call that reads them divided. Between shards all values are whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from parplan.executor.sharding.tensor_boxes import Strips
from parplan.planner.plan.traced_plan import ShardPlan, SplitPlan, TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.tracing.divisible import Divisible, outputs_of
from parplan.profiles.tracing.program import PARAMETER, Program


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor on a rank: dim `dim` is outer x size x inner, and `size` is divided."""

    dim: int
    outer: int
    size: int


class Division:
    """The factors by which the calls of `program` are divided over the ranks of `mesh`.

    factors     by call that the plan names, its factor
    parameters  by name, the part of a parameter on a rank; None where every rank has all of it
    strips      by name, of parameters that are several matrices each
    """

    def __init__(self, plan: TracedPlan, program: Program, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.divisible = Divisible(program, plan.tp_rules)
        self.factors: dict[fx.Node, int] = {}
        for shard in plan.shards:
            for split in plan.shardings.get(shard.layer, ()):
                node = program.calls[shard.first + split.place]
                self.factors[node] = self._factor(node, shard, split)
        self.parameters = {
            node.target: self._parameter_part(node)
            for node in program.graph.nodes
            if node.meta.get("origin") == PARAMETER
        }
        self.strips = {
            name: Strips(part.dim, part.outer, mesh.size())
            for name, part in self.parameters.items()
            if part is not None and part.outer > 1
        }

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def part(self, node: fx.Node, factor: int | None) -> Part | None:
        """The place of a factor in a tensor; None for a tensor without it."""
        for dim, axis in enumerate(self.divisible.axes(node)):
            if factor in axis:
                before = axis[: axis.index(factor)]
                outer = math.prod(map(self.divisible.size, before))
                return Part(dim, outer, self.divisible.size(factor))
        return None

    def factor_at(self, node: fx.Node, part: Part | None) -> int | None:
        """The factor by which a tensor is divided into `part`."""
        if part is None:
            return None
        factors = self.divisible.axes(node)[part.dim]
        return next(each for each in factors if self.part(node, each) == part)

    def shape(self, node: fx.Node, factor: int) -> list[int]:
        """The shape on a rank of a tensor that is divided by a factor if it has it."""
        shape = list(node.meta["val"].shape)
        part = self.part(node, factor)
        if part is not None:
            shape[part.dim] //= self.mesh.size()
        return shape

    def follows(self, node: fx.Node, factor: int | None) -> bool:
        """Tells whether a view of a tensor that is divided by `factor` is divided as well."""
        if factor is None or factor in self.divisible.whole(node):
            return False
        outputs = list(outputs_of(node))
        return bool(outputs) and all(self.part(each, factor) is not None for each in outputs)

    def placed(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter as a DTensor; several matrices in one are in the order of the ranks."""
        part, value = self.parameters[name], parameter.data
        if name in self.strips:
            value = self.strips[name].by_rank(value)
        placement = Replicate() if part is None else Shard(part.dim)
        # src_data_rank=None: every rank made the same values, so nothing is broadcast
        placed = distribute_tensor(value, self.mesh, [placement], src_data_rank=None)
        return nn.Parameter(placed, parameter.requires_grad)

    def _factor(self, node: fx.Node, shard: ShardPlan, split: SplitPlan) -> int:
        """The factor of a call that the plan names. Raises ConfigError where it has none."""
        factor = self.divisible.factor(node, split.dim)
        if factor is None or factor in self.divisible.whole(node):
            raise ConfigError(
                f"shardings.{shard.layer}: {node.meta['name']} cannot be divided by {split.dim}",
                hint="make the plan again: the module, or torch, has changed",
            )
        if self.divisible.size(factor) % self.mesh.size():
            raise ConfigError(
                f"shardings.{shard.layer}: {split.dim} of {node.meta['name']} is "
                f"{self.divisible.size(factor)}, which tp {self.mesh.size()} does not divide",
                hint="make a plan with a tp that divides it",
            )
        return factor

    def _parameter_part(self, parameter: fx.Node) -> Part | None:
        pending = [parameter]
        while pending:
            node = pending.pop(0)
            for reader in node.users:
                part = self.part(parameter, self.factors.get(reader))
                if part is not None:
                    return part
                if "path" in reader.meta and self.divisible.is_view(reader):
                    pending.append(reader)
        return None


class _Partial:
    """The state of a tensor of which every rank has a summand."""


PARTIAL = _Partial()
At = Part | _Partial | None  # where a tensor is: divided, a summand, or whole


class _Move(torch.autograd.Function):
    """Moves a tensor; its gradient, which the reader leaves at `gradient`, moves back."""

    @staticmethod
    def forward(ctx, x, mesh, source, target, gradient):  # type: ignore[no-untyped-def]
        ctx.mesh = mesh
        ctx.source, ctx.gradient = source, gradient
        moved = _redistributed(x, mesh, source, target)
        return x.view_as(x) if moved is x else moved

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        back = None if ctx.source is PARTIAL else ctx.source
        return _redistributed(gradient, ctx.mesh, ctx.gradient, back), None, None, None, None


def move(x: Tensor, mesh: DeviceMesh, source: At, target: At, gradient: At) -> Tensor:
    """Returns `x`, which is at `source`, at `target`; sends what the placements differ in.

    gradient   where the reader leaves the gradient of `x`: PARTIAL if it is divided by an index
               that `x` lacks
    """
    if source == target == gradient:
        return x
    moved: Tensor = _Move.apply(x, mesh, source, target, gradient)
    return moved


def _redistributed(x: Tensor, mesh: DeviceMesh, source: At, target: At) -> Tensor:
    if source == target:
        return x
    if isinstance(source, _Partial):
        x = _replicated(x.contiguous(), mesh, Partial())
    elif source is not None:
        exposed = _exposed(x, source, source.size // mesh.size())
        whole = _replicated(exposed, mesh, Shard(source.dim + 1))
        x = whole.flatten(source.dim, source.dim + 2)
    if isinstance(target, Part):
        share = target.size // mesh.size()
        parts = _exposed(x, target, target.size)
        own = parts.narrow(target.dim + 1, mesh.get_local_rank() * share, share)
        x = own.flatten(target.dim, target.dim + 2).contiguous()
    return x


def _exposed(x: Tensor, part: Part, size: int) -> Tensor:
    """Gives the divided index a dim of its own."""
    return x.unflatten(part.dim, (part.outer, size, -1)).contiguous()


def _replicated(x: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    placed = DTensor.from_local(x, mesh, [placement], run_check=False)
    return placed.redistribute(placements=[Replicate()]).to_local()


def largest(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The elementwise maximum over the ranks, without gradient."""
    result = x.detach().clone()
    dist.all_reduce(result, dist.ReduceOp.MAX, group=mesh.get_group())
    return result
