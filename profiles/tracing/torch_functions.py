"""The kind of operator, the dims and the model FLOPs of a torch function, by its name.

Dims of products are (rows..., features, contracted), of attention (batch, heads, sequence, keys,
head_dim), of a look-up (rows..., features, table rows), as costmodels/operators reads them. A
convolution is a product of its windows and its weight (implicit GEMM: Chetlur et al. 2014, arXiv
1410.0759).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from parplan.profiles.models.operator_graph import Attention, Dim, OperatorKind
from parplan.profiles.models.traced_model import BATCH
from parplan.profiles.tracing.program import ATTENTION

Dims = tuple[Dim, ...]
UNNAMED = "dim"  # dims whose index has no name are called after their place
DimsOf = Callable[[Any], Dims]  # the dims of a node's value


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """The kind, dims and contracted dim as in Operator, and the number of products of these dims.

    Attention has two products.
    """

    kind: OperatorKind
    dims: Dims
    contracted: str | None = None
    products: int = 0
    attention: Attention | None = None

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
    """The computation of a call; its kind is ELEMENTWISE if no other fits."""
    function = str(node.meta["function"])
    plain = function.replace("_", "").lower()
    output = dims_of(node)
    if function in _LINEAR | _ADDED | _PRODUCTS:
        return _product(node, function, output, dims_of)
    if function in _CONVOLUTIONS:
        return _convolution(node, function, dims_of)
    if function == ATTENTION:
        return _attention(node, dims_of)
    kind = OperatorKind.ELEMENTWISE
    if plain in _NORMS:
        kind = OperatorKind.NORM
    elif plain == "embedding":
        table = dims_of(argument(node, 1, "weight"))
        return Computation(
            kind=OperatorKind.EMBEDDING, dims=(*output, table[0]), contracted=table[0].name
        )
    elif plain.endswith(("crossentropy", "crossentropyloss")):
        kind, output = OperatorKind.CROSS_ENTROPY, dims_of(argument(node, 0, "input"))
    return Computation(kind=kind, dims=output)


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """Returns an argument of a call, by its place or name."""
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def _product(node: fx.Node, function: str, output: Dims, dims_of: DimsOf) -> Computation:
    first = 1 if function in _ADDED or function == "__rmatmul__" else 0
    names = ("mat1", "batch1", "mat") if first else ("input", "mat_a")
    candidates = (argument(node, first, name) for name in names)
    left = dims_of(next(value for value in candidates if value is not None))
    contracted = _named(left[-1], "contracted")
    return Computation(
        kind=OperatorKind.MATMUL,
        dims=(*_rows(output), contracted),
        contracted=contracted.name,
        products=1,
    )


def _named(dim: Dim, name: str) -> Dim:
    """Renames `dim`, unless it has a name, as the batch's has."""
    return Dim(name, dim.size) if dim.name.startswith(UNNAMED) else dim


def _rows(output: Dims) -> Dims:
    """The dims of a product's output; a product of vectors gets rows or features of 1."""
    *rows, features = output or (Dim("features", 1),)
    return (*(rows or [Dim("dim0", 1)]), _named(features, "features"))


def _convolution(node: fx.Node, function: str, dims_of: DimsOf) -> Computation:
    """A convolution: each output element sums over the window and its group's input channels.

    A transposed convolution instead spreads every input element.
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
    query, keys, values = (
        dims_of(argument(node, place, name)) for place, name in enumerate(("query", "key", "value"))
    )
    *outer, sequence, head_dim = query
    *batch, heads = outer if len(outer) > 1 else (*outer, Dim("heads", 1))
    dropout_p = argument(node, 4, "dropout_p", 0.0)
    needed = (
        Dim("sequence", sequence.size),
        Dim("keys", keys[-2].size),
        Dim("head_dim", head_dim.size),
    )
    batch_name = BATCH if any(dim.name == BATCH for dim in batch) else "rows"
    samples = Dim(batch_name, math.prod(dim.size for dim in batch))
    sizes = (samples, _named(heads, "heads"), *needed)
    return Computation(
        kind=OperatorKind.ATTENTION,
        dims=sizes,
        products=2,
        attention=Attention(
            causal=bool(argument(node, 5, "is_causal", False)),
            dropped=dropout_p > 0,
            kv_features=_features(keys, batch) + _features(values, batch),
            value_dim=values[-1].size,
        ),
    )


def _features(tensor: Dims, batch: list[Dim]) -> int:
    """The features of one token in keys or values, of all heads."""
    heads = math.prod(dim.size for dim in tensor[len(batch) : -2])
    return heads * tensor[-1].size


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedByFusedKernel:
    """Saved tensors of a GPU kernel where they differ from those of the recorded CPU kernel.

    saved        nodes whose values it saves
    rows         fp32 numbers that it saves for each row
    normalized   the number of dims that make a row
    mask         True if it saves one byte for each element
    """

    saved: tuple[fx.Node, ...] = ()
    rows: int = 0
    normalized: int = 1
    mask: bool = False


_STATISTICS = {"layer_norm": 2, "rms_norm": 1}  # mean and reciprocal deviation, or only the latter


def fused_kernel(node: fx.Node) -> SavedByFusedKernel | None:
    """The GPU kernel of a call that saves tensors; None where it saves the recorded tensors.

    Attention saves queries, keys, values, an additive mask, its output and one number per row (Dao
    2023, arXiv 2307.08691, algorithm 1).
    """
    function = str(node.meta["function"])
    if function == ATTENTION:
        given = (
            argument(node, place, name)
            for place, name in enumerate(("query", "key", "value", "attn_mask"))
        )
        return SavedByFusedKernel(
            saved=(*(each for each in given if isinstance(each, fx.Node)), node), rows=1
        )
    if function in _STATISTICS:
        return SavedByFusedKernel(
            saved=(argument(node, 0, "input"),),
            rows=_STATISTICS[function],
            normalized=len(argument(node, 1, "normalized_shape")),
        )
    if "dropout" in function and isinstance(node.meta["val"], Tensor):
        return SavedByFusedKernel(mask=True)
    return None
