"""The least redundant bytes of a layout in a step time, before any column (EQUATIONS R3, I5).

A rank whose blocks run on some options holds redundant bytes that add up over its blocks, and the
largest workspace and gather buffer of the options in use. With s in-flight micro-batches, ends at
ZeRO stage z, and x_o the blocks on option o,

    rho >= rho_z + sum_o x_o (states_o + s saved_o / v)
                 + max over o in use of (workspace_o + buffer_o)

where states and saved tensors count beyond their share of one copy. In a step of at most T each
rank has

    (M - a) t_z + tail_z + sum_o x_o ((M - a) t_o + tail_o) <= T - a U

with U the least seconds of all layers together where the rank has its number of blocks and each
rank its own speed. With real numbers of blocks and a given largest option, two options are enough.
So the least of a rank with n blocks is a minimum over pairs, and U and the least of all ranks
follow block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from parplan.costmodels.memory.peak_candidates import peak_candidates
from parplan.costmodels.memory.rank_memory import peak_stash_counts
from parplan.costmodels.schedules.hidden_recompute import hidden_passes
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints
from parplan.planner.layer_options.mixes import column_of
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.planner.stage_columns.chunk_columns import rank_columns
from parplan.planner.stage_columns.embedding_columns import AnyEnds
from parplan.planner.stage_columns.mix_prices import MixPrices
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_prices import EndCosts

ROUNDING = 1e-9  # relative, against another order of summation
LEAST_S = 1e-12  # in place of no difference between two options


class RedundancyBound:
    """Lower bounds of the redundant bytes of a layout without chunks and without the host.

    tables    the mixes of each pipeline rank
    share     bubble share of the layout; none counts where recompute ahead shortens the ramps
    """

    def __init__(self, layout: ParallelLayout, tables: Sequence[MixTable], share: float) -> None:
        self.layout = layout
        self.share = 0.0 if layout.recomputes_ahead else share
        repeats = layout.num_micro_batches - share - hidden_passes(layout.schedule)
        self.num_layers = tables[0].price_cache.model.num_layers
        self.ranks = [
            _RankBound(_prices(rank, layout, table), repeats) for rank, table in enumerate(tables)
        ]

    def least_bytes(self, slowest_s: float, longest: int | None) -> float:
        """Redundant bytes of the cluster that no plan within `slowest_s` is below.

        Infinite where no plan is in time.

        longest: the most blocks of a rank, None without a limit
        """
        counts = [
            np.array(list(block_counts(rank, self.layout, self.num_layers, longest)), int)
            for rank in range(len(self.ranks))
        ]
        least = self._none_placed()
        for costs, held, walk_s in zip(self.ranks, counts, self._walks_s(counts), strict=True):
            room_s = np.full(len(held), -np.inf)  # where the others cannot hold the other blocks
            fits = np.isfinite(walk_s)
            room_s[fits] = slowest_s * (1 + ROUNDING) - self.share * walk_s[fits]
            least = _with_rank(least, held, costs.least_bytes(held, room_s))
        cluster_bytes = self.layout.mesh.ranks_per_stage * float(least[-1])
        return cluster_bytes - ROUNDING * abs(cluster_bytes) if cluster_bytes < inf else inf

    def _walks_s(self, counts: Sequence[Ints]) -> list[Array]:
        """Least seconds of a micro-batch on all ranks, by rank and number of its blocks."""
        own_s = [rank.least_s(held) for rank, held in zip(self.ranks, counts, strict=True)]
        before, after = [self._none_placed()], [self._none_placed()]
        for held, least_s in zip(counts, own_s, strict=True):
            before.append(_with_rank(before[-1], held, least_s))
        for held, least_s in zip(reversed(counts), reversed(own_s), strict=True):
            after.append(_with_rank(after[-1], held, least_s))
        walks_s = []
        for rank, (held, least_s) in enumerate(zip(counts, own_s, strict=True)):
            behind_s = after[len(self.ranks) - 1 - rank]
            others_s = _with_rank(before[rank], np.arange(len(behind_s)), behind_s)
            walks_s.append(least_s + others_s[self.num_layers - held])
        return walks_s

    def _none_placed(self) -> Array:
        """Returns a least value by number of blocks placed so far, before any rank."""
        return np.append(0.0, np.full(self.num_layers, np.inf))


def _with_rank(least: Array, counts: Ints, values: Array) -> Array:
    """Returns the least sums by number of blocks placed, with the values of a further rank.

    counts    the numbers of blocks of the rank, each with its value
    """
    placed = np.arange(len(least))
    before = placed - counts[:, None]
    sums = np.where(before < 0, np.inf, least[np.maximum(before, 0)]) + values[:, None]
    of_all: Array = sums.min(axis=0)
    return of_all


def _prices(rank: int, layout: ParallelLayout, table: MixTable) -> list[MixPrices]:
    """Returns the prices of a rank with each way to run its embedding and head."""
    columns = rank_columns(rank, layout, table)
    ways = columns.ways if isinstance(columns, AnyEnds) else (columns,)
    mixes: list[MixPrices] = [way for way in ways if isinstance(way, MixPrices)]
    assert len(mixes) == len(ways), "the memory objective has no chunks and no host"
    return mixes


class _RankBound:
    """The pairs of options of one rank, and its costs besides blocks by way to run its ends.

    Arrays are by pair: the block on the faster option, and the difference of the slower one to it.
    """

    def __init__(self, ways: Sequence[MixPrices], repeats: float) -> None:
        costs = ways[0]  # blocks are alike in all ways
        self.costs, self.repeats = costs, repeats
        block = costs.block
        self.moment = _moment(costs)
        seconds, held = repeats * block.time_s + block.tail_s, _held_bytes(costs, self.moment)
        workspace = column_of(block.options, "workspace_bytes")
        if self.moment.alone:
            workspace = block.whole_workspace
        kept = _undominated(np.stack([seconds, held, workspace, block.zero_buffer]))
        faster, slower = np.nonzero(
            (seconds[kept][:, None] < seconds[kept]) & (held[kept][:, None] > held[kept])
        )
        faster = kept[np.concatenate([np.arange(len(kept)), faster])]
        slower = kept[np.concatenate([np.arange(len(kept)), slower])]
        self.seconds, self.longer_s = seconds[faster], seconds[slower] - seconds[faster]
        self.held, self.more_held = held[faster], held[slower] - held[faster]
        self.workspace = np.maximum(workspace[faster], workspace[slower])
        self.zero_buffer = np.maximum(block.zero_buffer[faster], block.zero_buffer[slower])
        ends = [way.fixed[zero] for way in ways for zero in way.end_stages]
        self._least_block_s = float(block.time_s.min())
        self._least_ends_s = min(fixed.time_s for fixed in ends)
        values = np.array([self._end_values(fixed) for fixed in ends])
        self.ends = [ends[number] for number in _undominated(values.T)]

    def _end_values(self, fixed: EndCosts) -> tuple[float, ...]:
        """Returns what `_least_bytes` reads of the ends; less of each is never worse."""
        return (
            self.repeats * fixed.time_s + fixed.tail_s,
            self._end_bytes(fixed),
            -fixed.used_up,
            fixed.head_workspace,
            fixed.zero_buffer,
        )

    def _end_bytes(self, fixed: EndCosts) -> float:
        ends_bytes = (
            fixed.states - fixed.ideal_states + fixed.held - fixed.ideal_held + fixed.waiting
        )
        return ends_bytes + (self.moment.stashes - self.costs.stashes) * fixed.saved

    def least_s(self, counts: Ints) -> Array:
        """Least seconds of a micro-batch by number of blocks."""
        return np.asarray(self._least_ends_s + counts * self._least_block_s, np.float64)

    def least_bytes(self, counts: Ints, room_s: Array) -> Array:
        """Least redundant bytes of a device by number of blocks, each within its `room_s`."""
        by_way = [self._least_bytes(fixed, counts, room_s) for fixed in self.ends]
        least: Array = np.min(by_way, axis=0)
        return least

    def _least_bytes(self, fixed: EndCosts, counts: Ints, room_s: Array) -> Array:
        block_s = (room_s - self.repeats * fixed.time_s - fixed.tail_s) / counts
        over_s = block_s - self.seconds[:, None]  # by pair and number of blocks
        share = np.clip(over_s / np.maximum(self.longer_s, LEAST_S)[:, None], 0.0, 1.0)
        held = counts * (self.held[:, None] + share * self.more_held[:, None])
        temporaries = np.maximum(self.workspace - fixed.used_up, fixed.head_workspace)
        buffers = np.maximum(self.zero_buffer, fixed.zero_buffer)
        largest = (temporaries + buffers)[:, None]
        least = np.where(over_s < 0.0, np.inf, held + largest).min(axis=0)
        of_rank: Array = least + self._end_bytes(fixed)
        return of_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """A moment of a rank that may be its peak, so that the peak holds no less.

    stashes, remade, waiting    micro-batches of all chunks: held, recomputed ahead, and those whose
                                weight gradients wait
    alone                       the backward pass has no recompute in it
    """

    stashes: float
    remade: float = 0.0
    waiting: float = 0.0
    alone: bool = False


def _moment(costs: MixPrices) -> _Moment:
    """The moment with the most stashes."""
    layout = costs.layout
    if layout.splits_backward:
        stashes, waiting = max(peak_stash_counts(costs.rank, layout))
        return _Moment(stashes=stashes, waiting=waiting)
    if layout.recomputes_ahead:
        fullest = max(peak_candidates(costs.rank, layout), key=lambda moment: moment.stashes)
        return _Moment(stashes=fullest.stashes, remade=fullest.remade, alone=fullest.alone)
    return _Moment(stashes=costs.stashes)


def _held_bytes(costs: MixPrices, moment: _Moment) -> Array:
    """Redundant bytes that one block adds to the rank, by option.

    The longest chunk counts for all chunks. It has no less than the mean, and no more blocks of an
    option than the rank.
    """
    block = costs.block
    saved = column_of(block.options, "saved_bytes")
    chunk = (
        moment.stashes * saved
        + moment.remade * (block.whole_saved - saved)
        + moment.waiting * block.waiting
        - costs.stashes * column_of(block.options, "ideal_saved_bytes")
    )
    of_states = block.states - block.ideal_states
    held: Array = of_states + np.where(chunk < 0, chunk, chunk / costs.layout.virtual_stages)
    return held


def _undominated(values: Array) -> Ints:
    """Columns of `values` that no other column is below or equal to in all rows."""
    no_worse = (values[:, :, None] <= values[:, None, :]).all(axis=0)  # [one, other]
    first = np.arange(values.shape[1])
    beats = no_worse & (~no_worse.T | (first[:, None] < first[None, :]))
    return np.flatnonzero(~beats.any(axis=0))
