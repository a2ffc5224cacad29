"""Redistribution of activations over several mesh axes, in the steps that are priced.

torch's DTensor walks the axes in its own order. Over data-parallel and tensor-parallel ranks that
order would send whole partial sums between nodes. Here every step changes one axis
(costmodels/communication/redistribution.py), in the backward pass as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parplan.costmodels.communication.redistribution import steps
from parplan.costmodels.operators.sharding import PARTIAL

Placed = tuple[Placement, ...]


def moved(tensor: DTensor, target: Placed, gradients: Placed) -> Tensor:
    """Returns this rank's part of `tensor` at `target`; its gradient will be at `gradients`.

    The part has no memory beyond its own.
    """
    source = tensor.placements
    read = tuple(
        Replicate() if over.is_partial() and not gradient.is_partial() else over
        for over, gradient in zip(source, gradients, strict=True)
    )
    part = tensor.to_local(grad_placements=read)
    if source == target and read == gradients:
        return part
    result: Tensor = _MoveOverAxes.apply(part, tensor.device_mesh, source, target, gradients, read)
    return result


class _MoveOverAxes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        mesh: DeviceMesh,
        source: Placed,
        target: Placed,
        gradients: Placed,
        read: Placed,
    ) -> Tensor:
        ctx.back = mesh, gradients, read
        out = _redistributed(part, mesh, source, target)
        return out.view_as(out) if out is part else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        mesh, gradients, read = ctx.back
        return _redistributed(gradient, mesh, gradients, read), *((None,) * 5)


def _redistributed(part: Tensor, mesh: DeviceMesh, source: Placed, target: Placed) -> Tensor:
    tensor = DTensor.from_local(part.contiguous(), mesh, source, run_check=False)
    here = list(source)
    for axis, place in steps(_places(source), _places(target)):
        here[axis] = Replicate() if place is None else Shard(int(place))
        tensor = tensor.redistribute(placements=tuple(here))
    moved_part = tensor.to_local()
    # Shard -> Shard(0) between CPUs gives a view of a gathered copy, which would be saved whole
    is_view = moved_part.untyped_storage().nbytes() > moved_part.nbytes
    return moved_part.clone() if is_view and target != source else moved_part


def _places(placements: Sequence[Placement]) -> tuple[str | None, ...]:
    return tuple(_place(over) for over in placements)


def _place(over: Placement) -> str | None:
    if isinstance(over, Partial):
        return PARTIAL
    return str(over.dim) if isinstance(over, Shard) else None
