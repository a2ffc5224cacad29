"""Blocks of attention have the outputs, log-sum-exps and gradients of its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parplan.executor.context.block_kernels import Attended, Scores, attend, attend_backward

QUERIES, FEATURES = 16, 8
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
)
DEVICES = [
    pytest.param(("cpu", torch.float32, 2e-6), id="cpu"),
    pytest.param(("cuda", torch.float32, 2e-3), id="gpu-fp32", marks=ON_GPU),
    pytest.param(("cuda", torch.bfloat16, 5e-2), id="gpu-bf16", marks=ON_GPU),
]


def scores_of(name: str, keys: int, like: Tensor) -> tuple[Scores, Tensor]:
    """The scores as a kernel takes them, and those that are not read."""
    unread = torch.zeros(QUERIES, keys, dtype=torch.bool)
    if name == "causal":
        return Scores(causal=True), torch.ones_like(unread).triu(1)
    if name == "masked":
        unread[:, 3] = True
        unread[5:, :2] = True
        added = torch.zeros_like(unread, dtype=like.dtype).masked_fill(unread, float("-inf"))
        return Scores(mask=added.to(like.device)), unread
    return Scores(), unread


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("value_features", [FEATURES, 6])
@pytest.mark.parametrize(
    ("name", "keys"), [("whole", 24), ("causal", QUERIES), ("masked", 24)], ids=lambda x: str(x)
)
def test_a_block_is_attention_over_the_keys_that_are_read(
    name, keys, value_features, kv_heads, where
):
    device, dtype, tolerance = where
    generator = torch.Generator().manual_seed(1)
    shapes = ((4, QUERIES, FEATURES), (kv_heads, keys, FEATURES), (kv_heads, keys, value_features))
    inputs = [
        torch.randn((2, *shape), generator=generator).to(device, dtype, copy=True)
        for shape in shapes
    ]
    scores, unread = scores_of(name, keys, inputs[0])
    leaves = [each.cpu().double().requires_grad_() for each in inputs]
    query, key, value = leaves
    repeats = 4 // kv_heads
    products = query @ key.repeat_interleave(repeats, 1).transpose(-2, -1) * FEATURES**-0.5
    products = products.masked_fill(unread, float("-inf"))
    expected = products.softmax(-1) @ value.repeat_interleave(repeats, 1)
    gradient = torch.randn(expected.shape, generator=generator)

    out, logsumexp = attend(*inputs, scores)
    attended = Attended(gradient.to(device, dtype), *inputs, out, logsumexp.float())
    gradients = attend_backward(attended, scores)

    compared = [(out, expected), (logsumexp, products.logsumexp(-1))]
    compared += zip(
        gradients, torch.autograd.grad(expected, leaves, gradient.double()), strict=True
    )
    assert all((a.cpu().double() - b).abs().max() <= tolerance for a, b in compared)
