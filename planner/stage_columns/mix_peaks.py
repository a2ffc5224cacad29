"""What the mixes of a rank hold at their fullest moment where gradients come and go
(costmodels/memory/peak_memory.py), for all mixes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.peak_memory import AlikeLayers, LayerBytes, passes_of, peak_of_runs
from parplan.costmodels.memory.rank_memory import (
    held_in_passes,
    layer_activations,
    stashes,
    throughout,
)
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import LayerChoice, ParallelLayout
from parplan.planner.dominance import Array
from parplan.planner.layer_options.mixes import Mixes, column_of, widest_mixes
from parplan.planner.stage_columns.dealing import counts_of_chunks
from parplan.planner.stage_columns.stage_prices import BlockCosts, EndCosts, end_kinds
from parplan.profiles.models.operator_graph import LayerKind


@dataclass(frozen=True, slots=True)
class MixPeak:
    """The first block of a backward pass, or the end of the step: what a bound of memory knows of
    it.

    stashes, remade   of all chunks together
    made              share of the blocks whose gradients are there
    besides           bytes of the rank that are not the blocks'
    """

    stashes: int
    remade: int
    made: float
    alone: bool
    besides: float

    def holds_no_less(self, other: MixPeak) -> bool:
        """Whether what is held at this moment is at least what is held at the other, whatever the
        blocks hold.
        """
        mine, theirs = ((one.stashes, one.remade, one.made, one.besides) for one in (self, other))
        return self.alone == other.alone and all(a >= b for a, b in zip(mine, theirs, strict=True))


class MixPeaks:
    """The blocks of one rank of a layout, on the options of `block`, and its embedding and head, at
    the ZeRO stages of `fixed`.
    """

    def __init__(
        self,
        rank: int,
        layout: ParallelLayout,
        block: BlockCosts,
        fixed: Mapping[int, EndCosts],
        price_cache: PriceCache,
    ) -> None:
        self.rank, self.layout, self.block, self.fixed, self.price_cache = (
            rank,
            layout,
            block,
            fixed,
            price_cache,
        )
        self._stashes = stashes(LayerKind.BLOCK, rank, layout)
        self._once = KeyedCache()

    def _end(self, kind: LayerKind, zero: int) -> AlikeLayers:
        choice = LayerChoice(kind, Recompute.NONE, zero)
        return self._once(
            (kind, zero),
            lambda: AlikeLayers(
                kind,
                held_in_passes(
                    choice,
                    layer_activations(choice, self.layout, self.price_cache),
                    self.layout,
                    self.price_cache,
                ),
            ),
        )

    def moments(self, zero: int) -> list[MixPeak]:
        """The moments of which one is the fullest, with embedding and head at one ZeRO stage."""
        return self._once(zero, lambda: self._fullest_moments(zero))

    def _fullest_moments(self, zero: int) -> list[MixPeak]:
        ends = {kind: self._end(kind, zero).held for kind in end_kinds(self.rank, self.layout)}
        stages, fixed = self.layout.stages_of(self.rank), self.fixed[zero]
        lasting = throughout(
            self.layout, zero if LayerKind.EMBEDDING in ends else None, 0.0, self.price_cache
        )
        places = {LayerKind.EMBEDDING: 0, LayerKind.HEAD: self.layout.num_virtual_stages - 1}
        passes, sent = passes_of(self.layout, self.rank)
        found = [MixPeak(0, 0, 1.0, False, fixed.states + sent * lasting.sent)]
        for one in (one for one in passes if one.backward):
            besides = fixed.states + one.sent * lasting.sent + lasting.gathered
            for kind, held in ends.items():
                chunk = stages.index(places[kind])
                of_this = (
                    chunk == one.chunk and kind is LayerKind.HEAD
                )  # it ran backward before the first block
                besides += (one.stashes[chunk] - of_this) * held.saved - held.gradients * (
                    chunk not in one.made and not of_this
                )
                besides += lasting.shared_table * of_this
            found.append(
                MixPeak(
                    sum(one.stashes),
                    sum(one.remade),
                    len(one.made) / len(stages),
                    one.ahead,
                    besides,
                )
            )
        return [
            one
            for n, one in enumerate(found)
            if not any(
                other.holds_no_less(one) and not (m > n and one.holds_no_less(other))
                for m, other in enumerate(found)
                if m != n
            )
        ]

    def _blocks(self, mixes: Mixes) -> list[AlikeLayers]:
        """The blocks of the rank as runs, the first used option of every row first; `count` is of
        the whole rank.
        """
        block, ahead = self.block.of(mixes.options), self.layout.recomputes_ahead
        saved, workspace = (
            column_of(block.options, name) for name in ("saved_bytes", "workspace_bytes")
        )
        gathered, reduced = block.passes_bytes
        remade = block.whole_saved - saved if ahead else np.zeros(len(saved))
        used = mixes.counts > 0
        order = np.argsort(~used, axis=1, kind="stable")[:, : used.sum(axis=1).max()]
        rows = np.arange(len(order))
        return [
            AlikeLayers(
                LayerKind.BLOCK,
                LayerBytes(
                    saved=saved[option],
                    workspace=workspace[option],
                    gradients=block.gradients[option],
                    gathered=gathered[option],
                    reduced=reduced[option],
                    remade=remade[option],
                    alone=block.whole_workspace[option],
                ),
                mixes.counts[rows, option],
            )
            for option in order.T
        ]

    def _chunks(self, mixes: Mixes, zero: int) -> Iterator[list[AlikeLayers]]:
        blocks, last_stage = self._blocks(mixes), self.layout.num_virtual_stages - 1
        whole = np.stack([run.count for run in blocks], axis=1)
        for stage, counts in zip(
            self.layout.stages_of(self.rank),
            counts_of_chunks(self.rank, whole, self.layout),
            strict=True,
        ):
            first = [self._end(LayerKind.EMBEDDING, zero)] * (stage == 0)
            last = [self._end(LayerKind.HEAD, zero)] * (stage == last_stage)
            yield [
                *first,
                *(replace(run, count=count) for run, count in zip(blocks, counts.T, strict=True)),
                *last,
            ]

    def apart_bytes(self, mixes: Mixes, zero: int, temporaries: Array) -> Array:
        """By row how much less is there at the fullest moment than states, activations and
        `temporaries` at their most together.

        Nothing of mixes that send activations to the host, as in `RankMemory.apart`.
        """
        fixed, block = self.fixed[zero], self.block.of(mixes.options)
        reduces = np.array(
            [
                buffer if option.zero == 1 else 0.0
                for option, buffer in zip(block.options, block.zero_buffer, strict=True)
            ]
        )
        kinds = end_kinds(self.rank, self.layout)
        reduced = np.maximum(
            widest_mixes(mixes.counts, reduces), fixed.zero_buffer if zero == 1 and kinds else 0.0
        )
        lasting = throughout(
            self.layout, zero if LayerKind.EMBEDDING in kinds else None, reduced, self.price_cache
        )
        fullest = peak_of_runs(self.layout, self.rank, list(self._chunks(mixes, zero)), lasting)
        kept = self._stashes * mixes.saved_bytes
        together = (
            fixed.gradients + mixes.counts @ block.gradients + fixed.held + kept + temporaries
        )
        found: Array = np.where(mixes.host_bytes > 0, 0.0, together - fullest)
        return found
