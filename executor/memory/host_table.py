"""The token table on the host (`Offload.LOOKUP`): rows come to the device, gradients go back.

costmodels/host/host_embedding.py prices it: each of D data-parallel ranks has h / D columns of all
rows of the table, in fp32. A rank looks up its columns of the tokens of all ranks, and an
all-to-all gives every rank all columns of its tokens; the backward pass does the same in reverse.
No gradient of the table is reduced, and the optimizer updates it on the host. Copies are counted
and waited for, because the next pass needs them. On a CPU the "device" gets copies as well. A table
that the head shares is looked up on the device, and is an FSDP2 unit with its states on the host
(executor/pipeline/stages.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from parplan.executor.memory.host_copies import HostCopies
from parplan.executor.tensors import GATHER, part, placed
from parplan.profiles.profiler.gpus import gpu, is_gpu


class HostTable(nn.Module):
    """Looks ids up in a table on the host.

    weight  [vocabulary, hidden], of which this rank has its columns
    table   the whole table on the device, before training
    dtype   the compute type
    copies  counts the bytes of rows that came and of gradients that went
    """

    def __init__(self, table: Tensor, dp_mesh: DeviceMesh, dtype: torch.dtype) -> None:
        super().__init__()
        columns = table.detach().chunk(dp_mesh.size(), dim=1)[dp_mesh.get_local_rank()]
        columns = columns.to("cpu", copy=True).contiguous()
        divided = placed(columns, dp_mesh, (Shard(1),), table.shape, table.stride())
        self.weight = nn.Parameter(divided)
        self.group = dp_mesh.get_group() if dp_mesh.size() > 1 else None
        self._dtype = dtype
        self.copies = HostCopies(table.device)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps [batch, sequence] to [batch, sequence, hidden] on the device."""
        all_ids = self._gather_ids(ids).cpu()
        rows = functional.embedding(all_ids, _Columns.apply(self.weight)).to(self._dtype)
        looked_up: Tensor = _Rows.apply(rows.unflatten(0, (-1, len(ids))), self)
        return looked_up

    def _gather_ids(self, ids: Tensor) -> Tensor:
        """Gathers the ids of all ranks as [ranks x batch, sequence]."""
        if self.group is None:
            return ids
        gathered = ids.new_empty((self.group.size() * len(ids), *ids.shape[1:]))
        GATHER(gathered, ids.contiguous(), group=self.group)
        return gathered

    def exchange(self, parts: Tensor) -> Tensor:
        """Sends part r of [ranks, ...] to rank r, and returns the parts received, by rank."""
        if self.group is None:
            return parts
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received

    def copy_across(self, tensor: Tensor, *, to_host: bool) -> Tensor:
        """Copies a tensor to the other side.

        The copy is there when this returns (host) or before the next computation (device).
        """
        if not to_host and is_gpu(self.copies.device):
            tensor = tensor.pin_memory()  # a copy of pageable memory holds up the host
        copy, there = self.copies.copy(tensor, to_host=to_host)
        if there is not None and to_host:
            there.synchronize()
        elif there is not None:
            gpu(self.copies.device).current_stream(self.copies.device).wait_event(there)
        return copy


class _Columns(torch.autograd.Function):
    """Maps the weight to this rank's columns, whose gradient stays on the host.

    `DTensor.to_local` makes the gradient a DTensor by `from_local`, which copies it to a mesh of
    GPUs.
    """

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.weight = weight
        columns = part(weight)
        return columns.view_as(columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        weight = ctx.weight
        mesh, placements = weight.device_mesh, weight.placements
        return placed(gradient, mesh, placements, weight.shape, weight.stride())


class _Rows(torch.autograd.Function):
    """Maps rows [ranks, batch, sequence, columns] on the host to [batch, sequence, hidden].

    The rows are by rank of the tokens; the result has this rank's tokens and is on the device.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, table: HostTable) -> Tensor:
        ctx.table, ctx.ranks = table, len(rows)
        return table.exchange(table.copy_across(rows, to_host=False)).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = gradient.unflatten(-1, (ctx.ranks, -1)).movedim(-2, 0).contiguous()
        return ctx.table.copy_across(ctx.table.exchange(parts), to_host=True), None
