"""Muon over matrices that ranks divide, and AdamW on tables and vectors.

torch.optim.Muon orthogonalizes each tensor as it is. This one orthogonalizes whole matrices, as the
distributed Muon of Liu et al. 2025 (arXiv 2502.16982, algorithm 1): the momentum stays divided, a
matrix that ZeRO divides is gathered in bf16 on one rank, which is its owner for the step and sends
every rank its part of the update. Owners also gather what tensor parallelism divides. That is
written by hand; the Newton-Schulz steps and the rates are torch's. Several matrices in one tensor,
as experts have them, are orthogonalized one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from parplan.costmodels.layers.model_states import chunk_shape
from parplan.executor.tensors import local
from parplan.profiles.profiler.gpus import device_of

COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
MOMENTUM = 0.95  # torch.optim.Muon's default
# The update has the size of AdamW's, so that AdamW's learning rate and decay serve both.
RATE = "match_rms_adamw"
INSIDE = ("tp", "data")  # axes that divide matrices for compute; those of ZeRO are others
EXPERTS = "ep"  # the axis whose ranks hold different matrices
Sizes = Sequence[Sequence[tuple[int, ...]]]  # the shape of each matrix's part, by rank


@dataclass(frozen=True, slots=True)
class _Division:
    """The division of a tensor of matrices over the axes of its mesh.

    zero      the axis over which ZeRO divides rows, if any
    inside    the axes that divide the matrices for compute, each with the dim that it divides
    """

    mesh: DeviceMesh | None = None
    zero: int | None = None
    inside: tuple[tuple[int, int], ...] = ()

    @property
    def owners(self) -> int:
        return 1 if self.mesh is None or self.zero is None else self.mesh.size(self.zero)

    @property
    def group(self) -> dist.ProcessGroup:
        assert self.mesh is not None
        assert self.zero is not None, "ZeRO divides it"
        return self.mesh.get_group(self.zero)


class Muon(torch.optim.Optimizer):
    """Muon on the groups of `matrices`, AdamW on those of `adam`.

    stacked    number of matrices that lie one under the other, of tensors with several
    """

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        adam: torch.optim.AdamW,
        *,
        lr: float,
        stacked: Mapping[nn.Parameter, int],
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": 0.0})
        self._matrices = tuple(self.param_groups)
        self._adam, self._stacked = adam, stacked
        adam.state = self.state
        self.param_groups += adam.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        by_division: dict[_Division, list[tuple[nn.Parameter, dict[str, Any]]]] = {}
        for group in self._matrices:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_division.setdefault(_division(parameter), []).append((parameter, group))
        for division, members in by_division.items():
            parameters = [parameter for parameter, _ in members]
            updates = self._updates(parameters, division)
            for (parameter, group), update in zip(members, updates, strict=True):
                self._apply(parameter, update, group)
        self._adam.step()

    def _apply(self, parameter: nn.Parameter, update: Tensor, group: dict[str, Any]) -> None:
        rows, columns = parameter.shape
        matrix = torch.Size((rows // self._number(parameter), columns))
        values = local(parameter)
        values.mul_(1 - group["lr"] * group["weight_decay"])
        values.add_(update, alpha=-_adjust_lr(group["lr"], RATE, matrix))

    def _number(self, parameter: nn.Parameter) -> int:
        """Returns the matrices of a whole tensor; ranks of the expert axis hold some each."""
        here = self._stacked.get(parameter, 1)
        if not isinstance(parameter, DTensor):
            return here
        names = parameter.device_mesh.mesh_dim_names or ()
        return here * (parameter.device_mesh[EXPERTS].size() if EXPERTS in names else 1)

    def _updates(self, parameters: Sequence[nn.Parameter], division: _Division) -> list[Tensor]:
        """Returns this rank's part of the update of each matrix. Collective."""
        parts = [self._ahead(parameter) for parameter in parameters]
        if division.owners == 1:
            each = zip(parameters, parts, strict=True)
            return [self._orthogonal(parameter, part, division) for parameter, part in each]
        shapes = [_shape(parameter, division) for parameter in parameters]
        owners = _owners(shapes, division.owners)
        rank = dist.get_rank(division.group)
        sizes = [
            [chunk_shape(shape, division.owners, r) for r in range(division.owners)]
            for shape in shapes
        ]
        arrived = _exchange(parts, owners, sizes, division.group)
        mine = [i for i, owner in enumerate(owners) if owner == rank]
        made = {i: self._orthogonal(parameters[i], torch.cat(arrived[i]), division) for i in mine}
        return _return(made, owners, sizes, division.group)

    def _ahead(self, parameter: nn.Parameter) -> Tensor:
        """Updates the momentum of this rank's part; returns it with Nesterov's step ahead."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None, "it has a gradient"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = local(state["momentum_buffer"]).lerp_(local(gradient), 1 - MOMENTUM)
        return local(gradient).lerp(momentum, MOMENTUM).bfloat16()

    def _orthogonal(self, parameter: nn.Parameter, part: Tensor, division: _Division) -> Tensor:
        """Returns the update of the rows of a tensor that ZeRO does not divide. Collective."""
        whole = part
        for axis, dim in division.inside:
            whole = _gathered(whole, division.mesh, axis, dim)
        matrices = whole.unflatten(0, (self._stacked.get(parameter, 1), -1))
        update = torch.cat(
            [
                _zeropower_via_newtonschulz(matrix, COEFFICIENTS, DEFAULT_NS_STEPS, EPS)
                for matrix in matrices
            ]
        )
        for axis, dim in reversed(division.inside):
            assert division.mesh is not None
            parts = update.chunk(division.mesh.size(axis), dim)
            update = parts[division.mesh.get_local_rank(axis)]
        return update


def _division(parameter: nn.Parameter) -> _Division:
    if not isinstance(parameter, DTensor):
        return _Division()
    mesh, zero = parameter.device_mesh, None
    inside = []
    names = mesh.mesh_dim_names or ()
    for axis, (name, placement) in enumerate(zip(names, parameter.placements, strict=True)):
        if placement.is_replicate() or name == EXPERTS or mesh.size(axis) == 1:
            continue
        if name in INSIDE:
            inside.append((axis, placement.dim))
        else:
            zero = axis
    return _Division(mesh, zero, tuple(inside))


def _shape(parameter: nn.Parameter, division: _Division) -> tuple[int, int]:
    """Returns the shape of what ZeRO divides: the experts and the parts of this rank."""
    mesh = division.mesh
    assert mesh is not None
    rows, columns = parameter.shape
    if EXPERTS in (mesh.mesh_dim_names or ()):
        rows //= mesh[EXPERTS].size()
    for axis, dim in division.inside:
        rows, columns = (
            (rows // mesh.size(axis), columns) if dim == 0 else (rows, columns // mesh.size(axis))
        )
    return rows, columns


def _owners(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """Returns the rank that orthogonalizes each matrix: the largest first, to the least loaded."""
    loads, owners = [0] * ranks, [0] * len(shapes)
    costs = [min(shape) * math.prod(shape) for shape in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: (-costs[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


def _exchange(
    parts: Sequence[Tensor], owners: Sequence[int], sizes: Sizes, group: dist.ProcessGroup
) -> dict[int, list[Tensor]]:
    """Sends every part to the owner of its matrix; returns the parts of this rank's matrices."""
    ranks, rank = group.size(), dist.get_rank(group)
    by_owner = [[i for i, owner in enumerate(owners) if owner == r] for r in range(ranks)]
    sent = [parts[i] for owned in by_owner for i in owned]
    splits = [sum(parts[i].numel() for i in owned) for owned in by_owner]
    expected = [[sizes[i][source] for i in by_owner[rank]] for source in range(ranks)]
    received = _all_to_all(sent, splits, expected, group)
    return {
        i: [received[source][k] for source in range(ranks)] for k, i in enumerate(by_owner[rank])
    }


def _return(
    made: Mapping[int, Tensor], owners: Sequence[int], sizes: Sizes, group: dist.ProcessGroup
) -> list[Tensor]:
    """Sends every rank its part of the updates that this rank made; returns this rank's parts."""
    ranks, rank = group.size(), dist.get_rank(group)
    cut = {i: update.split([rows for rows, _ in sizes[i]]) for i, update in made.items()}
    sent = [cut[i][target] for target in range(ranks) for i in cut]
    splits = [sum(cut[i][target].numel() for i in cut) for target in range(ranks)]
    by_owner = [[i for i, owner in enumerate(owners) if owner == r] for r in range(ranks)]
    expected = [[sizes[i][rank] for i in owned] for owned in by_owner]
    received = _all_to_all(sent, splits, expected, group)
    found = {
        i: part
        for owned, arrived in zip(by_owner, received, strict=True)
        for i, part in zip(owned, arrived, strict=True)
    }
    return [found[i] for i in range(len(owners))]


def _all_to_all(
    sent: Sequence[Tensor],
    splits: Sequence[int],
    expected: Sequence[Sequence[tuple[int, ...]]],
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """Exchanges tensors between all ranks; returns those that arrive, by source.

    splits      elements of `sent` for each rank
    expected    shapes of the tensors from each rank
    """
    none = torch.empty(0, dtype=torch.bfloat16, device=device_of(group))
    flat = torch.cat([none, *(tensor.flatten() for tensor in sent)])
    lengths = [[math.prod(shape) for shape in shapes] for shapes in expected]
    totals = [sum(each) for each in lengths]
    arrived = flat.new_empty(sum(totals))
    dist.all_to_all_single(arrived, flat, totals, list(splits), group=group)
    return [
        [part.view(shape) for part, shape in zip(chunk.split(each), shapes, strict=True)]
        for chunk, each, shapes in zip(arrived.split(totals), lengths, expected, strict=True)
    ]


def _gathered(part: Tensor, mesh: DeviceMesh | None, axis: int, dim: int) -> Tensor:
    """Returns the whole of a matrix whose equal parts the ranks of an axis hold."""
    assert mesh is not None
    parts = [torch.empty_like(part) for _ in range(mesh.size(axis))]
    dist.all_gather(parts, part.contiguous(), group=mesh.get_group(axis))
    return torch.cat(parts, dim)
