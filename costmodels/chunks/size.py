"""How large chunks should be (EQUATIONS O1): as small as they can be moved well, where little of them is left empty.

The score of a size are the bytes of a device that it costs, where every block of a pipeline rank has one home:

    (12 + 2 w) * (elements of its chunks - elements of its tensors)                        all states of what is empty
    + 2 w * (elements of the communication groups that the widest block's pass needs)      parameters and their gradients, gathered

w bytes a parameter. How many blocks have which home is no argument: a search knows the size before it chooses homes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache

from costmodels.chunks.layout import first_tensors, whole_groups
from profiles.hardware import Cluster

COPY_LATENCY_S = 1e-5  # assumed: to start one copy over PCIe, the launch included
MOVED_WELL = 0.9  # share of the bandwidth that a transfer of one chunk must reach
ALIGNED_ELEMENTS = 64  # 128 bytes in 16 bits: a line of a GPU's cache, and what NCCL and copies move at once
OPTIMIZER_BYTES = 12  # fp32 master and two moments (EQUATIONS M1)


def transfer_efficiency(n_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Share of the bandwidth W that a transfer of n bytes reaches: n / (alpha W + n)."""
    return n_bytes / (latency_s * bytes_per_s + n_bytes)


def widest(blocks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Of blocks whose tensors are divided in different ways, the largest of each tensor: its size of chunk fits them all."""
    return tuple(map(max, zip(*blocks, strict=True)))


def least_bytes(ranks: int, cluster: Cluster, share: float = MOVED_WELL) -> float:
    """Bytes of a chunk with which a copy over PCIe, and a step of the ring that gathers a group, reach `share` of their bandwidth."""
    slow = [COPY_LATENCY_S * cluster.pcie_bytes_per_s]
    if ranks > 1:
        slow.append(cluster.intra_node.latency_s * cluster.intra_node.bytes_per_s)
    if ranks > cluster.gpus_per_node:
        slow.append(cluster.nic.latency_s * cluster.nic.bytes_per_s)
    return max(slow) * share / (1 - share)


def candidate_sizes(block: tuple[int, ...], ranks: int, least_elements: float = 0) -> tuple[int, ...]:
    """Sizes one of which is the best: what consecutive tensors have, from the largest tensor to all tensors of a block.

    Between two of them the same tensors share a chunk, and only its tail grows. Blocks are used whole, so that a larger chunk would
    only bring what is not needed. Multiples of `ALIGNED_ELEMENTS`, so that every chunk of a gathered group begins on a line of the
    cache, and of `ranks`, so that a chunk can be divided over them. Those under `least_elements` are left out, but for the largest.
    """
    unit = math.lcm(ALIGNED_ELEMENTS, ranks)
    twice, count = block * 2, len(block)
    sums = {sum(twice[first:first + length]) for first in range(count) for length in range(1, count + 1)}
    least = min(max(max(block), least_elements), sum(block))
    return tuple(sorted({-(-math.ceil(size) // unit) * unit for size in (*sums, least) if size >= least}))


def widest_groups(block: tuple[int, ...], num_blocks: int, chunk_elements: int, ranks: int) -> int:
    """The most communication groups that the pass of one block needs."""
    starts, count = first_tensors(block, num_blocks, chunk_elements), len(block)

    def group(tensor: int) -> int:
        return (bisect_right(starts, tensor) - 1) // ranks

    return max(group((number + 1) * count - 1) - group(number * count) + 1 for number in range(num_blocks))


def score_bytes(block: tuple[int, ...], num_blocks: int, chunk_elements: int, ranks: int, width_bytes: int = 2) -> float:
    """Bytes of one device that a chunk size costs: of its own chunks what is empty, and the groups that a pass needs (see above)."""
    chunks = whole_groups(len(first_tensors(block, num_blocks, chunk_elements)), ranks)
    empty = chunks * chunk_elements - num_blocks * sum(block)
    needed = widest_groups(block, num_blocks, chunk_elements, ranks) * ranks * chunk_elements
    return (OPTIMIZER_BYTES + 2 * width_bytes) * empty / ranks + 2 * width_bytes * needed


@lru_cache(maxsize=256)
def _best(block: tuple[int, ...], num_blocks: int, ranks: int, least_elements: float, width_bytes: int) -> int:
    sizes = candidate_sizes(block, ranks, least_elements)
    return min(sizes, key=lambda size: (score_bytes(block, num_blocks, size, ranks, width_bytes), -size))


def chunk_size_of(block: tuple[int, ...], num_blocks: int, ranks: int, cluster: Cluster, width_bytes: int = 2) -> int:
    """Elements of the chunks of all homes of a pipeline rank with `num_blocks` blocks of tensors of `block` elements, in use order.

    ranks: data-parallel ranks; width_bytes: of a parameter. The least score among sizes that are moved well; where a block is too
    small for that, a whole block. Equal scores: the larger.
    """
    return _best(block, num_blocks, ranks, least_bytes(ranks, cluster) / width_bytes, width_bytes)
