"""Factors: the indices that the axes of a program's tensors run over.

An axis is a row-major product of factors, outermost first, so that [batch, sequence, heads x size]
has the axes (batch), (sequence) and (heads, size). Axes that run over the same index share its
factor. A factor is split when a view shows that it has parts, and two factors become one when an
operator reads them as one index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Axis = tuple[int, ...]  # numbers of factors; an axis of size 0 or 1 has none
Axes = tuple[Axis, ...]


class Factors:
    """Factors by number; `leaves` gives those into which an axis has been split so far."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parts: dict[int, Axis] = {}  # by a factor that was split or joined, its replacement

    def new(self, size: int) -> Axis:
        """Returns an axis over a new index."""
        if size < 2:
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def leaves(self, axis: Iterable[int]) -> Axis:
        """Returns the factors of an axis after all splits and joins."""
        found: list[int] = []
        for factor in axis:
            parts = self._parts.get(factor)
            if parts is None:
                found.append(factor)
            else:
                self._parts[factor] = self.leaves(parts)
                found.extend(self._parts[factor])
        return tuple(found)

    def size(self, factor: int) -> int:
        """The extent of a factor that was neither split nor joined."""
        return self._sizes[factor]

    def extent(self, axis: Iterable[int]) -> int:
        """The extent of an axis."""
        return math.prod(self._sizes[factor] for factor in self.leaves(axis))

    def join(self, first: Axis, second: Axis) -> bool:
        """Makes two axes one index; returns False where their factors do not match."""
        while True:
            pairs = zip(self.leaves(first), self.leaves(second), strict=False)
            unequal = next((pair for pair in pairs if pair[0] != pair[1]), None)
            if unequal is None:
                return self.extent(first) == self.extent(second)
            small, large = sorted(unequal, key=self.size)
            if self.size(small) == self.size(large):
                self._parts[max(unequal)] = (min(unequal),)
            elif self.size(large) % self.size(small) == 0:
                self._split(large, self.size(small))
            else:
                return False

    def cut(self, axis: Iterable[int], sizes: Sequence[int]) -> Axes | None:
        """Cuts an axis into axes of `sizes`; returns None where factors do not divide so."""
        rest = list(self.leaves(axis))
        pieces: list[Axis] = []
        for size in sizes:
            piece: list[int] = []
            while size > 1:
                factor = rest.pop(0)
                if self.size(factor) > size and self.size(factor) % size == 0:
                    factor, *rest = self._replaced([factor, *rest], factor, size)
                if size % self.size(factor):
                    return None
                piece.append(factor)
                size //= self.size(factor)
            pieces.append(tuple(piece))
        return tuple(pieces)

    def _replaced(self, factors: list[int], factor: int, outer: int) -> list[int]:
        self._split(factor, outer)
        return list(self.leaves(factors))

    def _split(self, factor: int, outer: int) -> None:
        """Splits a factor into an outer one of that size and the rest."""
        self._parts[factor] = (*self.new(outer), *self.new(self.size(factor) // outer))
