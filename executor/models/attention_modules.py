"""The attention of a described model as modules: norms and positions of queries and keys, kernel.

A tensor has the features of heads by groups of keys, so that a tensor-parallel shard holds whole
groups: [kv groups, queries of the group + key (+ value), head_dim]. Latent attention has as many
groups as heads. Plain causal attention is torch's `scaled_dot_product_attention`; windows, parts of
sequences, sinks, soft caps and values of another width run by blocks of scores
(executor/context/context_attention.py), on one rank as on several.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.executor.context.context_attention import Context, KeysRead, attend_alone
from parplan.executor.models.operators import rms_norm
from parplan.executor.models.run_again import run_again
from parplan.executor.tensors import local
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.operator_graph import Operator
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.stack import AttentionKernel

ALIKE = BlockRun()  # a block of a model whose blocks are alike
_LENGTHS = "document_lengths"  # attribute of a tensor of places, once they are known


def groups_of(x: Tensor, model: ModelSpec, *, values: bool) -> Tensor:
    """Views [batch, sequence, features] by head; `values` says whether it has those.

    Returns [batch, sequence, kv groups, queries per group + key (+ value + gates), head_dim], with
    as many gates of the output as queries, where the model has them.
    """
    queries = model.num_heads // model.num_kv_heads
    behind = (1 + queries * model.attention_gate) if values else 0
    return x.unflatten(-1, (-1, queries + 1 + behind, model.head_dim))


class _Positioned(nn.Module):
    """An operator that needs the positions of this rank's tokens."""

    on_shards = True
    context: Context | None = None

    def __init__(self, model: ModelSpec, block: BlockRun = ALIKE) -> None:
        super().__init__()
        self.model = model
        in_window = block.window and model.functions.window_rope_theta
        self.theta = in_window or model.rope_theta

    def tables(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of [sequence, 1, 1, size], computed in fp32."""
        if self.context is None:
            positions = torch.arange(x.shape[1], device=x.device)
        else:
            positions = self.context.positions(x.shape[1], x.device)
        even = torch.arange(0, size, 2, device=x.device, dtype=torch.float32)
        angles = torch.outer(positions.float(), self.theta ** -(even / size))
        angles = torch.cat((angles, angles), dim=-1)[:, None, None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Rotary(_Positioned):
    """Rotates the first `rotary_fraction` of queries and keys (rotate-half, as Llama and NeoX).

    gives_values  whether its output has the values of its input
    """

    def __init__(
        self, model: ModelSpec, block: BlockRun = ALIKE, operator: Operator | None = None
    ) -> None:
        super().__init__(model, block)
        read = gives = model.q_size + 2 * model.kv_size
        if operator is not None:
            read = operator.inputs[0].dims[-1].size
            gives = operator.outputs[0].dims[-1].size
        self.reads_values = read > model.q_size + model.kv_size
        self.gives_values = gives > model.q_size + model.kv_size

    def forward(self, x: Tensor) -> Tensor:
        size = int(self.model.head_dim * self.model.rotary_fraction)
        groups = groups_of(x, self.model, values=self.reads_values)
        first_value = self.model.num_heads // self.model.num_kv_heads + 1
        queries_keys = groups[..., :first_value, :]
        rotated, rest = queries_keys.split((size, self.model.head_dim - size), dim=-1)
        queries_keys = torch.cat((_turned(rotated, *self.tables(x, size)), rest), dim=-1)
        if self.gives_values:
            queries_keys = torch.cat((queries_keys, groups[..., first_value:, :]), dim=-2)
        return queries_keys.flatten(2)


class LatentRotary(_Positioned):
    """Joins the parts of queries and keys of latent attention, and rotates those with positions.

    All heads of a key share the rotated part. Returns [heads, query + key, head_dim].
    """

    shared_inputs = {1: 2}  # noqa: RUF012

    def forward(self, query: Tensor, down: Tensor, kv: Tensor) -> Tensor:
        latent = self.model.latent
        assert latent is not None, "the operator is one of latent attention"
        nope, rope = latent.nope_head_dim, latent.rope_head_dim
        cos, sin = (table.squeeze(1) for table in self.tables(query, rope))
        plain, turned = query.unflatten(-1, (-1, self.model.head_dim)).split((nope, rope), dim=-1)
        query = torch.cat((plain, _turned(turned, cos, sin)), dim=-1)
        shared = _turned(down[..., None, latent.kv_rank :], cos, sin)
        key = kv.unflatten(-1, (-1, nope + latent.value_head_dim))[..., :nope]
        key = torch.cat((key, shared.expand(*key.shape[:-1], rope)), dim=-1)
        return torch.stack((query, key), dim=-2).flatten(2)


class QueryKeyNorm(nn.Module):
    """The norms of queries and keys, with a weight of each if the operator has them.

    whole  they are over all heads, else over each
    """

    on_shards = True

    def __init__(self, model: ModelSpec, operator: Operator) -> None:
        super().__init__()
        self.model = model
        self.reads_values = operator.inputs[0].dims[-1].size > model.q_size + model.kv_size
        self.whole = operator.parallel_dim is None
        shapes = {parameter.name: parameter.shape for parameter in operator.parameters}
        for name in ("q_weight", "k_weight"):
            weight = nn.Parameter(torch.empty(shapes[name])) if name in shapes else None
            self.register_parameter(name, weight)

    def forward(self, x: Tensor) -> Tensor:
        groups = groups_of(x, self.model, values=self.reads_values)
        keys_at = self.model.num_heads // self.model.num_kv_heads
        query = self._normed(groups[..., :keys_at, :], self.q_weight)
        key = self._normed(groups[..., keys_at : keys_at + 1, :], self.k_weight)
        return torch.cat((query, key), dim=-2).flatten(2)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        weight = None if weight is None else local(weight)
        if not self.whole:
            return rms_norm(x, weight, self.model.norm_epsilon)
        return rms_norm(x.flatten(-3), weight, self.model.norm_epsilon).view(x.shape)


class AttentionGate(nn.Module):
    """Multiplies the output of attention by the sigmoid of its gates, which lie behind values."""

    on_shards = True

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model

    def forward(self, context: Tensor, qkv: Tensor) -> Tensor:
        return run_again(self._run, context, qkv)

    def _run(self, context: Tensor, qkv: Tensor) -> Tensor:
        first = self.model.num_heads // self.model.num_kv_heads + 2
        gates = groups_of(qkv, self.model, values=True)[..., first:, :]
        return context * gates.flatten(2).sigmoid()


class SelfAttention(nn.Module):
    """Grouped-query attention over the heads on this rank.

    causal    False: a token reads all tokens, or all of its window, a part of the sequence
    context   the ranks that divide every sequence; None where this rank has whole sequences
    """

    on_shards = True
    context: Context | None = None

    def __init__(
        self,
        model: ModelSpec,
        kernel: AttentionKernel,
        block: BlockRun = ALIKE,
        longest: int = 0,
        *,
        causal: bool = True,
    ) -> None:
        """`longest` is the number of tokens of the longest document, 0 where it is not known."""
        super().__init__()
        self.model = model
        self.kernel = kernel
        self.causal = causal
        self.dropout = model.dropout
        self.reading = KeysRead(
            window=block.window,
            chunk=block.chunk,
            factor=model.functions.score_factor or None,
            soft_cap=model.attention_soft_cap,
            longest=longest,
        )
        self.sinks = nn.Parameter(torch.empty(model.num_heads)) if model.sinks else None

    def forward(self, *read: Tensor) -> Tensor:
        """Returns [batch, sequence, features] of the tensors that `split` reads.

        The places of tokens in their documents may follow them, [batch, sequence] of integers of
        whole sequences: queries then stay within documents.
        """
        places = None
        if not read[-1].is_floating_point():
            *read, places = read
        if not self.causal:
            return self._in_parts(*read)
        run = self._flash if self.kernel is AttentionKernel.FLASH else self._unfused
        return run(*self.split(*read), places).transpose(1, 2).flatten(2)

    def _in_parts(self, x: Tensor) -> Tensor:
        """Returns the output where every token reads all of its window, or of the sequence."""
        length = x.shape[1]
        parts = x.unflatten(1, (-1, self.reading.window or length)).flatten(0, 1)
        run = self._flash if self.kernel is AttentionKernel.FLASH else self._unfused
        out = run(*self.split(parts), None).transpose(1, 2).flatten(2)
        return out.view(x.shape[0], length, -1)

    def split(self, *read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values as the kernel saves them.

        read   queries, keys and values in one tensor; or queries and keys, and a tensor with values
        Each is [batch, heads, sequence, features].
        """
        parts = self._of_heads(*read)
        return parts if self.context is None else self.context.enter(*parts)

    def _of_heads(self, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, ...]:
        groups = groups_of(first, self.model, values=second is None)
        keys_at = self.model.num_heads // self.model.num_kv_heads
        query = groups[..., :keys_at, :].flatten(2, 3).transpose(1, 2)
        key = groups[..., keys_at, :].transpose(1, 2)
        value = (groups[..., keys_at + 1, :] if second is None else self._values(second)).transpose(
            1, 2
        )
        if self.kernel is AttentionKernel.UNFUSED:
            # repeat_interleave copies keys and values, the batched product would copy the queries
            return (
                query.contiguous(),
                key.repeat_interleave(keys_at, dim=1),
                value.repeat_interleave(keys_at, dim=1),
            )
        if keys_at > 1 and groups.shape[2] > 1:
            # the queries of several groups are one copy; views of the keys would save all of qkv
            key = key.contiguous()
            value = value.contiguous() if second is None else value
        return query, key, value

    def _values(self, x: Tensor) -> Tensor:
        """Returns the values of a tensor that is saved whole, by head."""
        latent = self.model.latent
        if latent is None:
            keys_at = self.model.num_heads // self.model.num_kv_heads
            return groups_of(x, self.model, values=True)[..., keys_at + 1, :]
        width = latent.nope_head_dim + latent.value_head_dim
        return x.unflatten(-1, (-1, width))[..., latent.nope_head_dim :]

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, places: Tensor | None) -> Tensor:
        sinks, reading = None if self.sinks is None else local(self.sinks), self.reading
        if places is not None:
            reading = replace(reading, documents=document_lengths(places))
        if self.context is not None:
            return self.context.attend(query, key, value, reading, sinks)
        unlike_widths = query.shape[-1] != value.shape[-1]
        if places is not None or self._by_blocks(query.shape[2], unlike_widths):
            return attend_alone(query, key, value, reading, sinks)
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=self.causal,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.reading.factor,
            enable_gqa=key.shape[1] != query.shape[1],
        )

    def _by_blocks(self, length: int, unlike_widths: bool) -> bool:
        """Returns whether torch has no kernel for this attention over whole sequences."""
        if not self.causal:
            return False
        reach = self.reading.window or self.reading.chunk or length
        return (
            reach < length or unlike_widths or self.sinks is not None or self.reading.soft_cap > 0.0
        )

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, places: Tensor | None) -> Tensor:
        weights = self.weights(query @ key.transpose(-2, -1), places)
        weights = functional.dropout(weights, self.dropout, self.training)
        return weights @ value

    def weights(self, products: Tensor, places: Tensor | None = None) -> Tensor:
        """Returns the masked softmax of the products of queries and keys.

        Both are [batch, heads, sequence, sequence]; `places` are those of tokens in documents.
        """
        cap = self.reading.soft_cap
        scores = products * (self.reading.factor or self.model.head_dim**-0.5)
        if cap:
            scores = cap * (scores / cap).tanh()
        scores = scores.masked_fill(self._unread(scores, places), float("-inf"))
        if self.sinks is None:
            return scores.softmax(dim=-1)
        sinks = local(self.sinks)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]

    def _unread(self, scores: Tensor, places: Tensor | None) -> Tensor:
        """Returns which keys a query does not read."""
        if not self.causal:
            return scores.new_zeros(1, dtype=torch.bool)
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        distance = tokens[:, None] - tokens
        unread = distance < 0
        if self.reading.window:
            unread |= distance >= self.reading.window
        since = tokens[:, None] if places is None else places[:, None, :, None]
        if self.reading.chunk:
            unread = unread | (distance > since % self.reading.chunk)
        return unread if places is None else unread | (distance > since)


class CrossAttention(SelfAttention):
    """Attention of the tokens of the text to those of a tower, of the heads on this rank."""

    def __init__(self, model: ModelSpec, kernel: AttentionKernel) -> None:
        super().__init__(model, kernel, causal=False)

    def forward(self, *read: Tensor) -> Tensor:
        """Returns [batch, sequence, features] of queries, and of keys and values of the tower."""
        run = self._flash if self.kernel is AttentionKernel.FLASH else self._unfused
        return run(*self.split(*read), None).transpose(1, 2).flatten(2)

    def _of_heads(self, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, ...]:
        assert second is not None, "keys and values are of another tensor"
        query = first.unflatten(-1, (-1, self.model.head_dim)).transpose(1, 2)
        both = second.unflatten(-1, (-1, 2, self.model.head_dim))
        key, value = both.transpose(1, 2).unbind(3)
        return query, key, value


def document_lengths(places: Tensor) -> tuple[tuple[int, ...], ...]:
    """Returns the lengths of the documents of each sequence, whose first tokens have place 0.

    The host waits for a copy of them once for a tensor, which all layers of a stage read.
    """
    known: tuple[tuple[int, ...], ...] | None = getattr(places, _LENGTHS, None)
    if known is None:
        length = places.shape[1]
        begins = (places == 0).cpu()
        starts = [[*row.nonzero().flatten().tolist(), length] for row in begins]
        known = tuple(tuple(end - start for start, end in pairwise(row)) for row in starts)
        setattr(places, _LENGTHS, known)
    return known
