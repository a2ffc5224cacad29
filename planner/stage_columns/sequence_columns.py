"""Columns of a pipeline rank of a model with several layer classes.

The layers of a rank are a range of the model for each of its chunks (`StageContents`). Each layer
has the options of its class, which differ in the operators that run again. The front over all
choices is found layer by layer (planner/layer_options/recompute_labels.py), and is priced as the
mixes of equal blocks are (planner/stage_columns/mix_prices.py). The layers of a rank have one ZeRO
stage (EQUATIONS I7).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby, pairwise

import numpy as np

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.peak_memory import AlikeLayers, LayerBytes
from parplan.costmodels.memory.rank_memory import usable_bytes
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints, hull_prices
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.layer_options.mixes import Mixes, column_of
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.mix_peaks import MixPeaks
from parplan.planner.stage_columns.mix_prices import PricedMixes
from parplan.planner.stage_columns.rank_moment import RankMoment, fullest_moment
from parplan.planner.stage_columns.sequence_table import SequenceTable
from parplan.planner.stage_columns.stage_column import RankTimeLimit, StageColumn
from parplan.planner.stage_columns.stage_contents import Range, StageContents
from parplan.planner.stage_columns.stage_prices import (
    BlockCosts,
    EndCosts,
    block_prices,
    end_costs,
)
from parplan.planner.stage_recompute import RecomputeRule
from parplan.profiles.models.operator_graph import LayerKey, LayerKind


class SequenceColumns(RankColumns):
    """The columns of one pipeline rank with given layers."""

    def __init__(
        self, contents: StageContents, rank: int, layout: ParallelLayout, table: SequenceTable
    ) -> None:
        self.contents = contents
        self.places: tuple[tuple[Range, ...], ...] = tuple((layers,) for layers in contents.ranges)
        self._sequence_table = table
        self.chunks = contents.body(table.price_cache)
        self._keys = [key for keys in contents.keys(table.price_cache) for key in keys]
        levels = table.allowed(layout, rank)
        keys = [key for chunk in self.chunks for key in chunk]
        by_key = {
            key: table.options(key, layout.micro_batch_size, layout.sharding, levels)
            for key in dict.fromkeys(keys)
        }
        self._layers = [by_key[key] for key in keys]
        self._options = tuple(option for options in by_key.values() for option in options)
        self._prices: dict[int, PricedMixes] = {}
        self._ends_at: dict[int, EndCosts] = {}
        self._has_ends = bool(contents.ends(table.price_cache))
        self._numbers = {option: number for number, option in enumerate(self._options)}
        firsts = {key: self._numbers[options[0]] for key, options in by_key.items()}
        self._firsts = np.array([firsts[key] for key in keys], np.int64)
        super().__init__(rank, layout, table)

    @property
    def num_blocks(self) -> int:
        """The layers besides embedding and head."""
        return len(self._layers)

    def at(self, places: tuple[tuple[Range, ...], ...]) -> SequenceColumns:
        """Returns the same columns for other places of equal layers, given by chunk."""
        if places == self.places:
            return self
        assert len(self.front[1])  # the copy shares it
        other = copy(self)
        other.places = places
        return other

    @cached_property
    def _hosted(self) -> tuple[int, ...]:
        """The ZeRO stages at which the rank's share of the host has room for its states."""
        share = self.table.host_share_bytes
        return tuple(zero for zero in self.stages if self._host_bytes(zero) <= share)

    def _host_bytes(self, zero: int) -> int:
        price_cache, layout = self.table.price_cache, self.layout
        own = (price_cache.own_sharding(key, layout.sharding) for key in self._keys)
        return sum(
            price_cache.states(key, layout.mesh, split, zero).host
            for key, split in zip(self._keys, own, strict=True)
        )

    def _at(self, zero: int) -> tuple[LayerOption, ...]:
        """Returns the options of all layers at one ZeRO stage."""
        return self._placed[zero]

    @cached_property
    def _placed(self) -> dict[int, tuple[LayerOption, ...]]:
        once = self.table.once
        return {
            zero: tuple(
                once(("placed", option, zero), partial(replace, option, zero=zero))
                for option in self._options
            )
            for zero in self.table.zero_stages(self.layout)
        }

    def _end_costs(self, zero: int) -> EndCosts:
        if not self._has_ends:
            zero = self.stages[0]  # there is nothing that it divides
        if zero not in self._ends_at:
            self._ends_at[zero] = end_costs(self.rank, self.layout, zero, self.ends, self.contents)
        return self._ends_at[zero]

    def _block_costs(self) -> BlockCosts:
        layout, kinds = self.layout, frozenset(option.kind for option in self._options)
        key = layout.mesh, layout.micro_batch_size, layout.sharding, layout.recomputes_ahead, kinds

        def make() -> BlockCosts:
            every = tuple(option for zero in self.stages for option in self._at(zero))
            return block_prices(every, layout, self.table.price_cache)

        way = self.stages, layout.keeps_all(self.rank), layout.chunked
        return self.table.once(("blocks", *key, *way), make)

    @property
    def end_stages(self) -> tuple[int, ...]:
        return self.stages

    @cached_property
    def front(self) -> tuple[bool, Ints]:
        """The front: whether it is exact, and by choice and layer the number of the option."""
        if self.table.stage_recompute is not None:
            return True, self._firsts + self._staged(self.table.stage_recompute)
        ends = np.cumsum([0, *map(len, self.chunks)])
        chunks = [self._layers[first:end] for first, end in pairwise(ends)]
        labels = self._sequence_table.front(chunks)
        return labels.exact, self._firsts + labels.options

    def _staged(self, rule: RecomputeRule) -> Ints:
        """Returns the choices of a rule: the last layers run again, if that frees memory."""
        whole = [
            next((n for n, option in enumerate(options) if self._runs_again(option)), 0)
            for options in self._layers
        ]
        counts = rule.counts(self.num_blocks, self.rank, self.layout)
        again = np.arange(self.num_blocks) >= self.num_blocks - np.array(counts)[:, None]
        rows: Ints = np.where(again, np.array(whole, np.int64), 0)
        return rows

    def _runs_again(self, option: LayerOption) -> bool:
        """Returns whether the whole layer runs again."""
        whole = self.table.price_cache.recompute_operators(option.kind, Recompute.FULL)
        return option.recompute in (Recompute.FULL, whole)

    def front_mixes(self, zero: int) -> Mixes:
        """Returns the front as mixes at a ZeRO stage."""
        return self._mixes(zero)

    def least_states(self, zero: int) -> float:
        """Bytes of the states of all layers but embedding and head, without those in chunks."""
        return float(self.block.of(self._at(zero)).states[self._firsts].sum())

    def _mixes(self, zero: int, most: int | None = None) -> Mixes:
        """Returns the front, or its fastest choices, as mixes.

        `saved_bytes` are those of the chunk that saves most.
        """
        mixes = self._once(("mixes", most), lambda: self._make_mixes(self.front[1][:most]))
        return replace(mixes, options=self._at(zero))

    def _make_mixes(self, rows: Ints) -> Mixes:
        counts = self._counts(rows)
        by_layer = column_of(self._options, "saved_bytes")[rows]
        saved = self._of_fullest_chunk(by_layer)
        ideal = self._of_fullest_chunk(column_of(self._options, "ideal_saved_bytes")[rows], True)
        widest = column_of(self._options, "workspace_bytes")[rows].max(axis=1, initial=0.0)
        none = np.zeros(len(rows))
        return Mixes(
            options=self._options,
            counts=counts,
            chunk_counts=self._waiting_counts(rows) if self.layout.splits_backward else counts,
            saved_bytes=saved,
            ideal_saved_bytes=ideal,
            workspace_bytes=widest,
            host_bytes=none,
            window_bytes=self.stashes * (self._of_fullest_chunk(by_layer, True) - saved),
            last_s=none,
        )

    def _counts(self, rows: Ints) -> Ints:
        """Returns by row the number of layers on each option."""
        return np.asarray((rows[:, :, None] == np.arange(len(self._options))).sum(axis=1))

    def _waiting_counts(self, rows: Ints) -> Ints:
        """Returns the counts of the chunk whose weight gradients have most bytes as they wait."""
        waiting = self.block.of(self._at(self.stages[0])).waiting
        ends = np.cumsum([0, *map(len, self.chunks)])
        counts = np.stack([self._counts(rows[:, first:end]) for first, end in pairwise(ends)])
        return np.asarray(counts[(counts @ waiting).argmax(axis=0), np.arange(len(rows))])

    def _of_fullest_chunk(self, by_layer: Array, besides: bool = False) -> Array:
        """Sums values by row and layer over each chunk, and returns the largest sum by row.

        besides    with the bytes of the chunk besides its layers, less the most of any chunk
        """
        ends = np.cumsum([0, *map(len, self.chunks)])
        b, price_cache = self.layout.micro_batch_size, self.table.price_cache
        most = self.contents.besides_bytes(b, price_cache) if besides else 0.0
        sums = [
            by_layer[:, first:end].sum(axis=1)
            + (price_cache.besides_bytes(*layers, b) - most if besides else 0.0)
            for (first, end), layers in zip(pairwise(ends), self.contents.ranges, strict=True)
        ]
        fullest: Array = np.max(sums, axis=0)
        return fullest

    def candidates(self, num_blocks: int, *, exact: bool = True) -> list[PricedMixes]:
        """Returns the front of the layers at each ZeRO stage that fits the host."""
        return [self._priced(zero) for zero in self._hosted]

    def redundancy_mixes(self, num_blocks: int) -> list[PricedMixes]:
        """Returns none: the front of the layers is not made of pairs of options."""
        return []

    def _priced(self, zero: int) -> PricedMixes:
        if zero not in self._prices:
            self._prices[zero] = self.priced(self._mixes(zero), zero)
        return self._prices[zero]

    def fastest(
        self,
        num_blocks: int,
        limit_bytes: float,
        reach: RankTimeLimit | None = None,
        beside: Sequence[StageColumn] = (),
    ) -> list[StageColumn]:
        """Returns for each ZeRO stage the fastest choice within `limit_bytes`.

        All choices of a stage have the same tail. The exact peak is made only where the sum of the
        largest bytes of each class does not fit.
        """
        usable = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache)
        fastest = []
        for zero in self._hosted:
            priced = self._at_once[zero]
            if priced.allocated[0] > usable:
                if self._always_bytes(zero) > usable:
                    continue
                priced = self._priced(zero)
            fits = np.flatnonzero(priced.allocated <= usable)
            if len(fits):
                fastest.append((priced, int(fits[0])))
        return self._unbeaten(fastest, ("time_s", "tail_s", "plain_s", "ramp_s"))

    def _always_bytes(self, zero: int) -> float:
        """Bytes that every choice holds: states without gradients, and the least activations."""
        fixed, block = self.fixed[zero], self.block.of(self._at(zero))
        states = float((block.states - block.gradients)[self._firsts].sum())
        kept = sum(
            held * min(option.saved_bytes for option in options)
            for held, options in zip(self._in_flight, self._layers, strict=True)
        )
        return fixed.states - fixed.gradients + states + self._unsaved_bytes(zero) + kept

    @cached_property
    def _moment(self) -> RankMoment:
        return fullest_moment(self.layout, self.rank, frees=bool(self._freed))

    @property
    def _in_flight(self) -> list[float]:
        """Micro-batches of each layer that the rank holds at its fullest moment."""
        by_chunk = zip(self._moment.stashes, self.chunks, strict=False)
        return [held for held, chunk in by_chunk for _ in chunk]

    def _unsaved_bytes(self, zero: int) -> float:
        """Least bytes at the fullest moment of tensors that no block saves."""
        several = self.layout.virtual_stages > 1
        return 0.0 if several and self._freed else self.fixed[zero].held

    @cached_property
    def _at_once(self) -> dict[int, PricedMixes]:
        """The fastest choice at each ZeRO stage, as if the largest of all bytes came together."""
        return {
            zero: self.priced(self._mixes(zero, most=1), zero, exact=False) for zero in self.stages
        }

    def _make_peaks(self) -> MixPeaks:
        return _SequencePeaks(self)

    def _like_the_other_end(self, zero: int) -> tuple[float, ...]:
        return (float(zero > 0), float(zero == 0)) if self._shares else ()

    @cached_property
    def _shares(self) -> bool:
        """True if layers of other ranks hold some of its parameters too."""
        return self.layout.mesh.pp > 1 and bool(self.contents.shared(self.table.price_cache))

    def column(self, priced: PricedMixes, row: int) -> StageColumn:
        chosen = [priced.mixes.options[number] for number in self.front[1][row]]
        mix = tuple((option, len(list(alike))) for option, alike in groupby(chosen))
        return replace(
            super().column(priced, row), mix=mix, layers=self.places, shares=self._shares
        )

    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """Returns columns of a bound on any choice of an option for every layer.

        An exact front has every choice that is worth one, unless layers free gradients: their
        peak also depends on the order of the recomputed layers, which a rule for the recompute of
        the stages says. Nor does it where the operators of a class are divided in several ways,
        which hide different times of data parallelism. Else the seconds are those of a Lagrangian
        bound: saved bytes beyond the limit cost seconds.
        """
        ruled = self.table.stage_recompute is not None
        exact = self.front[0] and not self._freed and self._divided_alike
        if not plain and (ruled or exact):
            return self.fastest(num_blocks, limit_bytes)
        return self.bounds(limit_bytes, plain=plain)

    def averages(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        return self.bounds(limit_bytes, plain=plain)

    @property
    def _divided_alike(self) -> bool:
        """True if all options of a class have one sharding."""
        ways = {(option.kind, option.sharding) for option in self._options}
        return len(ways) == len({kind for kind, _ in ways})

    def bounds(self, limit_bytes: float, *, plain: bool = False) -> list[StageColumn]:
        """Returns the column of the Lagrangian bound at each ZeRO stage that has room."""

        def make() -> list[StageColumn]:
            usable = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache)
            columns = (self._bound_at(zero, usable, plain=plain) for zero in self._hosted)
            return [column for column in columns if column.time_s < math.inf]

        return self._once(("bounds", limit_bytes, plain), make)

    @cached_property
    def _rows(self) -> Counter[tuple[tuple[int, ...], float]]:
        """The number of layers with some options, of which the rank holds some micro-batches."""
        return Counter(
            (tuple(self._numbers[option] for option in options), held)
            for options, held in zip(self._layers, self._in_flight, strict=True)
        )

    def _least(self, values: Array) -> float:
        """Returns the least sum of a value of the options over all layers."""
        return sum(count * float(values[list(row)].min()) for (row, _), count in self._rows.items())

    def _bound_at(self, zero: int, usable: float, *, plain: bool) -> StageColumn:
        fixed, block = self.fixed[zero], self.block.of(self._at(zero))
        plain_time_s = block.time_s - block.recompute_s
        room = usable - fixed.states - self._least(block.states) - self._unsaved_bytes(zero)
        if not self._moment.made:  # gradients may come after the most saved activations
            room += fixed.gradients + self._least(block.gradients)
        if plain:
            least_s = self._least(plain_time_s)
        else:
            least_s = min(
                self._within_s(block.time_s, room - temporaries, widest)
                for widest, temporaries in self._temporaries_by_widest(zero)
            )
        plain_s = self._least(plain_time_s)
        hides = self.layout.recomputes_ahead
        return StageColumn(
            mix=tuple((self._at(zero)[row[0]], count) for (row, _), count in self._rows.items()),
            zero=zero,
            time_s=least_s + fixed.time_s,
            tail_s=fixed.tail_s + self._least(block.tail_s),
            memory_bytes=0.0,
            redundant_bytes=0.0,
            plain_s=(plain_s if hides else least_s) + fixed.time_s,
            ramp_s=(plain_s if hides else least_s) + fixed.time_s,
            layers=self.places,
            shares=self._shares,
            corner=True,
        )

    def _temporaries_by_widest(self, zero: int) -> list[tuple[float, float]]:
        """Returns the most workspace that a layer may have, each with the least temporaries.

        Where gradients come and go, or recompute is ahead of them, temporaries may be at another
        moment than the most activations.
        """
        if self._freed or self.layout.recomputes_ahead:
            return [(math.inf, 0.0)]
        fixed, block = self.fixed[zero], self.block.of(self._at(zero))
        workspace, buffer = column_of(self._options, "workspace_bytes"), fixed.zero_buffer
        least = 0.0
        for row, _ in self._rows:
            buffer = max(buffer, float(block.zero_buffer[list(row)].min()))
            least = max(least, float(workspace[list(row)].min()))
        limits = [width for width in np.unique(workspace).tolist() if width >= least] or [least]
        besides = fixed.used_up
        return [
            (width, max(0.0, width - besides, fixed.head_workspace) + buffer) for width in limits
        ]

    def _within_s(self, time_s: Array, room: float, widest: float) -> float:
        """Returns the least seconds of the layers whose saved bytes have some room.

        A Lagrangian bound over the options of at most some workspace, infinite without room.
        """
        saved, workspace = (
            column_of(self._options, name) for name in ("saved_bytes", "workspace_bytes")
        )
        allowed = [
            (np.array([n for n in row if workspace[n] <= widest]), held, count)
            for (row, held), count in self._rows.items()
        ]
        if sum(count * held * saved[row].min() for row, held, count in allowed) > room:
            return math.inf
        prices = {0.0}
        for row, held, _ in allowed:
            prices.update(hull_prices(time_s[row].tolist(), (held * saved[row]).tolist()))
        return max(
            sum(
                count * float((time_s[row] + price * held * saved[row]).min())
                for row, held, count in allowed
            )
            - price * room
            for price in prices
        )

    def smallest(self, num_blocks: int) -> StageColumn:
        """Returns the front's choice with the lowest peak memory, for any time.

        It fits the host if any choice does.
        """
        priced = [self._priced(zero) for zero in self._hosted or self.stages]
        columns = [self.column(each, int(each.allocated.argmin())) for each in priced]
        return min(columns, key=lambda column: column.memory_bytes)


class _SequencePeaks(MixPeaks):
    """Peaks of the choices of a rank's layers, if gradients come and go."""

    def __init__(self, columns: SequenceColumns) -> None:
        super().__init__(
            columns.rank,
            columns.layout,
            columns.block,
            columns.fixed,
            columns.ends,
            columns.contents.layers_of,
        )
        self._contents = columns.contents
        self._rows = columns.front[1]

    @property
    def _kinds(self) -> tuple[LayerKey, ...]:
        return self._contents.ends(self.price_cache)

    def _chunks(self, mixes: Mixes, zero: int) -> list[list[AlikeLayers]]:
        bytes_of = self._layer_bytes(mixes)
        b = self.layout.micro_batch_size
        chunks, place = [], 0
        for keys, layers in zip(
            self._contents.keys(self.price_cache), self._contents.ranges, strict=True
        ):
            besides = self.price_cache.besides_bytes(*layers, b)
            kept = LayerBytes(saved=besides, workspace=0, gradients=0)
            runs = [AlikeLayers(LayerKind.BLOCK, kept)]
            for is_block, alike in groupby(keys, lambda key: key.role is LayerKind.BLOCK):
                if not is_block:
                    runs += [self._end(key, zero) for key in alike]
                    continue
                end = place + len(list(alike))
                runs.append(AlikeLayers(LayerKind.BLOCK, bytes_of(self._rows[:, place:end].T)))
                place = end
            chunks.append(runs)
        return chunks
