"""Moments of each optimizer, by hand."""

from __future__ import annotations

import pytest

from parplan.costmodels.operators.optimizers import (
    OPTIMIZERS,
    PLAIN_OPTIMIZERS,
    WholeTensor,
    moments_bytes,
)
from parplan.profiles.models.spec import Optimizer

MATRIX = WholeTensor(100 * 300, matrix=(100, 300))
SMALL = WholeTensor(10 * 300, matrix=(10, 300))
TABLE = WholeTensor(100 * 300, table=True, matrix=(100, 300))
VECTOR = WholeTensor(8000)


@pytest.mark.parametrize(
    ("optimizer", "matrix", "small", "table", "vector"),
    [
        (Optimizer.ADAM, 240_000, 24_000, 240_000, 64_000),
        # 300 columns are two blocks: 2 (30,000 + 4 x 100 x 2)
        (Optimizer.ADAM_8BIT, 61_600, 24_000, 61_600, 64_000),
        (Optimizer.MUON, 120_000, 12_000, 240_000, 64_000),
        (Optimizer.ADAFACTOR, 1_600, 1_240, 1_600, 32_000),
        (Optimizer.SGD, 0, 0, 0, 0),
        (Optimizer.SGD_MOMENTUM, 120_000, 12_000, 120_000, 32_000),
    ],
)
def test_moments_are_those_of_the_table(optimizer, matrix, small, table, vector):
    found = (
        moments_bytes(optimizer, (100, 300), MATRIX),
        moments_bytes(optimizer, (10, 300), SMALL),
        moments_bytes(optimizer, (100, 300), TABLE),
        moments_bytes(optimizer, (8000,), VECTOR),
    )

    assert found == (matrix, small, table, vector)


@pytest.mark.parametrize("optimizer", Optimizer)
def test_parts_of_rows_hold_no_less_than_the_whole_and_no_more_than_their_factors(optimizer):
    whole = moments_bytes(optimizer, (100, 300), MATRIX)
    parts = 4 * moments_bytes(optimizer, (25, 300), MATRIX)

    columns = 4 * 300 if optimizer is Optimizer.ADAFACTOR else 0
    assert parts == whole + 3 * columns


def test_a_part_of_a_large_matrix_has_8_bits_however_small_it_is():
    assert moments_bytes(Optimizer.ADAM_8BIT, (1, 300), MATRIX) == 2 * (300 + 4 * 2)


@pytest.mark.parametrize("optimizer", Optimizer)
@pytest.mark.parametrize("tensor", [MATRIX, SMALL, TABLE, VECTOR])
def test_no_tensor_has_fewer_moments_than_the_least(optimizer, tensor):
    shape = tensor.matrix or (tensor.num_elements,)

    held = moments_bytes(optimizer, shape, tensor)

    assert held >= OPTIMIZERS[optimizer].least_moments * tensor.num_elements


@pytest.mark.parametrize("optimizer", PLAIN_OPTIMIZERS)
@pytest.mark.parametrize("tensor", [MATRIX, SMALL, TABLE, VECTOR])
def test_plain_optimizers_have_the_least_for_every_tensor(optimizer, tensor):
    shape = tensor.matrix or (tensor.num_elements,)

    held = moments_bytes(optimizer, shape, tensor)

    assert held == OPTIMIZERS[optimizer].least_moments * tensor.num_elements
