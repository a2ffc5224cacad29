"""Cross entropy over a vocabulary or over tokens that tensor-parallel ranks may share.

The forward pass saves four bytes a logit, and the backward pass turns them into the gradient in
place. torch's own cross entropy holds a second fp32 copy of the logits, and a third for their
gradient (EQUATIONS M5; Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The factor of the mean loss of further tokens: that of DeepSeek-V3's first 10 T tokens, arXiv
# 2412.19437, section 4.2.
FURTHER_WEIGHT = 0.3
TOKEN_DIMS = 2  # batch and sequence


class _CrossEntropy(torch.autograd.Function):
    """Sums log(sum_v exp x_v) - x_target over the tokens, each rank with its slice of v.

    The summands have `weights`, if there are any.

    The forward pass takes three reductions over `group`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        weights: Tensor | None,
    ) -> Tensor:
        scores = logits.to(torch.float32, copy=True)
        first = scores.shape[-1] * (dist.get_rank(group) if group else 0)
        scores.sub_(_all_reduce(scores.amax(dim=-1, keepdim=True), dist.ReduceOp.MAX, group))
        index = (targets - first).unsqueeze(-1)
        on_this_rank = (index >= 0) & (index < scores.shape[-1])
        index = index.clamp(0, scores.shape[-1] - 1)
        at_target = _all_reduce(scores.gather(-1, index) * on_this_rank, dist.ReduceOp.SUM, group)
        total = _all_reduce(scores.exp_().sum(dim=-1, keepdim=True), dist.ReduceOp.SUM, group)
        scores.div_(total)
        ctx.save_for_backward(scores, index, on_this_rank)
        ctx.dtype, ctx.weights = logits.dtype, weights
        losses = (total.log() - at_target).squeeze(-1)
        return (losses if weights is None else losses * weights).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, on_this_rank = ctx.saved_tensors
        if ctx.weights is not None:
            gradient = gradient * ctx.weights.unsqueeze(-1)
        minus_one = -on_this_rank.to(probabilities.dtype)
        probabilities.scatter_add_(-1, index, minus_one).mul_(gradient)
        return probabilities.to(ctx.dtype), None, None, None


def _all_reduce(
    tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> Tensor:
    if group:
        dist.all_reduce(tensor, operation, group)
    return tensor


class Loss(nn.Module):
    """Cross entropy summed over the tokens.

    The ranks of `group` hold equal slices of the vocabulary, in rank order. Without a group it is
    the sum over the given tokens, which may be a part of all. logits [batch, sequence, vocabulary
    of this rank], targets [batch, sequence] -> a scalar in fp32. Both may have a dim of predictions
    behind the sequence, each of one token further; negative targets are then of no token, and so
    they are where it `skips` them. The backward pass works in place, so it can run only once.
    """

    on_shards = True
    group: dist.ProcessGroup | None = None

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        weights = None
        if targets.ndim > TOKEN_DIMS:
            weights = _weights(targets)
        elif self.skips:
            weights = (targets >= 0).float()
        return _CrossEntropy.apply(logits, targets, self.group, weights)


def _weights(targets: Tensor) -> Tensor:
    """Returns the weights of predictions, 0 for those of no token: [.., predictions]."""
    further = FURTHER_WEIGHT / (targets.shape[-1] - 1)
    further = FURTHER_WEIGHT / (targets.shape[-1] - 1)
    weights = torch.full_like(targets, further, dtype=torch.float32)
    weights[..., 0] = 1.0
    return weights * (targets >= 0)
