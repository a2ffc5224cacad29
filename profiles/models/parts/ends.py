"""The embedding and the head of a described model."""

from __future__ import annotations

from parplan.profiles.models.operator_graph import Operator, OperatorKind, Parameter, Tensor
from parplan.profiles.models.parts.shapes import FP32_BYTES, Shapes, elementwise
from parplan.profiles.models.spec import Positions


def embedding_operators(shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the look-up of the tokens, and the sum with learned positions."""
    out = shapes.tokens("embedded", shapes.hidden)
    table = Parameter(name="weight", dims=(shapes.vocab, shapes.hidden))
    tokens = Operator(
        name="tokens",
        kind=OperatorKind.EMBEDDING,
        dims=(*out.dims, shapes.vocab),
        inputs=(),
        outputs=(out,),
        parameters=(table,),
        contracted="vocab",
        parallel_dim="vocab",
    )
    if shapes.model.positions is not Positions.LEARNED:
        return (tokens,)
    positioned = shapes.tokens("positioned", shapes.hidden)
    mask = (
        (shapes.tokens("embedding_mask", shapes.hidden, shapes.mask_bytes),)
        if shapes.model.dropout
        else ()
    )
    position_table = Parameter(name="weight", dims=(shapes.positions, shapes.hidden))
    positions = Operator(
        name="positions",
        kind=OperatorKind.ELEMENTWISE,
        dims=out.dims,
        inputs=(out,),
        outputs=(positioned,),
        parameters=(position_table,),
        saved=mask,
    )
    return tokens, positions


def head_operators(shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the last norm, the product with the vocabulary, and the loss.

    The loss saves its probabilities in fp32 (EQUATIONS M5).
    """
    x = shapes.tokens("head_input", shapes.hidden)
    normed = shapes.tokens("head_norm", shapes.hidden)
    logits = shapes.tokens("logits", shapes.vocab)
    probabilities = shapes.tokens("probabilities", shapes.vocab, FP32_BYTES)
    loss = Tensor(name="loss", dims=(shapes.batch, shapes.sequence), element_bytes=FP32_BYTES)
    weight = Parameter(
        name="weight", dims=(shapes.vocab, shapes.hidden), tied=shapes.model.tied_embeddings
    )
    flops = 2 * x.num_elements * shapes.vocab.size
    lm_head = Operator(
        name="lm_head",
        kind=OperatorKind.MATMUL,
        dims=(*logits.dims, shapes.hidden),
        inputs=(normed,),
        outputs=(logits,),
        parameters=(weight,),
        saved=(normed,),
        contracted="hidden",
        parallel_dim="vocab",
        flops_forward=flops,
        flops_backward=2 * flops,
    )
    capped = _logit_cap(logits, shapes)
    return (
        shapes.norm("norm", x, normed),
        lm_head,
        *capped,
        Operator(
            name="loss",
            kind=OperatorKind.CROSS_ENTROPY,
            dims=logits.dims,
            inputs=(capped[-1].outputs[0] if capped else logits,),
            outputs=(loss,),
            saved=(probabilities,),
            parallel_dim="vocab",
        ),
    )


def _logit_cap(logits: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the soft cap of the logits, which saves its output."""
    if not shapes.model.logit_soft_cap:
        return ()
    capped = shapes.tokens("capped_logits", shapes.vocab)
    return (elementwise("logit_cap", (logits,), capped, (capped,), parallel_dim="vocab"),)
