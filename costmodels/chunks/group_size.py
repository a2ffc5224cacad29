"""How large communication groups should be, and with them chunks (EQUATIONS O1).

The score of a size are the bytes of a device that it costs, where every block of a pipeline rank
has one home:

    (12 + 2 w) / D * (elements of the groups - elements of their tensors)     all states of what is
    empty + 2 w * (elements of the groups that the widest block's pass needs)       parameters and
    their gradients, gathered

w bytes a parameter. How many blocks have which home is no argument: a search knows the size before
it chooses homes.

    D = 1    a group is a chunk, searched among those that are moved well over PCIe
    D > 1    a group is a block. A pass needs all of a block, so that smaller groups are gathered
             all the same, with no less left empty, and a larger one would bring what the pass does
             not need: no size has a lower score (a test)

PatrickStar scores the chunk whatever D is, which there is no smaller than a tensor.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache

from parplan.costmodels.chunks.chunk_layout import first_tensors
from parplan.profiles.machines.hardware import Cluster

COPY_LATENCY_S = 1e-5  # assumed: to start one copy over PCIe, the launch included
MOVED_WELL = 0.9  # share of the bandwidth that a transfer of one chunk must reach
ALIGNED_ELEMENTS = (
    64  # 128 bytes in 16 bits: a line of a GPU's cache, and what NCCL and copies move at once
)
OPTIMIZER_BYTES = 12  # fp32 master and two moments (EQUATIONS M1)


def transfer_efficiency(n_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Share of the bandwidth W that a transfer of n bytes reaches: n / (alpha W + n)."""
    return n_bytes / (latency_s * bytes_per_s + n_bytes)


def widest_group(blocks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Of blocks whose tensors are divided in different ways, the largest of each tensor: its size
    of group fits them all.
    """
    return tuple(map(max, zip(*blocks, strict=True)))


def least_bytes(cluster: Cluster, share: float = MOVED_WELL) -> float:
    """Bytes of a chunk with which a copy over PCIe reaches `share` of the bandwidth."""
    return COPY_LATENCY_S * cluster.pcie_bytes_per_s * share / (1 - share)


def candidate_sizes(block: tuple[int, ...], least_elements: float = 0) -> tuple[int, ...]:
    """Sizes of a chunk one of which is the best on one rank: what consecutive tensors have, from
    the largest to all of a block.

    Between two of them the same tensors share a chunk, and only its tail grows. Blocks are used
    whole, so that a larger chunk would only bring what is not needed. Those under `least_elements`
    are left out, but for the largest.
    """
    twice, count = block * 2, len(block)
    sums = {
        sum(twice[first : first + length])
        for first in range(count)
        for length in range(1, count + 1)
    }
    least = min(max(max(block), least_elements), sum(block))
    return tuple(sorted({_aligned(math.ceil(size), 1) for size in (*sums, least) if size >= least}))


def _aligned(elements: int, ranks: int) -> int:
    """At least so many elements of a group each of whose chunks begins on a line of the cache."""
    unit = ALIGNED_ELEMENTS * ranks
    return -(-elements // unit) * unit


def widest_groups(
    block: tuple[int, ...], num_blocks: int, group_elements: int, ranks: int = 1
) -> int:
    """The most communication groups that the pass of one block needs."""
    starts, count = first_tensors(block, num_blocks, group_elements, ranks), len(block)

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
    """Bytes of one device that a size costs: of its own chunks what is empty, and the groups that a
    pass needs (see above).
    """
    empty = len(
        first_tensors(block, num_blocks, group_elements, ranks)
    ) * group_elements - num_blocks * sum(block)
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
    """Elements of the groups of all homes of a pipeline rank with `num_blocks` blocks of tensors of
    `block` elements, in use order.

    ranks: data-parallel ranks, each of which owns as large a chunk of every group; width_bytes: of
    a parameter. Of several ranks all of a block. Of one the least score among sizes that are moved
    well; where a block is too small for that, a whole block. Equal scores: the larger.
    """
    if ranks > 1:
        return _aligned(sum(block), ranks)
    return _best(block, num_blocks, least_bytes(cluster) / width_bytes, width_bytes)
