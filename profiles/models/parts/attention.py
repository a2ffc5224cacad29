"""Attention: its products, the norms of queries and keys, positions, and the kernel.

A window lowers the work of the kernel and the FLOPs. Soft caps run inside the kernel: they cost
nothing there, and un-fused attention saves the capped scores.
"""

from __future__ import annotations

from dataclasses import replace

from parplan.profiles.models.blocks import QkNorm
from parplan.profiles.models.documents import reading
from parplan.profiles.models.operator_graph import (
    Attention,
    Dim,
    Operator,
    OperatorKind,
    Parameter,
    Tensor,
)
from parplan.profiles.models.parts.latent_attention import latent_projections
from parplan.profiles.models.parts.shapes import FP32_BYTES, Shapes, elementwise, linear
from parplan.profiles.models.spec import Positions
from parplan.profiles.stack import AttentionKernel

POSITIONED = (("sequence", "positions are counted from the first token of a rank's part"),)


def attention_operators(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the operators of a block's attention, whose last gives its output."""
    model = shapes.model
    made = (latent_projections if model.latent is not None else _projections)(x, shapes)
    context = shapes.tokens("context", shapes.heads(model.context_size))
    attended = shapes.tokens("attention_out", shapes.hidden)
    bias = model.attention_output_bias
    kernel = attention_kernel(_read(made), context, shapes)
    gates = _gate(made, context, shapes) if model.attention_gate else ()
    x = gates[-1].outputs[0] if gates else context
    return (
        *made,
        kernel,
        *gates,
        linear("attention_out", x, attended, parallel_dim="heads", bias=bias),
    )


def _gate(made: tuple[Operator, ...], context: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the product of the output with its gate, which lies beside queries and keys."""
    (qkv,) = (out for op in made for out in op.outputs if out.name == "qkv")
    gated = shapes.tokens("attention_gated", context.dims[-1])
    read = context, qkv
    return (elementwise("attention_gate", read, gated, read, parallel_dim="heads"),)


def _read(made: tuple[Operator, ...]) -> tuple[Tensor, ...]:
    """Returns the tensors that hold queries, keys and values, which the last operators made."""
    last = made[-1].outputs[0]
    with_values = [out for op in made for out in op.outputs if out.name in ("qkv", "kv")]
    return (last,) if last.name in ("qkv", "qkv_rotated") else (last, *with_values)


def _projections(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the product of queries, keys and values, their norms and their positions."""
    model = shapes.model
    gate = model.context_size if model.attention_gate else 0
    qkv = shapes.tokens("qkv", shapes.heads(model.q_size + 2 * model.kv_size + gate))
    product = linear("qkv", x, qkv, parallel_dim="heads", bias=model.qkv_bias)
    of_bias = qkv.dims[-1] if model.key_bias else shapes.heads(model.q_size + model.kv_size)
    made = [biased(product, of_bias)]
    rotates = model.positions is Positions.ROTARY and shapes.block.rotary
    if model.qk_norm is QkNorm.PLAIN:
        if rotates:
            rotated = shapes.tokens("qk_rotated", qk_features(shapes))
            made.append(_rotary(qkv, rotated))
            made.append(_qk_norm(rotated, shapes))
        return tuple(made)
    if model.qk_norm is not QkNorm.NONE:
        made.append(_qk_norm(qkv, shapes))
    if rotates:
        positioned = made[-1].outputs[0]
        name = "qkv_rotated" if positioned is qkv else "qk_rotated"
        made.append(_rotary(positioned, shapes.tokens(name, positioned.dims[-1])))
    return tuple(made)


def biased(product: Operator, features: Dim) -> Operator:
    """Returns a product whose bias, if it has one, is of some of its features: not of keys."""
    weight, *bias = product.parameters
    return replace(
        product, parameters=(weight, *(replace(each, dims=(features,)) for each in bias))
    )


def qk_features(shapes: Shapes) -> Dim:
    return shapes.heads(shapes.model.q_size + shapes.model.kv_size)


def _rotary(x: Tensor, out: Tensor) -> Operator:
    return elementwise("rotary", (x,), out, parallel_dim="heads", undivided=POSITIONED)


def _qk_norm(x: Tensor, shapes: Shapes) -> Operator:
    """Returns the norms of queries and keys, in one kernel."""
    model = shapes.model
    out = shapes.tokens("qk_normed", qk_features(shapes))
    whole = model.qk_norm is QkNorm.WHOLE
    head = Dim("head_dim", model.head_dim)
    widths = {
        QkNorm.PLAIN: (),
        QkNorm.HEAD: (head, head),
        QkNorm.WHOLE: (shapes.heads(model.q_size), shapes.heads(model.kv_size)),
    }[model.qk_norm]
    return Operator(
        name="qk_norm",
        kind=OperatorKind.NORM,
        dims=out.dims,
        inputs=(x,),
        outputs=(out,),
        parameters=tuple(
            Parameter(name=f"{of}_weight", dims=(width,))
            for of, width in zip(("q", "k"), widths, strict=False)
        ),
        saved=(x,),
        parallel_dim=None if whole else "heads",
        undivided=(("heads", "the norm is over all heads"),) if whole else (),
    )


def attention_kernel(read: tuple[Tensor, ...], context: Tensor, shapes: Shapes) -> Operator:
    """Returns softmax(q k^T) v for every head, of the tensors that hold queries, keys and values.

    Unfused attention saves the scores: 5 a S^2 b bytes with dropout, 2 a S^2 b without.
    """
    model, block = shapes.model, shapes.block
    heads = Dim("heads", model.num_heads, model.num_heads // model.num_kv_heads)
    scores = (shapes.batch, heads, shapes.sequence, shapes.keys)
    kv_heads = model.num_kv_heads
    attention = Attention(
        causal=shapes.causal and not model.bidirectional,
        dropped=model.dropout > 0,
        window=block.window or block.chunk,
        chunked=bool(block.chunk),
        kv_features=kv_heads * (model.head_dim + model.value_head_dim),
        value_dim=model.value_head_dim,
    )
    attention = _in_documents(attention, shapes)
    counted = 2 if attention.causal else 1
    met = round(counted * attention.keys_met(shapes.keys.size))
    features = model.q_size + model.context_size
    flops = 2 * shapes.batch.size * shapes.sequence.size * met * features
    return Operator(
        name="attention",
        kind=OperatorKind.ATTENTION,
        dims=(*scores, Dim("head_dim", model.head_dim)),
        inputs=read,
        outputs=(context,),
        parameters=(Parameter(name="sinks", dims=(heads,)),) if model.sinks else (),
        saved=(*_kept(read, shapes), *_made_inside(scores, shapes), *_copies(context, shapes)),
        parallel_dim="heads",
        flops_forward=flops,
        flops_backward=2 * flops,
        attention=attention if _fused(shapes) else replace(attention, in_documents=None),
        undivided=(
            ("sequence", "attention reads every token of a sequence"),
            ("keys", "the softmax is over all of them"),
            ("head_dim", "the scores sum over it"),
        ),
    )


def _kept(read: tuple[Tensor, ...], shapes: Shapes) -> tuple[Tensor, ...]:
    """Returns the tensors that attention saves of those that it reads.

    Latent attention joins its keys to rotary parts, and only the values are left of the tensor that
    holds both; a stack may copy them out of it, which frees the rest.
    """
    model = shapes.model
    if model.latent is None or not shapes.training.stack.copies_latent_values:
        return read
    values = shapes.heads(model.num_heads * model.latent.value_head_dim)
    return tuple(shapes.tokens("kv", values) if each.name == "kv" else each for each in read)


def _in_documents(attention: Attention, shapes: Shapes) -> Attention:
    """Returns attention that reads within the documents of its sequences, if they have any.

    Attention to the tokens of a tower reads all of them.
    """
    documents = shapes.training.documents
    if documents is None or shapes.keys.size != shapes.training.seq_length:
        return attention
    read = reading(
        documents,
        shapes.keys.size,
        causal=attention.causal,
        window=attention.window,
        chunked=attention.chunked,
    )
    return replace(attention, in_documents=read)


def _fused(shapes: Shapes) -> bool:
    """True unless the kernel computes all scores, also those between documents."""
    return shapes.training.attention is AttentionKernel.FLASH


def _made_inside(scores: tuple[Dim, ...], shapes: Shapes) -> tuple[Tensor, ...]:
    """Returns the tensors that the kernel makes and saves."""
    element = shapes.element_bytes
    if not shapes.keeps_scores:
        return (Tensor(name="attention_logsumexp", dims=scores[:-1], element_bytes=FP32_BYTES),)
    names = [("attention_softmax", element)]
    if shapes.model.attention_soft_cap:
        names.append(("attention_capped", element))
    if shapes.model.dropout:
        names += [("attention_mask", shapes.mask_bytes), ("attention_dropped", element)]
    return tuple(Tensor(name=name, dims=scores, element_bytes=size) for name, size in names)


def _copies(context: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
    """Returns the copies that the stack's attention saves in addition.

    They are copies of keys and values, and of its output before batch and sequence change places.
    """
    stack = shapes.training.stack
    kv = Dim("heads", 2 * shapes.model.kv_size)
    outputs = stack.attention_output_copies if shapes.batch.size > 1 and _fused(shapes) else 0
    return (
        *(shapes.tokens(f"attention_kv_{i}", kv) for i in range(stack.attention_kv_copies)),
        *(shapes.tokens(f"{context.name}_{i}", context.dims[-1]) for i in range(outputs)),
    )
