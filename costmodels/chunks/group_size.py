"""The size of communication groups and their chunks (EQUATIONS O1).

The score of a size is its cost in device bytes, for a pipeline rank whose blocks have one location:

    (12 + 2 w) / D * (elements of the groups - elements of their tensors)    states of empty places
    + 2 w * (elements of the groups that the widest block's pass needs)      gathered parameters
                                                                             and gradients

w bytes a parameter. The number of blocks at each location is no argument, since a search needs the
size before it chooses locations.

    D = 1    a group is a chunk; only sizes that copy well over PCIe are candidates
    D > 1    a group is a block. A pass needs the whole block, so that smaller groups would all be
             gathered, with no fewer empty places, and a larger group would bring tensors that the
             pass does not need: no size has a lower score (a test checks it)

Blocks of several sizes, such as the shards of a traced module, each begin a group. Their score is
that of all blocks together, over the sums of consecutive tensors of a block.

PatrickStar scores the chunk for every D, where a chunk is no smaller than a tensor.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

from parplan.costmodels.chunks.chunk_layout import ExpertGroup, first_tensors
from parplan.profiles.machines.hardware import Cluster

COPY_LATENCY_S = 1e-5  # assumed: start of one copy over PCIe, including the launch
MOVED_WELL = 0.9  # share of the bandwidth that a transfer of one chunk must reach
# 128 bytes in 16 bits: a GPU's cache line, and the unit of NCCL and of copies
ALIGNED_ELEMENTS = 64
OPTIMIZER_BYTES = 12  # fp32 master and two moments (EQUATIONS M1)


def widest_group(blocks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the largest size of each tensor over blocks that are divided in different ways.

    A group size for these sizes fits all the blocks.
    """
    return tuple(map(max, zip(*blocks, strict=True)))


def summed_by_part(tensors: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes of the parts of a block, which have so many of its tensors each."""
    left = iter(tensors)
    return tuple(sum(next(left) for _ in range(count)) for count in counts)


def least_bytes(cluster: Cluster, share: float = MOVED_WELL) -> float:
    """Bytes of a chunk whose copy over PCIe reaches `share` of the bandwidth."""
    return COPY_LATENCY_S * cluster.pcie_bytes_per_s * share / (1 - share)


def candidate_sizes(block: tuple[int, ...], least_elements: float = 0) -> tuple[int, ...]:
    """Returns sizes of a chunk that include the best one for one rank.

    The sizes are those of consecutive tensors, from the largest tensor to a whole block. Between
    two of them the same tensors share a chunk, and only its tail grows. Passes use whole blocks, so
    that a larger chunk would only bring tensors that are not needed. Sizes under `least_elements`
    are left out, except the largest.
    """
    twice = block * 2
    count = len(block)
    sums = {
        sum(twice[first : first + length])
        for first in range(count)
        for length in range(1, count + 1)
    }
    least = min(max(max(block), least_elements), sum(block))
    return tuple(sorted({_aligned(math.ceil(size), 1) for size in (*sums, least) if size >= least}))


def _aligned(elements: int, ranks: int) -> int:
    """Rounds a group up so that each of its chunks begins on a cache line."""
    unit = ALIGNED_ELEMENTS * ranks
    return -(-elements // unit) * unit


def widest_groups(
    block: tuple[int, ...], num_blocks: int, group_elements: int, ranks: int = 1
) -> int:
    """The most communication groups that the pass of one block needs."""
    starts = first_tensors(block, num_blocks, group_elements, ranks)
    count = len(block)

    def group(tensor: int) -> int:
        return bisect_right(starts, tensor)

    return max(
        group((number + 1) * count - 1) - group(number * count) + 1 for number in range(num_blocks)
    )


def score_bytes(
    block: tuple[int, ...],
    num_blocks: int,
    group_elements: int,
    ranks: int = 1,
    width_bytes: int = 2,
) -> float:
    """Device bytes that a size costs: empty places of own chunks, and groups that a pass needs."""
    num_groups = len(first_tensors(block, num_blocks, group_elements, ranks))
    empty = num_groups * group_elements - num_blocks * sum(block)
    needed = widest_groups(block, num_blocks, group_elements, ranks) * group_elements
    return (OPTIMIZER_BYTES + 2 * width_bytes) * empty / ranks + 2 * width_bytes * needed


@lru_cache(maxsize=256)
def _best(block: tuple[int, ...], num_blocks: int, least_elements: float, width_bytes: int) -> int:
    sizes = candidate_sizes(block, least_elements)
    return min(
        sizes, key=lambda size: (score_bytes(block, num_blocks, size, 1, width_bytes), -size)
    )


def group_size_of(
    block: tuple[int, ...], num_blocks: int, ranks: int, cluster: Cluster, width_bytes: int = 2
) -> int:
    """Elements of all groups of a pipeline rank with `num_blocks` blocks.

    block          elements of each tensor of a block, in use order
    ranks          data-parallel ranks; each owns an equal chunk of every group
    width_bytes    of a parameter

    For several ranks the size is a whole block. For one rank it is the size with the least score
    that copies well, the larger of equals; a whole block if the block is too small for that.
    """
    if ranks > 1:
        return _aligned(sum(block), ranks)
    return _best(block, num_blocks, least_bytes(cluster) / width_bytes, width_bytes)


def common_group_size(
    blocks: Sequence[tuple[int, ...]],
    ranks: int,
    cluster: Cluster,
    width_bytes: int = 2,
    *,
    by_part: bool = False,
) -> int:
    """Elements of all groups of a pipeline rank whose blocks have these tensors, in use order.

    Blocks of one size have that of `group_size_of`. Else it is the size with the least score, the
    larger of equals.

    by_part    `blocks` are the sizes of their parts, of which a pass needs one; a group is smaller
               than a block, unless such a chunk copies badly
    """
    counts = Counter(blocks)
    if len(counts) == 1 and not by_part:
        return group_size_of(blocks[0], len(blocks), ranks, cluster, width_bytes)
    least = least_bytes(cluster) / width_bytes if ranks == 1 else 0.0
    return _best_of_several(frozenset(counts.items()), ranks, least, width_bytes, by_part)


def expert_group_size(
    blocks: Collection[ExpertGroup], ranks: int, expert_ranks: int
) -> ExpertGroup:
    """Elements of a group that holds any of some blocks, given by their elements.

    A group is a block. Each of its two parts is rounded up for its owners.
    """
    experts = _aligned(max(block.experts for block in blocks), expert_ranks)
    shared = _aligned(max(block.elements - block.experts for block in blocks), ranks)
    return ExpertGroup(shared + experts, experts)


@lru_cache(maxsize=256)
def _best_of_several(
    counts: frozenset[tuple[tuple[int, ...], int]],
    ranks: int,
    least_elements: float,
    width_bytes: int,
    by_part: bool,
) -> int:
    blocks = [block for block, _ in counts]
    largest = max(map(sum, blocks))
    least = min(max(max(map(max, blocks)), least_elements), largest)
    sums = {
        size
        for block in blocks
        for first in range(len(block))
        for size in accumulate(block[first:])
        if size >= least
    }
    sizes = {_aligned(math.ceil(size), ranks) for size in (*sums, least)}
    if by_part:
        sizes = {size for size in sizes if size < largest} or sizes

    def score(size: int) -> tuple[float, int]:
        groups = {block: len(first_tensors(block, 1, size)) for block in blocks}
        empty = sum(count * (groups[block] * size - sum(block)) for block, count in counts)
        needed = size if by_part else max(groups.values()) * size
        gathered = 2 * width_bytes * needed
        return (OPTIMIZER_BYTES + 2 * width_bytes) * empty / ranks + gathered, -size

    return min(sizes, key=score)
