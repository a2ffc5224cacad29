"""GPT and Llama as plain modules: one submodule per operator of
`parplan.profiles.models.transformer`, with its name and parameters.

Layouts that let a tensor-parallel shard along dim 0 hold whole units: qkv rows are (kv groups,
queries + 2, head_dim), gated fc1 rows are (ffn, gate and up). A module with `on_shards` computes on
the local shards of its inputs and parameters; the others run on DTensors. Activations are [batch,
sequence, feature].
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from parplan.executor.models.loss import Loss
from parplan.executor.models.mixture_of_experts import (
    Experts,
    Grouped,
    MixtureOfExperts,
    divide_experts,
    held_experts,
)
from parplan.executor.tensors import local
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, TrainingSpec
from parplan.profiles.stack import AttentionKernel

INIT_STD = 0.02  # GPT-2, Radford et al. 2019


class Linear(nn.Linear):
    """A product of whatever rows or columns of the weight a rank holds; the bias only where that
    gives whole sums.
    """

    on_shards = True
    adds_bias = True

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(
            x,
            local(self.weight),
            local(self.bias) if self.adds_bias and self.bias is not None else None,
        )


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
    """The token table, divided over the vocabulary under tensor parallelism."""

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):
            # DTensor gives the gradient of a vocabulary shard whole; through this no-op it is cut
            # to the shard at once
            weight = weight.redistribute(placements=weight.placements)
        return functional.embedding(ids, weight)


class LearnedPositions(nn.Module):
    """Adds the learned position table to the token embeddings."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_seq_length, model.hidden_size))
        self.dropout = model.dropout

    def forward(self, x: Tensor) -> Tensor:
        return _dropped(x + self.weight[: x.shape[1]], self.dropout if self.training else 0.0)


def _dropped(x: Tensor, probability: float) -> Tensor:
    """Dropout of what this rank holds; tensor-parallel ranks draw the same mask."""
    if not probability:
        return x
    if not isinstance(x, DTensor):
        return functional.dropout(x, probability)
    return DTensor.from_local(
        functional.dropout(x.to_local(), probability), x.device_mesh, x.placements, run_check=False
    )


class Rotary(nn.Module):
    """Rotates the first `rotary_fraction` of every query and key head (rotate-half, as Llama and
    NeoX).
    """

    on_shards = True

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model

    def forward(self, qkv: Tensor) -> Tensor:
        size = int(self.model.head_dim * self.model.rotary_fraction)
        groups = _groups(qkv, self.model)
        cos, sin = _rotary_tables(qkv.shape[1], size, self.model.rope_theta, qkv)
        turned, kept = groups[..., :-1, :].split((size, self.model.head_dim - size), dim=-1)
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
        queries_keys = torch.cat((turned, kept), dim=-1)
        return torch.cat((queries_keys, groups[..., -1:, :]), dim=-2).flatten(2)


def _groups(qkv: Tensor, model: ModelSpec) -> Tensor:
    """[batch, sequence, features] as [batch, sequence, kv groups, queries per group + key + value,
    head_dim].
    """
    return qkv.unflatten(-1, (-1, model.num_heads // model.num_kv_heads + 2, model.head_dim))


def _rotary_tables(length: int, size: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of [sequence, 1, 1, size], computed in fp32."""
    frequencies = theta ** -(
        torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size
    )
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention over the heads in its input, however many a rank holds."""

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
        """Queries, keys and values, each [batch, heads, sequence, head_dim], as the kernel keeps
        them.
        """
        groups = _groups(qkv, self.model)
        query = groups[..., :-2, :].flatten(2, 3).transpose(1, 2)
        key, value = (groups[..., i, :].transpose(1, 2) for i in (-2, -1))
        if self.kernel is AttentionKernel.UNFUSED:
            repeats = (
                query.shape[1] // key.shape[1]
            )  # repeat_interleave copies; a batched product would copy the queries
            return (
                query.contiguous(),
                key.repeat_interleave(repeats, dim=1),
                value.repeat_interleave(repeats, dim=1),
            )
        if self.model.num_kv_heads != self.model.num_heads:
            # the queries of several groups are copied together; views of the keys would keep the
            # whole of qkv beside them
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
        return (
            functional.dropout(
                self.weights(query @ key.transpose(-2, -1)), self.dropout, self.training
            )
            @ value
        )

    def weights(self, products: Tensor) -> Tensor:
        """The masked softmax of the products of queries and keys, [batch, heads, sequence,
        sequence].
        """
        scores = products * self.model.head_dim**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(dim=-1)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up that keeps only its input, as fused kernels do; autograd would also keep
    silu(gate).
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
    """Token ids [batch, sequence] -> [batch, sequence, hidden]."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.tokens = Tokens(model.padded_vocab_size, model.hidden_size)
        if model.positions is Positions.LEARNED:
            self.positions = LearnedPositions(model)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.positions(x) if hasattr(self, "positions") else x


class Block(nn.Module):
    """One pre-norm transformer block; of a mixture it holds the `experts` given."""

    def __init__(self, model: ModelSpec, training: TrainingSpec, experts: range = range(0)) -> None:
        super().__init__()
        hidden, ffn = model.hidden_size, model.ffn_hidden_size
        self.parallel_residual = model.parallel_residual
        self.norm1 = _norm(model)
        self.qkv = Linear(hidden, model.q_size + 2 * model.kv_size, bias=model.qkv_bias)
        if model.positions is Positions.ROTARY:
            self.rotary = Rotary(model)
        self.attention = Attention(model, training.attention)
        self.attention_out = Linear(model.q_size, hidden, bias=model.linear_bias)
        if not model.parallel_residual:
            self.residual1 = Residual(model)
        self.norm2 = _norm(model)
        if model.num_experts:
            router = Linear(hidden, model.num_experts, bias=False)
            self.mixture = MixtureOfExperts(
                model, router, Experts(model, experts, Activation(model))
            )
        else:
            self.fc1 = Linear(hidden, ffn * (2 if model.gated_ffn else 1), bias=model.linear_bias)
            self.activation = Activation(model)
            self.fc2 = Linear(ffn, hidden, bias=model.linear_bias)
        self.residual2 = Residual(model)

    def forward(self, x: Tensor) -> Tensor:
        # without names for what is passed on: a name would keep it until the block is through
        if self.parallel_residual:
            return self.residual2(x, self.attend(x), self.feed_forward(x))
        middle = self.residual1(x, self.attend(x))
        return self.residual2(middle, self.feed_forward(middle))

    def attend(self, x: Tensor) -> Tensor:
        """What attention adds to `x`."""
        if hasattr(self, "rotary"):
            return self.attention_out(self.attention(self.rotary(self.qkv(self.norm1(x)))))
        return self.attention_out(self.attention(self.qkv(self.norm1(x))))

    def feed_forward(self, x: Tensor) -> Tensor:
        """What the feed-forward network, or the mixture, adds to `x`."""
        normed = self.norm2(x)
        return (
            self.mixture(normed)
            if hasattr(self, "mixture")
            else self.fc2(self.activation(self.fc1(normed)))
        )


class Head(nn.Module):
    """[batch, sequence, hidden] -> logits [batch, sequence, padded vocabulary]; `loss` is called on
    them by the schedule.
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
    """A whole fp32 layer on `device`, its values a function of `seed`, the layer's index and the
    parameter alone.

    Every mesh therefore starts from the same model: each rank makes the layer and keeps its shard.
    Over `ep_mesh` a rank makes only its own experts, each of which has its own values.
    """
    experts = held_experts(model, ep_mesh)
    with torch.device("meta"):
        layer = {
            LayerKind.EMBEDDING: lambda: Embedding(model),
            LayerKind.BLOCK: lambda: Block(model, training, experts),
            LayerKind.HEAD: lambda: Head(model),
        }[kind]()
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
    return layer


def _materialize(layer: nn.Module, device: torch.device) -> None:
    """Give every parameter memory on `device`. Not `to_empty`, which cannot do it to fake tensors
    (executor/checking/dry_run.py).
    """
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(
                name, nn.Parameter(torch.empty_like(parameter, device=device))
            )


@torch.no_grad()
def _init(parameter: Tensor, key: str) -> None:
    """Matrices and tables are normal, norm weights one, biases zero."""
    if parameter.ndim == 1:
        parameter.fill_(0.0 if key.endswith("bias") else 1.0)
        return
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator))
