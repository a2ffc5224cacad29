"""Latent attention: the products of compressed queries, keys and values.

DeepSeek-V2, arXiv 2405.04434, section 2.1.2. Tensor-parallel ranks divide the heads of the products
up from the compressed width; those down to it are whole on every rank, as in Megatron, and their
tokens are divided under sequence parallelism. Training keeps keys and values of all heads.
"""

from __future__ import annotations

from parplan.profiles.models.operator_graph import Dim, Operator, OperatorKind, Tensor
from parplan.profiles.models.parts.shapes import Shapes, linear


def latent_projections(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the products of queries, keys and values; the last joins them to queries and keys."""
    queries = _queries(x, shapes)
    keys = _keys(x, shapes)
    read = tuple(made.outputs[0] for made in (queries[-1], keys[0], keys[-1]))
    joined = shapes.tokens("qk_rotated", shapes.heads(2 * shapes.model.q_size))
    rotary = Operator(
        name="rotary",
        kind=OperatorKind.ELEMENTWISE,
        dims=joined.dims,
        inputs=read,
        outputs=(joined,),
        parallel_dim="heads",
        undivided=(("sequence", "positions are counted from the first token of a rank's part"),),
    )
    return (*queries, *keys, rotary)


def _queries(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    model = shapes.model
    latent = model.latent
    assert latent is not None, "the model has latent attention"
    query = shapes.tokens("q", shapes.heads(model.q_size))
    if not latent.q_rank:
        return (linear("q", x, query, parallel_dim="heads", bias=False),)
    rank = Dim("q_rank", latent.q_rank)
    down, normed = shapes.tokens("q_down", rank), shapes.tokens("q_norm", rank)
    return (
        linear("q_down", x, down, parallel_dim=None, bias=model.qkv_bias),
        shapes.norm("q_norm", down, normed),
        linear("q_up", normed, query, parallel_dim="heads", bias=False),
    )


def _keys(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the products of keys and values.

    The first also gives the rotary part that all heads share.
    """
    model = shapes.model
    latent = model.latent
    assert latent is not None, "the model has latent attention"
    down = shapes.tokens("kv_down", Dim("kv_and_rope", latent.kv_rank + latent.rope_head_dim))
    rank = Dim("kv_rank", latent.kv_rank)
    normed = shapes.tokens("kv_norm", rank)
    features = model.num_heads * (latent.nope_head_dim + latent.value_head_dim)
    kv = shapes.tokens("kv", shapes.heads(features))
    return (
        linear("kv_down", x, down, parallel_dim=None, bias=model.qkv_bias),
        shapes.norm("kv_norm", down, normed),
        linear("kv_up", normed, kv, parallel_dim="heads", bias=False),
    )
