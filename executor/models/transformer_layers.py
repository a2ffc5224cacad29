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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from parplan.executor.models.adapters import adapted, add_adapters, freeze
from parplan.executor.models.loss import Loss
from parplan.executor.models.mixture_of_experts import (
    Experts,
    Grouped,
    MixtureOfExperts,
    divide_experts,
    held_experts,
)
from parplan.executor.tensors import local
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

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_seq_length, model.hidden_size))
        self.dropout = model.dropout

    def forward(self, x: Tensor) -> Tensor:
        return _dropout(x + self.weight[: x.shape[1]], self.dropout if self.training else 0.0)


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

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model

    def forward(self, qkv: Tensor) -> Tensor:
        size = int(self.model.head_dim * self.model.rotary_fraction)
        groups = _groups(qkv, self.model)
        cos, sin = _rotary_tables(qkv.shape[1], size, self.model.rope_theta, qkv)
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


def _rotary_tables(length: int, size: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of [sequence, 1, 1, size], computed in fp32."""
    even = torch.arange(0, size, 2, device=like.device, dtype=torch.float32)
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, theta ** -(even / size))
    angles = torch.cat((angles, angles), dim=-1)[:, None, None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class SelfAttention(nn.Module):
    """Causal grouped-query attention over the heads on this rank."""

    on_shards = True

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


class Block(nn.Module):
    """One pre-norm transformer block; `experts` are those on this rank of a mixture."""

    def __init__(self, model: ModelSpec, training: TrainingSpec, experts: range = range(0)) -> None:
        super().__init__()
        hidden, ffn = model.hidden_size, model.ffn_hidden_size
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
        if model.num_experts:
            router = Linear(hidden, model.num_experts, bias=False)
            networks = Experts(model, experts, Activation(model))
            self.mixture = MixtureOfExperts(model, router, networks)
        else:
            self.fc1 = Linear(hidden, ffn * (2 if model.gated_ffn else 1), bias=model.linear_bias)
            self.activation = Activation(model)
            self.fc2 = Linear(ffn, hidden, bias=model.linear_bias)
        self.residual2 = Residual(model)

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
        if hasattr(self, "mixture"):
            return self.mixture(normed)
        return adapted(self, "fc2", self.activation(adapted(self, "fc1", normed)))


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
    ep_mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Builds a whole fp32 layer on `device`.

    Its values are a function of `seed`, the layer's index and the parameter alone, so every mesh
    starts from the same model: each rank builds the layer and retains its shard. Over `ep_mesh` a
    rank builds only its share of the experts, each of which has separate values.
    """
    experts = held_experts(model, ep_mesh)
    with torch.device("meta"):
        layer = {
            LayerKind.EMBEDDING: lambda: Embedding(model),
            LayerKind.BLOCK: lambda: Block(model, training, experts),
            LayerKind.HEAD: lambda: Head(model),
        }[kind]()
        if training.fine_tuning is not None:
            tuned = _described(model, training, index)
            add_adapters(layer, tuned, Linear)
    _materialize(layer, device)
    grouped = {
        f"{name}.weight": module.weight
        for name, module in layer.named_modules()
        if isinstance(module, Grouped)
    }
    for name, parameter in layer.named_parameters():
        tied = model.tied_embeddings and name == "lm_head.weight"
        if name not in grouped:
            _init(parameter, f"{seed}/0/tokens.weight" if tied else f"{seed}/{index}/{name}")
    for name, weight in grouped.items():
        for expert, matrix in zip(experts, weight.chunk(len(experts)), strict=True):
            _init(matrix, f"{seed}/{index}/{name}/{expert}")
    if ep_mesh is not None:
        divide_experts(layer, ep_mesh)
    if training.fine_tuning is not None:
        freeze(layer, tuned)
    return layer


def _described(model: ModelSpec, training: TrainingSpec, index: int) -> LayerClass:
    graph = build_graph(model, training, 1)
    return graph.layer_class(graph.key(index))


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
