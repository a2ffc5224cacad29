"""Attention of a block to the output of a tower: Whisper, arXiv 2212.04356, section 2.2.

Every block reads the same tensor. Its sum of gradients over the blocks is left out, and a stage
saves the tensor once for all its blocks (`LayerClass.outside`).
"""

from __future__ import annotations

from dataclasses import replace

from parplan.profiles.models.operator_graph import Dim, Operator, Tensor
from parplan.profiles.models.parts.attention import attention_kernel, biased
from parplan.profiles.models.parts.shapes import Shapes, linear

ATTENDED = "tower_output"


def attended(shapes: Shapes) -> Tensor | None:
    """Returns the tensor that all blocks attend to, None in a model without such a tower."""
    tower = shapes.model.tower
    if tower is None or not tower.attended:
        return None
    return Tensor(
        name=ATTENDED,
        dims=(
            shapes.batch,
            Dim("sequence", tower.tokens * tower.images),
            Dim("tower_hidden", tower.hidden_size),
        ),
        element_bytes=shapes.element_bytes,
    )


def cross_attention_operators(x: Tensor, states: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the attention of `x` to `states`, whose last operator gives its output."""
    model = shapes.model
    tokens = states.dims[1].size
    queries = shapes.tokens("cross_q", shapes.heads(model.q_size))
    features = shapes.heads(2 * model.kv_size)
    values = replace(states, name="cross_kv", dims=(*states.dims[:2], features))
    context = shapes.tokens("cross_context", shapes.heads(model.context_size))
    out = shapes.tokens("cross_out", shapes.hidden)
    read = (queries, values)
    kernel = attention_kernel(read, context, shapes.over(tokens))
    kept = {tensor.name for tensor in read}
    saved = tuple(
        tensor if tensor.name in kept else replace(tensor, name=f"cross_{tensor.name}")
        for tensor in kernel.saved
    )
    product = linear("cross_kv", states, values, parallel_dim="heads", bias=model.qkv_bias)
    return (
        linear("cross_q", x, queries, parallel_dim="heads", bias=model.qkv_bias),
        biased(product, shapes.heads(model.kv_size) if not model.key_bias else features),
        replace(kernel, name="cross_attention", saved=saved),
        linear("cross_out", context, out, parallel_dim="heads", bias=model.attention_output_bias),
    )
