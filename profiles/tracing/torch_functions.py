"""What a function of torch computes, by its name: the kind of operator, its dims and its model
FLOPs.

Dims of products are (rows..., features, contracted), of attention (batch, heads, sequence, keys,
head_dim): as costmodels/operators/kernels.py reads them. A convolution is a product of its windows
by its weight (implicit GEMM: Chetlur et al. 2014, arXiv 1410.0759).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from parplan.profiles.models.operator_graph import Dim, OperatorKind
from parplan.profiles.models.traced_model import BATCH

Dims = tuple[Dim, ...]
DimsOf = Callable[[Any], Dims]  # the dims of what a node gives


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """kind, dims and contracted as in Operator; `products` how many products of these dims it is: 2
    for attention.
    """

    kind: OperatorKind
    dims: Dims
    contracted: str | None = None
    products: int = 0
    causal: bool = False
    dropped: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.products * math.prod(dim.size for dim in self.dims)


_NORMS = ("layernorm", "rmsnorm", "batchnorm", "groupnorm", "instancenorm")
_LINEAR, _ADDED = {"linear"}, {"addmm", "baddbmm", "addmv"}
_PRODUCTS = {
    "matmul",
    "bmm",
    "mm",
    "mv",
    "__matmul__",
    "__rmatmul__",
    "dot",
    "grouped_mm",
    "_grouped_mm",
}
_CONVOLUTIONS = {f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)}


def computation(node: fx.Node, dims_of: DimsOf) -> Computation:
    """What the call of `node` computes; ELEMENTWISE what has no other kind."""
    function = str(node.meta["function"])
    plain = function.replace("_", "").lower()
    output = dims_of(node)
    if function in _LINEAR | _ADDED | _PRODUCTS:
        return _product(node, function, output, dims_of)
    if function in _CONVOLUTIONS:
        return _convolution(node, function, dims_of)
    if function == "scaled_dot_product_attention":
        return _attention(node, dims_of)
    kind = OperatorKind.ELEMENTWISE
    if plain in _NORMS:
        kind = OperatorKind.NORM
    elif plain == "embedding":
        kind = OperatorKind.EMBEDDING
    elif plain.endswith(("crossentropy", "crossentropyloss")):
        kind, output = OperatorKind.CROSS_ENTROPY, dims_of(argument(node, 0, "input"))
    return Computation(kind=kind, dims=output)


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by its place or name."""
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def _product(node: fx.Node, function: str, output: Dims, dims_of: DimsOf) -> Computation:
    first = 1 if function in _ADDED else 0
    if function == "__rmatmul__":
        first = 1
    names = ("mat1", "batch1", "mat") if first else ("input", "mat_a")
    left = dims_of(
        next(found for name in names if (found := argument(node, first, name)) is not None)
    )
    contracted = _named(left[-1], "contracted")
    return Computation(
        kind=OperatorKind.MATMUL,
        dims=(*_rows(output), contracted),
        contracted=contracted.name,
        products=1,
    )


def _named(dim: Dim, name: str) -> Dim:
    """`dim` under a name of its own, unless it is the batch's."""
    return dim if dim.name == BATCH else Dim(name, dim.size)


def _rows(output: Dims) -> Dims:
    """The dims of an output of a product; one of vectors alone has rows or features of 1."""
    *rows, features = output or (Dim("features", 1),)
    return (*(rows or [Dim("dim0", 1)]), _named(features, "features"))


def _convolution(node: fx.Node, function: str, dims_of: DimsOf) -> Computation:
    """Every output element is a sum over the input channels of its group and the window;
    transposed, every input element is spread.
    """
    weight = dims_of(argument(node, 1, "weight"))
    side = dims_of(argument(node, 0, "input")) if "transpose" in function else dims_of(node)
    spatial = len(weight) - 2
    *batch, channels = side[: len(side) - spatial]
    contracted = Dim("contracted", math.prod(dim.size for dim in weight[1:]))
    rows = (*batch, *side[len(side) - spatial :])
    return Computation(
        kind=OperatorKind.MATMUL,
        dims=(*rows, Dim("features", channels.size), contracted),
        contracted="contracted",
        products=1,
    )


def _attention(node: fx.Node, dims_of: DimsOf) -> Computation:
    query, keys = dims_of(argument(node, 0, "query")), dims_of(argument(node, 1, "key"))
    *outer, sequence, head_dim = query
    *batch, heads = outer if len(outer) > 1 else (*outer, Dim("heads", 1))
    dropout_p = argument(node, 4, "dropout_p", 0.0)
    samples = Dim(
        BATCH if any(dim.name == BATCH for dim in batch) else "rows",
        math.prod(dim.size for dim in batch),
    )
    sizes = (
        samples,
        *(
            _named(dim, name)
            for dim, name in (
                (heads, "heads"),
                (sequence, "sequence"),
                (keys[-2], "keys"),
                (head_dim, "head_dim"),
            )
        ),
    )
    return Computation(
        kind=OperatorKind.ATTENTION,
        dims=sizes,
        products=2,
        causal=bool(argument(node, 5, "is_causal", False)),
        dropped=dropout_p > 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedByFusedKernel:
    """What a kernel of GPUs keeps where that of a CPU, which was recorded, keeps something else.

    kept: the nodes whose values it keeps; rows: fp32 numbers for every row, where `normalized` dims
    make a row; mask: a byte an element
    """

    kept: tuple[fx.Node, ...] = ()
    rows: int = 0
    normalized: int = 1
    mask: bool = False


_STATISTICS = {"layer_norm": 2, "rms_norm": 1}  # mean and reciprocal deviation, or that alone


def fused_kernel(node: fx.Node) -> SavedByFusedKernel | None:
    """The kernel of GPUs for a call that keeps something; None where it keeps what was recorded.

    Attention keeps queries, keys, values, an additive mask, its output and one number a row (Dao
    2023, arXiv 2307.08691, algorithm 1).
    """
    function = str(node.meta["function"])
    if function == "scaled_dot_product_attention":
        given = (
            argument(node, place, name)
            for place, name in enumerate(("query", "key", "value", "attn_mask"))
        )
        return SavedByFusedKernel(
            kept=(*(each for each in given if isinstance(each, fx.Node)), node), rows=1
        )
    if function in _STATISTICS:
        return SavedByFusedKernel(
            kept=(argument(node, 0, "input"),),
            rows=_STATISTICS[function],
            normalized=len(argument(node, 1, "normalized_shape")),
        )
    return (
        SavedByFusedKernel(mask=True)
        if "dropout" in function and isinstance(node.meta["val"], Tensor)
        else None
    )
