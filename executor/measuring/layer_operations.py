"""Operators of a model through the executor's own modules, with the micro-batch of the case."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.executor.measuring.operands import Maker, model_spec
from parplan.executor.measuring.products import Sizes
from parplan.executor.measuring.trials import Graph, TimedPasses, Trial, both
from parplan.executor.models.attention import Rotary, SelfAttention
from parplan.executor.models.loss import Loss
from parplan.executor.models.operators import (
    Activation,
    LayerNorm,
    LearnedPositions,
    Residual,
    RMSNorm,
    Tokens,
)
from parplan.profiles.stack import AttentionKernel

DROPOUT = 0.1  # its value does not change what runs


def _module(
    make: Callable[[], nn.Module], shape: tuple[int, ...], out: tuple[int, ...]
) -> tuple[TimedPasses, ...]:
    """Return both passes of a module of one input; all its parameters have gradients."""

    def trial(maker: Maker) -> Trial:
        with torch.device("meta"):
            module = make()
        module = maker.module(module)
        x = maker.normal(*shape, learned=True)
        return Graph(lambda: module(x), (x,), (x, *module.parameters()), maker.gradient(*out))

    return both(trial)


def layer_norm(sizes: Sizes) -> tuple[TimedPasses, ...]:
    shape = (1, sizes["tokens"], sizes["hidden"])
    return _module(lambda: LayerNorm(sizes["hidden"]), shape, shape)


def rms_norm(sizes: Sizes) -> tuple[TimedPasses, ...]:
    shape = (1, sizes["tokens"], sizes["hidden"])
    return _module(lambda: RMSNorm(sizes["hidden"], eps=1e-5), shape, shape)


def gelu(sizes: Sizes) -> tuple[TimedPasses, ...]:
    shape = (1, sizes["tokens"], sizes["width"])
    return _module(lambda: Activation(model_spec()), shape, shape)


def swiglu(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """Return the passes of SwiGLU; `width` is the width of one half, and of the output."""
    tokens, width = sizes["tokens"], sizes["width"]
    return _module(
        lambda: Activation(model_spec(gated_ffn=True)), (1, tokens, 2 * width), (1, tokens, width)
    )


def rotary(sizes: Sizes) -> tuple[TimedPasses, ...]:
    model = model_spec(
        num_heads=sizes["heads"], num_kv_heads=sizes["kv_heads"], head_dim=sizes["head_dim"]
    )
    shape = (sizes["batch"], sizes["seq"], model.q_size + 2 * model.kv_size)
    return _module(lambda: Rotary(model), shape, shape)


def attention(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """Return the passes of fused attention with the module's copies of queries, keys and values."""
    model = model_spec(
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        dropout=DROPOUT if sizes["dropout"] else 0.0,
    )
    tokens = (sizes["batch"], sizes["seq"])
    return _module(
        lambda: SelfAttention(model, AttentionKernel.FLASH),
        (*tokens, model.q_size + 2 * model.kv_size),
        (*tokens, model.q_size),
    )


def softmax(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """Return the passes of scale, mask and softmax of unfused attention."""
    attention = SelfAttention(model_spec(), AttentionKernel.UNFUSED)
    shape = (sizes["batch"], sizes["heads"], sizes["seq"], sizes["seq"])

    def trial(maker: Maker) -> Trial:
        products = maker.normal(*shape, learned=True)
        return Graph(
            lambda: attention.weights(products), (products,), (products,), maker.gradient(*shape)
        )

    return both(trial)


def dropout(sizes: Sizes) -> tuple[TimedPasses, ...]:
    def trial(maker: Maker) -> Trial:
        x = maker.normal(sizes["elements"], learned=True)
        return Graph(
            lambda: functional.dropout(x, DROPOUT), (x,), (x,), maker.gradient(sizes["elements"])
        )

    return both(trial)


def residual(sizes: Sizes) -> tuple[TimedPasses, ...]:
    return _residual(sizes, 0.0)


def dropped_residual(sizes: Sizes) -> tuple[TimedPasses, ...]:
    return _residual(sizes, DROPOUT)


def _residual(sizes: Sizes, dropped: float) -> tuple[TimedPasses, ...]:
    """Return the passes of a residual connection.

    The backward pass gives the branch's gradient. It adds the stream's gradient to the one that the
    branch's norm has just returned, in place as autograd adds a gradient with no other holder.
    """
    shape = (1, sizes["tokens"], sizes["hidden"])

    def trial(maker: Maker) -> Trial:
        module = Residual(model_spec(dropout=dropped))
        stream = maker.normal(*shape, learned=True)
        branch = maker.normal(*shape, learned=True)
        from_norm = maker.gradient(*shape)

        def add(gradients: tuple[Tensor, ...]) -> None:
            from_norm.add_(gradients[0])

        return Graph(
            lambda: module(stream, branch), (branch,), (stream, branch), maker.gradient(*shape), add
        )

    return both(trial)


def positions(sizes: Sizes) -> tuple[TimedPasses, ...]:
    return _positions(sizes, 0.0)


def dropped_positions(sizes: Sizes) -> tuple[TimedPasses, ...]:
    return _positions(sizes, DROPOUT)


def _positions(sizes: Sizes, dropped: float) -> tuple[TimedPasses, ...]:
    """Return the passes of learned positions.

    The backward pass adds the table's gradient to the step's.
    """
    model = model_spec(hidden_size=sizes["hidden"], max_seq_length=sizes["seq"], dropout=dropped)
    shape = (sizes["batch"], sizes["seq"], sizes["hidden"])

    def trial(maker: Maker) -> Trial:
        with torch.device("meta"):
            module = LearnedPositions(model)
        module = maker.module(module)
        x = maker.normal(*shape, learned=True)
        return Graph(
            lambda: module(x),
            (x,),
            (x, module.weight),
            maker.gradient(*shape),
            _accumulate(maker, module.weight),
        )

    return both(trial)


def embedding(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """Return the passes of the token table; its gradient is added to the step's."""

    def trial(maker: Maker) -> Trial:
        with torch.device("meta"):
            module = Tokens(sizes["vocab"], sizes["hidden"])
        module = maker.module(module)
        ids = maker.numbers(sizes["vocab"], 1, sizes["tokens"])
        gradient = maker.gradient(1, sizes["tokens"], sizes["hidden"])
        return Graph(
            lambda: module(ids), (), (module.weight,), gradient, _accumulate(maker, module.weight)
        )

    return both(trial)


def _accumulate(maker: Maker, table: Tensor) -> Callable[[tuple[Tensor, ...]], None]:
    """Return a function that adds the last gradient to an fp32 sum, as the executor does."""
    accumulated = maker.zeros_like(table, torch.float32)

    def add(gradients: tuple[Tensor, ...]) -> None:
        accumulated.add_(gradients[-1])

    return add


def cross_entropy(sizes: Sizes) -> tuple[TimedPasses, ...]:
    def trial(maker: Maker) -> Trial:
        logits = maker.normal(1, sizes["tokens"], sizes["vocab"], learned=True)
        targets = maker.numbers(sizes["vocab"], 1, sizes["tokens"])
        share = torch.full((), 1 / sizes["tokens"], device=maker.device)
        loss = Loss()
        return Graph(lambda: loss(logits, targets), (logits,), (logits,), share)

    return both(trial)
