"""The embedding and the head of a described model."""

from __future__ import annotations

from dataclasses import replace

from parplan.profiles.models.operator_graph import Dim, Operator, OperatorKind, Parameter, Tensor
from parplan.profiles.models.parts.multi_token import multi_token_operators
from parplan.profiles.models.parts.shapes import FP32_BYTES, Shapes, elementwise
from parplan.profiles.models.spec import Positions


def embedding_operators(shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the look-up of the tokens, and the sum with learned positions."""
    out = shapes.tokens("embedded", shapes.hidden)
    tokens = shapes.look_up("tokens", out)
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

    The loss saves its probabilities in fp32 (EQUATIONS M5), or in the precision of training where
    the stack's loss holds less for a logit. The product saves what its weight gradients read that
    the stack defers to the end of the step. Modules of multi-token prediction come
    first, and give as many more states to the product and the loss.
    """
    x = shapes.tokens("head_input", shapes.hidden)
    normed = shapes.tokens("head_norm", shapes.hidden)
    further, states = multi_token_operators(x, shapes)
    read = (normed, *states)
    predicted = (Dim("predictions", len(read)),) if states else ()
    rows = (shapes.batch, shapes.sequence, *predicted)
    logits = _over_vocabulary("logits", rows, shapes, shapes.element_bytes)
    weight = Parameter(
        name="weight", dims=(shapes.vocab, shapes.hidden), tied=shapes.model.tied_embeddings
    )
    flops = 2 * logits.num_elements * shapes.hidden.size
    lm_head = Operator(
        name="lm_head",
        kind=OperatorKind.MATMUL,
        dims=(*logits.dims, shapes.hidden),
        inputs=read,
        outputs=(logits,),
        parameters=(weight,),
        saved=(*read, *_deferred((*read, logits), shapes)),
        contracted="hidden",
        parallel_dim="vocab",
        flops_forward=flops,
        flops_backward=2 * flops,
    )
    capped = _logit_cap(logits, shapes)
    beyond = shapes.training.stack.logit_bytes - shapes.element_bytes
    saved_bytes = max(shapes.element_bytes, min(FP32_BYTES, beyond))
    loss = Operator(
        name="loss",
        kind=OperatorKind.CROSS_ENTROPY,
        dims=logits.dims,
        inputs=(capped[-1].outputs[0] if capped else logits,),
        outputs=(Tensor(name="loss", dims=rows, element_bytes=FP32_BYTES),),
        saved=(_over_vocabulary("probabilities", rows, shapes, saved_bytes),),
        parallel_dim="vocab",
    )
    return (*further, shapes.norm("norm", x, normed), lm_head, *capped, loss)


def _deferred(tensors: tuple[Tensor, ...], shapes: Shapes) -> tuple[Tensor, ...]:
    """Returns the inputs and gradients that a deferred weight gradient of the head reads."""
    count = shapes.training.stack.deferred_head_gradients
    return tuple(
        replace(each, name=f"deferred {each.name}", dims=(Dim("deferred", count), *each.dims))
        for each in tensors
        if count
    )


def _over_vocabulary(
    name: str, rows: tuple[Dim, ...], shapes: Shapes, element_bytes: int
) -> Tensor:
    return Tensor(name=name, dims=(*rows, shapes.vocab), element_bytes=element_bytes)


def _logit_cap(logits: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the soft cap of the logits, which saves its output."""
    if not shapes.model.logit_soft_cap:
        return ()
    capped = replace(logits, name="capped_logits")
    return (elementwise("logit_cap", (logits,), capped, (capped,), parallel_dim="vocab"),)
