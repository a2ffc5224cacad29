"""GPT and Llama as plain modules.

Every operator of `parplan.profiles.models.transformer` is a submodule with the same name and the
same parameters. The layouts let a tensor-parallel shard along dim 0 hold whole units: qkv rows are
(kv groups, queries + 2, head_dim), gated fc1 rows are (ffn, gate and up). A module with `on_shards`
computes on the local shards of its inputs and parameters; the others run on DTensors. Activations
are [batch, sequence, feature].
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from parplan.executor.context.context_attention import Context
from parplan.executor.context.zigzag import part_of
from parplan.executor.models.adapters import adapted, add_adapters, freeze
from parplan.executor.models.expert_exchange import EP, ETP, ExpertRanks
from parplan.executor.models.loss import Loss
from parplan.executor.models.mixture_of_experts import (
    Experts,
    Grouped,
    MixtureOfExperts,
    divide_experts,
    grouped_of,
    mark_biases,
)
from parplan.executor.tensors import local
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.operator_graph import LayerClass, LayerKind
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import AttentionKernel

INIT_STD = 0.02  # GPT-2, Radford et al. 2019
ZERO_AT_START = "_lora_b.weight"  # the second matrix of an adapter


class Linear(nn.Linear):
    """A product with the rows or columns of the weight on this rank.

    `adds_bias` is false where the product gives partial sums.
    """

    on_shards = True
    adds_bias = True

    def forward(self, x: Tensor) -> Tensor:
        bias = local(self.bias) if self.adds_bias and self.bias is not None else None
        return functional.linear(x, local(self.weight), bias)


class LayerNorm(nn.LayerNorm):
    on_shards = True

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x, self.normalized_shape, local(self.weight), local(self.bias), self.eps
        )


class RMSNorm(nn.RMSNorm):
    on_shards = True

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, local(self.weight), self.eps)


class Tokens(nn.Embedding):
    """The token table.

    `on_shards` is false where it is divided over the vocabulary: the rows of other ranks are masked
    by DTensor.
    """

    on_shards = False

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.weight
        if self.on_shards:
            return functional.embedding(ids, local(weight))
        if isinstance(weight, DTensor):
            # DTensor makes the gradient of a vocabulary shard whole; this no-op cuts it at once
            weight = weight.redistribute(placements=weight.placements)
        return functional.embedding(ids, weight)


class LearnedPositions(nn.Module):
    """Adds the learned position table to the token embeddings."""

    context: Context | None = None

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_seq_length, model.hidden_size))
        self.dropout = model.dropout

    def forward(self, x: Tensor) -> Tensor:
        return _dropout(x + self._rows(x.shape[1]), self.dropout if self.training else 0.0)

    def _rows(self, length: int) -> Tensor:
        """Returns the rows of this rank's `length` tokens."""
        if self.context is None:
            return self.weight[:length]
        rank, ranks = self.context.rank, self.context.ranks
        return part_of(self.weight[: ranks * length], rank, ranks, dim=0)


def _dropout(x: Tensor, probability: float) -> Tensor:
    """Drops out this rank's part of `x`; tensor-parallel ranks draw the same mask."""
    if not probability:
        return x
    if not isinstance(x, DTensor):
        return functional.dropout(x, probability)
    dropped = functional.dropout(x.to_local(), probability)
    return DTensor.from_local(dropped, x.device_mesh, x.placements, run_check=False)


class Rotary(nn.Module):
    """Rotates the first `rotary_fraction` of each head (rotate-half, as Llama and NeoX)."""

    on_shards = True
    context: Context | None = None

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model

    def forward(self, qkv: Tensor) -> Tensor:
        size = int(self.model.head_dim * self.model.rotary_fraction)
        groups = _groups(qkv, self.model)
        positions = _positions(self.context, qkv)
        cos, sin = _rotary_tables(positions, size, self.model.rope_theta, qkv)
        rotated, rest = groups[..., :-1, :].split((size, self.model.head_dim - size), dim=-1)
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
        queries_keys = torch.cat((rotated, rest), dim=-1)
        return torch.cat((queries_keys, groups[..., -1:, :]), dim=-2).flatten(2)


def _groups(qkv: Tensor, model: ModelSpec) -> Tensor:
    """Views [batch, sequence, features] by head.

    Returns [batch, sequence, kv groups, queries per group + key + value, head_dim].
    """
    return qkv.unflatten(-1, (-1, model.num_heads // model.num_kv_heads + 2, model.head_dim))


def _positions(context: Context | None, x: Tensor) -> Tensor:
    """Returns the positions of the tokens of `x`, which is [batch, sequence, features]."""
    if context is None:
        return torch.arange(x.shape[1], device=x.device)
    return context.positions(x.shape[1], x.device)


def _rotary_tables(
    positions: Tensor, size: int, theta: float, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of [sequence, 1, 1, size], computed in fp32."""
    even = torch.arange(0, size, 2, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions.float(), theta ** -(even / size))
    angles = torch.cat((angles, angles), dim=-1)[:, None, None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class SelfAttention(nn.Module):
    """Causal grouped-query attention over the heads on this rank.

    context   the ranks that divide every sequence; None where this rank has whole sequences
    """

    on_shards = True
    context: Context | None = None

    def __init__(self, model: ModelSpec, kernel: AttentionKernel) -> None:
        super().__init__()
        self.model = model
        self.kernel = kernel
        self.dropout = model.dropout

    def forward(self, qkv: Tensor) -> Tensor:
        run = self._flash if self.kernel is AttentionKernel.FLASH else self._unfused
        return run(*self.split(qkv)).transpose(1, 2).flatten(2)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values as the kernel saves them.

        Each is [batch, heads, sequence, head_dim].
        """
        parts = self._of_heads(qkv)
        return parts if self.context is None else self.context.enter(*parts)

    def _of_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = _groups(qkv, self.model)
        query = groups[..., :-2, :].flatten(2, 3).transpose(1, 2)
        key = groups[..., -2, :].transpose(1, 2)
        value = groups[..., -1, :].transpose(1, 2)
        if self.kernel is AttentionKernel.UNFUSED:
            # repeat_interleave copies keys and values, the batched product would copy the queries
            repeats = query.shape[1] // key.shape[1]
            return (
                query.contiguous(),
                key.repeat_interleave(repeats, dim=1),
                value.repeat_interleave(repeats, dim=1),
            )
        if self.model.num_kv_heads != self.model.num_heads:
            # the queries of several groups are one copy; views of the keys would save all of qkv
            key, value = key.contiguous(), value.contiguous()
        return query, key, value

    def _flash(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.context is not None:
            return self.context.attend(query, key, value)
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=key.shape[1] != query.shape[1],
        )

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = self.weights(query @ key.transpose(-2, -1))
        weights = functional.dropout(weights, self.dropout, self.training)
        return weights @ value

    def weights(self, products: Tensor) -> Tensor:
        """Returns the masked softmax of the products of queries and keys.

        Both are [batch, heads, sequence, sequence].
        """
        scores = products * self.model.head_dim**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(dim=-1)


class _SwiGLU(torch.autograd.Function):
    """Computes silu(gate) * up and saves only its input, as fused kernels do.

    Autograd would also save silu(gate).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].unflatten(-1, (-1, 2)).unbind(-1)
        sigmoid = gate.sigmoid()
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return torch.stack((gradient * up * slope, gradient * gate * sigmoid), dim=-1).flatten(-2)


class Activation(nn.Module):
    """GELU, or SwiGLU when the feed-forward network is gated (Shazeer 2020, arXiv 2002.05202)."""

    on_shards = True

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gated = model.gated_ffn

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return functional.gelu(x, approximate="tanh")
        return _SwiGLU.apply(x)


class Residual(nn.Module):
    """Adds the (dropped-out) outputs of sublayers to the residual stream."""

    on_shards = True

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.dropout = model.dropout

    def forward(self, x: Tensor, *branches: Tensor) -> Tensor:
        for branch in branches:
            x = x + functional.dropout(branch, self.dropout, self.training)
        return x


class Gated(nn.Module):
    """Multiplies features by a sigmoid, one number a token (the shared expert of Qwen2-MoE)."""

    on_shards = True

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()


class Sum(nn.Module):
    """Adds the outputs of the experts and of the network beside them."""

    on_shards = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Embedding(nn.Module):
    """Maps token ids [batch, sequence] to [batch, sequence, hidden]."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.tokens = Tokens(model.padded_vocab_size, model.hidden_size)
        if model.positions is Positions.LEARNED:
            self.positions = LearnedPositions(model)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.positions(x) if hasattr(self, "positions") else x


ALIKE = BlockRun()  # a block of a model whose blocks are alike


class Block(nn.Module):
    """One pre-norm transformer block; `ranks` divide its experts, if it has any."""

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        kind: BlockRun = ALIKE,
        ranks: ExpertRanks | None = None,
    ) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.parallel_residual = model.parallel_residual
        self.norm1 = _norm(model)
        self.qkv = Linear(hidden, model.q_size + 2 * model.kv_size, bias=model.qkv_bias)
        if model.positions is Positions.ROTARY:
            self.rotary = Rotary(model)
        self.attention = SelfAttention(model, training.attention)
        self.attention_out = Linear(model.q_size, hidden, bias=model.linear_bias)
        if not model.parallel_residual:
            self.residual1 = Residual(model)
        self.norm2 = _norm(model)
        if model.num_experts and kind.experts:
            self._add_experts(model, ranks)
        else:
            self._add_network(model, model.ffn_hidden_size)
        self.residual2 = Residual(model)

    def _add_network(self, model: ModelSpec, width: int, prefix: str = "") -> None:
        """Adds the two products of a dense network and the activation between them."""
        hidden, bias = model.hidden_size, model.linear_bias
        halves = 2 if model.gated_ffn else 1
        self.add_module(f"{prefix}fc1", Linear(hidden, width * halves, bias=bias))
        self.add_module(f"{prefix}activation", Activation(model))
        self.add_module(f"{prefix}fc2", Linear(width, hidden, bias=bias))

    def _add_experts(self, model: ModelSpec, ranks: ExpertRanks | None) -> None:
        """Adds the mixture of experts, and the network beside it that every token passes."""
        router = Linear(model.hidden_size, model.num_experts, bias=model.router_bias)
        held = range(model.num_experts) if ranks is None else ranks.held(model.num_experts)
        parts = 1 if ranks is None else ranks.degree(ETP)
        networks = Experts(model, held, parts, Activation(model))
        self.mixture = MixtureOfExperts(model, router, networks)
        if model.shared_experts is not None:
            self._add_network(model, model.shared_experts.ffn_hidden_size, "shared_")
            if model.shared_experts.gated:
                self.shared_gate = Linear(model.hidden_size, 1, bias=False)
                self.shared_gated = Gated()
            self.expert_sum = Sum()

    def forward(self, x: Tensor) -> Tensor:
        # a local name would hold an activation until the block ends
        if self.parallel_residual:
            return self.residual2(x, self.attend(x), self.feed_forward(x))
        middle = self.residual1(x, self.attend(x))
        return self.residual2(middle, self.feed_forward(middle))

    def attend(self, x: Tensor) -> Tensor:
        """Returns the attention branch of `x`, which the residual adds."""
        rotate = self.rotary if hasattr(self, "rotary") else _unchanged
        context = self.attention(rotate(adapted(self, "qkv", self.norm1(x))))
        return adapted(self, "attention_out", context)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Returns the branch of the feed-forward network or of the mixture."""
        normed = self.norm2(x)
        if hasattr(self, "expert_sum"):
            return self.expert_sum(self.mixture(normed), self.shared_experts(normed))
        if hasattr(self, "mixture"):
            return self.mixture(normed)
        return adapted(self, "fc2", self.activation(adapted(self, "fc1", normed)))

    def shared_experts(self, x: Tensor) -> Tensor:
        """Returns the output of the network beside the experts."""
        if hasattr(self, "shared_gate"):
            fed = self.shared_fc2(self.shared_activation(self.shared_fc1(x)))
            return self.shared_gated(fed, self.shared_gate(x))
        return self.shared_fc2(self.shared_activation(self.shared_fc1(x)))


def _unchanged(x: Tensor) -> Tensor:
    return x


class Head(nn.Module):
    """Maps [batch, sequence, hidden] to logits [batch, sequence, padded vocabulary].

    The schedule calls `loss` on the logits.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.norm = _norm(model)
        self.lm_head = Linear(model.hidden_size, model.padded_vocab_size, bias=False)
        self.loss = Loss()

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def divide_sequences(layer: nn.Module, context: Context) -> None:
    """Tells the operators of a layer that need it which tokens of each sequence this rank has."""
    for module in layer.modules():
        if isinstance(module, (LearnedPositions, Rotary, SelfAttention)):
            module.context = context


def _norm(model: ModelSpec) -> nn.Module:
    kind = LayerNorm if model.norm is Norm.LAYER_NORM else RMSNorm
    return kind(model.hidden_size, eps=model.norm_epsilon)


def build_layer(
    model: ModelSpec,
    training: TrainingSpec,
    kind: LayerKind,
    index: int,
    seed: int,
    device: torch.device,
    ranks: ExpertRanks | None = None,
) -> nn.Module:
    """Builds a whole fp32 layer on `device`.

    Its values are a function of `seed`, the layer's index and the parameter alone, so every mesh
    starts from the same model: each rank builds the layer and retains its shard. A rank of `ranks`
    builds only its part of the experts, each of which has separate values.
    """
    with torch.device("meta"):
        kind_of_block = model.block_kinds[(index - 1) % model.num_layers]
    layer = {
        LayerKind.EMBEDDING: lambda: Embedding(model),
        LayerKind.BLOCK: lambda: Block(model, training, kind_of_block, ranks),
        LayerKind.HEAD: lambda: Head(model),
    }[kind]()
    if training.fine_tuning is not None:
        tuned = _described(model, training, index)
        with torch.device("meta"):
            add_adapters(layer, tuned, Linear)
    _materialize(layer, device)
    of_experts = {parameter for each in grouped_of(layer) for parameter in each.parameters()}
    for name, parameter in layer.named_parameters():
        tied = model.tied_embeddings and name == "lm_head.weight"
        if parameter not in of_experts:
            _init(parameter, f"{seed}/0/tokens.weight" if tied else f"{seed}/{index}/{name}")
    for name, module in layer.named_modules():
        if isinstance(module, Grouped):
            _init_experts(module, f"{seed}/{index}/{name}", ranks)
    if ranks is not None:
        divide_experts(layer, ranks)
    mark_biases(layer)
    if training.fine_tuning is not None:
        freeze(layer, tuned)
    return layer


def _described(model: ModelSpec, training: TrainingSpec, index: int) -> LayerClass:
    graph = build_graph(model, training, 1)
    return graph.layer_class(graph.key(index))


@torch.no_grad()
def _init_experts(module: Grouped, key: str, ranks: ExpertRanks | None) -> None:
    """Fills this rank's part of the matrix of each expert, and biases with zeros."""
    held = range(module.num_experts)
    parts, part = 1, 0
    if ranks is not None:
        held = ranks.held(module.num_experts * ranks.degree(EP))
        parts, part = ranks.degree(ETP), ranks.rank(ETP)
    for expert, matrix in zip(held, module.weight.chunk(module.num_experts), strict=True):
        hidden, width = matrix.shape[0], matrix.shape[1] * parts
        whole = matrix.new_empty((width, hidden) if module.widens else (hidden, width))
        _init(whole, f"{key}.weight/{expert}")  # of [features, contracted], as any product
        by_width = whole.t() if module.widens else whole
        matrix.copy_(by_width.chunk(parts, dim=1)[part])
    if module.bias is not None:
        module.bias.zero_()


def _materialize(layer: nn.Module, device: torch.device) -> None:
    """Gives every parameter memory on `device`.

    `to_empty` cannot do so for fake tensors (executor/checking/dry_run.py).
    """
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            memory = torch.empty_like(parameter, device=device)
            module.register_parameter(name, nn.Parameter(memory))


@torch.no_grad()
def _init(parameter: Tensor, key: str) -> None:
    """Fills matrices and tables with normal values, norm weights with ones, biases with zeros.

    The second matrix of an adapter is zero, so that training starts at the base model.
    """
    if key.endswith(ZERO_AT_START):
        parameter.zero_()
        return
    if parameter.ndim == 1:
        parameter.fill_(0.0 if key.endswith("bias") else 1.0)
        return
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator))
