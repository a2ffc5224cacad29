"""The dims and tensors that the operators of a model share, and the operators of every part."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from typing import TypedDict

from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.operator_graph import Dim, Operator, OperatorKind, Parameter, Tensor
from parplan.profiles.models.spec import ModelSpec, Norm, TrainingSpec
from parplan.profiles.stack import AttentionKernel

MASK_BYTES = 1  # a dropout mask is one byte an element
FP32_BYTES = 4
MOST_PIECES = 64  # tensor-parallel ranks that divide the tokens
Reasons = tuple[tuple[str, str], ...]  # dims that no axis may divide, each with the reason


class Shapes:
    """The dims and tensors of the blocks of one kind, for micro-batches of `batch` sequences.

    causal: a token reads those before it alone

    cp: parts of every sequence, of which the tensors have one
    exchanged: the experts lie over several ranks, of which this is the fullest
    plain_dropout: dropout is no fused kernel, it saves a mask of its input's type; attention that
    drops out saves its scores
    """

    causal = True

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        batch: int,
        plain_dropout: bool,
        block: BlockRun | None = None,
        *,
        cp: int = 1,
        exchanged: bool = False,
    ) -> None:
        self.model, self.training = model, training
        self.block = block or BlockRun()
        self.element_bytes = training.precision.num_bytes
        self.mask_bytes = self.element_bytes if plain_dropout else MASK_BYTES
        self.keeps_scores = training.attention is not AttentionKernel.FLASH or (
            plain_dropout and model.dropout > 0
        )
        self.batch = Dim("batch", batch)
        self.sequence = Dim("sequence", -(-training.seq_length // cp))
        share = training.routed_share if exchanged or training.expert_capacity else 1.0
        self.routed = Dim("sequence", _scaled(self.sequence.size, share))
        self.keys = Dim("keys", training.seq_length)
        self.hidden = Dim("hidden", model.hidden_size)
        self.vocab = Dim("vocab", model.padded_vocab_size)
        self.positions = Dim("positions", model.max_seq_length)
        self.chosen = Dim("chosen", model.experts_per_token)

    def over(self, keys: int) -> Shapes:
        """Returns the same shapes for queries that attend to `keys` tokens of another sequence."""
        other = copy(self)
        other.keys, other.causal = Dim("keys", keys), False
        return other

    def heads(self, features: int) -> Dim:
        """Returns the dim of features that belong to heads, divided by groups of keys."""
        return Dim("heads", features, features // self.model.num_kv_heads)

    def tokens(self, name: str, feature: Dim, element_bytes: int | None = None) -> Tensor:
        """Returns a [batch, sequence, feature] activation."""
        size = self.element_bytes if element_bytes is None else element_bytes
        return Tensor(name=name, dims=(self.batch, self.sequence, feature), element_bytes=size)

    def copies(self, name: str, feature: Dim) -> Tensor:
        """Returns a [batch, sequence, chosen experts, feature] activation.

        It has one copy of a token for every expert that the token chose, of as many tokens as the
        experts of the fullest rank get.
        """
        return Tensor(
            name=name,
            dims=(self.batch, self.routed, self.chosen, feature),
            element_bytes=self.element_bytes,
        )

    def norm(self, name: str, x: Tensor, out: Tensor) -> Operator:
        """Returns the norm over all features of `out`, which are the first of those of `x`."""
        features = out.dims[-1]
        weight = Parameter(name="weight", dims=(features,))
        bias = Parameter(name="bias", dims=(features,))
        return Operator(
            name=name,
            kind=OperatorKind.NORM,
            dims=out.dims,
            inputs=(x,),
            outputs=(out,),
            parameters=(weight, bias) if self.model.norm is Norm.LAYER_NORM else (weight,),
            saved=self._kept_by_norm(name, x, out),
            undivided=((features.name, "a norm is over the whole of it"),),
        )

    def _kept_by_norm(self, name: str, x: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Returns what a norm saves: its input, and of PyTorch's operations what those save.

        An RMS norm of PyTorch's operations saves its input in fp32 for the power and the product
        with the scale, and the scaled values in `precision` for the product with the weight.
        """
        plain = "rms_norm" in self.training.stack.plain_kernels
        if not plain or self.model.norm is not Norm.RMS_NORM:
            return (x,)
        wide = replace(out, name=f"{name}_wide", element_bytes=FP32_BYTES)
        return (wide, replace(out, name=f"{name}_scaled"))

    def look_up(self, name: str, out: Tensor, *, tied: bool = False) -> Operator:
        """Returns the look-up of tokens in the table, or in a copy of it that is `tied`."""
        return Operator(
            name=name,
            kind=OperatorKind.EMBEDDING,
            dims=(*out.dims, self.vocab),
            inputs=(),
            outputs=(out,),
            parameters=(Parameter(name="weight", dims=(self.vocab, self.hidden), tied=tied),),
            contracted="vocab",
            parallel_dim="vocab",
        )

    def residual(self, name: str, inputs: tuple[Tensor, ...], out: Tensor) -> Operator:
        """Returns the dropout of sublayers' outputs added to the residual.

        It saves only the mask.
        """
        mask = (
            (self.tokens(f"{name}_mask", self.hidden, self.mask_bytes),)
            if self.model.dropout
            else ()
        )
        return elementwise(name, inputs, out, mask)


def _scaled(tokens: int, share: float) -> int:
    """Returns that share of a number of tokens, which as many ranks divide as divide the number."""
    if share == 1.0:
        return tokens
    pieces = math.gcd(tokens, MOST_PIECES)
    return math.ceil(tokens * share / pieces) * pieces


def linear(
    name: str,
    x: Tensor,
    out: Tensor,
    *,
    parallel_dim: str | None,
    bias: bool,
    undivided: Reasons = (),
) -> Operator:
    """Returns out[b, s, o] = x[b, s, i] weight[o, i]^T (+ bias[o]).

    Its backward pass is two products of the same size.
    """
    features, contracted = out.dims[-1], x.dims[-1]
    weight = Parameter(name="weight", dims=(features, contracted))
    flops = 2 * x.num_elements * features.size
    return Operator(
        name=name,
        kind=OperatorKind.MATMUL,
        dims=(*out.dims, contracted),
        inputs=(x,),
        outputs=(out,),
        saved=(x,),
        parameters=(weight, Parameter(name="bias", dims=(features,))) if bias else (weight,),
        contracted=contracted.name,
        parallel_dim=parallel_dim,
        undivided=undivided,
        flops_forward=flops,
        flops_backward=2 * flops,
    )


class Grouping(TypedDict):
    """The arguments that both products of the same experts have."""

    experts: Dim
    copies: int
    parallel_dim: str | None
    bias: bool
    undivided: Reasons


def grouped(
    name: str,
    x: Tensor,
    out: Tensor,
    *,
    experts: Dim,
    copies: int,
    parallel_dim: str | None,
    bias: bool,
    undivided: Reasons = (),
) -> Operator:
    """Returns out[token, o] = x[token, i] weight[expert of the token, o, i]^T.

    It runs for every token and every expert that the token chose.

    copies   tokens times the experts that each chose, which its FLOPs count
    """
    features, contracted = out.dims[-1], x.dims[-1]
    weight = Parameter(name="weight", dims=(experts, features, contracted))
    biases = (Parameter(name="bias", dims=(experts, features)),) if bias else ()
    flops = 2 * copies * contracted.size * features.size
    return Operator(
        name=name,
        kind=OperatorKind.EXPERTS,
        dims=(*out.dims, contracted),
        inputs=(x,),
        outputs=(out,),
        saved=(x,),
        parameters=(weight, *biases),
        contracted=contracted.name,
        parallel_dim=parallel_dim,
        undivided=undivided,
        flops_forward=flops,
        flops_backward=2 * flops,
    )


def elementwise(
    name: str,
    inputs: tuple[Tensor, ...],
    out: Tensor,
    saved: tuple[Tensor, ...] = (),
    *,
    parallel_dim: str | None = None,
    undivided: Reasons = (),
) -> Operator:
    """Returns an operator that computes each element of its output by itself."""
    return Operator(
        name=name,
        kind=OperatorKind.ELEMENTWISE,
        dims=out.dims,
        inputs=inputs,
        outputs=(out,),
        saved=saved,
        parallel_dim=parallel_dim,
        undivided=undivided,
    )
