"""The division of a sequence over context-parallel ranks, and the keys that queries read.

`parplan.costmodels.layers.sequence_pieces` says which pieces a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from parplan.costmodels.layers.sequence_pieces import Numbers, pieces, reached_pieces
from parplan.profiles.divisors import divisors


def part_of(whole: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    """Returns the two pieces of a rank, of a tensor whose `dim` is the sequence."""
    size = whole.shape[dim] // (2 * ranks)
    starts = [number * size for number in pieces(rank, ranks)]
    return torch.cat([whole.narrow(dim, start, size) for start in starts], dim)


def in_order(parts: Tensor, dim: int) -> Tensor:
    """Returns the tokens of all ranks in the order of the sequence.

    parts   [ranks, ...], the part of each rank
    dim     the dim of the tokens in a part
    """
    first, second = parts.chunk(2, dim + 1)
    return torch.cat((first, second.flip(0))).movedim(0, dim).flatten(dim, dim + 1)


def by_rank(whole: Tensor, ranks: int, dim: int) -> Tensor:
    """Returns the part of each rank, [ranks, ...]: the inverse of `in_order`."""
    first, second = whole.unflatten(dim, (2 * ranks, -1)).movedim(dim, 0).chunk(2)
    return torch.cat((first, second.flip(0)), dim + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBlock:
    """A rectangle of scores: a range of this rank's queries, and a range of the keys at hand.

    causal   query i of the range reads its first i + 1 keys alone
    lead     None where a query reads all its keys; else the number of tokens from the first key to
             the first query, and a query reads those keys that are in its window
    batch    the sequences of the batch that it is of
    """

    queries: slice
    keys: slice
    batch: slice = field(default_factory=lambda: slice(None))
    causal: bool = False
    lead: int | None = None

    def moved(self, tokens: int, row: int) -> ScoreBlock:
        """Returns the block behind a number of tokens of one sequence of the batch."""
        return replace(
            self,
            queries=slice(self.queries.start + tokens, self.queries.stop + tokens),
            keys=slice(self.keys.start + tokens, self.keys.stop + tokens),
            batch=slice(row, row + 1),
        )

    def mask(self, window: int, like: Tensor) -> Tensor | None:
        """Returns the mask to add to the scores, or None; [queries, keys] in the type of `like`."""
        if self.lead is None:
            return None
        queries = torch.arange(self.queries.stop - self.queries.start, device=like.device)
        keys = torch.arange(self.keys.stop - self.keys.start, device=like.device)
        distance = self.lead + queries[:, None] - keys
        unread = (distance < 0) | (distance >= window)
        return torch.zeros_like(unread, dtype=like.dtype).masked_fill(unread, float("-inf"))


def blocks(queries: Numbers, keys: Numbers, length: int, window: int) -> Iterator[ScoreBlock]:
    """Yields the blocks of scores that pieces of queries have with pieces of keys.

    Each pair of a query and a key that it reads is in one block.

    queries, keys   pieces that lie one after the other in the tensors
    length          tokens of a piece
    window          tokens that a query reads, itself included; 0 for all before it
    """
    if queries == keys and not window:
        whole = slice(0, len(keys) * length)
        yield ScoreBlock(queries=whole, keys=whole, causal=True)
        return
    if window:
        yield from _windowed(queries, keys, length, window)
        return
    for place, query in enumerate(queries):
        yield from _unwindowed(place, query, keys, length)


def _unwindowed(place: int, query: int, keys: Numbers, length: int) -> Iterator[ScoreBlock]:
    """Yields at most two blocks of one piece of queries: with the pieces before it, with itself."""
    rows = slice(place * length, (place + 1) * length)
    before = sum(key < query for key in keys)
    if before:
        yield ScoreBlock(queries=rows, keys=slice(0, before * length))
    if query in keys:
        own = slice(before * length, (before + 1) * length)
        yield ScoreBlock(queries=rows, keys=own, causal=True)


def _windowed(queries: Numbers, keys: Numbers, length: int, window: int) -> Iterator[ScoreBlock]:
    """Yields blocks of tiles, into which pieces are cut so that few scores are computed in vain.

    A tile is the smallest equal part of a piece that is no shorter than a window.
    """
    tile = min(size for size in divisors(length) if size >= min(window, length))
    places = {number: place for place, number in enumerate(_tiles(keys, length // tile))}
    for place, query in enumerate(_tiles(queries, length // tile)):
        for key in range(query - reached_pieces(window, tile), query + 1):
            if key in places:
                block = _of_tiles((place, query), (places[key], key), tile, window)
                if block is not None:
                    yield block


def _tiles(numbers: Numbers, parts: int) -> Iterator[int]:
    """Yields the numbers in the sequence of the tiles of pieces, each cut into `parts`."""
    for number in numbers:
        yield from range(number * parts, (number + 1) * parts)


def _of_tiles(
    query: tuple[int, int], key: tuple[int, int], length: int, window: int
) -> ScoreBlock | None:
    """Returns the block of two tiles, without the queries and the keys that read nothing there.

    query, key   place and number of each tile
    """
    apart = (query[1] - key[1]) * length  # tokens from the first key to the first query
    read = min(length, length - apart + window - 1)  # queries that reach the last key
    skipped = max(0, apart - window + 1)  # keys before the window of the first query
    if read <= 0 or skipped >= length:
        return None
    lead = apart - skipped
    inside = lead + read - 1 < window and lead >= length - skipped - 1
    causal = apart == 0 and window >= length
    return ScoreBlock(
        queries=slice(query[0] * length, query[0] * length + read),
        keys=slice(key[0] * length + skipped, (key[0] + 1) * length),
        causal=causal,
        lead=None if inside or causal else lead,
    )
