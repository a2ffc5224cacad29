"""The prices of a pipeline rank's mixes, with its embedding and head.

A rank runs its blocks on a mix of the catalogue's options, each at a ZeRO stage
(planner/layer_options/mixes.py). The price is a sum over layers, so the mixes of n blocks are
priced at once, vectorised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.memory.peak_candidates import PeakCandidate, peak_candidates
from parplan.costmodels.memory.rank_memory import (
    gradients_come_and_go,
    occupied_bytes,
    peak_stash_counts,
    stashes,
)
from parplan.costmodels.schedules.hidden_recompute import plain_and_ramp
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints
from parplan.planner.layer_options.mixes import (
    Mixes,
    chains,
    column_of,
    near_mixes,
    widest_mixes,
)
from parplan.planner.stage_columns.mix_peaks import MixPeaks
from parplan.planner.stage_columns.mix_table import MixTable, StageTable
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.planner.stage_columns.stage_prices import (
    BlockCosts,
    EndCosts,
    MixCosts,
    end_costs,
    end_kinds,
    sums_of,
)
from parplan.profiles.models.operator_graph import LayerKind

Chains = tuple[tuple[int, ...], ...]  # options that are near one another, by number


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedMixes:
    """Prices of mixes of one block count, by row; seconds are those of `StageColumn`.

    zero         the ZeRO stage of embedding and head
    mixed        the blocks of a mix may have two ZeRO stages
    allocated    bytes of tensors at the peak
    redundant    redundant bytes
    """

    mixes: Mixes
    zero: int
    mixed: bool
    time_s: Array
    tail_s: Array
    plain_s: Array
    ramp_s: Array
    allocated: Array
    redundant: Array


class MixPrices:
    """Prices the mixes of one pipeline rank of a layout.

    ends    the prices of its embedding and head
    """

    def __init__(
        self,
        rank: int,
        layout: ParallelLayout,
        table: StageTable,
        ends: LayerPriceCache | None = None,
    ) -> None:
        self.rank = rank
        self.layout = layout
        self.table = table
        self.ends = ends or table.price_cache
        self.stages = table.zero_stages(layout)
        costs = {zero: self._end_costs(zero) for zero in self.end_stages}
        self.fixed = {zero: costs.get(zero, costs[self.end_stages[-1]]) for zero in self.stages}
        self.block = self._block_costs()
        self.stashes = stashes(LayerKind.BLOCK, rank, layout)
        self._once = KeyedCache()
        self._peaks = peak_stash_counts(rank, layout) if layout.splits_backward else ()
        self._moments: tuple[PeakCandidate, ...] = (PeakCandidate(self.stashes),)
        if layout.recomputes_ahead:
            self._moments = peak_candidates(rank, layout)

    @property
    def mix_table(self) -> MixTable:
        """The mixes of a model with one class of blocks."""
        assert isinstance(self.table, MixTable), "several layer classes have no mixes"
        return self.table

    def _end_costs(self, zero: int) -> EndCosts:
        return end_costs(self.rank, self.layout, zero, self.ends)

    def _block_costs(self) -> BlockCosts:
        return self.mix_table.per_block(self.layout, self.rank)

    @cached_property
    def _freed(self) -> MixPeaks | None:
        """The peaks of mixes if gradients come and go, else None.

        Chunks have a separate account of freed gradients (costmodels/chunks/chunk_budget.py).
        """
        if self.layout.chunked or not gradients_come_and_go(self.layout, self.ends):
            return None
        return self._make_peaks()

    @property
    def peaks(self) -> MixPeaks:
        """The peaks of mixes, whose gradients come and go."""
        assert self._freed is not None, "the gradients of this layout stay"
        return self._freed

    def _make_peaks(self) -> MixPeaks:
        return MixPeaks(self.rank, self.layout, self.block, self.fixed, self.ends)

    @property
    def looks_up(self) -> bool:
        """True if the host holds the token table of this rank."""
        return self.ends.offload != self.table.price_cache.offload

    @cached_property
    def tied_table(self) -> tuple[str | None, ...]:
        """The division of a tied token table in embedding or head of this rank."""
        for kind in end_kinds(self.rank, self.layout):
            return self.ends.table_division(kind, self.layout.sharding)
        return ()

    @property
    def end_stages(self) -> tuple[int, ...]:
        """The ZeRO stages that embedding and head may have.

        A rank with neither has a single one.
        """
        return self.stages if end_kinds(self.rank, self.layout) else self.stages[-1:]

    def candidates(self, num_blocks: int, *, exact: bool = True) -> list[PricedMixes]:
        """Returns mixes at one ZeRO stage, with embedding and head, and mixes of two stages.

        The latter exist if there are several stages. Under a rule for the recompute of the stages
        they are the mixes with its number of recomputed blocks.

        exact    the peaks of gradients that come and go are found
        """
        if self.table.stage_recompute is not None:
            counts = self.table.stage_recompute.counts(num_blocks, self.rank, self.layout)
            mixes = self.mix_table.staged(self.layout, self.rank, num_blocks, counts)
            return [self.priced(mixes, zero) for zero in self.end_stages]
        if len(self.stages) > 1 and self.mix_table.catalogue.by_operator:
            return self._mixed_candidates(num_blocks, exact=exact)
        candidates = [
            self.priced(
                self.mix_table.get(self.layout, self.rank, num_blocks, zero), zero, exact=exact
            )
            for zero in self.stages
        ]
        if len(self.stages) > 1:
            candidates += self._mixed_candidates(num_blocks, exact=exact)
        return candidates

    def _mixed_candidates(self, num_blocks: int, *, exact: bool) -> list[PricedMixes]:
        """Returns mixes of options at any ZeRO stages, by the stage of embedding and head."""
        mixes, sums = self._mixed(num_blocks)
        return [
            self.priced(mixes, zero, mixed=True, sums=sums, exact=exact) for zero in self.end_stages
        ]

    def redundancy_mixes(self, num_blocks: int) -> list[PricedMixes]:
        """Returns mixes of options that are near in seconds and redundant bytes.

        Recompute frees bytes that need not be redundant, so that `candidates`, whose options are
        near in seconds and held bytes, may lack the mix with the least redundant bytes.
        """
        if self.table.stage_recompute is not None:
            return []
        mixes, sums = self._mixed(num_blocks, redundancy=True)
        return [self.priced(mixes, zero, mixed=True, sums=sums) for zero in self.end_stages]

    def _mixed(self, num_blocks: int, *, redundancy: bool = False) -> tuple[Mixes, MixCosts]:
        virtual_stages = self.layout.virtual_stages
        every = self.mix_table.tries_every_list(
            self.layout, self.rank, -(-num_blocks // virtual_stages)
        )
        block, near = self._chained(every, redundancy)

        def make() -> tuple[Mixes, MixCosts]:
            mixes = near_mixes(block.options, near, num_blocks, virtual_stages)
            return mixes, sums_of(mixes, self.block)

        return self.mix_table.recent(("mixed", block, near, virtual_stages, num_blocks), make)

    def _chained(self, every: bool, redundancy: bool) -> tuple[BlockCosts, Chains]:
        """Returns the costs of options, and the chains of those near one another.

        The chains are those of the seconds that a block adds to the step, and of the bytes that it
        adds to the peak, or of its redundant bytes.
        """

        def make() -> tuple[BlockCosts, Chains]:
            block = self.mix_table.unbeaten_blocks(self.layout, self.rank, every=every)
            step_s = self.layout.num_micro_batches * block.time_s + block.tail_s
            held = self._redundant_bytes(block) if redundancy else self._held_bytes(block)
            return block, tuple(map(tuple, chains(block.options, step_s, held)))

        return self._once(("chained", every, redundancy), make)

    @cached_property
    def _unbeaten_blocks(self) -> BlockCosts:
        return self.mix_table.unbeaten_blocks(self.layout, self.rank)

    def _redundant_bytes(self, block: BlockCosts) -> Array:
        """Redundant bytes of a block by option."""
        saved, ideal = (
            column_of(block.options, name) for name in ("saved_bytes", "ideal_saved_bytes")
        )
        in_flight = self.stashes / self.layout.virtual_stages
        return np.asarray(block.states - block.ideal_states + in_flight * (saved - ideal))

    def _held_bytes(self, block: BlockCosts) -> Array:
        """Bytes that a block adds to the peak, by option."""
        in_flight = self.stashes / self.layout.virtual_stages
        return np.asarray(
            block.states
            + self._spare(block.step_copies)
            + in_flight * column_of(block.options, "saved_bytes")
        )

    def _spare(self, step_copies: Array | float) -> Array:
        """Bytes for the copies of the optimizer's step.

        They are free of the share that the allocator holds in addition to tensors.
        """
        share = self.table.price_cache.training.stack.allocator_share
        spare: Array = np.asarray(step_copies / (1 + share))
        return spare

    def priced(
        self,
        mixes: Mixes,
        zero: int,
        *,
        mixed: bool = False,
        sums: MixCosts | None = None,
        exact: bool = True,
    ) -> PricedMixes:
        """Returns the prices of mixes with embedding and head at stage `zero`.

        sums    the costs of the mixes' blocks, if they are known
        """
        fixed = self.fixed[zero]
        blocks = sums or sums_of(mixes, self.block)
        running = self.running(mixes, zero, blocks)
        buffers = np.maximum(blocks.zero_buffer, fixed.zero_buffer)
        held = fixed.states + blocks.states + self.stashes * mixes.saved_bytes + fixed.held
        ideal = (
            fixed.ideal_states
            + blocks.ideal_states
            + self.stashes * mixes.ideal_saved_bytes
            + fixed.ideal_held
        )
        allocated = held + running + buffers
        time_s = blocks.time_s + fixed.time_s + mixes.last_s
        plain_s, ramp_s = plain_and_ramp(
            self.layout.schedule,
            self.rank,
            self.layout.mesh.pp,
            time_s,
            blocks.recompute_s,
            blocks.longer_s,
        )
        frees = exact and self._freed
        apart = frees.apart_bytes(mixes, zero, running + buffers) if frees else 0.0
        return PricedMixes(
            mixes=mixes,
            zero=zero,
            mixed=mixed,
            time_s=time_s,
            tail_s=blocks.tail_s + fixed.tail_s,
            plain_s=plain_s,
            ramp_s=ramp_s,
            allocated=allocated - apart + self._spare(fixed.step_copies + blocks.step_copies),
            redundant=allocated - ideal,
        )

    def exactly(self, loose: PricedMixes, rows: Ints) -> PricedMixes:
        """Returns some rows with the peaks of gradients that come and go."""
        return self.priced(loose.mixes.at(rows), loose.zero, mixed=loose.mixed)

    def least_allocated(self, loose: PricedMixes, rows: Ints, num_blocks: int) -> Array:
        """Lower bound of the bytes at the peak of some rows, if gradients come and go.

        It leaves out what a layer allocates in its own pass. It is zero where the chunks of the
        rank differ in length.
        """
        freed, block = self._freed, self.block.of(loose.mixes.options)
        if freed is None or not len(rows) or num_blocks % self.layout.virtual_stages:
            return np.zeros(len(rows))
        spare = self._spare(self.fixed[loose.zero].step_copies)
        always = block.states + self._spare(block.step_copies)
        counts = loose.mixes.counts[rows].astype(np.float64)
        states, gradients = (counts @ np.stack([always, block.gradients], axis=1)).T
        saved = loose.mixes.saved_bytes[rows]
        levels = [
            peak.besides + spare - (peak.made < 1) * gradients + peak.stashes * saved
            for peak in freed.moments(loose.zero, num_blocks)
            if not peak.remade
        ]
        return np.asarray(np.max(levels, axis=0) + states)

    def running(self, mixes: Mixes, zero: int, sums: MixCosts | None = None) -> Array:
        """Bytes at the peak beyond states and the most stashes.

        (costmodels/memory/peak_candidates.py)
        """
        fixed = self.fixed[zero]
        blocks = sums or sums_of(mixes, self.block)
        saved = mixes.saved_bytes
        whole = blocks.whole_saved
        inside = self._temporaries(mixes.workspace_bytes, saved, blocks.waiting, fixed)
        inside = inside + mixes.window_bytes
        if not self.layout.recomputes_ahead:
            return inside
        workspace = widest_mixes(mixes.counts, self.block.of(mixes.options).whole_workspace)
        alone = self._temporaries(workspace, whole, np.zeros_like(saved), fixed)
        levels = [
            (moment.stashes - self.stashes) * (saved + fixed.saved)
            + moment.remade * (whole - saved)
            + (alone if moment.alone else inside)
            for moment in self._moments
        ]
        peak: Array = np.max(levels, axis=0)
        return peak

    def _temporaries(
        self, workspace: Array, saved: Array, waiting: Array, fixed: EndCosts
    ) -> Array:
        """Bytes of the largest layer's temporaries, and of waiting weight gradients.

        The latter exist in a split backward pass (costmodels/memory/rank_memory.py).
        """
        freed = 0.0 if self._peaks else saved
        of_layers = np.maximum(workspace, fixed.embedding_workspace - freed) - fixed.used_up
        largest: Array = np.maximum(of_layers, fixed.head_workspace)
        if not self._peaks:
            return largest
        fullest: Array = np.max(
            [held * saved + waits * waiting for held, waits in self._peaks], axis=0
        )
        return largest + fullest - self.stashes * saved + fixed.waiting

    def host_fits(self, priced: PricedMixes) -> npt.NDArray[np.bool_]:
        """Returns for each mix whether a device's share of the host holds its bytes."""
        fixed, in_flight = self.fixed[priced.zero].host, self.stashes * priced.mixes.host_bytes
        fits: npt.NDArray[np.bool_] = in_flight + fixed <= self.table.host_share_bytes
        return fits

    def column(self, priced: PricedMixes, row: int) -> StageColumn:
        memory = occupied_bytes(
            float(priced.allocated[row]), self.layout.mesh, self.table.price_cache
        )
        mix = tuple(
            (option, int(count))
            for option, count in zip(priced.mixes.options, priced.mixes.counts[row], strict=True)
            if count
        )
        return StageColumn(
            mix,
            priced.zero,
            float(priced.time_s[row]),
            float(priced.tail_s[row]),
            float(memory),
            float(priced.redundant[row]),
            float(priced.plain_s[row]),
            float(priced.ramp_s[row]),
            ends=self.ends.ends,
            table=self.tied_table,
            looks_up=self.looks_up,
        )
