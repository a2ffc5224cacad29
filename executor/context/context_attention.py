"""Causal attention over the ranks that divide a sequence.

The ranks of a context group run one of four forms (`ContextForm`). Keys and values are carried to
the queries, block by block, and the blocks are merged. Where tokens are exchanged for heads,
queries, keys and values go through torch's differentiable all-to-all before it, and the output goes
back; the two-level form does both. The output is kept by tokens alone, as the next operator reads
it, and comes by heads with its gradient. One rank alone runs the blocks of a window in the same
way.

A sink is one more score of every query, whose value is zero: it scales the output of all blocks,
and its gradient follows from the output and its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from parplan.costmodels.layers.sequence_pieces import Numbers, pieces
from parplan.executor.context.block_kernels import Attended, Scores, attend, attend_backward
from parplan.executor.context.carriers import (
    TOKENS,
    Alone,
    Carrier,
    Gather,
    Ring,
    WholeSequences,
    Window,
)
from parplan.executor.context.zigzag import (
    ScoreBlock,
    blocks,
    blocks_of_part,
    by_rank,
    in_order,
)
from parplan.profiles.stack import ContextForm

Inputs = tuple[Tensor, Tensor, Tensor]  # query, key and value


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysRead:
    """The keys that the queries read, and their scores.

    window     tokens that a query reads, itself included; 0 for all before it
    chunk      tokens of the parts of a sequence that queries stay within; 0 for none
    factor     the factor of the scores; None: head_dim^-1/2
    soft_cap   the bound of the scores; 0 for none
    documents  lengths of the documents of each sequence, which queries stay within; empty where
               they read whole sequences
    longest    tokens of the longest document that is planned; 0 where that is not known
    """

    window: int = 0
    chunk: int = 0
    factor: float | None = None
    soft_cap: float = 0.0
    documents: tuple[tuple[int, ...], ...] = ()
    longest: int = 0

    @property
    def reach(self) -> int:
        """Tokens that a query reads at most, with itself; 0: all."""
        longest = self.longest and max(self.longest, *map(max, self.documents), 0)
        return min((each for each in (self.window, self.chunk, longest) if each), default=0)

    def blocks(self, queries: Numbers, keys: Numbers, length: int) -> Iterator[ScoreBlock]:
        """Yields the blocks of scores of pieces of `length` tokens."""
        if not self.documents and not self.chunk:
            yield from blocks(queries, keys, length, self.window)
            return
        for row, lengths in enumerate(self.documents or (((queries[-1] + 1) * length,),)):
            batch = slice(row, row + 1) if self.documents else slice(None)
            for part in self._parts(lengths):
                for block in blocks_of_part(part, queries, keys, length, self.window):
                    yield replace(block, batch=batch)

    def _parts(self, lengths: tuple[int, ...]) -> Iterator[range]:
        """Yields the tokens of every document, or of its parts."""
        for stop, tokens in zip(accumulate(lengths), lengths, strict=True):
            for start in range(stop - tokens, stop, self.chunk or tokens):
                yield range(start, min(start + (self.chunk or tokens), stop))

    def scores(self, block: ScoreBlock, query: Tensor) -> Scores:
        mask = block.mask(self.window, query)
        return Scores(causal=block.causal, mask=mask, factor=self.factor, soft_cap=self.soft_cap)


CAUSAL = KeysRead()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """This rank among those that divide every sequence with it.

    rank, ranks   its number and theirs
    form          the form of their attention
    heads         neighbours that exchange tokens for heads, or None
    around        ranks between which keys and values are carried, or None; with `heads` each of
                  them stands for its neighbours
    """

    rank: int
    ranks: int
    form: ContextForm
    heads: dist.ProcessGroup | None = None
    around: dist.ProcessGroup | None = None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(group for group in (self.heads, self.around) if group is not None)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the positions in the sequence of this rank's `length` tokens."""
        piece = torch.arange(length // 2, device=device)
        return torch.cat([number * (length // 2) + piece for number in self.pieces])

    @property
    def pieces(self) -> Numbers:
        """The numbers of the two pieces of a sequence that this rank has."""
        return pieces(self.rank, self.ranks)

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
        """Returns queries, keys and values as attention saves them.

        Each is [batch, heads, tokens, features] of this rank's tokens; where ranks exchange tokens
        for heads, it is of all their tokens and of this rank's share of the heads.
        """
        if self.heads is None:
            return query, key, value
        key, value = _for_each_rank(key, self.heads), _for_each_rank(value, self.heads)
        query, key, value = _to_heads((query, key, value), self.heads)
        return query, key, value

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        reading: KeysRead = CAUSAL,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns causal attention over whole sequences, for this rank's tokens and all heads.

        query, key, value   as `enter` returns them
        sinks               one score of each head
        """
        carrier = self._carrier(query.shape[TOKENS] // 2, reading.reach)
        if sinks is not None and self.heads is not None:
            first = dist.get_rank(self.heads) * query.shape[1]
            sinks = sinks[first : first + query.shape[1]]
        out: Tensor = _Attention.apply(query, key, value, sinks, carrier, self.heads, reading)
        return out

    def _carrier(self, length: int, reach: int) -> Carrier:
        if self.around is None:
            return Alone()
        if 0 < reach < 2 * length * dist.get_world_size(self.around):
            return Window(self.around, length, reach)
        return (Gather if self.form is ContextForm.ALL_GATHER else Ring)(self.around)


def attend_alone(
    query: Tensor, key: Tensor, value: Tensor, reading: KeysRead, sinks: Tensor | None
) -> Tensor:
    """Returns causal attention of a rank that has whole sequences."""
    out: Tensor = _Attention.apply(query, key, value, sinks, WholeSequences(), None, reading)
    return out


class _Attention(torch.autograd.Function):
    """Attention of this rank's queries over the keys and values that a carrier brings.

    Its output leaves the ranks of `heads`, if there are any, by tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        carrier: Carrier,
        heads: dist.ProcessGroup | None,
        reading: KeysRead,
    ) -> Tensor:
        merged = _Merged(query, value.shape[-1])
        for numbers, held in carrier.passes(torch.cat((key, value), dim=-1)):
            for block in reading.blocks(carrier.held, numbers, _length(query, carrier)):
                inputs = _inputs(block, query, held)
                merged.add(block, *attend(*inputs, reading.scores(block, query)))
        if sinks is not None:
            merged.add_sinks(sinks)
        out = merged.out.to(query.dtype)
        out = out if heads is None else _to_tokens(out, heads)
        given = () if sinks is None else (sinks,)
        ctx.save_for_backward(query, key, value, out, merged.logsumexp, *given)
        ctx.how = carrier, heads, reading
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp, *sinks = ctx.saved_tensors
        carrier, heads, reading = ctx.how
        if heads is not None:
            gradient, out = _to_heads((gradient, out), heads)
        by_query = torch.zeros_like(query, dtype=torch.float32)

        def gradient_of(numbers: Numbers, held: Tensor) -> Tensor:
            by_held = torch.zeros_like(held, dtype=torch.float32)
            by_key, by_value = by_held.split((key.shape[-1], value.shape[-1]), dim=-1)
            for block in reading.blocks(carrier.held, numbers, _length(query, carrier)):
                rows = (block.batch, slice(None), block.queries)
                read = (block.batch, slice(None), block.keys)
                of = Attended(
                    gradient[rows], *_inputs(block, query, held), out[rows], logsumexp[rows]
                )
                gradients = attend_backward(of, reading.scores(block, query))
                by_query[rows] += gradients[0]
                by_key[read] += gradients[1]
                by_value[read] += gradients[2]
            return by_held

        own = torch.cat((key, value), dim=-1)
        by_own = carrier.returned(own, gradient_of).to(key.dtype)
        by_key, by_value = by_own.split((key.shape[-1], value.shape[-1]), dim=-1)
        by_sinks = _by_sinks(sinks[0], gradient, out, logsumexp) if sinks else None
        return by_query.to(query.dtype), by_key, by_value, by_sinks, None, None, None


def _by_sinks(sinks: Tensor, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> Tensor:
    """Returns the gradient of the sinks: -P sum(dO O) over batch and tokens, by head."""
    weights = (sinks.float()[:, None] - logsumexp).exp()
    along = (gradient.float() * out.float()).sum(-1)
    return -(weights * along).sum((0, 2)).to(sinks.dtype)


class _Merged:
    """Output and log-sum-exp over the blocks so far, in fp32.

    The output lies in memory as [batch, tokens, heads, features], as the kernels return it.
    """

    def __init__(self, query: Tensor, features: int) -> None:
        batch, heads, tokens, _ = query.shape
        self.out = query.new_zeros((batch, tokens, heads, features), dtype=torch.float32)
        self.out = self.out.transpose(1, 2)
        self.logsumexp = torch.full(
            (batch, heads, tokens), float("-inf"), dtype=torch.float32, device=query.device
        )

    def add(self, block: ScoreBlock, out: Tensor, logsumexp: Tensor) -> None:
        """Adds the output of a block: a mean over its keys, whose weight is its sum of exps."""
        rows = (block.batch, slice(None), block.queries)
        before = self.logsumexp[rows]
        after = torch.logaddexp(before, logsumexp)
        merged = self.out[rows]
        merged.mul_((before - after).exp().unsqueeze(-1))
        merged.addcmul_(out.float(), (logsumexp - after).exp().unsqueeze(-1))
        before.copy_(after)

    def add_sinks(self, sinks: Tensor) -> None:
        """Adds one score of each head, of a key without a value."""
        after = torch.logaddexp(self.logsumexp, sinks.float()[:, None])
        self.out.mul_((self.logsumexp - after).exp().unsqueeze(-1))
        self.logsumexp = after


def _length(query: Tensor, carrier: Carrier) -> int:
    """Returns the tokens of a piece."""
    return query.shape[TOKENS] // len(carrier.held)


def _inputs(block: ScoreBlock, query: Tensor, held: Tensor) -> Inputs:
    """Returns queries, keys and values of a block."""
    keys_values = held[block.batch, :, block.keys]
    features = query.shape[-1]
    return (
        query[block.batch, :, block.queries],
        keys_values[..., :features],
        keys_values[..., features:],
    )


def _for_each_rank(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Repeats fewer kv heads than ranks, so that a rank has the one that its queries read."""
    repeats = max(1, dist.get_world_size(group) // x.shape[1])
    return x.repeat_interleave(repeats, dim=1) if repeats > 1 else x


def _to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Exchanges tokens for heads: all tokens of the group's ranks, of this rank's heads."""
    ranks = dist.get_world_size(group)
    by_heads = [each.unflatten(1, (ranks, -1)).movedim(1, 0) for each in tensors]
    sent = torch.cat([each.flatten(1) for each in by_heads], dim=1)
    received = all_to_all_single_autograd(sent, None, None, group)
    parts = received.split([each[0].numel() for each in by_heads], dim=1)
    return [
        in_order(part.unflatten(1, each.shape[1:]), TOKENS)
        for part, each in zip(parts, by_heads, strict=True)
    ]


def _to_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges heads for tokens: all heads of this rank's tokens, the inverse of `_to_heads`."""
    by_tokens = by_rank(out, dist.get_world_size(group), TOKENS)
    received = all_to_all_single_autograd(by_tokens.contiguous(), None, None, group)
    # [ranks, batch, heads of a rank, tokens, features] -> tokens outside of heads, as kernels do
    return received.permute(1, 3, 0, 2, 4).flatten(2, 3).contiguous().transpose(1, 2)
