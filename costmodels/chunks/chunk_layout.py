"""Tensors in use order, packed into communication groups of chunks (EQUATIONS O1, O5).

All groups have one element count, and each rank owns a chunk of every group.

    D = 1    a group is a chunk; no tensor is split, and a block begins where the previous one ends.
             Blocks of several sizes, as the shards of a traced module, each begin a group
    D > 1    a group is one run of D chunks and is gathered whole. No tensor is split over two
             groups, but it may cross the border between two chunks of its group: one rank owns a
             part of its elements, the next rank the rest. Every block begins a group, so that a
             pass gathers nothing of another block

In PatrickStar each chunk is at least as large as the largest tensor, and D chunks in a row are a
group: it gathers D times the largest tensor at once, or, to save that memory, broadcasts parameters
one by one, which sends 10 bytes per parameter instead of 6 (EQUATIONS O5). Here the group must hold
the largest tensor and a chunk is a D-th of it: the gathered bytes do not grow with D, and the
traffic stays at 6 bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerClass


@dataclass(frozen=True, slots=True)
class SizedTensor:
    """A tensor of one rank of a model copy, with a name such as `block3.qkv.weight`."""

    name: str
    elements: int
    of_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """The communication group of each tensor, and its offset in elements there.

    ranks    data-parallel ranks; in their order, each owns one chunk of every group
    counts   tensors of each block
    expert_elements, expert_ranks    the last elements of a group, and the ranks that own equal
                                     parts of them, where experts have other owners
    """

    group_elements: int
    ranks: int
    tensors: tuple[SizedTensor, ...]
    group_of: tuple[int, ...]
    offset_of: tuple[int, ...]
    num_groups: int
    counts: tuple[int, ...]
    expert_elements: int = 0
    expert_ranks: int = 1

    @property
    def shared_elements(self) -> int:
        """The elements of a group that `ranks` own together, which are its first."""
        return self.group_elements - self.expert_elements

    @property
    def chunk_elements(self) -> int:
        return self.shared_elements // self.ranks + self.expert_elements // self.expert_ranks

    @property
    def num_chunks(self) -> int:
        """The number of chunks on all ranks."""
        return self.num_groups * self.ranks

    @property
    def used_elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def utilisation(self) -> float:
        """The share of all groups' elements that tensors use."""
        return self.used_elements / (self.num_groups * self.group_elements)


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Elements of a communication group, and those of experts with owners of their own."""

    elements: int
    experts: int

    @classmethod
    def of(cls, tensors: Iterable[SizedTensor]) -> ExpertGroup:
        """Returns the elements of a block without padding."""
        sizes = [(each.elements, each.of_experts) for each in tensors]
        return cls(sum(size for size, _ in sizes), sum(size for size, own in sizes if own))


def block_tensors(layer: LayerClass, sharding: Sharding) -> tuple[SizedTensor, ...]:
    """Returns the parameters of a layer in use order, as one tensor-parallel rank has them.

    Their names have the form `qkv.weight`; each is there once.
    """
    return tuple(
        SizedTensor(
            f"{operator.name}.{parameter.name}",
            math.prod(sharding.parameter_shape(operator, parameter)),
            parameter.of_experts,
        )
        for operator in layer.operators
        for parameter in operator.parameters
        if not parameter.tied
    )


def pack(
    tensors: Sequence[SizedTensor],
    group_elements: int,
    ranks: int = 1,
    counts: Sequence[int] = (),
    *,
    apart: bool = False,
    units: Sequence[int] = (),
) -> ChunkLayout:
    """Packs each tensor behind the previous one, or into the next group if it does not fit.

    counts     the tensors of each block; by default all are of one block
    units      the tensors that lie in one group together; by default each is alone
    apart      every block begins a group, as it does with several ranks

    Raises ConfigError if there is no tensor, a tensor is larger than a group, or `ranks` do not
    divide a group.
    """
    if not tensors:
        raise ConfigError("no tensors to lay out in chunks")
    if group_elements % ranks:
        raise ConfigError(
            f"a group of {group_elements} elements is not divided by {ranks} ranks",
            hint=f"use a multiple of {ranks}",
        )
    ends = tuple(accumulate(units or (1,) * len(tensors)))
    begins = {
        first: sum(tensor.elements for tensor in tensors[first:end])
        for first, end in zip((0, *ends), ends, strict=False)
    }
    largest = max(begins, key=begins.__getitem__)
    _require_room(tensors[largest].name, begins[largest], group_elements)
    group = 0
    filled = 0
    places = []
    counts = tuple(counts) or (len(tensors),)
    firsts = set(accumulate(counts[:-1])) if apart or ranks > 1 else set[int]()
    for index, tensor in enumerate(tensors):
        if index in firsts or filled + begins.get(index, 0) > group_elements:
            group += 1
            filled = 0
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
        counts=counts,
    )


def pack_with_experts(
    blocks: Sequence[Sequence[SizedTensor]], size: ExpertGroup, ranks: int, expert_ranks: int
) -> ChunkLayout:
    """Packs each block into a group, its experts behind the elements that all blocks' others take.

    Raises ConfigError if a block does not fit.
    """
    shared = size.elements - size.experts
    group_of, offset_of = list[int](), list[int]()
    for number, tensors in enumerate(blocks):
        filled = {False: 0, True: shared}
        for tensor in tensors:
            group_of.append(number)
            offset_of.append(filled[tensor.of_experts])
            filled[tensor.of_experts] += tensor.elements
        _require_room("a block without its experts", filled[False], shared)
        _require_room("a block", filled[True], size.elements)
    return ChunkLayout(
        group_elements=size.elements,
        ranks=ranks,
        tensors=tuple(tensor for tensors in blocks for tensor in tensors),
        group_of=tuple(group_of),
        offset_of=tuple(offset_of),
        num_groups=len(blocks),
        counts=tuple(map(len, blocks)),
        expert_elements=size.experts,
        expert_ranks=expert_ranks,
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
    """Returns the first tensor of each group, as `pack` lays out `num_blocks` equal blocks.

    block    elements of each tensor of a block

    Tensors are counted through all blocks. The number of tensors in a group depends only on the
    place of its first tensor in a block.
    """
    _require_room("a tensor", max(block), group_elements)
    if ranks > 1:
        starts = first_tensors(block, 1, group_elements)
        return tuple(
            number * len(block) + first for number in range(num_blocks) for first in starts
        )
    ends = (0, *accumulate(block))
    per_block = len(block)
    taken = []
    for first in range(per_block):
        blocks, rest = divmod(ends[first] + group_elements, ends[-1])
        taken.append(blocks * per_block + bisect_right(ends, rest) - 1 - first)
    firsts = []
    first = 0
    while first < num_blocks * per_block:
        firsts.append(first)
        first += taken[first % per_block]
    return tuple(firsts)


@lru_cache(maxsize=1024)
def groups_after(
    block: tuple[int, ...], num_blocks: int, group_elements: int, ranks: int = 1
) -> tuple[int, ...]:
    """Returns the communication groups of x equal blocks at one location, x = 0 .. `num_blocks`.

    Every run of blocks at one location is packed from the beginning of a group, so that x counts
    the blocks of any run. O(blocks + groups).
    """
    starts = first_tensors(block, num_blocks, group_elements, ranks)
    counts = [0]
    begun = 0
    for end in range(len(block), num_blocks * len(block) + 1, len(block)):
        while begun < len(starts) and starts[begun] < end:
            begun += 1
        counts.append(begun)
    return tuple(counts)
