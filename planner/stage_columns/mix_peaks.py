"""The peak of a rank's mixes if gradients come and go, for all mixes at once.

(costmodels/memory/peak_memory.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.peak_memory import (
    AlikeLayers,
    Bytes,
    ConstantBytes,
    LayerBytes,
    passes_of,
    peak_of_runs,
)
from parplan.costmodels.memory.rank_memory import (
    LayersOf,
    constant_bytes,
    held_in_passes,
    layer_activations,
    stashes,
)
from parplan.costmodels.strategy import LayerChoice, ParallelLayout
from parplan.planner.dominance import Array, Ints
from parplan.planner.layer_options.mixes import Mixes, column_of, widest_mixes
from parplan.planner.stage_columns.dealing import counts_of_chunks
from parplan.planner.stage_columns.stage_prices import BlockCosts, EndCosts, end_kinds
from parplan.profiles.models.operator_graph import LayerKey, LayerKind


@dataclass(frozen=True, slots=True)
class MixPeak:
    """The first block of a backward pass, or the end of the step, as a memory bound knows it.

    stashes, remade    micro-batches of all chunks together
    made               share of the blocks whose gradients exist
    alone              the backward pass has no recompute in it
    besides            bytes of the rank that are not the blocks'
    """

    stashes: int
    remade: int
    made: float
    alone: bool
    besides: float


class MixPeaks:
    """Peaks of one rank's mixes: blocks on options of `block`, embedding and head of `fixed`."""

    def __init__(
        self,
        rank: int,
        layout: ParallelLayout,
        block: BlockCosts,
        fixed: Mapping[int, EndCosts],
        price_cache: LayerPriceCache,
        layers_of: LayersOf | None = None,
    ) -> None:
        self.rank = rank
        self.layout = layout
        self.block = block
        self.fixed = fixed
        self.price_cache = price_cache
        self._stashes = stashes(LayerKind.BLOCK, rank, layout)
        self._layers_of = layers_of
        self._once = KeyedCache()

    @property
    def _kinds(self) -> tuple[LayerKey, ...]:
        """The classes of embedding and head, as far as the rank has them."""
        return end_kinds(self.rank, self.layout)

    def _constant(self, zero: int, reduced: Bytes) -> ConstantBytes:
        embeddings = (kind for kind in self._kinds if kind.role is LayerKind.EMBEDDING)
        return constant_bytes(
            self.rank,
            self.layout,
            next((self._choice(kind, zero) for kind in embeddings), None),
            reduced,
            self.price_cache,
            self._layers_of,
        )

    def _choice(self, kind: LayerKey, zero: int) -> LayerChoice:
        own = self.price_cache.own_sharding(kind, self.layout.sharding)
        return LayerChoice(kind, Recompute.NONE, zero, own)

    def _end(self, kind: LayerKey, zero: int) -> AlikeLayers:
        choice = self._choice(kind, zero)
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
        """Returns moments that include the peak, with embedding and head at one ZeRO stage."""
        return self._once(zero, lambda: self._fullest_moments(zero))

    def _fullest_moments(self, zero: int) -> list[MixPeak]:
        ends = {kind.role: self._end(kind, zero).held for kind in self._kinds}
        stages = self.layout.stages_of(self.rank)
        fixed = self.fixed[zero]
        lasting = self._constant(zero, 0.0)
        places = {LayerKind.EMBEDDING: 0, LayerKind.HEAD: self.layout.num_virtual_stages - 1}
        passes, sent = passes_of(self.layout, self.rank)
        peaks = [MixPeak(0, 0, 1.0, False, fixed.states + sent * lasting.sent)]
        for peak_pass in passes:
            if not peak_pass.backward:
                continue
            besides = fixed.states + peak_pass.sent * lasting.sent + lasting.gathered
            for kind, held in ends.items():
                chunk = stages.index(places[kind])
                # the head ran backward before the first block of its chunk
                ran = chunk == peak_pass.chunk and kind is LayerKind.HEAD
                has_gradients = chunk in peak_pass.made or ran
                stashed = peak_pass.stashes[chunk] - ran
                besides += stashed * held.saved - (0.0 if has_gradients else held.gradients)
                if ran:
                    besides += lasting.shared_table
            peaks.append(
                MixPeak(
                    sum(peak_pass.stashes),
                    sum(peak_pass.remade),
                    len(peak_pass.made) / len(stages),
                    peak_pass.ahead,
                    besides,
                )
            )
        values = np.array(
            [
                (p.stashes, p.remade, p.made, p.besides, p.alone, -float(p.alone), -n)
                for n, p in enumerate(peaks)
            ]
        )
        no_less = (values[:, None, :-1] >= values[None, :, :-1]).all(axis=2)
        # of equal moments the first stays
        beats = no_less & (~no_less.T | (values[:, None, -1] > values[None, :, -1]))
        return [peak for peak, beaten in zip(peaks, beats.any(axis=0), strict=True) if not beaten]

    def _blocks(self, mixes: Mixes) -> list[AlikeLayers]:
        """Returns the blocks of the rank as runs, the first used option of every row first.

        Their `count` is that of the whole rank.
        """
        bytes_of = self._layer_bytes(mixes)
        used = mixes.counts > 0
        order = np.argsort(~used, axis=1, kind="stable")[:, : used.sum(axis=1).max()]
        rows = np.arange(len(order))
        return [
            AlikeLayers(LayerKind.BLOCK, bytes_of(option), mixes.counts[rows, option])
            for option in order.T
        ]

    def _layer_bytes(self, mixes: Mixes) -> Callable[[Ints], LayerBytes]:
        """Returns the bytes of a block, by the numbers of its options among those of the mixes."""
        block = self.block.of(mixes.options)
        saved = column_of(block.options, "saved_bytes")
        workspace = column_of(block.options, "workspace_bytes")
        gathered, reduced = block.gathered_bytes, block.reduced_bytes
        remade = np.zeros(len(saved))
        if self.layout.recomputes_ahead:
            remade = block.whole_saved - saved
        return lambda option: LayerBytes(
            saved=saved[option],
            workspace=workspace[option],
            gradients=block.gradients[option],
            gathered=gathered[option],
            reduced=reduced[option],
            remade=remade[option],
            alone=block.whole_workspace[option],
        )

    def _chunks(self, mixes: Mixes, zero: int) -> Iterable[list[AlikeLayers]]:
        blocks = self._blocks(mixes)
        last_stage = self.layout.num_virtual_stages - 1
        whole = np.stack([run.count for run in blocks], axis=1)
        for stage, counts in zip(
            self.layout.stages_of(self.rank),
            counts_of_chunks(self.rank, whole, self.layout),
            strict=True,
        ):
            first = [self._end(LayerKind.EMBEDDING, zero)] if stage == 0 else []
            last = [self._end(LayerKind.HEAD, zero)] if stage == last_stage else []
            yield [
                *first,
                *(replace(run, count=count) for run, count in zip(blocks, counts.T, strict=True)),
                *last,
            ]

    def apart_bytes(self, mixes: Mixes, zero: int, temporaries: Array) -> Array:
        """Bytes by which the sum of the largest of each class exceeds the peak, by row.

        The classes are states, activations and `temporaries`. Zero for mixes that offload
        activations, as in `RankMemory.apart`.
        """
        fixed = self.fixed[zero]
        block = self.block.of(mixes.options)
        kinds = self._kinds
        reduced = np.maximum(
            widest_mixes(mixes.counts, block.reduced_after_bytes),
            fixed.zero_buffer if zero == 1 and kinds else 0.0,
        )
        lasting = self._constant(zero, reduced)
        fullest = peak_of_runs(self.layout, self.rank, list(self._chunks(mixes, zero)), lasting)
        saved = self._stashes * mixes.saved_bytes
        together = (
            fixed.gradients + mixes.counts @ block.gradients + fixed.held + saved + temporaries
        )
        apart: Array = np.where(mixes.host_bytes > 0, 0.0, together - fullest)
        return apart
