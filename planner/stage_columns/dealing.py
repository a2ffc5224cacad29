"""The blocks of each model chunk of a rank, dealt out in turn.

Every chunk gets an equal number of blocks of every kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Ints


def dealt_blocks(rank: int, num_blocks: int, layout: ParallelLayout) -> Iterator[list[int]]:
    """Yields the block numbers of each chunk of a rank, counted over the rank from zero.

    If the chunks do not divide the blocks, some chunks have one block less: the first and the last
    virtual stage of equal ranks, the later chunks of other ranks.
    """
    stages = layout.stages_of(rank)
    longest = -(-num_blocks // layout.virtual_stages)
    shorter: tuple[int, ...] = ()
    if num_blocks % layout.virtual_stages:
        shorter = (0, layout.num_virtual_stages - 1) if layout.equal_ranks else stages[1:]
    room = [longest - 1 if stage in shorter else longest for stage in stages]
    turns = [chunk for level in range(longest) for chunk, most in enumerate(room) if level < most]
    for chunk in range(len(stages)):
        yield [block for block, turn in enumerate(turns) if turn == chunk]


def counts_of_chunks(rank: int, counts: Ints, layout: ParallelLayout) -> list[Ints]:
    """Returns for each chunk of a rank the number of its blocks on each option, by row.

    counts    the numbers for the whole rank, by row
    """
    if layout.virtual_stages == 1:
        return [counts]
    ends = np.cumsum(counts, axis=1)
    by_chunk = []
    for blocks in dealt_blocks(rank, int(counts[0].sum()), layout):
        before = np.searchsorted(np.array(blocks), ends)
        by_chunk.append(np.diff(before, axis=1, prepend=0))
    return by_chunk
