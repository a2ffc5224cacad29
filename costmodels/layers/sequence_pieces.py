"""The pieces of a sequence that context-parallel ranks hold and read (EQUATIONS T5).

A sequence is cut into 2 cp pieces, and rank i holds pieces i and 2 cp - 1 - i. Under a causal mask
the later piece reads as many more keys as the earlier one reads fewer, so that all ranks compute
equally much.
"""

from __future__ import annotations

from functools import lru_cache

Numbers = tuple[int, ...]  # of pieces, in their order in the sequence


def pieces(rank: int, ranks: int) -> Numbers:
    """Returns the numbers of the two pieces of a rank."""
    return rank, 2 * ranks - 1 - rank


def reached_pieces(window: int, length: int) -> int:
    """Returns the pieces of a length before its own that a query reads from."""
    return -(-(window - 1) // length)


def read_from_others(rank: int, ranks: int, length: int, window: int) -> Numbers:
    """Returns the pieces of other ranks that the windows of a rank's queries reach into."""
    reach = reached_pieces(window, length)
    held = pieces(rank, ranks)
    read = {key for query in held for key in range(max(0, query - reach), query)}
    return tuple(sorted(read.difference(held)))


@lru_cache(maxsize=256)
def most_read_from_others(ranks: int, length: int, window: int) -> int:
    """Returns the pieces of others that the rank reads whose windows reach into the most."""
    return max(len(read_from_others(rank, ranks, length, window)) for rank in range(ranks))
