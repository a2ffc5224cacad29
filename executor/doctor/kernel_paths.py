"""Kernels of a GPU: attention, norms, products of 16 and 8 bits, the fused update."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.executor.context.block_kernels import (
    Attended,
    Scores,
    attend,
    attend_backward,
    kernel_of,
)
from parplan.executor.doctor.path import Checked, GpuPath, Place, RefusedError, require_close
from parplan.executor.models.operators import rms_norm
from parplan.executor.run_options import Options
from parplan.executor.training.optimizer import build_optimizer
from parplan.profiles.profiler.gpus import gpu

TOKENS, HEADS = 64, 4
FEATURES = (64, 100)  # the second must be padded
TOLERANCES = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
PRODUCT = 256
FP8_CAPABILITY = (8, 9)  # Ada; torch._scaled_mm needs it
FP8_TOLERANCE = 0.1
FP8_LARGEST = 448.0  # of float8_e4m3fn


def block_attention(place: Place) -> Checked:
    """Compares attention of one block, its log-sum-exp and gradients in every type."""
    used: dict[str, float] = {}
    for dtype, features, masked in itertools.product(TOLERANCES, FEATURES, (False, True)):
        if place.on_gpu and place.real and not _has_type(place, dtype):
            continue
        here = [place.normal(1, HEADS, TOKENS, features, seed=seed) for seed in range(4)]
        mask = torch.zeros(TOKENS, TOKENS)
        mask[:, 3] = float("-inf")
        scores = Scores(mask=mask) if masked else Scores(causal=True)
        expected = _attended(here, scores)
        there = [each.to(place.device, dtype) for each in here]
        if masked:
            scores = Scores(mask=mask.to(place.device, dtype))
        kernel = kernel_of(there[0], scores)
        for actual, right in zip(_attended(there, scores), expected, strict=True):
            error = require_close(f"attention by {kernel}", actual, right, TOLERANCES[dtype])
            used[kernel] = max(error, used.get(kernel, 0.0))
    texts = (f"{kernel}: error {error:.1e}" for kernel, error in used.items())
    return Checked(says="; ".join(texts))


def _attended(tensors: list[Tensor], scores: Scores) -> list[Tensor]:
    query, key, value, gradient = tensors
    out, logsumexp = attend(query, key, value, scores)
    of = Attended(gradient, query, key, value, out, logsumexp.float())
    return [out, logsumexp, *attend_backward(of, scores)]


def whole_attention(place: Place) -> Checked:
    """Compares torch's own choice of a kernel over whole sequences, forward and backward."""
    errors = {}
    for dtype, tolerance in TOLERANCES.items():
        if place.on_gpu and place.real and not _has_type(place, dtype):
            continue
        made = []
        for device, kind in ((torch.device("cpu"), torch.float32), (place.device, dtype)):
            parts = [
                place.normal(1, HEADS, TOKENS, FEATURES[0], seed=seed).to(device, kind)
                for seed in range(3)
            ]
            leaves = [each.requires_grad_() for each in parts]
            out = functional.scaled_dot_product_attention(*leaves, is_causal=True)
            made.append([out, *torch.autograd.grad(out.float().sum(), leaves)])
        for right, actual in zip(*made, strict=True):
            errors[dtype] = require_close("attention", actual, right, tolerance)
    return Checked(says=_by_type(errors))


def norms_and_update(place: Place) -> Checked:
    """Compares the fused norm and the fused AdamW with the CPU's."""
    made = []
    for device in (torch.device("cpu"), place.device):
        weight = nn.Parameter(place.normal(PRODUCT, seed=1).to(device))
        matrix = nn.Parameter(place.normal(PRODUCT, PRODUCT, seed=2).to(device))
        optimizer = build_optimizer([weight, matrix], Options())
        for seed in range(2):
            x = place.normal(8, PRODUCT, seed=seed).to(device)
            rms_norm(x @ matrix, weight, 1e-5).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        made.append([weight, matrix])
    errors = [
        require_close("an updated parameter", actual, right, 1e-3)
        for right, actual in zip(*made, strict=True)
    ]
    return Checked(says=f"two updates, largest error {max(errors):.1e}")


def narrow_products(place: Place) -> Checked:
    """Compares products in fp32, fp16 and bf16, with their gradients."""
    errors = {}
    for dtype, tolerance in TOLERANCES.items():
        if place.on_gpu and place.real and not _has_type(place, dtype):
            continue
        pair = [place.normal(PRODUCT, PRODUCT, seed=seed) for seed in range(2)]
        there = [each.to(place.device, dtype).requires_grad_() for each in pair]
        here = [each.clone().requires_grad_() for each in pair]
        products = [left @ right for left, right in (here, there)]
        gradients = [
            torch.autograd.grad(product.float().sum(), leaves)
            for product, leaves in zip(products, (here, there), strict=True)
        ]
        errors[dtype] = require_close("a product", products[1], products[0], tolerance)
        for right, actual in zip(*gradients, strict=True):
            require_close("the gradient of a product", actual, right, tolerance)
    return Checked(says=_by_type(errors))


def fp8_products(place: Place) -> Checked:
    """Compares a product of two tensors in fp8, each with one scale."""
    if place.on_gpu and place.real:
        capability = gpu(place.device).get_device_capability(place.device)
        if capability < FP8_CAPABILITY:
            text = ".".join(map(str, capability))
            raise RefusedError(f"compute capability {text} has no products of fp8, 8.9 has")
    left, right = (place.normal(PRODUCT, PRODUCT, seed=seed) for seed in range(2))
    narrow, scales = [], []
    for each in (left, right.t().contiguous()):
        scale = each.abs().max() / FP8_LARGEST
        narrow.append((each / scale).to(torch.float8_e4m3fn).to(place.device))
        scales.append(scale.reshape(()).to(place.device))
    product = torch._scaled_mm(
        narrow[0], narrow[1].t(), scales[0], scales[1], out_dtype=torch.bfloat16
    )
    error = require_close("a product of fp8", product, left @ right, FP8_TOLERANCE)
    return Checked(says=f"error {error:.1e} beside fp32")


def _has_type(place: Place, dtype: torch.dtype) -> bool:
    """Returns whether the GPU computes in a type by itself: bf16 from Ampere on."""
    capability = gpu(place.device).get_device_capability(place.device)
    return bool(dtype is not torch.bfloat16 or capability >= (8, 0))


def _by_type(errors: dict[torch.dtype, float]) -> str:
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in errors}
    return ", ".join(f"{names[dtype]} error {error:.1e}" for dtype, error in errors.items())


PATHS = (
    GpuPath(
        name="attention of blocks",
        checks="FlashAttention, the memory-efficient kernel and their fall-back, padded heads",
        run=block_attention,
        covers=("executor/context/block_kernels.py:kernel_of",),
    ),
    GpuPath(
        name="attention of sequences",
        checks="torch's choice of a kernel in each type",
        run=whole_attention,
    ),
    GpuPath(
        name="fused norm and update",
        checks="RMS norm and AdamW as single kernels",
        run=norms_and_update,
        covers=("executor/models/operators.py:rms_norm",),
    ),
    GpuPath(
        name="16-bit products", checks="products and gradients in each type", run=narrow_products
    ),
    GpuPath(name="fp8 products", checks="a scaled product of fp8", run=fp8_products),
)
