"""The division of a sequence over context-parallel ranks, and the keys that queries read.

`parplan.costmodels.layers.sequence_pieces` says which pieces a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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


def blocks_of_part(
    part: range, queries: Numbers, keys: Numbers, length: int, window: int
) -> Iterator[ScoreBlock]:
    """Yields the blocks of scores between the tokens of a part of the sequence, or a document.

    part      its tokens
    The other arguments are those of `blocks`. Blocks with a mask have at most a window of queries.
    """
    for place, query in enumerate(queries):
        first, last = max(part.start, query * length), min(part.stop, (query + 1) * length)
        for start in range(first, last, window or length):
            tile = range(start, min(start + (window or length), last))
            since = max(part.start, start - window + 1) if window else part.start
            yield from _of_tile(place, query, tile, since, keys, length, window)


def _of_tile(
    place: int, query: int, tile: range, since: int, keys: Numbers, length: int, window: int
) -> Iterator[ScoreBlock]:
    """Yields the blocks of some queries of a piece with the keys from token `since` on."""

    def rows(stop: int) -> slice:
        shift = (place - query) * length
        return slice(tile.start + shift, stop + shift)

    masked = window > 0 and tile.stop - since > window
    read = [(at, key) for at, key in enumerate(keys) if key < query and (key + 1) * length > since]
    if read and not masked:
        at, key = read[0]
        start = at * length + max(0, since - key * length)
        yield ScoreBlock(queries=rows(tile.stop), keys=slice(start, (read[-1][0] + 1) * length))
    for at, key in read if masked else ():
        start, stop = max(since, key * length), (key + 1) * length
        reaching = min(tile.stop, stop - 1 + window)
        if reaching > tile.start:
            held = slice(start + (at - key) * length, stop + (at - key) * length)
            yield ScoreBlock(queries=rows(reaching), keys=held, lead=tile.start - start)
    if query in keys:
        start, shift = max(since, query * length), (keys.index(query) - query) * length
        lead = tile.start - start
        yield ScoreBlock(
            queries=rows(tile.stop),
            keys=slice(start + shift, tile.stop + shift),
            causal=not (masked or lead),
            lead=lead if masked or lead else None,
        )


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
