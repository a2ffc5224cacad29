"""The gated delta rule as the mixer of a block: Yang et al. 2024, arXiv 2412.06464, section 3.

Every head keeps a matrix of its key by its value features. A token takes out what the matrix says
of its key, and writes its value there. The kernels of its authors take a sequence in chunks, whose
tokens are written at once through the inverse of a triangular matrix (section 3.3): products of
matrices, priced as one of their common depth. They save their inputs and make the rest again.
Tensor parallelism divides the heads of keys, each with its heads of values.
"""

from __future__ import annotations

from parplan.profiles.models.blocks import DeltaRule
from parplan.profiles.models.operator_graph import Dim, Operator, Tensor
from parplan.profiles.models.parts.chunked_scan import (
    convolution,
    gated_output,
    scan,
    steps_of_heads,
)
from parplan.profiles.models.parts.shapes import FP32_BYTES, Shapes, linear

CHUNK = 64  # tokens that the kernels of flash-linear-attention take at once


def delta_rule_operators(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the operators of a gated delta rule, whose last gives its output."""
    shape = shapes.model.delta_rule
    assert shape is not None, "the model has blocks with a delta rule"
    heads = _grouped(shape.value_heads, shape)
    projected = shapes.tokens("in_proj", _grouped(shape.conv_size + shape.value_size, shape))
    gates = shapes.tokens("gate_proj", _grouped(2 * shape.value_heads, shape))
    mixed = shapes.tokens("conv", _grouped(shape.conv_size, shape))
    steps = shapes.tokens("steps", gates.dims[-1], FP32_BYTES)
    scanned = shapes.tokens("scan", _grouped(shape.value_size, shape))
    return (
        linear("in_proj", x, projected, parallel_dim="heads", bias=False),
        linear("gate_proj", x, gates, parallel_dim="heads", bias=False),
        convolution(projected, mixed, shape.conv_kernel, bias=False),
        steps_of_heads(gates, steps, heads, ("dt_bias", "A_log")),
        scan(
            (mixed, steps),
            scanned,
            shapes,
            heads=heads,
            head_dim=shape.value_head_dim,
            depth=_depth(shape, shapes),
            chunk=CHUNK,
        ),
        *gated_output(
            scanned, projected, Dim("head_dim", shape.value_head_dim), shapes, bias=False
        ),
    )


def _grouped(size: int, shape: DeltaRule) -> Dim:
    """Returns a dim of features that belong to heads of keys, with their heads of values."""
    return Dim("heads", size, size // shape.key_heads)


def _depth(shape: DeltaRule, shapes: Shapes) -> int:
    """Returns the common depth of the products over chunks of Q tokens.

    FLOPs of a token and head of k key and v value features, without the inverse:

        2 (3 Q k + 2 Q v + 3 k v)    scores of keys and of queries, the rows that replace keys and
                                     values, and their sums; the state taken out, read and written
    """
    chunk = min(CHUNK, shapes.sequence.size)
    k, v = shape.key_head_dim, shape.value_head_dim
    return round((3 * chunk * k + 2 * chunk * v + 3 * k * v) / v)
