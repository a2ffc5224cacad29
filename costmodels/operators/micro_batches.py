"""Layers of several micro-batch sizes at once, for prices as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parplan.profiles.elementwise import Number
from parplan.profiles.models.operator_graph import Dim, LayerClass, Operator, Tensor


def of_all_sizes(layers: Sequence[LayerClass]) -> LayerClass:
    """Returns one layer of several micro-batch sizes, given as the layer of each.

    A size that differs between them is an array with a row for each. The layers have equal
    `numbers_of_tensors`.
    """
    if len(layers) == 1:
        return layers[0]
    operators = zip(*(layer.operators for layer in layers), strict=True)
    return replace(layers[0], operators=tuple(_operator(each) for each in operators))


def numbers_of_tensors(layer: LayerClass) -> tuple[tuple[int, ...], ...]:
    """Returns by operator how many tensors it reads, makes and saves; `of_all_sizes` needs equal.

    Some stacks save one more tensor where a micro-batch has several sequences.
    """
    return tuple(
        (len(operator.inputs), len(operator.outputs), len(operator.saved))
        for operator in layer.operators
    )


def _operator(each: Sequence[Operator]) -> Operator:
    return replace(
        each[0],
        dims=_dims([operator.dims for operator in each]),
        inputs=_tensors([operator.inputs for operator in each]),
        outputs=_tensors([operator.outputs for operator in each]),
        saved=_tensors([operator.saved for operator in each]),
        flops_forward=_number([operator.flops_forward for operator in each]),
        flops_backward=_number([operator.flops_backward for operator in each]),
    )


def _tensors(rows: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(
        replace(each[0], dims=_dims([tensor.dims for tensor in each]))
        for each in zip(*rows, strict=True)
    )


def _dims(rows: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    return tuple(
        replace(each[0], size=_number([dim.size for dim in each]))
        for each in zip(*rows, strict=True)
    )


def _number(values: Sequence[int]) -> Number:
    return values[0] if len(set(values)) == 1 else np.array(values)[:, None]
