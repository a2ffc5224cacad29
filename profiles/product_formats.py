"""The formats in which the matrix products of blocks may run: narrow operands with scales.

Weights and activations are in the training's precision, and each operand is cast before its
product (EQUATIONS K8). A row of `FORMATS` says what the casts move, and what the device must have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class ProductFormat(StrEnum):
    FP8_DELAYED = "fp8-delayed"
    FP8_CURRENT = "fp8-current"
    FP8_ROWWISE = "fp8-rowwise"
    FP8_BLOCK = "fp8-block"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandFormat:
    """The format of one operand of a product.

    peak            the key of the device's peak FLOP/s
    element_bytes   bytes of an element with its part of the scales
    reads           passes over the operand in the training's precision: one, or a first one for the
                    largest value
    copies          casts that are written: one by rows and one by columns, where the two products
                    that read an operand need it so
    from_capability the least compute capability of a device of NVIDIA that runs it
    product_slower  factor on the time of a product beside that of scales of whole tensors
    gathered_bytes  bytes of an element of a weight that ranks gather in the format
    casts_again     the backward pass can cast an operand again from a copy in training's precision
    one_weight_cast the compute capabilities, from and below, on which one cast of a weight serves
                    both products that read it; None: each needs its own
    """

    peak: str
    element_bytes: float
    reads: int
    copies: int
    from_capability: float
    product_slower: float = 1.0
    gathered_bytes: float = 1.0
    casts_again: bool = True
    one_weight_cast: tuple[float, float] | None = None

    @property
    def element_parts(self) -> int:
        """64ths of a byte of an element with its part of the scales."""
        return round(64 * self.element_bytes)

    def weight_casts(self, capability: float | None) -> int:
        """Returns the number of casts of a weight on a device of a compute capability.

        (EQUATIONS M8)
        """
        first, end = self.one_weight_cast or (math.inf, math.inf)
        return 1 if first <= (capability or 0.0) < end else 2

    def cast_bytes(self, element_bytes: int) -> float:
        """Bytes that the cast of one element moves, of `element_bytes` in training's precision."""
        return self.reads * element_bytes + self.copies * self.element_bytes


_HOPPER, _BLACKWELL = 8.9, 10.0  # fp8 begins with Ada
_ULTRA = 10.3  # B300 and GB300
# The efficiency that products in a narrow format reach, over that of the same products in 16 bits
# on the same device: fits of the form of K1 to the products of ai-dynamo/aiconfigurator
# (095f58a51c: gemm_perf of TensorRT-LLM 1.3.0rc20 and SGLang 0.5.14 on H100, H200, B200, B300,
# GB200 and GB300, each with the cast of its input apart). fp8: 0.93 to 0.97. fp4: 0.73 to 0.83,
# and 0.53 to 0.67 where its peak alone is half as high again.
_EFFICIENCY = {"fp8": 0.95, "fp4": 0.78}
_ULTRA_FP4 = 0.57
# Power that a narrow product would draw at its full rate, over that of a 16-bit one. Runs of the
# same source that sampled the power under steady load were 1.15 to 1.24 times as slow as the others
# in 16 bits, and 1.02 to 1.12 times in fp8 (B200 and GB200, TensorRT-LLM 1.3.0rc15 and rc17).
# On H200 large products were 1.04 times as slow in either (vLLM 0.22.0).
_NARROW_POWER = 0.9


def narrow_power(capability: float | None) -> float:
    """Returns the power of a narrow product at its full rate over that of a 16-bit one."""
    return 1.0 if is_before_blackwell(capability) else _NARROW_POWER


# Products with scales for rows took 1.13 to 1.31 times as long as those with one for the tensor
# (the same source, SGLang 0.5.14 against TensorRT-LLM 1.3.0rc20 on H100, H200, B200 and GB200).
_SCALED_ROWS = 1.22
# Gradients' products in fp8 promote their sums to fp32 on the way before Blackwell, as Transformer
# Engine (use_split_accumulator) and torchao have it; without, products on H100 are 1.1 to 1.2 times
# as fast (pytorch/ao issue 2377).
PROMOTED_SUMS = 1.15


def narrow_efficiency(peak: str, capability: float | None) -> float:
    """Returns the efficiency of products at `peak` over that of 16-bit products of a device."""
    if peak == "fp4" and capability is not None and capability >= _ULTRA:
        return _ULTRA_FP4
    return _EFFICIENCY[peak]


def is_before_blackwell(capability: float | None) -> bool:
    """Returns whether a compute capability is known and before Blackwell's."""
    return capability is not None and capability < _BLACKWELL


def gradient_slowdown(peak: str, capability: float | None) -> float:
    """Returns the factor on the time of a gradient's product whose operands have `peak`."""
    return PROMOTED_SUMS if peak == "fp8" and is_before_blackwell(capability) else 1.0


# Transformer Engine (transformer_engine/common/recipe/__init__.py): DelayedScaling (the scale of
# earlier steps; the cast writes the transposed copy too, which Hopper's products need),
# Float8CurrentScaling, Float8BlockScaling (1 x 128 of activations, 128 x 128 of weights),
# MXFP8BlockScaling (32 with a scale of one byte) and NVFP4BlockScaling (16 with a scale of one
# byte, under one scale of the tensor). torchao float8 (recipe tensorwise and rowwise).
# Memory, NVIDIA/TransformerEngine d0067d0da: pytorch/module/linear.py (the saved input has its
# columns alone, `update_usage`; save_original_input keeps the operand instead, which delayed
# scaling refuses), pytorch/csrc/quantizer.cpp (a transposed copy only where products read no other
# order, nvte_is_non_tn_fp8_gemm_supported: from capability 10 to 12; formats with scales of blocks
# always have both). Gathers, NVIDIA/Megatron-LM d98e8a64dd: megatron/core/distributed/
# param_and_grad_buffer.py (--fp8-param-gather in bytes, --reuse-grad-buf-for-mxfp8-param-ag in 16
# bits through the gradients' buffer, NVFP4 packed by rows).
FORMATS: Mapping[ProductFormat, OperandFormat] = MappingProxyType(
    {
        ProductFormat.FP8_DELAYED: OperandFormat(
            peak="fp8",
            element_bytes=1.0,
            reads=1,
            copies=2,
            from_capability=_HOPPER,
            casts_again=False,
            one_weight_cast=(_BLACKWELL, 12.0),
        ),
        ProductFormat.FP8_CURRENT: OperandFormat(
            peak="fp8",
            element_bytes=1.0,
            reads=2,
            copies=1,
            from_capability=_HOPPER,
            one_weight_cast=(_BLACKWELL, 12.0),
        ),
        ProductFormat.FP8_ROWWISE: OperandFormat(
            peak="fp8",
            element_bytes=1.0,
            reads=2,
            copies=2,
            from_capability=_HOPPER,
            product_slower=_SCALED_ROWS,
        ),
        ProductFormat.FP8_BLOCK: OperandFormat(
            peak="fp8", element_bytes=1 + 4 / 128, reads=1, copies=2, from_capability=9.0
        ),
        ProductFormat.MXFP8: OperandFormat(
            peak="fp8",
            element_bytes=1 + 1 / 32,
            reads=1,
            copies=2,
            from_capability=_BLACKWELL,
            gathered_bytes=2.0,
        ),
        ProductFormat.NVFP4: OperandFormat(
            peak="fp4",
            element_bytes=0.5 + 1 / 16,
            reads=2,
            copies=2,
            from_capability=_BLACKWELL,
            gathered_bytes=0.5,
        ),
    }
)
