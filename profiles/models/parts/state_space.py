"""The state-space mixer of a block: Mamba-2, Dao and Gu 2024, arXiv 2405.21060, sections 6 and 7.

Its scan takes a sequence in chunks, each as products of matrices. Per token and feature it
multiplies with the chunk's scores, makes the chunk's state and reads the state before it. The
products are priced as one of their common depth. The fused scan saves its inputs and makes the
rest again, as the kernels of its authors do. Tensor parallelism divides the groups of heads.
"""

from __future__ import annotations

from parplan.profiles.models.blocks import StateSpace
from parplan.profiles.models.operator_graph import Dim, Operator, OperatorKind, Parameter, Tensor
from parplan.profiles.models.parts.shapes import FP32_BYTES, Shapes, linear

_SCAN = (
    ("chunks", "a chunk begins with the state that the one before it leaves"),
    ("chunk", "the tokens of a chunk read each other"),
    ("head_dim", "a rank has whole heads"),
    ("depth", "a token sums over it"),
)
_NEIGHBOURS = (("sequence", "a token reads those before it"),)


def state_space_operators(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the operators of a Mamba-2 mixer, whose last gives its output."""
    shape = shapes.model.state_space
    assert shape is not None, "the model has state-space blocks"
    inner, heads = _grouped(shape.inner_size, shape), _grouped(shape.num_heads, shape)
    features = shape.inner_size + shape.conv_size + shape.num_heads
    projected = shapes.tokens("in_proj", _grouped(features, shape))
    mixed = shapes.tokens("conv", _grouped(shape.conv_size, shape))
    steps = shapes.tokens("steps", heads, FP32_BYTES)
    scanned, normed = shapes.tokens("scan", inner), shapes.tokens("gated_norm", inner)
    return (
        linear("in_proj", x, projected, parallel_dim="heads", bias=shape.linear_bias),
        _convolution(projected, mixed, shape),
        _steps(projected, steps, heads),
        _scan((mixed, steps), scanned, shape, shapes),
        Operator(
            name="gated_norm",
            kind=OperatorKind.NORM,
            dims=normed.dims,
            inputs=(scanned, projected),
            outputs=(normed,),
            parameters=(Parameter(name="weight", dims=(inner,)),),
            saved=(scanned, projected),
            parallel_dim="heads",
        ),
        linear(
            "out_proj",
            normed,
            shapes.tokens("out_proj", shapes.hidden),
            parallel_dim="heads",
            bias=shape.linear_bias,
        ),
    )


def _grouped(size: int, shape: StateSpace) -> Dim:
    """Returns a dim of features that belong to groups of heads, which stay together."""
    return Dim("heads", size, size // shape.num_groups)


def _convolution(x: Tensor, out: Tensor, shape: StateSpace) -> Operator:
    """Returns the causal convolution of each channel with its activation."""
    channels = out.dims[-1]
    weight = Parameter(name="weight", dims=(channels, Dim("kernel", shape.conv_kernel)))
    bias = Parameter(name="bias", dims=(channels,))
    return Operator(
        name="conv",
        kind=OperatorKind.ELEMENTWISE,
        dims=out.dims,
        inputs=(x,),
        outputs=(out,),
        parameters=(weight, bias) if shape.conv_bias else (weight,),
        saved=(x,),
        parallel_dim="heads",
        undivided=_NEIGHBOURS,
    )


def _steps(x: Tensor, out: Tensor, heads: Dim) -> Operator:
    """Returns the step sizes of the heads; it also holds the decay and the skip of each head."""
    names = ("dt_bias", "A_log", "D")
    return Operator(
        name="steps",
        kind=OperatorKind.ELEMENTWISE,
        dims=out.dims,
        inputs=(x,),
        outputs=(out,),
        parameters=tuple(Parameter(name=name, dims=(heads,)) for name in names),
        saved=(out,),
        parallel_dim="heads",
    )


def _scan(inputs: tuple[Tensor, ...], out: Tensor, shape: StateSpace, shapes: Shapes) -> Operator:
    """Returns the scan over chunks of Q tokens.

    FLOPs of a token:  2 (Q (g n + i) + 2 n i)   with g groups, n the state size, i the inner width
    """
    chunk = min(shape.chunk_size, shapes.sequence.size)
    chunks = -(-shapes.sequence.size // chunk)
    state, inner = shape.state_size, shape.inner_size
    depth = round((chunk * (shape.num_groups * state + inner) + 2 * state * inner) / inner)
    heads = Dim("heads", shape.num_heads, shape.num_heads // shape.num_groups)
    dims = (
        shapes.batch,
        heads,
        Dim("chunks", chunks),
        Dim("chunk", chunk),
        Dim("head_dim", shape.head_dim),
        Dim("depth", depth),
    )
    flops = 2 * shapes.batch.size * chunks * chunk * inner * depth
    return Operator(
        name="scan",
        kind=OperatorKind.MATMUL,
        dims=dims,
        inputs=inputs,
        outputs=(out,),
        saved=inputs,
        parallel_dim="heads",
        undivided=_SCAN,
        flops_forward=flops,
        flops_backward=2 * flops,
    )
