"""Cross entropy over a vocabulary that tensor-parallel ranks may share, in the memory that the
price counts.

Four bytes a logit are kept for the backward pass, which turns them into the gradient in place:
torch's own cross entropy holds a second fp32 copy of the logits, and a third for their gradient
(EQUATIONS M5; Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _CrossEntropy(torch.autograd.Function):
    """sum over tokens of log(sum_v exp x_v) - x_target, for this rank's slice of v; three
    reductions over `group`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        scores = logits.to(torch.float32, copy=True)
        first = scores.shape[-1] * (dist.get_rank(group) if group else 0)
        scores.sub_(_reduced(scores.amax(dim=-1, keepdim=True), dist.ReduceOp.MAX, group))
        index = (targets - first).unsqueeze(-1)
        mine = (index >= 0) & (index < scores.shape[-1])
        index = index.clamp(0, scores.shape[-1] - 1)
        at_target = _reduced(scores.gather(-1, index) * mine, dist.ReduceOp.SUM, group)
        total = _reduced(scores.exp_().sum(dim=-1, keepdim=True), dist.ReduceOp.SUM, group)
        scores.div_(total)
        ctx.save_for_backward(scores, index, mine)
        ctx.dtype = logits.dtype
        return (total.log() - at_target).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, index, mine = ctx.saved_tensors
        probabilities.scatter_add_(-1, index, -mine.to(probabilities.dtype)).mul_(gradient)
        return probabilities.to(ctx.dtype), None, None


def _reduced(
    tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> Tensor:
    if group:
        dist.all_reduce(tensor, operation, group)
    return tensor


class Loss(nn.Module):
    """Cross entropy summed over the tokens; with `group` its ranks hold equal slices of the
    vocabulary, in rank order.

    logits [batch, sequence, vocabulary of this rank], targets [batch, sequence] -> a scalar in
    fp32. The backward pass can run once: it works in place.
    """

    on_shards = True
    group: dist.ProcessGroup | None = None

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return _CrossEntropy.apply(logits, targets, self.group)
