"""Lower bounds of a layout within a memory limit, from the blocks of its ranks (EQUATIONS I5).

No plan of the layout can be below them.
"""

from __future__ import annotations

import math

import numpy as np

from parplan.costmodels.memory.peak_memory import passes_of
from parplan.costmodels.memory.rank_memory import (
    gradients_come_and_go,
    sent_bytes,
    stashes,
    usable_bytes,
)
from parplan.costmodels.stage_costs import rank_receives
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.lower_bounds import (
    TimeBound,
    fewest_blocks,
    least_end_bytes,
    least_end_s,
)
from parplan.planner.dominance import Array, Ints, lower_hull
from parplan.planner.layer_options.mixes import by_way_of_running, column_of, one_way_of_running
from parplan.planner.stage_columns.mix_peaks import MADE_SHARES
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_prices import BlockCosts, end_kinds
from parplan.profiles.models.operator_graph import LayerKind

# prices of a byte, in units of the longest block's extra seconds over the largest one's extra bytes
_BYTE_PRICES = np.array([0.0, *np.geomspace(0.05, 20.0, 24)])
NEAR_MEAN = 4  # numbers of blocks of a rank that are priced on both sides of the mean


def corner_bound_s(
    layout: ParallelLayout, table: MixTable, limit_bytes: float, bound: TimeBound
) -> float:
    """Returns a bound as `memory_bound_s` does, with the corners of a block in place of options.

    It takes less to find, and is a little lower. Without corners it is that of `bound`.
    """
    block = None if layout.recomputes_ahead else table.corners(layout, 0)
    if block is None:
        return bound.step_s
    return _within_memory_s(layout, table, limit_bytes, bound, block)


def memory_bound_s(
    layout: ParallelLayout, table: MixTable, limit_bytes: float, bound: TimeBound
) -> float:
    """Returns a lower bound of a step within `limit_bytes`, from the blocks of one rank alone.

    Let an option take c seconds of a step and b bytes for each of the rank's n blocks. Real numbers
    of blocks on any options within R bytes take, for any price p of a byte (a Lagrangian bound),

        n c >= n min over options of (c + p (b - R / n))

    Those seconds are its micro-batches, the rank's own part of the ramps among them, and its tail:
    an option with a short tail may have long passes. The other ranks add their ramps at their
    fastest. Equal ranks are bounded by the first one, which also runs what `bound` has beside its
    blocks. Otherwise some rank has at least the mean number, and no fewer stashes than any rank;
    where gradients come and go, each rank has its own (`_unequal_ranks_s`).
    The largest temporaries are no less than their mean over the blocks. Where gradients come and
    go, the least workspace counts, and each moment is a limit by itself. Bytes of embedding and
    head are left out, except of states that come and go. Blocks that gain nothing by another
    recompute than that of their rank have one, each with its own bound.
    """
    if layout.recomputes_ahead or layout.chunked:
        return bound.step_s
    block = table.per_block(layout, 0)
    if table.catalogue.by_operator:
        block, _ = table.averages(layout, 0)
    return _within_memory_s(layout, table, limit_bytes, bound, block)


def _within_memory_s(
    layout: ParallelLayout,
    table: MixTable,
    limit_bytes: float,
    bound: TimeBound,
    block: BlockCosts,
) -> float:
    """Returns the bound of `memory_bound_s` for the costs of a block."""
    num_layers, pp = table.price_cache.model.num_layers, layout.mesh.pp
    first = layout.equal_ranks or pp == 1
    fewest = int(fewest_blocks(layout, num_layers)[0]) if first else -(-num_layers // pp)
    if not gradients_come_and_go(layout, table.price_cache):
        least_s = _least_held_s(layout, table, limit_bytes, block, fewest, first=first)
    elif first:
        rank = _FreedRank(block, 0, fewest, layout, table, limit_bytes)
        least_s = float(rank.least_s(np.array([fewest]))[0])
    else:
        return max(bound.step_s, _unequal_ranks_s(layout, table, limit_bytes, bound, block))
    beside_s = _beside_s(0, layout, table) if first else 0.0
    (step_s,) = _with_rank_s(layout, table, bound, beside_s, np.array([fewest]), least_s)
    return max(bound.step_s, float(step_s))


def _with_rank_s(
    layout: ParallelLayout,
    table: MixTable,
    bound: TimeBound,
    beside_s: float,
    counts: Ints,
    least_s: Array | float,
) -> Array:
    """Seconds of a step by number of blocks of one rank, with the others at their fastest.

    beside_s    least seconds of the rank and a micro-batch besides its blocks
    least_s     least seconds of a step and of one of the blocks
    """
    share = bubble_share(layout, table.price_cache)
    beside_s *= layout.num_micro_batches - share
    return np.asarray(bound.total_s + beside_s + counts * (least_s - share * bound.block_s))


def _least_held_s(
    layout: ParallelLayout,
    table: MixTable,
    limit_bytes: float,
    block: BlockCosts,
    num_blocks: int,
    *,
    first: bool,
) -> float:
    """Least seconds of a step and of an average block where gradients stay.

    first    whether the blocks are those of the first rank, else of any
    """
    price_cache = table.price_cache
    block_s = layout.num_micro_batches * block.time_s + block.tail_s
    ranks = (0,) if first else range(layout.mesh.pp)
    stashed = min(stashes(LayerKind.BLOCK, rank, layout) for rank in ranks)
    block_bytes = block.states + stashed / layout.virtual_stages * column_of(
        block.options, "saved_bytes"
    )
    block_bytes += column_of(block.options, "workspace_bytes") / num_blocks
    block_bytes += min(sent_bytes(rank, layout, price_cache) for rank in ranks) / num_blocks
    beyond = block_bytes - usable_bytes(limit_bytes, layout.mesh, price_cache) / num_blocks
    prices = _BYTE_PRICES * (np.ptp(block_s) / max(1.0, float(np.ptp(block_bytes))))
    priced_s = block_s + np.multiply.outer(prices, beyond)
    if not one_way_of_running(block.options, num_blocks, layout.virtual_stages):
        return float(priced_s.min(axis=1).max())
    way = by_way_of_running(block.options)
    return min(
        float(priced_s[:, way == number].min(axis=1).max()) for number in range(way.max() + 1)
    )


def _beside_s(rank: int, layout: ParallelLayout, table: MixTable) -> float:
    """Least seconds of a rank and micro-batch besides its blocks."""
    received_s = rank_receives(rank, layout, table.price_cache).value_s
    return received_s + sum(least_end_s(kind, layout, table) for kind in end_kinds(rank, layout))


def _unequal_ranks_s(
    layout: ParallelLayout,
    table: MixTable,
    limit_bytes: float,
    bound: TimeBound,
    block: BlockCosts,
) -> float:
    """Least seconds of a step whose ranks may hold any numbers of blocks, where gradients go.

    Within some seconds each rank holds at most so many blocks, fewer where it has more stashes. The
    least seconds are those within which the ranks hold all blocks. Numbers far below the mean count
    as within any seconds, and numbers far above it as one.
    """
    num_layers, pp = table.price_cache.model.num_layers, layout.mesh.pp
    mean = -(-num_layers // pp)
    counts = np.arange(max(1, mean - NEAR_MEAN), min(num_layers, mean + NEAR_MEAN) + 1)

    def steps_of(rank: int) -> Array:
        blocks = _FreedRank(block, rank, mean, layout, table, limit_bytes)
        beside_s = _beside_s(rank, layout, table)
        return _with_rank_s(layout, table, bound, beside_s, counts, blocks.least_s(counts))

    steps_s = np.array([steps_of(rank) for rank in range(pp)])
    steps_s = np.maximum.accumulate(steps_s, axis=1)
    for within_s in np.unique(steps_s[np.isfinite(steps_s)]).tolist():
        held = (steps_s <= within_s).sum(axis=1)
        most = np.where(held == len(counts), num_layers, counts[0] - 1 + held)
        if most.sum() >= num_layers:
            return float(within_s)
    return math.inf


class _FreedRank:
    """The blocks of a rank whose gradients come and go, as averages of the costs of `block`.

    Each moment of a backward pass is a limit by itself: it has the stashes of the rank and the
    gradients of the chunks that already ran backward.
    """

    def __init__(
        self,
        block: BlockCosts,
        rank: int,
        num_blocks: int,
        layout: ParallelLayout,
        table: MixTable,
        limit_bytes: float,
    ) -> None:
        self._rank, self._layout = rank, layout
        self._block = block
        self._saved = column_of(block.options, "saved_bytes") / layout.virtual_stages
        self._stash_bytes = num_blocks * float(self._saved.mean())
        workspace = np.maximum(column_of(block.options, "workspace_bytes"), block.reduced_bytes)
        self._room = usable_bytes(limit_bytes, layout.mesh, table.price_cache)
        self._room -= float((block.gathered_bytes + workspace).min())
        self._room -= least_end_bytes(rank, layout, table)
        self._message = 0.0
        if layout.mesh.pp > 1:  # all cuts are alike
            prices = table.price_cache
            self._message = float(
                prices.sent_bytes(prices.cut_class(0), layout.micro_batch_size, layout.sharding)
            )

    def least_s(self, counts: Ints) -> Array:
        """Least seconds of a step by number of blocks, of one of them, infinite without room."""
        block, layout = self._block, self._layout
        block_s = layout.num_micro_batches * block.time_s + block.tail_s
        least_s = np.zeros(len(counts))
        for made in MADE_SHARES:
            stashed, sent = self._fullest_moment(made)
            held = block.states - (1 - made) * block.gradients + stashed * self._saved
            room = (self._room - sent * self._message) / counts
            least_s = np.maximum(least_s, least_averages(block_s, held, room))
        return least_s

    def _fullest_moment(self, made: float) -> tuple[float, float]:
        """Returns stashes and sent messages of the fullest moment with a share of gradients.

        It is the begin of a backward pass, by which at least `made` of the chunks have gradients.
        No such moment is there where each chunk has one backward pass.
        """
        layout = self._layout
        moments = [
            (sum(each.stashes), each.sent)
            for each in passes_of(layout, self._rank)[0]
            if each.backward and len(each.made) >= made * layout.virtual_stages
        ]
        return max(
            moments,
            key=lambda moment: moment[0] * self._stash_bytes + moment[1] * self._message,
            default=(0, 0),
        )


def least_averages(seconds: Array, held: Array, room: Array) -> Array:
    """Returns by room the least average of `seconds` for shares that hold no more on average.

    It is the optimum of a linear program with one limit: the lower hull of the options.
    """
    points = zip(held.tolist(), seconds.tolist(), range(len(held)), strict=True)
    hull = lower_hull(points)
    least_s = np.interp(room, held[hull], seconds[hull])
    return np.asarray(np.where(room >= held[hull[0]], least_s, np.inf))
