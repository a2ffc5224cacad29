"""Carriers bring keys and values to the ranks that divide a sequence, and gradients back.

Keys and values are one tensor, [batch, kv heads, tokens, features of a key and of a value]. A
carrier yields them with the numbers of their pieces as they arrive. In the backward pass it carries
them again instead of keeping them, and adds the gradients of a piece on the rank that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parplan.costmodels.layers.sequence_pieces import Numbers, pieces, read_from_others
from parplan.executor.context.zigzag import by_rank, in_order
from parplan.executor.tensors import GATHER, SCATTER

GradientOf = Callable[[Numbers, Tensor], Tensor]
TOKENS = 2  # the dim of tokens


class Carrier(Protocol):
    """Carries keys and values between the ranks of a group."""

    held: Numbers

    def passes(self, own: Tensor) -> Iterator[tuple[Numbers, Tensor]]:
        """Yields all keys and values that this rank's queries read. Collective."""

    def returned(self, own: Tensor, gradient_of: GradientOf) -> Tensor:
        """Returns the gradient of `own` keys and values, summed over all ranks. Collective.

        gradient_of   returns the gradient of keys and values by this rank's queries in fp32
        """


class Alone:
    """One rank that has whole sequences: nothing is carried."""

    held: Numbers = pieces(0, 1)

    def passes(self, own: Tensor) -> Iterator[tuple[Numbers, Tensor]]:
        yield self.held, own

    def returned(self, own: Tensor, gradient_of: GradientOf) -> Tensor:
        return gradient_of(self.held, own)


class WholeSequences(Alone):
    """One rank that has whole sequences as one piece, of any length."""

    held: Numbers = (0,)


@dataclass(frozen=True, slots=True)
class _Shift:
    """A tensor on its way from the rank before; `sent` lives as long."""

    received: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class Ring:
    """Every rank sends to the next one what it has, while it computes on it.

    A message of keys and values comes from each other rank, forward and backward; and one of
    gradients in the backward pass, which begins at the rank after that of the keys.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.held = pieces(self.rank, self.ranks)

    def passes(self, own: Tensor) -> Iterator[tuple[Numbers, Tensor]]:
        for step in range(self.ranks):
            shift = self._shift(own) if step < self.ranks - 1 else None
            yield pieces((self.rank - step) % self.ranks, self.ranks), own
            if shift is not None:
                own = shift.wait()

    def returned(self, own: Tensor, gradient_of: GradientOf) -> Tensor:
        shift = None
        for step, (numbers, held) in enumerate(self.passes(own)):
            gradient = gradient_of(numbers, held)
            if step == 0:
                total = gradient
                continue
            if shift is not None:
                gradient += shift.wait()
            shift = self._shift(gradient.to(own.dtype))
        assert shift is not None, "a ring has two ranks or more"
        return total + shift.wait()

    def _shift(self, tensor: Tensor) -> _Shift:
        received = torch.empty_like(tensor)
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
            ]
        )
        return _Shift(received, tensor, works)


class Gather:
    """Every rank gathers all keys and values, and their gradients are reduce-scattered."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.held = pieces(dist.get_rank(group), self.ranks)

    def passes(self, own: Tensor) -> Iterator[tuple[Numbers, Tensor]]:
        gathered = own.new_empty((self.ranks * len(own), *own.shape[1:]))
        GATHER(gathered, own, group=self.group)
        by_ranks = gathered.unflatten(0, (self.ranks, -1))
        yield tuple(range(2 * self.ranks)), in_order(by_ranks, TOKENS)

    def returned(self, own: Tensor, gradient_of: GradientOf) -> Tensor:
        ((numbers, everything),) = self.passes(own)
        summands = by_rank(gradient_of(numbers, everything), self.ranks, TOKENS).to(own.dtype)
        total = torch.empty_like(own)
        SCATTER(total, summands.flatten(0, 1), group=self.group)
        return total


class Window:
    """Every rank sends its pieces to those ranks alone whose queries' windows reach into them.

    The gradients go back the same way.
    """

    def __init__(self, group: dist.ProcessGroup, length: int, window: int) -> None:
        self.group = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.held = pieces(rank, ranks)
        read = [read_from_others(each, ranks, length, window) for each in range(ranks)]
        holders = [pieces(each, ranks) for each in range(ranks)]
        self.sent = [[number for number in each if number in self.held] for each in read]
        self.received = [[number for number in each if number in read[rank]] for each in holders]

    def passes(self, own: Tensor) -> Iterator[tuple[Numbers, Tensor]]:
        by_number = dict(zip(self.held, own.chunk(2, TOKENS), strict=True))
        parts = [by_number[number] for numbers in self.sent for number in numbers]
        received, work = self._exchange(_stacked(parts, own), self.sent, self.received)
        yield self.held, own
        work.wait()
        in_hand = dict(zip(_flat(self.received), received, strict=True))
        if in_hand:
            numbers = tuple(sorted(in_hand))
            yield numbers, torch.cat([in_hand[number] for number in numbers], TOKENS)

    def returned(self, own: Tensor, gradient_of: GradientOf) -> Tensor:
        gradients = [gradient_of(numbers, held) for numbers, held in self.passes(own)]
        total, numbers = gradients[0], sorted(_flat(self.received))
        by_number = {}
        if numbers:
            parts = gradients[1].to(own.dtype).chunk(len(numbers), TOKENS)
            by_number = dict(zip(numbers, parts, strict=True))
        parts = [by_number[number] for number in _flat(self.received)]
        received, work = self._exchange(_stacked(parts, own), self.received, self.sent)
        work.wait()
        halves = dict(zip(self.held, total.chunk(2, TOKENS), strict=True))
        for number, part in zip(_flat(self.sent), received, strict=True):
            halves[number] += part
        return total

    def _exchange(
        self, parts: Tensor, sent: list[list[int]], received: list[list[int]]
    ) -> tuple[Tensor, dist.Work]:
        """Returns the pieces that come from each rank for those that go to each."""
        out = parts.new_empty((len(_flat(received)), *parts.shape[1:]))
        work = dist.all_to_all_single(
            out,
            parts,
            [len(numbers) for numbers in received],
            [len(numbers) for numbers in sent],
            group=self.group,
            async_op=True,
        )
        return out, work


def _stacked(parts: Sequence[Tensor], own: Tensor) -> Tensor:
    """Returns pieces as one tensor, which has none if there are none."""
    if parts:
        return torch.stack(parts)
    batch, heads, tokens, features = own.shape
    return own.new_empty((0, batch, heads, tokens // 2, features))


def _flat(numbers: list[list[int]]) -> list[int]:
    return [number for each in numbers for number in each]
