"""Bytes that products in a narrow format keep and gather (EQUATIONS M8).

A stack either keeps the casts of a product's operands (Transformer Engine), or the operands
themselves, which it casts again in the backward pass (torchao). Products by the format and by the
stack are in rows (`parplan.profiles.product_formats`, `Stack`); here they become bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from parplan.costmodels.layers.tensor_flow import saves_own_output
from parplan.costmodels.operators.operator_kernels import narrow_format
from parplan.profiles.models.operator_graph import LayerClass, Operator, Tensor
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.product_formats import FORMATS, OperandFormat


@dataclass(frozen=True, slots=True)
class NarrowWeights:
    """Bytes of an element of the weights of products in a narrow format.

    casts       held beside the weight for the whole step
    weight      of the weight itself, 0 where its casts replace it
    gathered    moved when data-parallel ranks gather it
    experts     products of experts have the format, too
    """

    casts: float
    weight: float
    gathered: float
    experts: bool

    @property
    def held(self) -> float:
        return self.casts + self.weight


def narrow_weights(training: TrainingSpec, capability: float | None) -> NarrowWeights | None:
    """Returns the bytes of the weights of narrow products, None where none is narrow.

    capability: the compute capability of the device
    """
    if training.products is None:
        return None
    stack, width = training.stack, float(training.precision.num_bytes)
    row = FORMATS[training.products]
    casts = row.weight_casts(capability) * row.element_bytes
    replaces = training.narrow_weights and stack.holds_cast_weights
    return NarrowWeights(
        casts=casts if stack.keeps_casts and stack.holds_cast_weights else 0.0,
        weight=0.0 if replaces else width,
        gathered=row.gathered_bytes if training.narrow_weights else width,
        experts=stack.narrow_experts,
    )


def with_kept_casts(
    layer: LayerClass, training: TrainingSpec, capability: float | None
) -> LayerClass:
    """Returns the layer whose narrow products save the casts of their operands.

    A product keeps one cast of its input, by the columns of the other operand of the weight's
    gradient. Where another operator saves the tensor in the precision of training, the product
    reads that copy and casts it again, but for a format whose scale is of earlier steps. Casts of
    weights that are made in every micro-batch are saved with them.
    """
    if training.products is None or not training.stack.keeps_casts:
        return layer
    wide = frozenset(_kept_wide(layer, training))
    return replace(
        layer,
        operators=tuple(
            _keeping_casts(operator, row, wide, training, capability)
            if (row := narrow_format(operator, training)) is not None
            else operator
            for operator in layer.operators
        ),
    )


def _kept_wide(layer: LayerClass, training: TrainingSpec) -> Iterator[str]:
    """Yields the tensors that operators save in the precision of training."""
    for operator in layer.operators:
        if narrow_format(operator, training) is None:
            yield from (tensor.name for tensor in operator.saved)
        if saves_own_output(operator):
            yield from (tensor.name for tensor in operator.outputs)


def _keeping_casts(
    operator: Operator,
    row: OperandFormat,
    wide: frozenset[str],
    training: TrainingSpec,
    capability: float | None,
) -> Operator:
    saved = tuple(_kept(operator.saved, row, wide))
    if not training.stack.holds_cast_weights:
        saved += tuple(_cast_weights(operator, row, capability))
    return replace(operator, saved=saved)


def _kept(saved: Iterable[Tensor], row: OperandFormat, wide: frozenset[str]) -> Iterator[Tensor]:
    for tensor in saved:
        if tensor.name not in wide:
            yield replace(tensor, element_parts=row.element_parts)
            continue
        yield tensor
        if not row.casts_again:
            yield replace(tensor, name=f"{tensor.name} cast", element_parts=row.element_parts)


def _cast_weights(
    operator: Operator, row: OperandFormat, capability: float | None
) -> Iterator[Tensor]:
    weight = operator.parameters[0]
    parts = row.weight_casts(capability) * row.element_parts
    yield Tensor(
        name=f"{operator.name} weight cast", dims=weight.dims, element_bytes=0, element_parts=parts
    )
