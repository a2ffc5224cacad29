"""A pipeline stage with message buffers only while they are needed.

A buffer lives from the posting of its message until the end of the micro-batch's backward pass.
torch's own stage allocates the buffers of all micro-batches, activations and gradients, before the
first step and holds them: one per message of the step, where the schedule has few in flight. It
also holds logits, in GPipe those of all micro-batches, through a backward pass that starts from
their loss; and the graph of every loss, with the received tensors, until the end of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _make_tensor_from_meta


class LeanStage(PipelineStage):
    """A pipeline stage that holds only the messages in flight."""

    def _setup_forward_recv_info(self, *args: Any, **kwargs: Any) -> None:
        self._without_memory(super()._setup_forward_recv_info, *args, **kwargs)

    def _setup_backward_recv_info(self, *args: Any, **kwargs: Any) -> None:
        self._without_memory(super()._setup_backward_recv_info, *args, **kwargs)

    def _without_memory(self, setup: Any, *args: Any, **kwargs: Any) -> None:
        """Lets torch record shapes and sources, with buffers that have no memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            setup(*args, **kwargs)
        finally:
            self.device = device

    def _get_recv_ops(self, recv_infos: Any) -> Any:
        for info in recv_infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)
        return super()._get_recv_ops(recv_infos)

    def empty_buffers(self, chunk_id: int) -> None:
        """Replaces the buffers of a micro-batch by tensors of no sequence."""
        for info in (*self.args_recv_info[chunk_id], *self.grad_recv_info[chunk_id]):
            if info.buffer is not None:
                info.buffer = info.buffer.new_empty((0, *info.buffer.shape[1:]))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:  # the backward pass starts from the loss and needs no logits
            self.fwd_cache[fwd_chunk_id] = ((), self.fwd_cache[fwd_chunk_id][1])
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        **kwargs: Any,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, **kwargs)
        if loss is not None and full_backward:
            # the schedule holds the loss until the step ends; its graph holds received tensors
            loss.detach_()
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None
