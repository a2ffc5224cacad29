"""Stage columns: for one pipeline rank, every block count with its best ways to run, priced and
within memory.

Only the mixes that no other mix of the same rank and block count beats become columns of the
master (EQUATIONS I4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from parplan.costmodels.memory.peak_candidates import PeakCandidate
from parplan.costmodels.memory.rank_memory import (
    usable_bytes,
)
from parplan.costmodels.schedules.hidden_recompute import plain_and_ramp
from parplan.planner.dominance import Array, Ints, undominated_rows
from parplan.planner.layer_options.mixes import (
    all_tried,
    pure_mixes,
)
from parplan.planner.stage_columns.mix_peaks import MixPeak
from parplan.planner.stage_columns.mix_prices import MixPrices, PricedMixes
from parplan.planner.stage_columns.relaxed_pairs import (
    RelaxedPairs,
    corners_of_lines,
    least_shares,
)
from parplan.planner.stage_columns.stage_column import StageColumn, unbeaten_rows
from parplan.planner.stage_columns.stage_prices import (
    tied_ends,
)

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


class RankColumns(MixPrices):
    """The columns of one pipeline rank of a layout, made for one block count at a time."""

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


def _some(rows: Ints, most: int) -> Ints:
    """At most so many of the rows, evenly, with the first and the last."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def _of_equal_tail(priced: PricedMixes, rows: Ints) -> list[Ints]:
    """`rows` in groups: the tail is that of a layout of the weights, of which there are few."""
    _, group = np.unique(np.round(priced.tail_s[rows], PICOSECOND), return_inverse=True)
    return [rows[group == one] for one in range(group.max(initial=-1) + 1)]
