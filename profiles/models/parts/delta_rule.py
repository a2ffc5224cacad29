"""The gated delta rule as the mixer of a block: Yang et al. 2024, arXiv 2412.06464, section 3.

Every head keeps a matrix of its key by its value features. A token takes out what the matrix says
of its key, and writes its value there. The kernels of its authors take a sequence in chunks, whose
tokens are written at once through the inverse of a triangular matrix (section 3.3): products of
matrices, priced as one of their common depth. They save their inputs and make the rest again.
Tensor parallelism divides the heads of keys, each with its heads of values.
"""

from __future__ import annotations

from parplan.profiles.models.blocks import DeltaRule
from parplan.profiles.models.operator_graph import Dim, Operator, OperatorKind, Parameter, Tensor
from parplan.profiles.models.parts.shapes import FP32_BYTES, Shapes, linear

CHUNK = 64  # tokens that the kernels of flash-linear-attention take at once
_SCAN = (
    ("chunks", "a chunk begins with the state that the one before it leaves"),
    ("chunk", "the tokens of a chunk read each other"),
    ("head_dim", "a rank has whole heads"),
    ("depth", "a token sums over it"),
)
_NEIGHBOURS = (("sequence", "a token reads those before it"),)


def delta_rule_operators(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the operators of a gated delta rule, whose last gives its output."""
    shape = shapes.model.delta_rule
    assert shape is not None, "the model has blocks with a delta rule"
    values = _grouped(shape.value_size, shape)
    projected = shapes.tokens("in_proj", _grouped(shape.conv_size + shape.value_size, shape))
    gates = shapes.tokens("gate_proj", _grouped(2 * shape.value_heads, shape))
    mixed = shapes.tokens("conv", _grouped(shape.conv_size, shape))
    steps = shapes.tokens("steps", gates.dims[-1], FP32_BYTES)
    scanned, normed = shapes.tokens("scan", values), shapes.tokens("gated_norm", values)
    return (
        linear("in_proj", x, projected, parallel_dim="heads", bias=False),
        linear("gate_proj", x, gates, parallel_dim="heads", bias=False),
        _by_channel("conv", projected, mixed, (projected,), _conv_weight(mixed, shape)),
        _by_channel("steps", gates, steps, (steps,), _decays(shape)),
        _scan((mixed, steps), scanned, shape, shapes),
        Operator(
            name="gated_norm",
            kind=OperatorKind.NORM,
            dims=normed.dims,
            inputs=(scanned, projected),
            outputs=(normed,),
            parameters=(Parameter(name="weight", dims=(Dim("head_dim", shape.value_head_dim),)),),
            saved=(scanned, projected),
            parallel_dim="heads",
        ),
        linear(
            "out_proj",
            normed,
            shapes.tokens("out_proj", shapes.hidden),
            parallel_dim="heads",
            bias=False,
        ),
    )


def _grouped(size: int, shape: DeltaRule) -> Dim:
    """Returns a dim of features that belong to heads of keys, with their heads of values."""
    return Dim("heads", size, size // shape.key_heads)


def _conv_weight(out: Tensor, shape: DeltaRule) -> tuple[Parameter, ...]:
    return (Parameter(name="weight", dims=(out.dims[-1], Dim("kernel", shape.conv_kernel))),)


def _decays(shape: DeltaRule) -> tuple[Parameter, ...]:
    heads = _grouped(shape.value_heads, shape)
    return tuple(Parameter(name=name, dims=(heads,)) for name in ("dt_bias", "A_log"))


def _by_channel(
    name: str,
    x: Tensor,
    out: Tensor,
    saved: tuple[Tensor, ...],
    parameters: tuple[Parameter, ...],
) -> Operator:
    return Operator(
        name=name,
        kind=OperatorKind.ELEMENTWISE,
        dims=out.dims,
        inputs=(x,),
        outputs=(out,),
        parameters=parameters,
        saved=saved,
        parallel_dim="heads",
        undivided=_NEIGHBOURS if name == "conv" else (),
    )


def _scan(inputs: tuple[Tensor, ...], out: Tensor, shape: DeltaRule, shapes: Shapes) -> Operator:
    """Returns the rule over chunks of Q tokens.

    FLOPs of a token and head of k key and v value features, without the inverse:

        2 (3 Q k + 2 Q v + 3 k v)    scores of keys and of queries, the rows that replace keys and
                                     values, and their sums; the state taken out, read and written
    """
    chunk = min(CHUNK, shapes.sequence.size)
    chunks = -(-shapes.sequence.size // chunk)
    k, v = shape.key_head_dim, shape.value_head_dim
    heads = shape.value_heads
    depth = round((3 * chunk * k + 2 * chunk * v + 3 * k * v) / v)
    dims = (
        shapes.batch,
        Dim("heads", heads, heads // shape.key_heads),
        Dim("chunks", chunks),
        Dim("chunk", chunk),
        Dim("head_dim", v),
        Dim("depth", depth),
    )
    flops = 2 * shapes.batch.size * chunks * chunk * heads * v * depth
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
