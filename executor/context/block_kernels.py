"""Torch's fused attention over one block of scores, with the log-sum-exp of every query.

Parts of a softmax are merged by their log-sum-exp, and the backward pass of a block is that of the
kernel with the output and the log-sum-exp of all blocks (Liu et al. 2023, arXiv 2310.01889).
`scaled_dot_product_attention` returns no log-sum-exp, so the kernels below it are called, with the
checks and paddings that it makes for them. On GPUs they are FlashAttention for 16 bits without a
mask from Ampere on, and torch's memory-efficient kernel otherwise. Scores with a soft cap, which no
kernel bounds, and types that a GPU has no kernel for are computed here, some queries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from parplan.profiles.profiler.gpus import gpu, is_gpu

aten = torch.ops.aten
# The memory-efficient kernel pads its log-sum-exp to a multiple of as many queries, and reads masks
# whose rows begin at multiples of as many keys.
EFFICIENT_ROWS = 32
ALIGNED_KEYS = 16
PLAIN_ROWS = 512  # queries whose scores are computed at a time
FLASH_CAPABILITY = (8, 0)  # Ampere; torch has no FlashAttention for GPUs before it
FLASH_FEATURES = 256  # the widest head of FlashAttention
PADDED_FEATURES = 8  # both kernels of GPUs read heads of a multiple of as many features
_16_BITS = (torch.bfloat16, torch.float16)


class Kernel(StrEnum):
    """The ways to compute one block of scores."""

    HOST = "torch's kernel for CPUs"
    FLASH = "FlashAttention"
    EFFICIENT = "torch's memory-efficient kernel"
    PLAIN = "products and a softmax"


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
    kernel = kernel_of(query, scores)
    if kernel is Kernel.PLAIN:
        return _plain(query, _for_every_head(key, query), _for_every_head(value, query), scores)
    features, scores = value.shape[-1], _with_factor(query, scores)
    width = _width(query, kernel)
    query, key, value = (_widened(each, width) for each in (query, key, value))
    if kernel is Kernel.HOST:
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, scores.causal, attn_mask=scores.mask, scale=scores.factor
        )
    elif kernel is Kernel.FLASH:
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
    kernel = kernel_of(of.query, scores)
    if kernel is Kernel.PLAIN:
        return _plain_backward(of, scores)
    features, of_values = of.query.shape[-1], of.value.shape[-1]
    scores, width = _with_factor(of.query, scores), _width(of.query, kernel)
    wide = Attended(*(_widened(each, width) for each in of[:-1]), of.logsumexp)
    if kernel is Kernel.HOST:
        by_query, by_key, by_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide[:-1],
            of.logsumexp.contiguous(),
            0.0,
            scores.causal,
            attn_mask=scores.mask,
            scale=scores.factor,
        )
    elif kernel is Kernel.FLASH:
        by_query, by_key, by_value = _flash_backward(wide, scores)
    else:
        by_query, by_key, by_value = _efficient_backward(wide, scores)
    return by_query[..., :features], by_key[..., :features], by_value[..., :of_values]


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


def _plain(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of attention by its definition, of equally many heads."""
    outs, sums = [], []
    for rows in _row_parts(query):
        bounded = _read(_bounded(query, key, rows, scores), rows, scores)
        sums.append(bounded.logsumexp(-1))
        weights = (bounded - sums[-1].unsqueeze(-1)).exp()
        outs.append(weights.to(value.dtype) @ value)
    out = torch.cat(outs, dim=2)
    # as the kernels return it: tokens outside of heads
    return out.transpose(1, 2).contiguous().transpose(1, 2), torch.cat(sums, dim=2)


def _plain_backward(of: Attended, scores: Scores) -> Gradients:
    """Returns the gradients: d score = P (dP - sum(dO O)), of bounded ones times 1 - (s / c)^2."""
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
        by_score = factor * by_bounded
        if scores.soft_cap:
            by_score = by_score * (1 - (bounded / scores.soft_cap).square())
        by_query.append(by_score @ keys)
        by_key += by_score.transpose(-2, -1) @ query[:, :, rows].float()
        by_value += weights.transpose(-2, -1) @ by_out
    return (
        torch.cat(by_query, dim=2).to(query.dtype),
        _over_queries(by_key, key).to(key.dtype),
        _over_queries(by_value, value).to(value.dtype),
    )


def _row_parts(query: Tensor) -> list[slice]:
    starts = range(0, query.shape[2], PLAIN_ROWS)
    return [slice(start, min(start + PLAIN_ROWS, query.shape[2])) for start in starts]


def _factor(query: Tensor, scores: Scores) -> float:
    return float(query.shape[-1] ** -0.5) if scores.factor is None else scores.factor


def _bounded(query: Tensor, key: Tensor, rows: slice, scores: Scores) -> Tensor:
    """Returns scores of some queries in fp32, bounded where they have a soft cap."""
    raw = query[:, :, rows].float() @ key.float().transpose(-2, -1)
    if not scores.soft_cap:
        return raw * _factor(query, scores)
    return scores.soft_cap * (raw * (_factor(query, scores) / scores.soft_cap)).tanh()


def _read(bounded: Tensor, rows: slice, scores: Scores) -> Tensor:
    """Returns the scores with -inf for keys that a query does not read."""
    if scores.causal:
        queries = torch.arange(rows.start, rows.stop, device=bounded.device)
        keys = torch.arange(bounded.shape[-1], device=bounded.device)
        return bounded.masked_fill(keys > queries[:, None], float("-inf"))
    return bounded if scores.mask is None else bounded + scores.mask[rows]


def kernel_of(query: Tensor, scores: Scores) -> Kernel:
    """Returns the kernel that computes a block with such queries on their device."""
    if scores.soft_cap:
        return Kernel.PLAIN
    if not is_gpu(query.device):
        return Kernel.HOST
    return gpu_kernel(
        query.dtype,
        query.shape[-1],
        gpu(query.device).get_device_capability(query.device),
        masked=scores.mask is not None,
    )


def gpu_kernel(
    dtype: torch.dtype, features: int, capability: tuple[int, int], *, masked: bool
) -> Kernel:
    """Returns the kernel of a GPU, as torch chooses it for `scaled_dot_product_attention`.

    Before Ampere neither kernel has bf16 (torch: aten/src/ATen/native/transformers/cuda/sdp_utils).

    capability   compute capability; (0, 0) for a device that has no kernels of CUDA
    """
    ampere = capability >= FLASH_CAPABILITY
    if ampere and dtype in _16_BITS and features <= FLASH_FEATURES and not masked:
        return Kernel.FLASH
    has_type = dtype is not torch.bfloat16 or ampere
    return Kernel.EFFICIENT if has_type and capability > (0, 0) else Kernel.PLAIN


def _with_factor(query: Tensor, scores: Scores) -> Scores:
    """Returns scores that name their factor, which a kernel would take from padded heads."""
    return replace(scores, factor=_factor(query, scores))


def _width(query: Tensor, kernel: Kernel) -> int:
    """Returns the features of a head that a kernel reads."""
    features = query.shape[-1]
    return features if kernel is Kernel.HOST else features + -features % PADDED_FEATURES


def _widened(x: Tensor, width: int) -> Tensor:
    """Pads features with zeros, which change no score and no sum."""
    missing = width - x.shape[-1]
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
