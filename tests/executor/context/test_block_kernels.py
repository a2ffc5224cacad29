"""Blocks of attention have the outputs, log-sum-exps and gradients of its definition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from parplan.executor.context import block_kernels
from parplan.executor.context.block_kernels import (
    Attended,
    Kernel,
    Scores,
    attend,
    attend_backward,
    gpu_kernel,
)

CPU_KERNELS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
QUERIES, FEATURES = 16, 8
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
)
DEVICES = [
    pytest.param(("cpu", torch.float32, 2e-6), id="cpu"),
    pytest.param(("plain", torch.float32, 2e-6), id="plain"),
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
    name, keys, value_features, kv_heads, where, monkeypatch
):
    device, dtype, tolerance = where
    if device == "plain":
        device = "cpu"
        monkeypatch.setattr(block_kernels, "kernel_of", lambda *_: Kernel.PLAIN)
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


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VOLTA, TURING, AMPERE, HOPPER = (7, 0), (7, 5), (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("capability", "dtype", "features", "masked", "kernel"),
    [
        pytest.param(AMPERE, BF16, 128, False, Kernel.FLASH, id="ampere"),
        pytest.param(HOPPER, FP16, 100, False, Kernel.FLASH, id="hopper-fp16-padded"),
        pytest.param(AMPERE, BF16, 128, True, Kernel.EFFICIENT, id="masked"),
        pytest.param(AMPERE, FP32, 128, False, Kernel.EFFICIENT, id="fp32"),
        pytest.param(AMPERE, BF16, 320, False, Kernel.EFFICIENT, id="wide-heads"),
        pytest.param(VOLTA, FP16, 128, False, Kernel.EFFICIENT, id="v100"),
        pytest.param(TURING, FP16, 128, False, Kernel.EFFICIENT, id="t4"),
        pytest.param(TURING, BF16, 128, False, Kernel.PLAIN, id="t4-has-no-bf16"),
        pytest.param((0, 0), FP32, 128, False, Kernel.PLAIN, id="no-kernels-of-cuda"),
    ],
)
def test_a_gpu_runs_a_kernel_that_it_has(capability, dtype, features, masked, kernel):
    assert gpu_kernel(dtype, features, capability, masked=masked) is kernel


def test_heads_are_padded_to_what_the_kernels_of_gpus_read(monkeypatch):
    """The kernel for CPUs stands for FlashAttention, which reads multiples of 8 features."""
    seen, cpu, cpu_backward = [], *CPU_KERNELS

    def flash(query, key, value, dropout, causal, *, scale):
        seen.append({each.shape[-1] for each in (query, key, value)})
        return cpu(query, key, value, dropout, causal, scale=scale)

    def flash_backward(*arguments, scale):
        seen.append({each.shape[-1] for each in arguments[:5]})
        tensors, causal = arguments[:6], arguments[11]
        return cpu_backward(*tensors, 0.0, causal, scale=scale)

    ops = SimpleNamespace(
        _scaled_dot_product_flash_attention=flash,
        _scaled_dot_product_flash_attention_backward=flash_backward,
    )
    generator = torch.Generator().manual_seed(1)
    query, key, value, gradient = torch.randn((4, 2, 4, 16, 12), generator=generator).unbind()
    value, gradient = value[..., :10], gradient[..., :10]
    outcomes = []
    for kernel in (Kernel.PLAIN, Kernel.FLASH):
        monkeypatch.setattr(block_kernels, "kernel_of", lambda *_, chosen=kernel: chosen)
        monkeypatch.setattr(block_kernels, "aten", ops)
        out, logsumexp = attend(query, key, value, Scores(causal=True))
        of = Attended(gradient, query, key, value, out, logsumexp)
        outcomes.append((out, logsumexp, *attend_backward(of, Scores(causal=True))))

    assert seen == [{16}, {16}]
    for plain, padded in zip(*outcomes, strict=True):
        assert plain.shape == padded.shape
        assert (plain - padded).abs().max() <= 2e-6
