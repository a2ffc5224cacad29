"""Cuts by merging: neighbours join as long as that narrows what they hand on.

At first every run of operators between two legal cuts is a part. The width of a part is the bytes
that it reads from before and hands to later operators; values that only pass by do not count. Two
neighbours may join where their part is narrower than the wider of them. The pair that gains most
joins first, until no pair gains. So cuts inside a block, where a tensor is wide, go, and cuts of
equal width stay. The first part counts what it hands on twice, and the last what it reads, because
what the batch and the loss weigh says nothing.

Merak's second partitioner ("nearest min deps", HPDL-Group/Merak at 1593043, Merak/core/fx) merges
by the number of tensors and as long as it does not grow. In a chain of equal cuts that would join
everything, so that here bytes must fall (EQUATIONS G2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache

import numpy as np

from parplan.planner.traced.boundary_values import Values


def merged_neighbours(values: Values, cuts: Sequence[int], splits: Collection[int]) -> list[int]:
    """Returns the bounds of the parts: 0, the cuts that stay, and the number of operators.

    Parts on both sides of a split never join.
    """
    size = len(values.model.operators)
    bounds = [0, *cuts, size]
    width = _width_of(values)

    def gain(inner: int) -> float:
        """Bytes by which a part is narrower than the wider of the two that a bound divides."""
        first, cut, end = bounds[inner - 1 : inner + 2]
        if cut in splits:
            return 0.0
        return max(width(first, cut), width(cut, end)) - width(first, end)

    gains = [0.0, *(gain(inner) for inner in range(1, len(bounds) - 1)), 0.0]
    while max(gains) > 0:
        inner = gains.index(max(gains))
        del bounds[inner], gains[inner]
        for beside in (inner - 1, inner):
            if 0 < beside < len(bounds) - 1:
                gains[beside] = gain(beside)
    return bounds


class _Edges:
    """Values and their readers as arrays, one row a reader."""

    def __init__(self, values: Values) -> None:
        rows = [
            (number, value.maker, reader, value.tensor.num_bytes)
            for number, value in enumerate(values.by_name.values())
            for reader in value.readers
        ]
        columns = np.array(rows, np.int64).reshape(-1, 4).T
        self.value, self.maker, self.reader, self.num_bytes = columns

    def bytes_of(self, first: int, end: int, *, read: bool) -> float:
        """Bytes that operators [first, end) read from before, or else hand to later ones."""
        if read:
            rows = (self.maker < first) & (first <= self.reader) & (self.reader < end)
        else:
            rows = (first <= self.maker) & (self.maker < end) & (end <= self.reader)
        _, once = np.unique(self.value[rows], return_index=True)
        return float(self.num_bytes[rows][once].sum())


def _width_of(values: Values) -> Callable[[int, int], float]:
    edges, size = _Edges(values), len(values.model.operators)

    @cache
    def width(first: int, end: int) -> float:
        if first == 0 and end == size:
            return float("inf")  # nothing is left to hand on, which is no gain
        read = edges.bytes_of(first, end, read=True)
        given = edges.bytes_of(first, end, read=False)
        if first == 0:
            return 2 * given
        return read + (read if end == size else given)

    return width
