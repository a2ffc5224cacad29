"""A pipeline stage that holds the buffer of a message from when it is posted until its
micro-batch's backward pass is over.

torch's own stage makes the buffers of all micro-batches, activations and gradients, before the
first step and keeps them: as many again as a long step has messages, beside the few that the
schedule has in flight. It also keeps logits, in GPipe those of all micro-batches, through a
backward pass that starts from their loss, and the graph of every loss, with what the stage
received, until the step is over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _make_tensor_from_meta


class LeanStage(PipelineStage):
    """Memory of messages as the schedule needs it."""

    def _setup_forward_recv_info(self, *args: Any, **kwargs: Any) -> None:
        self._without_memory(super()._setup_forward_recv_info, *args, **kwargs)

    def _setup_backward_recv_info(self, *args: Any, **kwargs: Any) -> None:
        self._without_memory(super()._setup_backward_recv_info, *args, **kwargs)

    def _without_memory(self, setup: Any, *args: Any, **kwargs: Any) -> None:
        """Let torch write down shapes and sources; where it would put a buffer there is one without
        memory.
        """
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

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:  # the backward pass starts from the loss: it needs no logits
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
            # the schedule keeps it until the step is over, and with its graph what the stage
            # received
            loss.detach_()
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None
