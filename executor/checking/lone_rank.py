"""Runs one rank of a plan by itself.

The process group has no other members that answer, tensors have no data, and kernels are a GPU's.
Everything else is the executor's: its stages, its schedule with torch's runtime, its optimizer. The
following is replaced:

- FSDP's list of all shards of a parameter, of which it reads two;
- the vote of torch.distributed.pipelining on whether shapes are known, which reads a number that
  another rank sent: shapes are given;
- the exchanged numbers of tokens that experts get, which follow from data: routing is balanced, as
  it is priced;
- operators of a plan of GPUs whose CPU kernels save other tensors: between CPUs DTensor gathers
  where GPUs exchange, dropout saves a mask of its input's type, an RMS norm copies in fp32, and
  attention with dropout saves the scores. GPU operators of the same shapes stand in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import placement_types
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from parplan.executor.models import mixture_of_experts
from parplan.executor.models.expert_exchange import balanced_rows
from parplan.planner.plan.plan import Plan


@contextmanager
def alone(plan: Plan, rank: int) -> Iterator[None]:
    """Enter a process group of all ranks of the plan, as `rank` sees it.

    Transfers and collectives end at once.
    """
    # A mesh gives every axis of all ranks the same group, by which no axis can be told: the world
    # has one rank more.
    world_size = plan.mesh.num_ranks + 1
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(_PipelineSchedule, "_warmup_p2p", _vote))
            stack.enter_context(patch.object(_fsdp_param, "_chunk_with_empty", FirstAndLastChunk))
            stack.enter_context(patch.object(mixture_of_experts, "count_rows", balanced_rows))
            for owner, name, stand_in in _gpu_kernels() if not plan.cluster.device.is_host else ():
                stack.enter_context(patch.object(owner, name, stand_in))
            yield
    finally:
        dist.destroy_process_group()


def _vote(_: Any, stages: Any, has_backward: bool, __: bool) -> None:
    for stage in stages:
        assert not InferenceMode.needs_dynamic(stage._user_meta, has_backward), (
            "the executor gives its stages their shapes"
        )
        stage._inference_mode = InferenceMode.STATIC


class FirstAndLastChunk:
    """`torch.chunk` with empty chunks at the end, as FSDP cuts a parameter for its ranks.

    FSDP reads two chunks. Making all of them for 64 ranks took a third of a dry run.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._rows = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        size = self._tensor.size(self._dim)
        start = min(index * self._rows, size)
        rows = min(self._rows, size - start)
        return self._tensor.narrow(self._dim, start, rows) if rows else self._tensor.new_empty(0)


def _gpu_kernels() -> tuple[tuple[Any, str, Any], ...]:
    return (
        (placement_types, "shard_dim_alltoall", _exchange),
        (functional, "dropout", _dropout),
        (functional, "rms_norm", _rms_norm),
        (
            functional,
            "scaled_dot_product_attention",
            _attention(functional.scaled_dot_product_attention),
        ),
    )


def _exchange(x: Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Tensor:
    """Exchange shards as `_collective_utils.shard_dim_alltoall` of DTensor does between GPUs."""
    return torch.ops._dtensor.shard_dim_alltoall(
        x, gather_dim, shard_dim, mesh.get_group(mesh_dim).group_name
    )


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run the fused kernel of GPUs, which saves one byte per element."""
    return torch.native_dropout(x, p, training)[0] if training and p else x


class _RMSNorm(torch.autograd.Function):
    """The memory of the fused kernel of GPUs, which saves its input and one number per token.

    Its values are undefined.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, _: Any, weight: Tensor, __: float | None = None) -> Tensor:
    return _RMSNorm.apply(x, weight)


def _attention(kernel: Any) -> Any:
    """Return fused attention as on GPUs, where dropout saves no mask."""

    def without_mask(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        **rest: Any,
    ) -> Tensor:
        return kernel(query, key, value, attn_mask=attn_mask, dropout_p=0.0, **rest)

    return without_mask
