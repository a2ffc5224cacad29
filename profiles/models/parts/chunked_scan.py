"""The parts that mixers with a scan over chunks of tokens share, priced as products of matrices.

Tensor parallelism divides the heads, in groups that stay together.
"""

from __future__ import annotations

from collections.abc import Mapping

from parplan.profiles.models.operator_graph import Dim, Operator, OperatorKind, Parameter, Tensor
from parplan.profiles.models.parts.shapes import Shapes, linear

_UNDIVIDED = (
    ("chunks", "a chunk begins with the state that the one before it leaves"),
    ("chunk", "the tokens of a chunk read each other"),
    ("head_dim", "a rank has whole heads"),
    ("depth", "a token sums over it"),
)
_NEIGHBOURS = (("sequence", "a token reads those before it"),)


def convolution(x: Tensor, out: Tensor, kernel: int, *, bias: bool) -> Operator:
    """Returns the causal convolution of each channel with its activation."""
    channels = out.dims[-1]
    parameters = {"weight": (channels, Dim("kernel", kernel))} | (
        {"bias": (channels,)} if bias else {}
    )
    return _by_channel("conv", x, out, x, parameters, undivided=_NEIGHBOURS)


def steps_of_heads(x: Tensor, out: Tensor, heads: Dim, names: tuple[str, ...]) -> Operator:
    """Returns the step sizes of the heads, which it keeps; `names` are its parameters."""
    return _by_channel("steps", x, out, out, dict.fromkeys(names, (heads,)))


def _by_channel(
    name: str,
    x: Tensor,
    out: Tensor,
    saved: Tensor,
    parameters: Mapping[str, tuple[Dim, ...]],
    undivided: tuple[tuple[str, str], ...] = (),
) -> Operator:
    return Operator(
        name=name,
        kind=OperatorKind.ELEMENTWISE,
        dims=out.dims,
        inputs=(x,),
        outputs=(out,),
        parameters=tuple(Parameter(name=key, dims=dims) for key, dims in parameters.items()),
        saved=(saved,),
        parallel_dim="heads",
        undivided=undivided,
    )


def scan(
    inputs: tuple[Tensor, ...],
    out: Tensor,
    shapes: Shapes,
    *,
    heads: Dim,
    head_dim: int,
    depth: int,
    chunk: int,
) -> Operator:
    """Returns a scan over chunks of at most `chunk` tokens.

    A token and feature multiplies `depth` times. The fused scan saves its inputs.
    """
    chunk = min(chunk, shapes.sequence.size)
    chunks = -(-shapes.sequence.size // chunk)
    flops = 2 * shapes.batch.size * chunks * chunk * heads.size * head_dim * depth
    return Operator(
        name="scan",
        kind=OperatorKind.MATMUL,
        dims=(
            shapes.batch,
            heads,
            Dim("chunks", chunks),
            Dim("chunk", chunk),
            Dim("head_dim", head_dim),
            Dim("depth", depth),
        ),
        inputs=inputs,
        outputs=(out,),
        saved=inputs,
        parallel_dim="heads",
        undivided=_UNDIVIDED,
        flops_forward=flops,
        flops_backward=2 * flops,
    )


def gated_output(
    scanned: Tensor, gate: Tensor, weight: Dim, shapes: Shapes, *, bias: bool
) -> tuple[Operator, Operator]:
    """Returns the norm of what a scan gives, with its gate, and the product behind it."""
    normed = shapes.tokens("gated_norm", scanned.dims[-1])
    norm = Operator(
        name="gated_norm",
        kind=OperatorKind.NORM,
        dims=normed.dims,
        inputs=(scanned, gate),
        outputs=(normed,),
        parameters=(Parameter(name="weight", dims=(weight,)),),
        saved=(scanned, gate),
        parallel_dim="heads",
    )
    out = shapes.tokens("out_proj", shapes.hidden)
    return norm, linear("out_proj", normed, out, parallel_dim="heads", bias=bias)
