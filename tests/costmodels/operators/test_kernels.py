"""Kernels built of their sizes: alignment, and the bytes of an update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.operators.kernels import (
    MISALIGNED_BATCHED,
    misaligned,
    product_kernel,
    update_kernels,
)
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL

TRAINING = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)


@pytest.mark.parametrize(
    ("curve", "sizes"),
    [
        ("forward", (64, 100, 9)),
        ("input_gradient", (64, 9, 100)),
        ("weight_gradient", (9, 100, 64)),
    ],
)
def test_a_product_built_of_its_sizes_is_as_slow_as_its_weight_is_misaligned(curve, sizes):
    made = product_kernel(curve, sizes, 2, 2)  # a weight of 100 x 9: its rows share no 16 bytes

    assert made.sizes == sizes
    assert made.slower == misaligned(2) > 1.0
    assert product_kernel(curve, (64, 64, 64), 2, 2).slower == 1.0


@pytest.mark.parametrize(
    ("head_dim", "slower"), [(144, 1.0), (108, MISALIGNED_BATCHED), (145, MISALIGNED_BATCHED)]
)
def test_heads_that_are_no_multiple_of_16_bytes_leave_the_tensor_cores(head_dim, slower):
    scores = product_kernel("batched_forward", (4, 2048, 2048, head_dim), 2, 2)
    values = product_kernel("batched_backward", (4, 2048, head_dim, 2048), 2, 2)

    assert scores.slower == values.slower == slower


@pytest.mark.parametrize(
    ("precision", "gradients", "adam", "norm"),
    [
        (Precision.BF16, Precision.FP32, 30, 4),
        (Precision.BF16, Precision.BF16, 28, 2),
        (Precision.FP32, Precision.FP32, 28, 4),
    ],
)
def test_an_update_is_adam_and_the_norm_of_the_gradients(precision, gradients, adam, norm):
    kernels = update_kernels(
        1000, replace(TRAINING, precision=precision, gradient_precision=gradients)
    )

    assert [(kernel.curve, kernel.sizes) for kernel in kernels] == [
        ("optimizer", (1000 * adam,)),
        ("gradient_norm.forward", (1000 * norm,)),
    ]
