"""Torch's fused attention over one block of scores, with the log-sum-exp of every query.

Parts of a softmax are merged by their log-sum-exp, and the backward pass of a block is that of the
kernel with the output and the log-sum-exp of all blocks (Liu et al. 2023, arXiv 2310.01889).
`scaled_dot_product_attention` returns no log-sum-exp, so the kernels below it are called. On GPUs
they are FlashAttention for 16 bits without a mask, and torch's memory-efficient kernel otherwise.
None of them bounds scores: those with a soft cap are computed here, some queries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from parplan.profiles.profiler.gpus import is_gpu

aten = torch.ops.aten
# The memory-efficient kernel pads its log-sum-exp to a multiple of as many queries, and reads masks
# whose rows begin at multiples of as many keys.
EFFICIENT_ROWS = 32
ALIGNED_KEYS = 16
CAPPED_ROWS = 512  # queries whose bounded scores are computed at a time


@dataclass(frozen=True, slots=True)
class Scores:
    """The keys that the queries of a block read.

    causal     query i reads the first i + 1 keys
    mask       is added to the scores, -inf where a key is not read
    factor     of the scores; None: head_dim^-1/2
    soft_cap   their bound, c tanh(x / c); 0: none
    """

    causal: bool = False
    mask: Tensor | None = None
    factor: float | None = None
    soft_cap: float = 0.0


def attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of attention over one block.

    query           [batch, heads, queries, head_dim]
    key, value      [batch, kv heads, keys, head_dim], where the values may have fewer features
    output          [batch, heads, queries, features of the values]
    log-sum-exp     [batch, heads, queries] in fp32
    """
    if scores.soft_cap:
        return _capped(query, _for_every_head(key, query), _for_every_head(value, query), scores)
    features, value = value.shape[-1], _widened(value, query)
    if not is_gpu(query.device):
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, scores.causal, attn_mask=scores.mask, scale=scores.factor
        )
    elif _runs_flash(query, scores):
        out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, scores.causal, scale=scores.factor
        )
    else:
        key, value = _for_every_head(key, query), _for_every_head(value, query)
        mask = _of_heads(scores.mask, query)
        out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, True, 0.0, scores.causal, scale=scores.factor
        )
    return out[..., :features], logsumexp[..., : query.shape[2]]


class Attended(NamedTuple):
    """A block after its forward pass, with the gradient of the output.

    query, key, value             of the block
    gradient, output, logsumexp   of its queries, over all blocks
    """

    gradient: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    logsumexp: Tensor


Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


def attend_backward(of: Attended, scores: Scores) -> Gradients:
    """Returns the gradients of query, key and value by the scores of one block."""
    if scores.soft_cap:
        return _capped_backward(of, scores)
    features = of.value.shape[-1]
    wide = of._replace(
        gradient=_widened(of.gradient, of.query),
        value=_widened(of.value, of.query),
        output=_widened(of.output, of.query),
    )
    if not is_gpu(of.query.device):
        by_query, by_key, by_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide[:-1],
            of.logsumexp.contiguous(),
            0.0,
            scores.causal,
            attn_mask=scores.mask,
            scale=scores.factor,
        )
    elif _runs_flash(of.query, scores):
        by_query, by_key, by_value = _flash_backward(wide, scores)
    else:
        by_query, by_key, by_value = _efficient_backward(wide, scores)
    return by_query, by_key, by_value[..., :features]


def _flash_backward(of: Attended, scores: Scores) -> Gradients:
    random = torch.zeros((), dtype=torch.int64, device=of.query.device)  # read by dropout alone
    gradients: Gradients = aten._scaled_dot_product_flash_attention_backward(
        *of[:-1],
        of.logsumexp.contiguous(),
        None,
        None,
        of.query.shape[2],
        of.key.shape[2],
        0.0,
        scores.causal,
        random,
        random,
        scale=scores.factor,
    )
    return gradients


def _efficient_backward(of: Attended, scores: Scores) -> Gradients:
    query = of.query
    random = torch.zeros((), dtype=torch.int64)  # read by dropout alone
    padding = -query.shape[2] % EFFICIENT_ROWS
    by_query, by_key, by_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        of.gradient,
        query,
        _for_every_head(of.key, query),
        _for_every_head(of.value, query),
        _of_heads(scores.mask, query),
        of.output,
        functional.pad(of.logsumexp, (0, padding)).contiguous(),
        random,
        random,
        0.0,
        [True, True, True, False],
        scores.causal,
        scale=scores.factor,
    )
    return by_query, _over_queries(by_key, of.key), _over_queries(by_value, of.value)


def _capped(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of attention with bounded scores, of equally many heads."""
    outs, sums = [], []
    for rows in _row_parts(query):
        bounded = _read(_bounded(query, key, rows, scores), rows, scores)
        sums.append(bounded.logsumexp(-1))
        weights = (bounded - sums[-1].unsqueeze(-1)).exp()
        outs.append(weights.to(value.dtype) @ value)
    out = torch.cat(outs, dim=2)
    # as the kernels return it: tokens outside of heads
    return out.transpose(1, 2).contiguous().transpose(1, 2), torch.cat(sums, dim=2)


def _capped_backward(of: Attended, scores: Scores) -> Gradients:
    """Returns the gradients: d score = P (dP - sum(dO O)) (1 - (bounded / c)^2)."""
    gradient, query, key, value, output, logsumexp = of
    keys, values = _for_every_head(key, query).float(), _for_every_head(value, query).float()
    by_key, by_value = torch.zeros_like(keys), torch.zeros_like(values)
    by_query = []
    factor = _factor(query, scores)
    for rows in _row_parts(query):
        by_out = gradient[:, :, rows].float()
        bounded = _bounded(query, keys, rows, scores)
        weights = (_read(bounded, rows, scores) - logsumexp[:, :, rows].unsqueeze(-1)).exp()
        along = (by_out * output[:, :, rows].float()).sum(-1, keepdim=True)
        by_bounded = weights * (by_out @ values.transpose(-2, -1) - along)
        by_score = factor * by_bounded * (1 - (bounded / scores.soft_cap).square())
        by_query.append(by_score @ keys)
        by_key += by_score.transpose(-2, -1) @ query[:, :, rows].float()
        by_value += weights.transpose(-2, -1) @ by_out
    return (
        torch.cat(by_query, dim=2).to(query.dtype),
        _over_queries(by_key, key).to(key.dtype),
        _over_queries(by_value, value).to(value.dtype),
    )


def _row_parts(query: Tensor) -> list[slice]:
    starts = range(0, query.shape[2], CAPPED_ROWS)
    return [slice(start, min(start + CAPPED_ROWS, query.shape[2])) for start in starts]


def _factor(query: Tensor, scores: Scores) -> float:
    return float(query.shape[-1] ** -0.5) if scores.factor is None else scores.factor


def _bounded(query: Tensor, key: Tensor, rows: slice, scores: Scores) -> Tensor:
    """Returns bounded scores of some queries in fp32."""
    raw = query[:, :, rows].float() @ key.float().transpose(-2, -1)
    return scores.soft_cap * (raw * (_factor(query, scores) / scores.soft_cap)).tanh()


def _read(bounded: Tensor, rows: slice, scores: Scores) -> Tensor:
    """Returns the scores with -inf for keys that a query does not read."""
    if scores.causal:
        queries = torch.arange(rows.start, rows.stop, device=bounded.device)
        keys = torch.arange(bounded.shape[-1], device=bounded.device)
        return bounded.masked_fill(keys > queries[:, None], float("-inf"))
    return bounded if scores.mask is None else bounded + scores.mask[rows]


def _runs_flash(query: Tensor, scores: Scores) -> bool:
    return scores.mask is None and query.dtype is not torch.float32


def _widened(x: Tensor, query: Tensor) -> Tensor:
    """Pads features with zeros to those of the query, which the kernels need."""
    missing = query.shape[-1] - x.shape[-1]
    return functional.pad(x, (0, missing)) if missing else x


def _for_every_head(x: Tensor, query: Tensor) -> Tensor:
    """Repeats kv heads for the queries that share them."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _over_queries(gradient: Tensor, x: Tensor) -> Tensor:
    """Adds the gradients of repeated kv heads."""
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2)


def _of_heads(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Returns a mask as the memory-efficient kernel reads it: of every head, in aligned rows."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    aligned = functional.pad(mask, (0, -keys % ALIGNED_KEYS))[..., :keys]
    return aligned.expand(*query.shape[:2], -1, -1)
