"""Tensors in use order, packed into chunks of one element count (EQUATIONS O1)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from costmodels.sharding import Sharding
from profiles.errors import ConfigError
from profiles.model import LayerClass


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


def block_tensors(layer: LayerClass, sharding: Sharding) -> tuple[Sized, ...]:
    """The parameters of a layer in use order, as one tensor-parallel rank has them, by name `qkv.weight`."""
    return tuple(
        Sized(f"{operator.name}.{parameter.name}", math.prod(sharding.parameter_shape(operator, parameter)))
        for operator in layer.operators for parameter in operator.parameters)


def pack(tensors: Sequence[Sized], chunk_elements: int, ranks: int = 1) -> Layout:
    """Each tensor at the next place, in the next chunk where what is left of this one is too small for it; none is split.

    The last communication group is filled up to `ranks` chunks. Raises ConfigError: a tensor is larger than a chunk, or there is none.
    """
    if not tensors:
        raise ConfigError("no tensors to lay out in chunks")
    largest = max(tensors, key=lambda tensor: tensor.elements)
    if largest.elements > chunk_elements:
        raise ConfigError(f"{largest.name} has {largest.elements} elements, a chunk {chunk_elements}", hint="choose larger chunks")
    chunk, filled, places = 0, 0, []
    for tensor in tensors:
        if filled + tensor.elements > chunk_elements:
            chunk, filled = chunk + 1, 0
        places.append((chunk, filled))
        filled += tensor.elements
    chunk_of, offset_of = zip(*places, strict=True)
    return Layout(
        chunk_elements=chunk_elements, ranks=ranks, tensors=tuple(tensors), chunk_of=chunk_of, offset_of=offset_of,
        num_chunks=whole_groups(chunk + 1, ranks))


def whole_groups(num_chunks: int, ranks: int) -> int:
    """As many chunks, with those that fill the last communication group up."""
    return -(-num_chunks // ranks) * ranks


@lru_cache(maxsize=1024)
def first_tensors(block: tuple[int, ...], num_blocks: int, chunk_elements: int) -> tuple[int, ...]:
    """With which tensor each chunk begins when `num_blocks` blocks of tensors of `block` elements each are packed, as `pack` does.

    Tensors are counted through all blocks. How many go into a chunk depends only on which of a block the first is.
    """
    if max(block) > chunk_elements:
        raise ConfigError(f"a tensor has {max(block)} elements, a chunk {chunk_elements}", hint="choose larger chunks")
    ends, per_block, taken = (0, *accumulate(block)), len(block), []
    for first in range(per_block):
        blocks, rest = divmod(ends[first] + chunk_elements, ends[-1])
        taken.append(blocks * per_block + bisect_right(ends, rest) - 1 - first)
    starts, first = [], 0
    while first < num_blocks * per_block:
        starts.append(first)
        first += taken[first % per_block]
    return tuple(starts)


@lru_cache(maxsize=1024)
def chunks_after(block: tuple[int, ...], num_blocks: int, chunk_elements: int, ranks: int = 1) -> tuple[int, ...]:
    """By x = 0 .. `num_blocks`, the chunks of x equal blocks that have one home, with those that fill the last group up.

    Every run of blocks with one home is packed from a chunk's beginning, so that x counts blocks of any run. O(blocks + chunks).
    """
    starts = first_tensors(block, num_blocks, chunk_elements)
    counts, begun = [0], 0
    for end in range(len(block), num_blocks * len(block) + 1, len(block)):
        while begun < len(starts) and starts[begun] < end:
            begun += 1
        counts.append(whole_groups(begun, ranks))
    return tuple(counts)
