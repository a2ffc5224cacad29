"""Prices of the mixes of one pipeline rank, with its embedding and head.

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
from parplan.costmodels.memory.peak_candidates import PeakCandidate, moments
from parplan.costmodels.memory.rank_memory import (
    gradients_come_and_go,
    occupied_bytes,
    peaks,
    stashes,
)
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.hidden_recompute import plain_and_ramp
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array
from parplan.planner.layer_options.mixes import (
    Mixes,
    chains,
    column_of,
    near_mixes,
    widest_mixes,
)
from parplan.planner.stage_columns.mix_peaks import MixPeaks
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.planner.stage_columns.stage_prices import (
    BlockCosts,
    EndCosts,
    MixCosts,
    end_kinds,
    fixed_price,
    sums_of,
)
from parplan.profiles.models.operator_graph import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedMixes:
    """Mixes of one block count, by row: seconds as in `StageColumn`, bytes to allocate, redundant
    bytes.

    zero     the ZeRO stage of embedding and head
    mixed    whether the blocks of a mix may have two ZeRO stages
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
    """The mixes of one pipeline rank of a layout and their prices.

    ends    the prices of its embedding and head
    """

    def __init__(
        self, rank: int, layout: ParallelLayout, table: MixTable, ends: PriceCache | None = None
    ) -> None:
        self.rank, self.layout, self.table, self.ends = (
            rank,
            layout,
            table,
            ends or table.price_cache,
        )
        self.stages = table.zero_stages(layout)
        self.fixed = {zero: fixed_price(rank, layout, zero, self.ends) for zero in self.stages}
        self.block = table.per_block(layout, rank)
        self.stashes = stashes(LayerKind.BLOCK, rank, layout)
        self._of_moments = KeyedCache()
        self._peaks = peaks(rank, layout) if layout.splits_backward else ()
        self._moments = (
            moments(rank, layout) if layout.recomputes_ahead else (PeakCandidate(self.stashes),)
        )

    @cached_property
    def _freed(self) -> MixPeaks | None:
        """What is not there at once where gradients come and go; chunks have their own account of
        it (costmodels/chunks/chunk_budget.py).
        """
        come_and_go = gradients_come_and_go(self.layout, self.ends) and not self.layout.chunked
        return (
            MixPeaks(self.rank, self.layout, self.block, self.fixed, self.ends)
            if come_and_go
            else None
        )

    @property
    def looks_up(self) -> bool:
        return self.ends is not self.table.price_cache

    @property
    def end_stages(self) -> tuple[int, ...]:
        """The ZeRO stages that embedding and head may have; where the rank has neither, one says
        all.
        """
        return self.stages if end_kinds(self.rank, self.layout) else self.stages[-1:]

    def candidates(self, num_blocks: int) -> list[PricedMixes]:
        """Mixes at one ZeRO stage, with embedding and head, and those of two stages, where there
        are several.
        """
        found = [
            self.priced(self.table.get(self.layout, self.rank, num_blocks, zero), zero)
            for zero in self.stages
        ]
        if len(self.stages) > 1:
            mixes = self._mixed(num_blocks)
            sums = sums_of(mixes, self.block)
            found += [self.priced(mixes, zero, mixed=True, sums=sums) for zero in self.end_stages]
        return found

    def _mixed(self, num_blocks: int) -> Mixes:
        return self.table.once(
            (
                "mixed",
                self._unbeaten_blocks.options,
                self._chains,
                self.layout.virtual_stages,
                num_blocks,
            ),
            lambda: near_mixes(
                self._unbeaten_blocks.options, self._chains, num_blocks, self.layout.virtual_stages
            ),
        )

    @cached_property
    def _unbeaten_blocks(self) -> BlockCosts:
        return self.table.unbeaten_blocks(self.layout, self.rank)[0]

    @cached_property
    def _chains(self) -> tuple[tuple[int, ...], ...]:
        """The chains of what a block adds to the step of this rank, and of what it adds to the peak
        of its device.
        """
        block = self._unbeaten_blocks
        step_s = self.layout.num_micro_batches * block.time_s + block.tail_s
        in_flight = self.stashes / self.layout.virtual_stages
        held = (
            block.states
            + self._spare(block.step_copies)
            + in_flight * column_of(block.options, "saved_bytes")
        )
        return tuple(map(tuple, chains(block.options, step_s, held)))

    def _spare(self, step_copies: Array | float) -> Array:
        """Bytes for the copies of the optimizer's step, which are no part of what the allocator
        keeps a share of besides.
        """
        found: Array = np.asarray(
            step_copies / (1 + self.table.price_cache.training.stack.allocator_share)
        )
        return found

    def priced(
        self, mixes: Mixes, zero: int, *, mixed: bool = False, sums: MixCosts | None = None
    ) -> PricedMixes:
        """The prices of mixes with embedding and head at stage `zero`; sums: of the mixes' blocks,
        where they are known.
        """
        fixed, own = self.fixed[zero], sums or sums_of(mixes, self.block)
        running = self.running(mixes, zero, own)
        buffers = np.maximum(own.zero_buffer, fixed.zero_buffer)
        held = fixed.states + own.states + self.stashes * mixes.saved_bytes + fixed.held
        ideal = (
            fixed.ideal_states
            + own.ideal_states
            + self.stashes * mixes.ideal_saved_bytes
            + fixed.ideal_held
        )
        allocated = held + running + buffers
        time_s = own.time_s + fixed.time_s + mixes.last_s
        plain_s, ramp_s = plain_and_ramp(
            self.layout.schedule,
            self.rank,
            self.layout.mesh.pp,
            time_s,
            own.recompute_s,
            own.longer_s,
        )
        apart = self._freed.apart_bytes(mixes, zero, running + buffers) if self._freed else 0.0
        return PricedMixes(
            mixes=mixes,
            zero=zero,
            mixed=mixed,
            time_s=time_s,
            tail_s=own.tail_s + fixed.tail_s,
            plain_s=plain_s,
            ramp_s=ramp_s,
            allocated=allocated - apart + self._spare(fixed.step_copies + own.step_copies),
            redundant=allocated - ideal,
        )

    def running(self, mixes: Mixes, zero: int, own: MixCosts | None = None) -> Array:
        """What the fullest moment holds beyond states and the most stashes
        (costmodels/memory/peak_candidates.py).
        """
        fixed, own = self.fixed[zero], own or sums_of(mixes, self.block)
        saved, whole = mixes.saved_bytes, own.whole_saved
        inside = (
            self._temporaries(mixes.workspace_bytes, saved, own.waiting, fixed) + mixes.window_bytes
        )
        if not self.layout.recomputes_ahead:
            return inside
        alone = self._temporaries(
            widest_mixes(mixes.counts, self.block.of(mixes.options).whole_workspace),
            whole,
            np.zeros_like(saved),
            fixed,
        )
        levels = [
            (one.stashes - self.stashes) * (saved + fixed.saved)
            + one.remade * (whole - saved)
            + (alone if one.alone else inside)
            for one in self._moments
        ]
        found: Array = np.max(levels, axis=0)
        return found

    def _temporaries(
        self, workspace: Array, saved: Array, waiting: Array, fixed: EndCosts
    ) -> Array:
        """The largest of a layer, and with a split backward what weight gradients that wait hold
        (costmodels/memory/rank_memory.py).
        """
        freed = 0.0 if self._peaks else saved
        of_layers = np.maximum(workspace, fixed.embedding_workspace - freed) - fixed.used_up
        found: Array = np.maximum(of_layers, fixed.head_workspace)
        if not self._peaks:
            return found
        fullest: Array = np.max(
            [held * saved + waits * waiting for held, waits in self._peaks], axis=0
        )
        return found + fullest - self.stashes * saved + fixed.waiting

    def host_fits(self, mixes: Mixes) -> npt.NDArray[np.bool_]:
        """Which mixes a device's share of the host holds."""
        fixed = self.fixed[self.stages[0]].host
        found: npt.NDArray[np.bool_] = (
            self.stashes * mixes.host_bytes + fixed <= self.table.host_share_bytes
        )
        return found

    def column(self, priced: PricedMixes, row: int) -> StageColumn:
        memory = occupied_bytes(
            float(priced.allocated[row]), self.layout.mesh, self.table.price_cache
        )
        mix = tuple(
            (option, int(n))
            for option, n in zip(priced.mixes.options, priced.mixes.counts[row], strict=True)
            if n
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
            looks_up=self.looks_up,
        )
