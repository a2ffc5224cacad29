"""Pipeline stages that are as balanced as memory allows.

The step of a pipeline with one stage a rank is that of its slowest rank and of ramps, which take as
long whatever blocks the stages have. So the stages whose slowest rank is fastest are the best.
Blocks that are alike go one by one to the rank that takes the least time with one more. Blocks of
several classes are cut by a dynamic program. A rank that does not fit its device gets fewer, and
all blocks are dealt again, for no stages with as many on it fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, pairwise

import numpy as np

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.optimum import pass_s, rank_bytes
from parplan.planner.dominance import Array
from parplan.profiles.models.operator_graph import LayerKind

Blocks = tuple[int, ...]
_RankSeconds = Callable[[int, int], float]
Made = Callable[[Blocks], Strategy]  # the strategy of stages, with any number of blocks on each


def balanced_stages(
    layout: ParallelLayout,
    made: Made,
    distinct: int,
    num_layers: int,
    price_cache: PriceCache,
    limit_bytes: float,
    below_s: float,
) -> Iterator[Blocks]:
    """Yields stages that fit and whose slowest rank alone takes less than `below_s`.

    distinct    blocks of a stage from which on all others run as the one before
    Of ranks that are as fast, those yielded first have more blocks on the first ranks, and those
    yielded then on the last.
    """
    pp = layout.mesh.pp
    rank_s = _seconds_by_blocks(layout, made((distinct,) * pp), price_cache)
    for first in (True, False):
        most = [num_layers - pp + 1] * pp
        while (blocks := _dealt(rank_s, num_layers, most, first=first)) is not None:
            slowest_s = max(rank_s(rank, count) for rank, count in enumerate(blocks))
            if layout.num_micro_batches * slowest_s >= below_s:
                break
            strategy = made(blocks)
            full = [r for r in range(pp) if rank_bytes(strategy, r, price_cache) > limit_bytes]
            if not full:
                yield blocks
                break
            for rank in full:
                most[rank] = blocks[rank] - 1


def _seconds_by_blocks(
    layout: ParallelLayout, strategy: Strategy, price_cache: PriceCache
) -> _RankSeconds:
    """Returns the seconds of a micro-batch on a rank with a number of blocks.

    strategy    stages of some blocks, of which those beyond run as the last
    """
    choices = {id(choice): choice for stage in strategy.stages for choice in stage}
    choice_s = {key: pass_s(choice, layout, price_cache) for key, choice in choices.items()}
    first, last = strategy.stages[0], strategy.stages[-1]
    ends_s = {0: choice_s[id(first[0])], len(strategy.stages) - 1: choice_s[id(last[-1])]}
    blocks_s = list(accumulate((choice_s[id(choice)] for choice in first[1:]), initial=0.0))
    block_s = choice_s[id(first[-1])]

    def seconds(rank: int, count: int) -> float:
        known = min(count, len(blocks_s) - 1)
        return ends_s.get(rank, 0.0) + blocks_s[known] + (count - known) * block_s

    return seconds


def _dealt(
    rank_s: _RankSeconds, num_layers: int, most: Sequence[int], *, first: bool
) -> Blocks | None:
    """Returns the blocks of every rank, at least one and at most `most`, None where none are."""
    if min(most) < 1 or sum(most) < num_layers:
        return None

    def with_one_more(rank: int) -> tuple[float, int]:
        return rank_s(rank, counts[rank] + 1), rank if first else -rank

    counts = [1] * len(most)
    open_ranks = [(with_one_more(rank), rank) for rank in range(len(most)) if most[rank] > 1]
    heapify(open_ranks)
    for _ in range(num_layers - len(most)):
        _, rank = open_ranks[0]
        counts[rank] += 1
        if counts[rank] < most[rank]:
            heapreplace(open_ranks, (with_one_more(rank), rank))
        else:
            heappop(open_ranks)
    return tuple(counts)


def balanced_cuts(
    layout: ParallelLayout,
    made: Made,
    start: Blocks,
    price_cache: PriceCache,
    limit_bytes: float,
    below_s: float,
) -> Iterator[Blocks]:
    """Yields the stages of unlike blocks that fit, if their slowest rank takes less than `below_s`.

    A rank holds no fewer micro-batches than the ranks behind it, so blocks that do not fit on a
    rank fit on none before it.

    start    any stages; a block runs in the same way on each
    """
    pp, num_layers = layout.mesh.pp, sum(start)
    rank_s = _seconds_by_range(made(start), price_cache)
    while (blocks := _cut(rank_s)) is not None:
        ranges = list(pairwise(accumulate(blocks, initial=0)))
        slowest_s = max(rank_s[rank, first, end] for rank, (first, end) in enumerate(ranges))
        if layout.num_micro_batches * slowest_s >= below_s:
            return
        strategy = made(blocks)
        full = [r for r in range(pp) if rank_bytes(strategy, r, price_cache) > limit_bytes]
        if not full:
            yield blocks
            return
        for rank in full:
            first, end = ranges[rank]
            # the embedding and the head lie on one rank alone
            ranks = slice(rank if rank in (0, pp - 1) else 0, rank + 1)
            rank_s[ranks, : first + 1, end : num_layers + 1] = np.inf


def _seconds_by_range(strategy: Strategy, price_cache: PriceCache) -> Array:
    """Returns the seconds of a micro-batch by rank, first block and end of its blocks."""
    pp = strategy.layout.mesh.pp
    blocks_s: list[float] = []
    ends_s = [0.0] * pp
    for rank, stage in enumerate(strategy.stages):
        for choice in stage:
            seconds = pass_s(choice, strategy.layout, price_cache)
            if choice.kind.role is LayerKind.BLOCK:
                blocks_s.append(seconds)
            else:
                ends_s[rank] += seconds
    sums_s = np.cumsum([0.0, *blocks_s])
    rank_s = (sums_s - sums_s[:, None]) + np.array(ends_s)[:, None, None]
    rank_s[:, np.tri(len(sums_s), dtype=bool)] = np.inf  # a rank has a block or more
    return np.asarray(rank_s)


def _cut(rank_s: Array) -> Blocks | None:
    """Returns the stages whose slowest rank is fastest, and of these the most even ones."""
    slowest_s = rank_s[0, 0]
    for of_rank_s in rank_s[1:]:
        slowest_s = np.maximum(slowest_s[:, None], of_rank_s).min(axis=0)
    if slowest_s[-1] == np.inf:
        return None
    squares = np.where(rank_s <= slowest_s[-1], rank_s, np.inf) ** 2
    sums, before = squares[0, 0], []
    for of_rank in squares[1:]:
        through = sums[:, None] + of_rank
        before.append(through.argmin(axis=0))
        sums = through.min(axis=0)
    ends = [len(sums) - 1]
    for of_rank in reversed(before):
        ends.append(int(of_rank[ends[-1]]))
    return tuple(end - first for first, end in pairwise((0, *reversed(ends))))
