"""A GPT or Llama model in plain torch, which train_fsdp2.py divides over ranks.

Replace it by a model of your own: train_fsdp2.py knows `ModelStage`, its layers, and the names of
their products and norms. Activations are [batch, tokens, features].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from fsdp2_settings import ModelSettings
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}
INIT_STD = 0.02


def build_norm(model: ModelSettings) -> nn.Module:
    kind = nn.RMSNorm if model.norm == "rms_norm" else nn.LayerNorm
    return kind(model.hidden_size, eps=model.norm_epsilon)


class InputEmbedding(nn.Module):
    """Maps token ids to [batch, tokens, hidden]; `first` is the place of the rank's first token."""

    def __init__(self, model: ModelSettings, first: int) -> None:
        super().__init__()
        self.first = first
        self.tokens = nn.Embedding(model.padded_vocab_size, model.hidden_size)
        self.positions = None
        if model.positions == "learned":
            self.positions = nn.Embedding(model.max_seq_length, model.hidden_size)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            places = torch.arange(self.first, self.first + ids.shape[1], device=ids.device)
            x = x + self.positions(places)
        return self.dropout(x)


class CausalAttention(nn.Module):
    """Grouped-query attention over this rank's heads.

    Features lie by groups: some queries, their key, their value. The ranks of `group` divide every
    sequence: an all-to-all gives each of them all tokens of some heads (DeepSpeed-Ulysses, Jacobs
    et al. 2023, arXiv 2309.14509).
    """

    def __init__(self, model: ModelSettings, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.head_dim = model.head_dim
        self.queries = model.num_heads // model.num_kv_heads
        self.dropout = model.dropout
        self.theta = model.rope_theta if model.positions == "rotary" else None
        self.rotated = int(model.head_dim * model.rotary_fraction)

    def forward(self, qkv: Tensor) -> Tensor:
        groups = qkv.unflatten(-1, (-1, self.queries + 2, self.head_dim))
        query, key, value = groups.split((self.queries, 1, 1), dim=-2)
        parts = [each.flatten(2, 3) for each in (query, key, value)]  # [batch, tokens, heads, dim]
        if self.theta is not None:
            parts[:2] = (self.rotate(each) for each in parts[:2])
        if self.group is not None:
            ranks = dist.get_world_size(self.group)
            if parts[1].shape[2] % ranks:
                parts[1:] = (each.repeat_interleave(self.queries, dim=2) for each in parts[1:])
            parts = [divide_heads(each, self.group) for each in parts]
        query, key, value = (each.transpose(1, 2) for each in parts)
        context = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        if self.group is not None:
            context = divide_tokens(context, self.group)
        return context.flatten(2)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates the first features of every head by the places of their tokens."""
        rank = 0 if self.group is None else dist.get_rank(self.group)
        tokens = x.shape[1]
        places = torch.arange(rank * tokens, (rank + 1) * tokens, device=x.device)
        even = torch.arange(0, self.rotated, 2, device=x.device, dtype=torch.float32)
        angles = torch.outer(places.float(), self.theta ** -(even / self.rotated))
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        turned, rest = x.split((self.rotated, self.head_dim - self.rotated), dim=-1)
        first, second = turned.chunk(2, dim=-1)
        quarter = torch.cat((-second, first), dim=-1)
        turned = turned * angles.cos().to(x.dtype) + quarter * angles.sin().to(x.dtype)
        return torch.cat((turned, rest), dim=-1)


def divide_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From [batch, tokens of this rank, heads, dim] to [batch, all tokens, some heads, dim]."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), dim=2))
    received = all_to_all_single_autograd(parts, None, None, group)
    return received.transpose(0, 1).flatten(1, 2)


def divide_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From [batch, all tokens, some heads, dim] to [batch, tokens of this rank, heads, dim]."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), dim=1))
    received = all_to_all_single_autograd(parts, None, None, group)
    return torch.cat(received.unbind(0), dim=2)


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(
        self, model: ModelSettings, recompute: str, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        hidden, width = model.hidden_size, model.ffn_hidden_size
        heads = model.num_heads + 2 * model.num_kv_heads
        self.recompute = recompute
        self.gated = model.gated_ffn
        self.function = ACTIVATIONS[model.activation]
        self.norm1 = build_norm(model)
        self.qkv = nn.Linear(hidden, heads * model.head_dim, bias=model.qkv_bias)
        self.attention = CausalAttention(model, group)
        self.attention_out = nn.Linear(
            model.num_heads * model.head_dim, hidden, bias=model.linear_bias
        )
        self.norm2 = build_norm(model)
        self.fc1 = nn.Linear(hidden, width * (1 + model.gated_ffn), bias=model.linear_bias)
        self.fc2 = nn.Linear(width, hidden, bias=model.linear_bias)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "full":
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        qkv = self.product(self.qkv, self.norm1, x)
        x = x + self.dropout(self.attention_out(self.attention(qkv)))
        inner = self.product(self.fc1, self.norm2, x)
        return x + self.dropout(self.product(self.fc2, self.activate, inner))

    def product(self, linear: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns linear(function(x)).

        Selective recompute runs `function` again in the backward pass, which stops before the
        product, whose result is not needed there.
        """
        if self.recompute == "selective":
            return checkpoint(lambda x: linear(function(x)), x, use_reentrant=False)
        return linear(function(x))

    def activate(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.function(x)
        gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)  # ranks divide whole pairs
        return self.function(gate) * up


class OutputHead(nn.Module):
    """The last norm and the product with the vocabulary."""

    def __init__(self, model: ModelSettings) -> None:
        super().__init__()
        self.norm = build_norm(model)
        self.lm_head = nn.Linear(model.hidden_size, model.padded_vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


class ModelStage(nn.Module):
    """The layers of a pipeline stage; all of the model without a pipeline."""

    def __init__(
        self,
        embedding: InputEmbedding | None,
        blocks: dict[str, TransformerBlock],
        head: OutputHead | None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleDict(blocks)  # named by their number in the model
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


@torch.no_grad()
def init_weights(layer: nn.Module, seed: int) -> None:
    """Fills matrices with normal values; the same seed gives the same values on every mesh."""
    torch.manual_seed(seed)
    for module in layer.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
