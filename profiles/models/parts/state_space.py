"""The state-space mixer of a block: Mamba-2, Dao and Gu 2024, arXiv 2405.21060, sections 6 and 7.

Its scan takes a sequence in chunks, each as products of matrices. Per token and feature it
multiplies with the chunk's scores, makes the chunk's state and reads the state before it. The
products are priced as one of their common depth. The fused scan saves its inputs and makes the
rest again, as the kernels of its authors do. Tensor parallelism divides the groups of heads.
"""

from __future__ import annotations

from parplan.profiles.models.blocks import StateSpace
from parplan.profiles.models.operator_graph import Dim, Operator, Tensor
from parplan.profiles.models.parts.chunked_scan import (
    convolution,
    gated_output,
    scan,
    steps_of_heads,
)
from parplan.profiles.models.parts.shapes import FP32_BYTES, Shapes, linear


def state_space_operators(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the operators of a Mamba-2 mixer, whose last gives its output."""
    shape = shapes.model.state_space
    assert shape is not None, "the model has state-space blocks"
    inner, heads = _grouped(shape.inner_size, shape), _grouped(shape.num_heads, shape)
    features = shape.inner_size + shape.conv_size + shape.num_heads
    projected = shapes.tokens("in_proj", _grouped(features, shape))
    mixed = shapes.tokens("conv", _grouped(shape.conv_size, shape))
    steps = shapes.tokens("steps", heads, FP32_BYTES)
    scanned = shapes.tokens("scan", inner)
    return (
        linear("in_proj", x, projected, parallel_dim="heads", bias=shape.linear_bias),
        convolution(projected, mixed, shape.conv_kernel, bias=shape.conv_bias),
        # it also holds the decay and the skip of each head
        steps_of_heads(projected, steps, heads, ("dt_bias", "A_log", "D")),
        scan(
            (mixed, steps),
            scanned,
            shapes,
            heads=heads,
            head_dim=shape.head_dim,
            depth=_depth(shape, shapes),
            chunk=shape.chunk_size,
        ),
        *gated_output(scanned, projected, inner, shapes, bias=shape.linear_bias),
    )


def _grouped(size: int, shape: StateSpace) -> Dim:
    """Returns a dim of features that belong to groups of heads, which stay together."""
    return Dim("heads", size, size // shape.num_groups)


def _depth(shape: StateSpace, shapes: Shapes) -> int:
    """Returns the common depth of the products over chunks of Q tokens.

    FLOPs of a token:  2 (Q (g n + i) + 2 n i)   with g groups, n the state size, i the inner width
    """
    chunk = min(shape.chunk_size, shapes.sequence.size)
    state, inner = shape.state_size, shape.inner_size
    return round((chunk * (shape.num_groups * state + inner) + 2 * state * inner) / inner)
