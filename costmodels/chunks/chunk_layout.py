"""Tensors in use order, packed into communication groups of one element count, of which each rank
owns a chunk (EQUATIONS O1, O5).

    D = 1    a group is a chunk; no tensor is split, and a block begins where the one before it ends
    D > 1    a group is one run of D chunks, which is gathered whole. No tensor is split over two
             groups, but it may cross the border between two chunks of its group: one rank owns a
             part of its elements, the next the others. Every block begins a group, so that a pass
             gathers nothing of another block

PatrickStar packs into chunks, each at least as large as the largest tensor, and D of them in a row
are a group: D times the largest tensor is gathered at once, or, to save that memory, parameters are
broadcast one by one, which sends 10 bytes a parameter instead of 6 (EQUATIONS O5). Here the group
must hold the largest tensor and a chunk is a D-th of it: what is gathered does not grow with D, at
6.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerClass


@dataclass(frozen=True, slots=True)
class SizedTensor:
    """A tensor as one rank of a copy of the model has it, by name `block3.qkv.weight`."""

    name: str
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Where each tensor lies: in which communication group, and how many elements from its
    beginning.

    ranks: data-parallel ranks, of which each owns one chunk of every group, in their order
    """

    group_elements: int
    ranks: int
    tensors: tuple[SizedTensor, ...]
    group_of: tuple[int, ...]
    offset_of: tuple[int, ...]
    num_groups: int

    @property
    def chunk_elements(self) -> int:
        return self.group_elements // self.ranks

    @property
    def num_chunks(self) -> int:
        """Of all ranks."""
        return self.num_groups * self.ranks

    @property
    def used_elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def utilisation(self) -> float:
        """Used elements of those that all groups have."""
        return self.used_elements / (self.num_groups * self.group_elements)


def block_tensors(layer: LayerClass, sharding: Sharding) -> tuple[SizedTensor, ...]:
    """The parameters of a layer in use order, as one tensor-parallel rank has them, by name
    `qkv.weight`.
    """
    return tuple(
        SizedTensor(
            f"{operator.name}.{parameter.name}",
            math.prod(sharding.parameter_shape(operator, parameter)),
        )
        for operator in layer.operators
        for parameter in operator.parameters
    )


def pack(
    tensors: Sequence[SizedTensor], group_elements: int, ranks: int = 1, num_blocks: int = 1
) -> ChunkLayout:
    """Each tensor at the next place, in the next group where what is left of this one is too small
    for it; none is split over two.

    The tensors of `num_blocks` blocks, as many of each. Of several `ranks` every block begins a
    group. Raises ConfigError: a tensor is larger than a group, there is none, or `ranks` do not
    divide a group.
    """
    if not tensors:
        raise ConfigError("no tensors to lay out in chunks")
    if group_elements % ranks:
        raise ConfigError(
            f"a group of {group_elements} elements is not divided by {ranks} ranks",
            hint=f"use a multiple of {ranks}",
        )
    largest = max(tensors, key=lambda tensor: tensor.elements)
    _require_room(largest.name, largest.elements, group_elements)
    group, filled, places, per_block = 0, 0, [], len(tensors) // num_blocks
    for index, tensor in enumerate(tensors):
        begins = ranks > 1 and index > 0 and index % per_block == 0
        if begins or filled + tensor.elements > group_elements:
            group, filled = group + 1, 0
        places.append((group, filled))
        filled += tensor.elements
    group_of, offset_of = zip(*places, strict=True)
    return ChunkLayout(
        group_elements=group_elements,
        ranks=ranks,
        tensors=tuple(tensors),
        group_of=group_of,
        offset_of=offset_of,
        num_groups=group + 1,
    )


def _require_room(name: str, elements: int, group_elements: int) -> None:
    if elements > group_elements:
        raise ConfigError(
            f"{name} has {elements} elements, a group of chunks {group_elements}",
            hint="choose larger chunks",
        )


@lru_cache(maxsize=1024)
def first_tensors(
    block: tuple[int, ...], num_blocks: int, group_elements: int, ranks: int = 1
) -> tuple[int, ...]:
    """With which tensor each group begins when `num_blocks` blocks of tensors of `block` elements
    each are packed, as `pack` does.

    Tensors are counted through all blocks. How many go into a group depends only on which of a
    block the first is.
    """
    _require_room("a tensor", max(block), group_elements)
    if ranks > 1:
        own = first_tensors(block, 1, group_elements)
        return tuple(number * len(block) + first for number in range(num_blocks) for first in own)
    ends, per_block, taken = (0, *accumulate(block)), len(block), []
    for first in range(per_block):
        blocks, rest = divmod(ends[first] + group_elements, ends[-1])
        taken.append(blocks * per_block + bisect_right(ends, rest) - 1 - first)
    starts, first = [], 0
    while first < num_blocks * per_block:
        starts.append(first)
        first += taken[first % per_block]
    return tuple(starts)


@lru_cache(maxsize=1024)
def groups_after(
    block: tuple[int, ...], num_blocks: int, group_elements: int, ranks: int = 1
) -> tuple[int, ...]:
    """By x = 0 .. `num_blocks`, the communication groups of x equal blocks that have one home.

    Every run of blocks with one home is packed from a group's beginning, so that x counts blocks of
    any run. O(blocks + groups).
    """
    starts = first_tensors(block, num_blocks, group_elements, ranks)
    counts, begun = [0], 0
    for end in range(len(block), num_blocks * len(block) + 1, len(block)):
        while begun < len(starts) and starts[begun] < end:
            begun += 1
        counts.append(begun)
    return tuple(counts)
