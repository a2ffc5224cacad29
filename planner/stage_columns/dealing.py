"""Which blocks of a rank each of its model chunks has: they are dealt out in turn, so that every
chunk has as many of every kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Ints


def dealt(rank: int, num_blocks: int, layout: ParallelLayout) -> Iterator[list[int]]:
    """By chunk of a rank the numbers of its blocks, counted over the rank from zero.

    Where the chunks do not divide the blocks, the first and the last virtual stage of equal ranks,
    and the later chunks of others, have a block less.
    """
    own = layout.stages_of(rank)
    shorter = (0, layout.num_virtual_stages - 1) if layout.equal_ranks else own[1:]
    longest, uneven = (
        -(-num_blocks // layout.virtual_stages),
        num_blocks % layout.virtual_stages > 0,
    )
    room = [longest - (uneven and stage in shorter) for stage in own]
    turns = [chunk for level in range(longest) for chunk, most in enumerate(room) if level < most]
    for chunk in range(len(own)):
        yield [block for block, turn in enumerate(turns) if turn == chunk]


def counts_of_chunks(rank: int, counts: Ints, layout: ParallelLayout) -> list[Ints]:
    """By chunk of a rank how many of its blocks are of each option, by row of `counts`, which has
    those of the whole rank.
    """
    if layout.virtual_stages == 1:
        return [counts]
    ends = np.cumsum(counts, axis=1)
    found = []
    for blocks in dealt(rank, int(counts[0].sum()), layout):
        before = np.searchsorted(np.array(blocks), ends)
        found.append(np.diff(before, axis=1, prepend=0))
    return found
