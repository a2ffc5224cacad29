"""Tensors in use order, packed into chunks of one element count (EQUATIONS O1)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sized:
    """A tensor as one rank of a copy of the model has it, by name `block3.qkv.weight`."""

    name: str
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each tensor lies: in which chunk, and how many elements from its beginning.

    ranks: data-parallel ranks, of which each owns one chunk of every `ranks` in a row, a communication group
    num_chunks: with those that only fill the last group up
    """

    chunk_elements: int
    ranks: int
    tensors: tuple[Sized, ...]
    chunk_of: tuple[int, ...]
    offset_of: tuple[int, ...]
    num_chunks: int

    @property
    def num_groups(self) -> int:
        return self.num_chunks // self.ranks

    @property
    def used_elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def utilisation(self) -> float:
        """Used elements of those that all chunks have."""
        return self.used_elements / (self.num_chunks * self.chunk_elements)
