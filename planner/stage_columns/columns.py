"""Stage columns: for one pipeline rank, every block count with its best ways to run, priced and
within memory.

A rank runs its blocks on a mix of the catalogue's options, each at a ZeRO stage
(planner/layer_options/mixes.py). The price is a sum over layers, so the mixes of n blocks are
priced at once, vectorised. Only the points that no other point of the same rank and count beats
become columns of the master (EQUATIONS I4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    usable_bytes,
)
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.hidden_recompute import plain_and_ramp
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints, undominated_rows
from parplan.planner.host_options.state_locations import NOTHING, BlockLocations
from parplan.planner.layer_options.catalogue import LayerOption
from parplan.planner.layer_options.mixes import (
    Mixes,
    all_tried,
    chains,
    column_of,
    near_mixes,
    pure_mixes,
    widest_mixes,
)
from parplan.planner.stage_columns.mix_peaks import MixPeak, MixPeaks
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.relaxed_pairs import (
    RelaxedPairs,
    corners_of_lines,
    least_shares,
)
from parplan.planner.stage_columns.stage_prices import (
    BlockCosts,
    EndCosts,
    MixCosts,
    end_kinds,
    fixed_price,
    sums_of,
    tied_ends,
)
from parplan.profiles.models.operator_graph import LayerKind

MOST_MIXED, MOST_LEAN = (
    8,
    32,
)  # mixes of two ZeRO stages with one number of blocks that are columns, evenly along their front
PICOSECOND = 12  # decimals of seconds
_TAIL_POWERS = (
    -2,
    -1,
    0,
    1,
    2,
    3,
    4,
    6,
)  # of two: the weights of the tail at which the relaxation is solved, over one micro-batch
Mix = tuple[tuple[LayerOption, int], ...]


@dataclass(frozen=True, slots=True)
class StageColumn:
    """One way to run one rank: how many of its blocks on which option, and the ZeRO stage of its
    embedding and head.

    time_s of one micro-batch; tail_s after the last one; memory_bytes the peak of a device;
    redundant_bytes per device. plain_s, ramp_s: of time_s what there is without recompute, and in
    the ramps of the pipeline (costmodels/schedules/hidden_recompute.py)
    homes: where the states of its blocks lie, of a layout in chunks
    looks_up: whether the host has its token table
    corner: of a bound, whether averages with the other corners of `group` stand for plans, and not
    the column by itself
    """

    mix: Mix
    zero: int
    time_s: float
    tail_s: float
    memory_bytes: float
    redundant_bytes: float
    plain_s: float
    ramp_s: float
    homes: BlockLocations = NOTHING
    looks_up: bool = False
    corner: bool = False

    @property
    def group(self) -> tuple[int, int, bool]:
        """Number of blocks, ZeRO stage of the ends and place of the token table: what no average is
        over.
        """
        return self.num_blocks, self.zero, self.looks_up

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.mix)

    def alone_s(self, num_micro_batches: int) -> float:
        """Seconds of all micro-batches of the rank and of its tail, whatever the other ranks
        take.
        """
        return num_micro_batches * self.time_s + self.tail_s


@dataclass(frozen=True, slots=True)
class RankTimeLimit:
    """What a rank may take in a plan of a layout: `repeats` micro-batches and its tail in `room_s`
    seconds.
    """

    repeats: float
    room_s: float

    def within(self, time_s: Array, tail_s: Array | float) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self.repeats * time_s + tail_s <= self.room_s
        return found


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


class RankColumns:
    """The columns of one pipeline rank of a layout, made for one block count at a time; `ends`: the
    prices of its embedding and head.
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

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]:
        """The mixes within `limit_bytes` that no other beats in time and in tail, nor in what
        counts in the ramps.
        """
        names = (
            ("time_s", "tail_s", "plain_s", "ramp_s")
            if self.layout.recomputes_ahead
            else ("time_s", "tail_s")
        )
        found: list[tuple[PricedMixes, int]] = []
        for priced, fits in self._fitting(num_blocks, limit_bytes):
            if self.layout.mesh.pp == 1:
                found += [(priced, int(row)) for row in self._fastest_alone(priced, fits)]
                continue
            for rows in (
                _of_equal_tail(priced, fits)
                if self.layout.recomputes_ahead and not priced.mixed
                else (fits,)
            ):
                kept = undominated_rows(
                    priced.time_s[rows], getattr(priced, names[-1])[rows], priced.allocated[rows]
                )
                found += [
                    (priced, int(row))
                    for row in rows[_some(kept, MOST_MIXED) if priced.mixed else kept]
                ]
        if self.layout.mesh.pp == 1 and found:
            priced, row = min(
                found, key=lambda one: (self._step_s(one[0])[one[1]], one[0].allocated[one[1]])
            )
            found = [(priced, row)]
        return self._unbeaten(found, names)

    def _step_s(self, priced: PricedMixes) -> Array:
        """Seconds of the step of a rank without a pipeline, rounded: sums of the same terms in
        another order are equal.
        """
        return np.round(self.layout.num_micro_batches * priced.time_s + priced.tail_s, PICOSECOND)

    def _fastest_alone(self, priced: PricedMixes, rows: Ints) -> Ints:
        """Of a rank without a pipeline the row with the shortest step, of equals the one that holds
        least.
        """
        return rows[np.lexsort((priced.allocated[rows], self._step_s(priced)[rows]))[:1]]

    def leanest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]:
        """The mixes within `limit_bytes` that no other beats in time, tail and redundant bytes
        together.

        Of mixes of two ZeRO stages those that no other beats in redundant bytes and in the time of
        all micro-batches with the tail.
        """
        found: list[tuple[PricedMixes, int]] = []
        for priced, rows in self._fitting(num_blocks, limit_bytes):
            step_s = priced.time_s[rows] + priced.tail_s[rows] / self.layout.num_micro_batches
            kept = undominated_rows(
                step_s if priced.mixed else priced.time_s[rows],
                priced.redundant[rows],
                priced.allocated[rows],
            )
            found += [
                (priced, int(row)) for row in rows[_some(kept, MOST_LEAN) if priced.mixed else kept]
            ]
        return self._unbeaten(found, ("time_s", "tail_s", "redundant"))

    def _fitting(self, num_blocks: int, limit_bytes: float) -> Iterator[tuple[PricedMixes, Ints]]:
        """The candidates with those of their rows that fit the device and its share of the host."""
        usable = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache)
        for priced in self.candidates(num_blocks):
            yield (
                priced,
                np.flatnonzero((priced.allocated <= usable) & self.host_fits(priced.mixes)),
            )

    def _unbeaten(
        self, found: Sequence[tuple[PricedMixes, int]], names: Sequence[str]
    ) -> list[StageColumn]:
        """The rows that no other beats or equals in the values of `names`; of equals the one with
        least memory.

        Where the ends of two ranks are tied, a whole one does not stand in for a sharded one, nor
        that for it: the other rank's is alike.
        """
        if not found:
            return []
        values = np.array(
            [
                [
                    *(getattr(priced, name)[row] for name in names),
                    *self._like_the_other_end(priced.zero),
                    priced.allocated[row],
                ]
                for priced, row in found
            ]
        )
        return [self.column(*found[index]) for index in unbeaten_rows(values)]

    def _like_the_other_end(self, zero: int) -> tuple[float, ...]:
        """Values in which an end that is whole and one that is sharded beat each other, where that
        of another rank must be as it is.
        """
        tied = self.table.price_cache.tied and self.rank in tied_ends(self.layout)
        return (float(zero > 0), float(zero == 0)) if tied else ()

    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """Columns of which one, or an average of corners of one group, is as good as any choice of
        an option and a ZeRO stage for every block by itself within `limit_bytes`: a bound, no plan.

        Every such choice has t + w tail >= m(w) for every weight w, where m(w) is the least over
        all pairs of options. The columns are the corners of the region that some of these lines
        leave. Without a pipeline one line with w = 1 / M says all. Where the mixes are all that
        there are, as with one block, they are the columns.

        plain: the time of a micro-batch is without recompute, which no schedule that recomputes
        ahead of the gradient goes below
        """
        if not plain and all_tried(
            self._unbeaten_blocks.options, num_blocks, self.layout.virtual_stages
        ):
            return self.fastest(num_blocks, limit_bytes)
        usable = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache)
        found: list[StageColumn] = []
        for zero in self.end_stages:
            least_s = self.relaxed_s(num_blocks, zero, usable, plain=plain)
            if least_s is not None:
                shortest_s = (
                    None if plain or not self.layout.recomputes_ahead else float(least_s[0])
                )
                found += (
                    self._bound(num_blocks, zero, *corner, shortest_s)
                    for corner in self._corners(num_blocks, zero, least_s)
                )
        return found

    def _corners(self, num_blocks: int, zero: int, least_s: Array) -> list[tuple[float, float]]:
        if self.layout.mesh.pp == 1:
            return [(float(least_s[0]), 0.0)]
        return corners_of_lines(
            self._weights,
            least_s,
            num_blocks * float(self.block.tail_s.min()) + self.fixed[zero].tail_s,
        )

    def _bound(
        self, num_blocks: int, zero: int, time_s: float, tail_s: float, shortest_s: float | None
    ) -> StageColumn:
        """A column of a bound; shortest_s: what no mix takes less than, where recompute may be
        hidden.
        """
        plain_s, ramp_s = time_s, time_s
        if shortest_s is not None:
            plain_s, ramp_s = self._least_plain_and_ramp(
                num_blocks, zero, shortest_s - self.fixed[zero].time_s
            )
        mix = ((self.block.options[0], num_blocks),)
        return StageColumn(
            mix,
            zero,
            time_s,
            tail_s,
            0.0,
            0.0,
            plain_s,
            ramp_s,
            looks_up=self.looks_up,
            corner=True,
        )

    @cached_property
    def _weights(self) -> Array:
        """Weights of the tail, in micro-batches, for which the least time is found; zero is
        first.
        """
        if self.layout.mesh.pp == 1:
            return np.array([1 / self.layout.num_micro_batches])
        return np.array(
            [0.0, *(2.0**power / self.layout.num_micro_batches for power in _TAIL_POWERS)]
        )

    def _least_plain_and_ramp(
        self, num_blocks: int, zero: int, blocks_s: float
    ) -> tuple[float, float]:
        """What no mix is below whose blocks take at least `blocks_s`: its least without recompute,
        of the ramps no more than that.
        """
        fixed_s, block = self.fixed[zero].time_s, self.block
        least_s = num_blocks * float((block.time_s - block.recompute_s).min())
        plain_s, _ = plain_and_ramp(
            self.layout.schedule,
            self.rank,
            self.layout.mesh.pp,
            blocks_s,
            blocks_s - least_s,
            blocks_s,
        )
        return plain_s + fixed_s, plain_s + fixed_s

    @cached_property
    def _pairs(self) -> RelaxedPairs:
        return RelaxedPairs(*self.table.unbeaten_blocks(self.layout, self.rank))

    def relaxed_s(
        self, num_blocks: int, zero: int, usable: float, *, plain: bool = False
    ) -> Array | None:
        """By weight the least seconds of a micro-batch, with so much of the tail, over all pairs of
        options; None where no pair fits.

        Each moment is taken by itself: a program over two limits at once would take three options,
        and the larger of two optima over one limit is below it. Chunks of a rank count as alike.
        """
        fixed, pairs = self.fixed[zero], self._pairs
        least_s = np.zeros(len(self._weights))
        for own, room in self._limits(num_blocks, zero, usable):
            chosen, share = least_shares(own, room, pairs.alone)
            if not len(chosen):
                return None
            time_s, tail_s = pairs.at(chosen, share, plain=plain)
            least_s = np.maximum(
                least_s,
                num_blocks * (time_s + np.multiply.outer(self._weights, tail_s)).min(axis=1),
            )
        found: Array = least_s + fixed.time_s + self._weights * fixed.tail_s
        return found

    def _limits(self, num_blocks: int, zero: int, usable: float) -> Iterator[tuple[Array, Array]]:
        """For each moment the bytes of a block, by side and pair, and the most that an average
        block may have, by pair.
        """
        fixed, pairs = self.fixed[zero], self._pairs
        chunk, outside = (
            num_blocks / self.layout.virtual_stages,
            usable - self._spare(fixed.step_copies),
        )
        if self._freed:
            for at, own in zip(self._freed.moments(zero), self._bytes_by_moment(zero), strict=True):
                yield own, (outside - at.besides - pairs.inside(at.alone)) / num_blocks
            return
        room = outside - (
            fixed.states + fixed.held + np.maximum(pairs.zero_buffer, fixed.zero_buffer)
        )
        for one, own in zip(self._moments, self._bytes_by_moment(zero), strict=True):
            workspace = pairs.whole_workspace if one.alone else pairs.workspace_bytes
            saved = chunk * (pairs.whole_saved if one.alone else pairs.saved_bytes).max(axis=0)
            temporaries = self._temporaries(workspace, saved, chunk * pairs.waiting, fixed)
            yield (
                own,
                (room - temporaries - (one.stashes - self.stashes) * fixed.saved) / num_blocks,
            )

    def _bytes_by_moment(self, zero: int) -> list[Array]:
        """Of every moment the bytes of one block by side and pair."""
        pairs, chunks = self._pairs, self.layout.virtual_stages
        always, remade = (
            pairs.states + self._spare(pairs.step_copies),
            pairs.whole_saved - pairs.saved_bytes,
        )
        kept: Sequence[MixPeak | PeakCandidate] = (
            self._freed.moments(zero) if self._freed else self._moments
        )
        return self._of_moments(
            zero,
            lambda: [
                always
                - (1 - one.made) * pairs.gradients
                + one.stashes / chunks * pairs.saved_bytes
                + one.remade / chunks * remade
                for one in kept
            ],
        )

    def smallest(self, num_blocks: int) -> StageColumn:
        """The mix and ZeRO stages with the lowest peak memory, whatever its time.

        It is all blocks on one option: of two that are mixed, the one that holds less has the
        larger workspace or buffer already.
        """
        pure = pure_mixes(self.block.options, num_blocks, self.layout.virtual_stages)
        fits = self.host_fits(pure)
        rows = [
            (p, int(np.where(fits, p.allocated, np.inf).argmin()))
            for p in (self.priced(pure, zero) for zero in self.end_stages)
        ]
        return min((self.column(p, row) for p, row in rows), key=lambda column: column.memory_bytes)


def same_ends(rank: int, layout: ParallelLayout, one: StageColumn, other: StageColumn) -> bool:
    """Whether either column may take the other's place beside tied ends and a token table that is
    where it is.
    """
    return not end_kinds(rank, layout) or (one.zero > 0, one.looks_up) == (
        other.zero > 0,
        other.looks_up,
    )


def _some(rows: Ints, most: int) -> Ints:
    """At most so many of the rows, evenly, with the first and the last."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def _of_equal_tail(priced: PricedMixes, rows: Ints) -> list[Ints]:
    """`rows` in groups: the tail is that of a layout of the weights, of which there are few."""
    _, group = np.unique(np.round(priced.tail_s[rows], PICOSECOND), return_inverse=True)
    return [rows[group == one] for one in range(group.max(initial=-1) + 1)]


def unbeaten_rows(values: Array) -> list[int]:
    """The rows that no other beats or equals in every column but the last; of rows that are equal
    the one with the least last.
    """
    kept: list[int] = []
    best = np.empty((len(values), values.shape[1] - 1))
    for row in np.lexsort(values.T[::-1]):
        if not (best[: len(kept)] <= values[row, :-1]).all(axis=1).any():
            best[len(kept)] = values[row, :-1]
            kept.append(int(row))
    return kept


def unbeaten(found: Sequence[StageColumn]) -> list[StageColumn]:
    """The columns that no other beats or equals in time, in tail and in what counts in the ramps;
    of equals the one with least memory.
    """
    values = np.array(
        [[c.time_s, c.tail_s, c.plain_s, c.ramp_s, c.memory_bytes] for c in found]
    ).reshape(-1, 5)
    return [found[index] for index in unbeaten_rows(values)]
