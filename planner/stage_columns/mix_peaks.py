"""The peak of a rank's mixes if gradients come and go, for all mixes at once.

(costmodels/memory/peak_memory.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

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
from parplan.planner.dominance import Array, Ints, Mask
from parplan.planner.layer_options.mixes import Mixes, column_of, widest_mixes
from parplan.planner.stage_columns.dealing import counts_of_chunks
from parplan.planner.stage_columns.stage_prices import BlockCosts, EndCosts, end_kinds
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

MADE_SHARES = (0.0, 0.5, 1.0)  # of the chunks whose gradients exist at a moment of a bound


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassArrays:
    """The backward passes of a rank (`PeakPass`), by pass, or by pass and chunk.

    all_sent    messages that the rank sends in a step
    """

    chunk: Ints
    ahead: Mask
    sent: Ints
    stashes: Ints
    remade: Ints
    made: Mask
    all_sent: int


@lru_cache(maxsize=4096)
def _pass_arrays(layout: ParallelLayout, rank: int) -> _PassArrays:
    passes, all_sent = passes_of(layout, rank)
    backward = [each for each in passes if each.backward]
    chunks = range(len(layout.stages_of(rank)))
    return _PassArrays(
        chunk=np.array([each.chunk for each in backward]),
        ahead=np.array([each.ahead for each in backward], np.bool_),
        sent=np.array([each.sent for each in backward]),
        stashes=np.array([each.stashes for each in backward]),
        remade=np.array([each.remade for each in backward]),
        made=np.array([[chunk in each.made for chunk in chunks] for each in backward], np.bool_),
        all_sent=all_sent,
    )


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
        lasting = self._once(("constant", zero), lambda: self._made_constant(zero))
        return replace(lasting, reduced=reduced)

    def _made_constant(self, zero: int) -> ConstantBytes:
        embeddings = (kind for kind in self._kinds if kind.role is LayerKind.EMBEDDING)
        return constant_bytes(
            self.rank,
            self.layout,
            next((self._choice(kind, zero) for kind in embeddings), None),
            0.0,
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

    def moments(self, zero: int, num_blocks: int) -> list[MixPeak]:
        """Returns moments near the peak, with embedding and head at one ZeRO stage."""
        key = zero, num_blocks
        return self._once(key, lambda: self._fullest_moments(zero, num_blocks))

    def besides(self, zero: int) -> tuple[Array, float]:
        """Returns the bytes of the rank beside its blocks by backward pass, and after the last."""
        passes = _pass_arrays(self.layout, self.rank)
        fixed, lasting = self.fixed[zero], self._constant(zero, 0.0)
        besides = fixed.states + passes.sent * lasting.sent + lasting.gathered
        for kind in self._kinds:
            held = self._end(kind, zero).held
            head = kind.role is LayerKind.HEAD
            chunk = self.layout.stages_of(self.rank).index(
                self.layout.num_virtual_stages - 1 if head else 0
            )
            # the head ran backward before the first block of its chunk
            ran = (passes.chunk == chunk) & head
            besides = besides + (passes.stashes[:, chunk] - ran) * held.saved
            besides = besides - np.where(passes.made[:, chunk] | ran, 0.0, held.gradients)
            besides = besides + ran * lasting.shared_table
        return besides, fixed.states + passes.all_sent * lasting.sent

    def _fullest_moments(self, zero: int, num_blocks: int) -> list[MixPeak]:
        passes = _pass_arrays(self.layout, self.rank)
        besides, at_end = self._once(("besides", zero), lambda: self.besides(zero))
        stashes, remade = passes.stashes.sum(axis=1), passes.remade.sum(axis=1)
        made = passes.made.mean(axis=1)
        peaks = [MixPeak(0, 0, 1.0, False, at_end)]
        for row in self._chosen(stashes, made, besides, passes.ahead, num_blocks):
            peaks.append(
                MixPeak(
                    int(stashes[row]),
                    int(remade[row]),
                    float(made[row]),
                    bool(passes.ahead[row]),
                    float(besides[row]),
                )
            )
        return peaks

    def _chosen(
        self, stashes: Ints, made: Array, besides: Array, ahead: Mask, num_blocks: int
    ) -> list[int]:
        """Returns passes that no other dominates, or the fullest for some blocks.

        The blocks save the least, the mean and the most bytes of an option. Before the fullest
        pass others may be fuller that have fewer gradients.
        """
        if self.layout.recomputes_ahead:
            values = np.stack([stashes, made, besides, ahead, ~ahead], axis=1)
            no_less = (values[:, None] >= values[None, :]).all(axis=2)
            first = np.arange(len(values))
            beats = no_less & (~no_less.T | (first[:, None] < first[None, :]))
            return [int(row) for row in np.flatnonzero(~beats.any(axis=0))]
        saved = column_of(self.block.options, "saved_bytes") / self.layout.virtual_stages
        chosen: dict[int, None] = {}
        for each in (saved.min(), saved.mean(), saved.max()):
            held = besides + num_blocks * stashes * each
            for share in MADE_SHARES:
                chosen[int(np.where(made >= share, held, -np.inf).argmax())] = None
        return list(chosen)

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


class LeastPeaks(MixPeaks):
    """Bounds of the peaks of a rank with the least bytes of several ways to run its ends.

    every    the peaks with each way, and a ZeRO stage of embedding and head
    """

    def __init__(self, one: MixPeaks, every: Sequence[tuple[MixPeaks, int]]) -> None:
        super().__init__(one.rank, one.layout, one.block, one.fixed, one.price_cache)
        self._every = tuple(every)

    def besides(self, zero: int) -> tuple[Array, float]:
        ways = [peaks.besides(stage) for peaks, stage in self._every]
        return np.min([each for each, _ in ways], axis=0), min(at_end for _, at_end in ways)
