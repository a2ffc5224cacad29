"""Columns of one pipeline rank: every block count with its best mixes within memory.

Only the mixes that no other mix of the same rank and block count beats become columns of the master
(EQUATIONS I4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
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
    by_way_of_running,
    one_way_of_running,
    pure_mixes,
)
from parplan.planner.stage_columns.mix_peaks import LeastPeaks, MixPeak, MixPeaks
from parplan.planner.stage_columns.mix_prices import MixPrices, PricedMixes
from parplan.planner.stage_columns.relaxed_pairs import (
    RelaxedPairs,
    corners_of_lines,
    least_shares,
)
from parplan.planner.stage_columns.stage_column import (
    RankTimeLimit,
    StageColumn,
    unbeaten_rows,
)
from parplan.planner.stage_columns.stage_prices import EndCosts, tied_ends

# columns with mixes of two ZeRO stages for one number of blocks, evenly along their front
MOST_MIXED = 8
MOST_LEAN = 32
FEW_PEAKS = 128  # mixes whose peaks are found at once
PICOSECOND = 12  # decimals of seconds
# weights of the tail in the relaxation, per micro-batch
_TAIL_WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)

MixRow = tuple[PricedMixes, int]  # mixes and the row of one of them


class RankColumns(MixPrices):
    """The columns of one pipeline rank of a layout, made for one block count at a time."""

    def fastest(
        self,
        num_blocks: int,
        limit_bytes: float,
        reach: RankTimeLimit | None = None,
        beside: Sequence[StageColumn] = (),
    ) -> list[StageColumn]:
        """Returns the mixes within `limit_bytes` that are undominated in time and in tail.

        With recompute ahead, the seconds that count in the ramps are compared too. Mixes out of
        `reach` may be left out, and those that a column `beside` them beats.
        """
        mixed = len(self.stages) > 1 and self.mix_table.catalogue.by_operator
        if (
            self._freed is None
            or self.table.stage_recompute
            or (self.layout.recomputes_ahead and not mixed)
        ):
            return self._once(
                ("fastest", num_blocks, limit_bytes), lambda: self._fastest(num_blocks, limit_bytes)
            )
        if reach is not None or beside:
            return self._fastest_freed(num_blocks, limit_bytes, reach, beside)
        return self._once(
            ("fastest", num_blocks, limit_bytes),
            lambda: self._fastest_freed(num_blocks, limit_bytes, None, ()),
        )

    def _fastest_freed(
        self,
        num_blocks: int,
        limit_bytes: float,
        reach: RankTimeLimit | None,
        beside: Sequence[StageColumn],
    ) -> list[StageColumn]:
        """Returns the columns of `fastest` where gradients come and go.

        The peak of a mix takes long there. It is found for the mixes that are not slower than one
        that surely fits, and that do not surely need more.
        """
        usable = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache)
        alone = self.layout.mesh.pp == 1
        last = "ramp_s" if self.layout.recomputes_ahead else "tail_s"
        fastest: list[MixRow] = []
        found: dict[tuple[float, ...], Array] = {}
        for end in {self._like_the_other_end(zero) for zero in self.end_stages}:
            alike = [c for c in beside if self._like_the_other_end(c.zero) == end]
            known = np.array([(c.time_s, getattr(c, last)) for c in alike]).reshape(-1, 2)
            if alone:
                known = np.repeat(self._rounded_s(known[:, :1], known[:, 1:]), 2, axis=1)
            found[end] = known
        for loose in self.candidates(num_blocks, exact=False):
            rows = np.flatnonzero(self.host_fits(loose))
            if reach is not None:
                rows = rows[reach.within(loose.plain_s[rows], loose.tail_s[rows])]
            seconds = np.stack([loose.time_s, getattr(loose, last)], axis=1)
            if alone:
                seconds = np.stack([self._step_s(loose)] * 2, axis=1)
            end = self._like_the_other_end(loose.zero)
            rows = self._that_fit(loose, rows, seconds, found[end], usable, num_blocks)
            if not len(rows):
                continue
            priced = self.exactly(loose, rows)
            every = np.arange(len(rows))
            if alone:
                front = self._fastest_alone(priced, every)
            else:
                front = undominated_rows(priced.time_s, getattr(priced, last), priced.allocated)
                if priced.mixed:
                    front = _some(front, MOST_MIXED)
            fastest += [(priced, int(row)) for row in front]
            found[end] = np.concatenate([found[end], seconds[rows[front]]])
        if alone and fastest:
            fastest = [min(fastest, key=self._step_and_memory)]
        names = ("time_s", "tail_s", "plain_s", "ramp_s")
        return self._unbeaten(fastest, names if self.layout.recomputes_ahead else names[:2])

    def _that_fit(
        self,
        loose: PricedMixes,
        rows: Ints,
        seconds: Array,
        known: Array,
        usable: float,
        num_blocks: int,
    ) -> Ints:
        """Returns those of `rows` that fit and that no faster one beats, with all their equals.

        loose      mixes with the sum of their largest classes as allocated bytes
        seconds    time and tail by row
        known      time and tail of mixes that fit
        """
        rows = _unbeaten_by(rows, seconds, known)
        if not len(rows):
            return rows
        sure = loose.allocated[rows] <= usable
        unsure = rows[~sure]
        unsure = unsure[self.least_allocated(loose, unsure, num_blocks) <= usable]
        rows = np.concatenate([rows[sure], unsure])
        while len(rows):
            front = _unbeaten_by(rows, seconds, seconds[rows])
            doubtful = front[loose.allocated[front] > usable]
            if not len(doubtful):
                return front
            if len(doubtful) < FEW_PEAKS:  # more at once take hardly longer
                others = rows[loose.allocated[rows] > usable]
                order = np.argsort(seconds[others].sum(axis=1), kind="stable")
                doubtful = np.union1d(doubtful, others[order[:FEW_PEAKS]])
            exact = self.exactly(loose, doubtful).allocated
            loose.allocated[doubtful] = np.minimum(loose.allocated[doubtful], exact)
            rows = rows[~np.isin(rows, doubtful[exact > usable])]
        return rows

    def _fastest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]:
        ahead = self.layout.recomputes_ahead
        names = ("time_s", "tail_s", "plain_s", "ramp_s") if ahead else ("time_s", "tail_s")
        fastest: list[MixRow] = []
        for priced, fits in self._fitting(num_blocks, limit_bytes):
            if self.layout.mesh.pp == 1:
                fastest += [(priced, int(row)) for row in self._fastest_alone(priced, fits)]
                continue
            split = ahead and not priced.mixed
            for rows in _of_equal_tail(priced, fits) if split else (fits,):
                front = undominated_rows(
                    priced.time_s[rows], getattr(priced, names[-1])[rows], priced.allocated[rows]
                )
                if priced.mixed:
                    front = _some(front, MOST_MIXED)
                fastest += [(priced, int(row)) for row in rows[front]]
        if self.layout.mesh.pp == 1 and fastest:
            fastest = [min(fastest, key=self._step_and_memory)]
        return self._unbeaten(fastest, names)

    def beyond_memory(self, num_blocks: int, cut_s: float) -> list[StageColumn]:
        """Returns the mixes undominated in step and memory, of a rank without a pipeline.

        Their steps are at most `cut_s`. They need not fit the device.
        """
        front: list[MixRow] = []
        for priced in self.candidates(num_blocks):
            step_s = self._step_s(priced)
            rows = np.flatnonzero((step_s <= cut_s) & self.host_fits(priced))
            front += [
                (priced, int(row))
                for row in rows[undominated_rows(step_s[rows], priced.allocated[rows])]
            ]
        values = np.array([self._step_and_memory(row) for row in front]).reshape(-1, 2)
        return [self.column(*front[index]) for index in undominated_rows(*values.T)]

    def _step_and_memory(self, mix_row: MixRow) -> tuple[float, float]:
        priced, row = mix_row
        return self._step_s(priced)[row], priced.allocated[row]

    def _step_s(self, priced: PricedMixes) -> Array:
        """Seconds of the step of a rank without a pipeline.

        They are rounded, so that sums of the same terms in another order are equal.
        """
        return self._rounded_s(priced.time_s, priced.tail_s)

    def _rounded_s(self, time_s: Array, tail_s: Array) -> Array:
        return np.round(self.layout.num_micro_batches * time_s + tail_s, PICOSECOND)

    def _fastest_alone(self, priced: PricedMixes, rows: Ints) -> Ints:
        """Returns the row with the shortest step, for a rank without a pipeline.

        Of equals it is the one with the least memory.
        """
        return rows[np.lexsort((priced.allocated[rows], self._step_s(priced)[rows]))[:1]]

    def leanest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]:
        """Returns the mixes within `limit_bytes` undominated in time, tail and redundant bytes.

        Mixes of two ZeRO stages are compared by redundant bytes and by the time of all
        micro-batches with the tail.
        """
        leanest: list[MixRow] = []
        more = self.redundancy_mixes(num_blocks)
        for priced, rows in self._fitting(num_blocks, limit_bytes, more):
            step_s = priced.time_s[rows] + priced.tail_s[rows] / self.layout.num_micro_batches
            front = undominated_rows(
                step_s if priced.mixed else priced.time_s[rows],
                priced.redundant[rows],
                priced.allocated[rows],
            )
            if priced.mixed:
                front = _some(front, MOST_LEAN)
            leanest += [(priced, int(row)) for row in rows[front]]
        return self._unbeaten(leanest, ("time_s", "tail_s", "redundant"))

    def _fitting(
        self, num_blocks: int, limit_bytes: float, more: Sequence[PricedMixes] = ()
    ) -> Iterator[tuple[PricedMixes, Ints]]:
        """Yields the candidates with their rows that fit the device and its share of the host."""
        usable = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache)
        for priced in (*self.candidates(num_blocks), *more):
            fits = (priced.allocated <= usable) & self.host_fits(priced)
            yield priced, self._as_the_rule(np.flatnonzero(fits), num_blocks)

    def _as_the_rule(self, fits: Ints, num_blocks: int) -> Ints:
        """Returns the rows that a rule for the recompute of the stages leaves of those that fit.

        By memory these are the rows with the fewest recomputed blocks of each pair of options.
        """
        rule = self.table.stage_recompute
        if rule is None:
            return fits
        pair = fits // len(rule.counts(num_blocks, self.rank, self.layout))
        return fits[np.diff(pair, prepend=-1) > 0]

    def _unbeaten(self, rows: Sequence[MixRow], names: Sequence[str]) -> list[StageColumn]:
        """Returns the rows that are undominated in the values of `names`.

        Of equals it is the one with the least memory. If the ends of two ranks are tied, a whole
        end does not replace a sharded one, nor the reverse, since the other rank's end must match.
        """
        if not rows:
            return []
        values = np.array(
            [
                [
                    *(getattr(priced, name)[row] for name in names),
                    *self._like_the_other_end(priced.zero),
                    priced.allocated[row],
                ]
                for priced, row in rows
            ]
        )
        return [self.column(*rows[index]) for index in unbeaten_rows(values)]

    @property
    def matches_another(self) -> bool:
        """True if another rank has the token table of this one as well."""
        return self.table.price_cache.tied and self.rank in tied_ends(self.layout)

    def _like_the_other_end(self, zero: int) -> tuple[float, ...]:
        """Values that make whole and sharded ends incomparable if another rank's end must match."""
        return (float(zero > 0), float(zero == 0)) if self.matches_another else ()

    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """Returns columns of a bound on any choice of an option and a ZeRO stage for every block.

        One of them, or an average of corners of one group, is as good as any such choice within
        `limit_bytes`. They are no plans. Every choice has t + w tail >= m(w) for every weight w,
        where m(w) is the least over all pairs of options. The columns are the corners of the region
        that some of these lines leave. Without a pipeline one line with w = 1 / M suffices. If the
        mixes include every choice, as with one block, they are the columns.

        plain    the time of a micro-batch is without recompute, a bound for every schedule that
                 recomputes ahead of the gradient
        """
        if not plain and self._tries_all(num_blocks):
            return self.fastest(num_blocks, limit_bytes)
        return self.averages(num_blocks, limit_bytes, plain=plain)

    def averages(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """Returns the columns of `relaxed` as if the mixes did not include every choice.

        They take less to find than all mixes, and bound them too.
        """
        return self._once(
            ("averages", num_blocks, limit_bytes, plain),
            lambda: self._averages(num_blocks, limit_bytes, plain=plain),
        )

    def _averages(self, num_blocks: int, limit_bytes: float, *, plain: bool) -> list[StageColumn]:
        usable = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache)
        hides = self.layout.recomputes_ahead and not plain
        bounds: list[StageColumn] = []
        for zero in self.end_stages:
            least_s = self.relaxed_s(num_blocks, zero, usable, plain=plain)
            if least_s is not None:
                shortest_s = float(least_s[0]) if hides else None
                bounds += (
                    self._bound(num_blocks, zero, *corner, shortest_s)
                    for corner in self._corners(num_blocks, zero, least_s)
                )
        return bounds

    def _tries_all(self, num_blocks: int) -> bool:
        """Returns whether the mixes are all that the search states."""
        return self.table.stage_recompute is not None or all_tried(
            self.mix_table.unbeaten_blocks(self.layout, self.rank, every=True).options,
            num_blocks,
            self.layout.virtual_stages,
        )

    def _corners(self, num_blocks: int, zero: int, least_s: Array) -> list[tuple[float, float]]:
        if self.layout.mesh.pp == 1:
            return [(float(least_s[0]), 0.0)]
        tail_s = num_blocks * float(self.block.tail_s.min()) + self.fixed[zero].tail_s
        return corners_of_lines(self._weights, least_s, tail_s)

    def _bound(
        self, num_blocks: int, zero: int, time_s: float, tail_s: float, shortest_s: float | None
    ) -> StageColumn:
        """Returns a column of a bound.

        shortest_s    the least seconds of any mix if recompute may be hidden
        """
        plain_s, ramp_s = time_s, time_s
        if shortest_s is not None:
            plain_s, ramp_s = self._least_plain_and_ramp(
                num_blocks, zero, shortest_s - self.fixed[zero].time_s
            )
        return StageColumn(
            mix=((self.block.options[0], num_blocks),),
            zero=zero,
            time_s=time_s,
            tail_s=tail_s,
            memory_bytes=0.0,
            redundant_bytes=0.0,
            plain_s=plain_s,
            ramp_s=ramp_s,
            ends=self.ends.ends,
            table=self.tied_table,
            looks_up=self.looks_up,
            corner=True,
        )

    @cached_property
    def _weights(self) -> Array:
        """Weights of the tail in micro-batches at which the least time is sought; zero is first."""
        if self.layout.mesh.pp == 1:
            return np.array([1 / self.layout.num_micro_batches])
        return np.array([0.0, *(w / self.layout.num_micro_batches for w in _TAIL_WEIGHTS)])

    def _least_plain_and_ramp(
        self, num_blocks: int, zero: int, blocks_s: float
    ) -> tuple[float, float]:
        """Returns lower bounds of `plain_s` and `ramp_s` if blocks take `blocks_s` or more.

        The bound of the ramps is that of the seconds without recompute.
        """
        fixed_s = self.fixed[zero].time_s
        least_s = num_blocks * float((self.block.time_s - self.block.recompute_s).min())
        plain_s, _ = plain_and_ramp(
            self.layout.schedule,
            self.rank,
            self.layout.mesh.pp,
            blocks_s,
            blocks_s - least_s,
            blocks_s,
        )
        return plain_s + fixed_s, plain_s + fixed_s

    def _pairs(self, num_blocks: int) -> RelaxedPairs:
        """Returns the pairs of options that the blocks of a rank may be an average of."""
        block, pairs = self.mix_table.averages(self.layout, self.rank)
        alike = not self._freed and one_way_of_running(
            block.options, num_blocks, self.layout.virtual_stages
        )

        def make() -> RelaxedPairs:
            some = pairs
            if alike:
                way = by_way_of_running(block.options)[pairs.index]
                some = pairs.at(np.flatnonzero(way[0] == way[1]))
            relaxed = RelaxedPairs(block, some)
            self.table.deadline.count(*relaxed.arrays)
            return relaxed

        return self.table.once(("pairs", block, alike), make)

    def relaxed_s(
        self, num_blocks: int, zero: int, usable: float, *, plain: bool = False
    ) -> Array | None:
        """Returns by weight the least seconds of a micro-batch with its share of the tail.

        The least is over all pairs of options, None if no pair fits. Each moment is bounded
        separately: a program with two limits at once would mix three options, and the larger of two
        optima with one limit each is below its optimum. Chunks of a rank count as equal.
        """
        fixed, pairs = self.fixed[zero], self._pairs(num_blocks)
        least_s = np.zeros(len(self._weights))
        for block_bytes, room in self._limits(num_blocks, zero, usable):
            chosen, share = least_shares(block_bytes, room, pairs.alone)
            if not len(chosen):
                return None
            time_s, tail_s = pairs.at(chosen, share, plain=plain)
            block_s = (time_s + np.multiply.outer(self._weights, tail_s)).min(axis=1)
            least_s = np.maximum(least_s, num_blocks * block_s)
        with_ends_s: Array = least_s + fixed.time_s + self._weights * fixed.tail_s
        return with_ends_s

    def _limits(self, num_blocks: int, zero: int, usable: float) -> Iterator[tuple[Array, Array]]:
        """Yields for each moment the bytes of a block and the limit of an average block.

        The bytes are by side and pair, the limit by pair.
        """
        fixed, pairs = self.fixed[zero], self._pairs(num_blocks)
        chunk = num_blocks / self.layout.virtual_stages
        outside = usable - self._spare(fixed.step_copies)
        by_moment = self._bytes_by_moment(num_blocks, zero, pairs)
        if self._freed:
            for peak, block_bytes in zip(
                self._freed.moments(zero, num_blocks), by_moment, strict=True
            ):
                room = outside - peak.besides - pairs.inside(peak.alone)
                yield block_bytes, room / num_blocks
            return
        buffers = np.maximum(pairs.zero_buffer, fixed.zero_buffer)
        beside = outside - (fixed.states + fixed.held + buffers)
        for moment, block_bytes in zip(self._moments, by_moment, strict=True):
            workspace = pairs.whole_workspace if moment.alone else pairs.workspace_bytes
            saved = chunk * (pairs.whole_saved if moment.alone else pairs.saved_bytes).max(axis=0)
            temporaries = self._temporaries(workspace, saved, chunk * pairs.waiting, fixed)
            room = beside - temporaries - (moment.stashes - self.stashes) * fixed.saved
            yield block_bytes, room / num_blocks

    def _bytes_by_moment(self, num_blocks: int, zero: int, pairs: RelaxedPairs) -> list[Array]:
        """Returns for every moment the bytes of one block by side and pair."""
        chunks = self.layout.virtual_stages
        always = pairs.states + self._spare(pairs.step_copies)
        remade = pairs.whole_saved - pairs.saved_bytes
        candidates: Sequence[MixPeak | PeakCandidate] = (
            self._freed.moments(zero, num_blocks) if self._freed else self._moments
        )
        kinds = tuple((moment.stashes, moment.remade, moment.made) for moment in candidates)

        def make() -> list[Array]:
            return [
                always
                - (1 - made) * pairs.gradients
                + stashed / chunks * pairs.saved_bytes
                + again / chunks * remade
                for stashed, again, made in kinds
            ]

        if self.layout.equal_ranks:  # one number of blocks, so that nothing asks for them again
            return make()

        def kept() -> list[Array]:
            made = make()
            self.table.deadline.count(*made)
            return made

        return self._once(("moments", kinds, pairs), kept)

    def smallest(self, num_blocks: int) -> StageColumn:
        """Returns the mix and ZeRO stages with the lowest peak memory, for any time.

        All its blocks have one option: of two mixed options, the one with fewer bytes already has
        the larger workspace or buffer.
        """
        if self.table.stage_recompute is not None:
            every = self.candidates(num_blocks)
        else:
            pure = pure_mixes(self.block.options, num_blocks, self.layout.virtual_stages)
            every = [self.priced(pure, zero) for zero in self.end_stages]
        columns = []
        for priced in every:
            fits = self.host_fits(priced)
            row = int(np.where(fits, priced.allocated, np.inf).argmin())
            columns.append(self.column(priced, row))
        return min(columns, key=lambda column: column.memory_bytes)


def _unbeaten_by(rows: Ints, seconds: Array, rivals: Array) -> Ints:
    """Returns the rows that no rival beats in time or tail without a loss in the other.

    Rows that equal a rival stay.
    """
    if not len(rows) or not len(rivals):
        return rows
    order = np.lexsort((rivals[:, 1], rivals[:, 0]))
    times, tails = rivals[order].T
    least = np.minimum.accumulate(tails)
    own_s, own_tail_s = seconds[rows].T
    last = np.searchsorted(times, own_s, side="right") - 1  # rivals that take no longer
    before = np.searchsorted(times, own_s, side="left") - 1  # rivals that are faster
    shorter = (last >= 0) & (least[last] < own_tail_s)
    faster = (before >= 0) & (least[before] <= own_tail_s)
    kept: Ints = rows[~(shorter | faster)]
    return kept


def _some(rows: Ints, most: int) -> Ints:
    """Returns at most `most` of the rows, evenly spaced, with the first and the last."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def _of_equal_tail(priced: PricedMixes, rows: Ints) -> list[Ints]:
    """Returns `rows` in groups of equal tail, one for each layout of the weights."""
    _, group = np.unique(np.round(priced.tail_s[rows], PICOSECOND), return_inverse=True)
    return [rows[group == number] for number in range(group.max(initial=-1) + 1)]


class LeastEnds(RankColumns):
    """Bounds of one rank with any of several ways to run embedding and head.

    The rank has the least of each of their costs, at any ZeRO stage. Its columns are no plans.
    """

    def __init__(self, ways: Sequence[RankColumns]) -> None:
        first = ways[0]
        super().__init__(first.rank, first.layout, first.table, first.ends)
        self.ways = tuple(ways)
        costs = [way.fixed[zero] for way in ways for zero in way.end_stages]
        # a layer that is used up leaves its bytes to others
        least = {
            each.name: (max if each.name == "used_up" else min)(
                getattr(cost, each.name) for cost in costs
            )
            for each in fields(EndCosts)
        }
        self.fixed = dict.fromkeys(self.stages, EndCosts(**least))

    @property
    def end_stages(self) -> tuple[int, ...]:
        return self.stages[-1:]

    def _make_peaks(self) -> MixPeaks:
        every = [(way.peaks, zero) for way in self.ways for zero in way.end_stages]
        return LeastPeaks(super()._make_peaks(), every)
