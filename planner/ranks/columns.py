"""Stage columns: for one pipeline rank, every block count with its best ways to run, priced and within memory.

A rank runs its blocks on a mix of the catalogue's options (planner/layers/mixes.py) at one ZeRO stage. The price is a sum over
layers, so the mixes of n blocks are priced at once, vectorised; they depend on the micro-batch and the sharding alone. Only
the points that no other point of the same rank and count beats become columns of the master (EQUATIONS I4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from costmodels.book import PriceBook
from costmodels.moments import Moment, moments
from costmodels.occupancy import occupied_bytes, peaks, stashes, usable_bytes
from costmodels.passes import plain_and_ramp
from costmodels.strategy import Frame
from planner.fronts import Array, Ints, front
from planner.host.homes import NOTHING, Homes
from planner.layers.mixes import Mixes, Pairs, exhaustive, pure_mixes, widest
from planner.layers.plans import LayerOption
from planner.ranks.mix_table import MixTable
from planner.ranks.prices import Fixed, fixed_price
from profiles.model import LayerKind

PICOSECOND = 12  # decimals of seconds
Mix = tuple[tuple[LayerOption, int], ...]


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run one rank: how many of its blocks on which option, at ZeRO stage `zero`.

    time_s of one micro-batch; tail_s after the last one; memory_bytes the peak of a device; redundant_bytes per device.
    plain_s, ramp_s: of time_s what there is without recompute, and in the ramps of the pipeline (costmodels/passes.py)
    homes: where the states of its blocks lie, of a frame in chunks
    looks_up: whether the host has its token table
    """

    mix: Mix
    zero: int
    time_s: float
    tail_s: float
    memory_bytes: float
    redundant_bytes: float
    plain_s: float
    ramp_s: float
    homes: Homes = NOTHING
    looks_up: bool = False

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.mix)


@dataclass(frozen=True, slots=True)
class Pace:
    """What a rank may take in a plan of a frame: `repeats` micro-batches and its tail in `room_s` seconds."""

    repeats: float
    room_s: float

    def within(self, time_s: Array, tail_s: Array | float) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self.repeats * time_s + tail_s <= self.room_s
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Mixes of one block count at one ZeRO stage, by row: seconds as in `Column`, bytes to allocate, redundant bytes."""

    mixes: Mixes
    zero: int
    time_s: Array
    tail_s: Array
    plain_s: Array
    ramp_s: Array
    allocated: Array
    redundant: Array


class RankColumns:
    """The columns of one pipeline rank of a frame, made for one block count at a time; `ends`: the prices of its embedding and head."""

    def __init__(self, rank: int, frame: Frame, table: MixTable, ends: PriceBook | None = None) -> None:
        self.rank, self.frame, self.table, self.ends = rank, frame, table, ends or table.book
        self.stages = table.zero_stages(frame)
        self.fixed = {zero: fixed_price(rank, frame, zero, self.ends) for zero in self.stages}
        self.per_block = table.per_block(frame, rank)
        self.stashes = stashes(LayerKind.BLOCK, rank, frame)
        self._peaks = peaks(rank, frame) if frame.splits_backward else ()
        self._moments = moments(rank, frame) if frame.recomputes_ahead else (Moment(self.stashes),)

    @property
    def looks_up(self) -> bool:
        return self.ends is not self.table.book

    def priced(self, mixes: Mixes, zero: int) -> Priced:
        fixed, block = self.fixed[zero], self.per_block[zero]
        counts = mixes.counts
        running = self.running(mixes, zero)
        buffers = np.maximum(widest(counts, block.zero_buffer), fixed.zero_buffer)
        held = fixed.states + counts @ block.states + self.stashes * mixes.saved_bytes + fixed.held
        ideal = fixed.ideal_states + counts @ block.ideal_states + self.stashes * mixes.ideal_saved_bytes + fixed.ideal_held
        allocated = held + running + buffers
        reserved = (fixed.step_copies + counts @ block.step_copies) / (1 + self.table.book.training.stack.allocator_share)
        time_s = counts @ block.time_s + fixed.time_s + mixes.last_s
        plain_s, ramp_s = self._plain_and_ramp(time_s, counts @ block.recompute_s, counts @ block.longer_s)
        return Priced(
            mixes=mixes, zero=zero, time_s=time_s, tail_s=counts @ block.tail_s + fixed.tail_s, plain_s=plain_s, ramp_s=ramp_s,
            allocated=allocated + reserved, redundant=allocated - ideal)

    def _plain_and_ramp(self, time_s: Array, recompute_s: Array, longer_s: Array) -> tuple[Array, Array]:
        return plain_and_ramp(self.frame.schedule, self.rank, self.frame.mesh.pp, time_s, recompute_s, longer_s)

    def running(self, mixes: Mixes, zero: int) -> Array:
        """What the fullest moment holds beyond states and the most stashes (costmodels/moments.py)."""
        fixed, block = self.fixed[zero], self.per_block[zero]
        saved, whole = mixes.saved_bytes, mixes.chunk_counts @ block.whole_saved
        inside = self._temporaries(mixes.workspace_bytes, saved, mixes.chunk_counts @ block.waiting, fixed) + mixes.window_bytes
        if not self.frame.recomputes_ahead:
            return inside
        alone = self._temporaries(widest(mixes.counts, block.whole_workspace), whole, np.zeros_like(saved), fixed)
        levels = [
            (one.stashes - self.stashes) * (saved + fixed.saved) + one.remade * (whole - saved) + (alone if one.alone else inside)
            for one in self._moments]
        found: Array = np.max(levels, axis=0)
        return found

    def _temporaries(self, workspace: Array, saved: Array, waiting: Array, fixed: Fixed) -> Array:
        """The largest of a layer, and with a split backward what weight gradients that wait hold (costmodels/occupancy.py)."""
        freed = 0.0 if self._peaks else saved
        of_layers = np.maximum(workspace, fixed.embedding_workspace - freed) - fixed.used_up
        found: Array = np.maximum(of_layers, fixed.head_workspace)
        if not self._peaks:
            return found
        fullest: Array = np.max([held * saved + waits * waiting for held, waits in self._peaks], axis=0)
        return found + fullest - self.stashes * saved + fixed.waiting

    def host_fits(self, mixes: Mixes) -> npt.NDArray[np.bool_]:
        """Which mixes a device's share of the host holds."""
        fixed = self.fixed[self.stages[0]].host
        found: npt.NDArray[np.bool_] = self.stashes * mixes.host_bytes + fixed <= self.table.host_share_bytes
        return found

    def column(self, priced: Priced, row: int) -> Column:
        memory = occupied_bytes(float(priced.allocated[row]), self.frame.mesh, self.table.book)
        mix = tuple((option, int(n)) for option, n in zip(priced.mixes.options, priced.mixes.counts[row], strict=True) if n)
        return Column(
            mix, priced.zero, float(priced.time_s[row]), float(priced.tail_s[row]), float(memory), float(priced.redundant[row]),
            float(priced.plain_s[row]), float(priced.ramp_s[row]), looks_up=self.looks_up)

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """The mixes within `limit_bytes` that no other beats in time and in tail, nor in what counts in the ramps."""
        if self.frame.recomputes_ahead:
            return self._unbeaten(num_blocks, limit_bytes, "time_s", "tail_s", "plain_s", "ramp_s")
        return self._unbeaten(num_blocks, limit_bytes, "time_s", "tail_s")

    def leanest(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """Every mix within `limit_bytes` that no other beats in time, tail and redundant bytes together."""
        return self._unbeaten(num_blocks, limit_bytes, "time_s", "tail_s", "redundant")

    def _unbeaten(self, num_blocks: int, limit_bytes: float, *names: str) -> list[Column]:
        """Mixes that fit and that no other beats or equals in the values of `names`; of equals the one with least memory."""
        usable, found = usable_bytes(limit_bytes, self.frame.mesh, self.table.book), []
        for zero in self.stages:
            priced = self.priced(self.table.get(self.frame, self.rank, num_blocks), zero)
            fits = np.flatnonzero((priced.allocated <= usable) & self.host_fits(priced.mixes))
            for rows in _of_equal_tail(priced, fits) if self.frame.recomputes_ahead else (fits,):
                kept = rows[front(priced.time_s[rows], getattr(priced, names[-1])[rows])]
                found += [(priced, int(row)) for row in kept]
        if not found:
            return []
        values = np.array([[*(getattr(priced, name)[row] for name in names), priced.allocated[row]] for priced, row in found])
        return [self.column(*found[index]) for index in unbeaten_rows(values)]

    def relaxed(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """Per ZeRO stage a column that no mix of real numbers of blocks can beat within `limit_bytes`: a bound, not a plan.

        A linear program over one memory limit takes at most two options; for each two, the least share of the leaner one.
        Where the mixes are all that there are, as with one block a chunk, the best of them is the bound.
        """
        options = self.table.options(self.frame, self.rank)
        if exhaustive(options, -(-num_blocks // self.frame.virtual_stages)):
            return self.fastest(num_blocks, limit_bytes)
        usable, found = usable_bytes(limit_bytes, self.frame.mesh, self.table.book), []
        pairs = self.table.pairs(self.frame, self.rank)
        for zero in self.stages:
            time_s, fits = self.relaxed_s(num_blocks, zero, pairs, usable)
            tail_s = num_blocks * float(self.per_block[zero].tail_s.min()) + self.fixed[zero].tail_s
            if fits:
                plain_s, ramp_s = self._least_plain_and_ramp(num_blocks, zero, time_s)
                time_s += self.fixed[zero].time_s
                found.append(Column(((options[0], num_blocks),), zero, time_s, tail_s, 0.0, 0.0, plain_s, ramp_s, looks_up=self.looks_up))
        return unbeaten(found)

    def _least_plain_and_ramp(self, num_blocks: int, zero: int, blocks_s: float) -> tuple[float, float]:
        """What no mix is below whose blocks take at least `blocks_s`: its least without recompute, of the ramps no more than that."""
        fixed_s, block = self.fixed[zero].time_s, self.per_block[zero]
        least_s = num_blocks * float((block.time_s - block.recompute_s).min())
        plain_s, _ = plain_and_ramp(self.frame.schedule, self.rank, self.frame.mesh.pp, blocks_s, blocks_s - least_s, blocks_s)
        return plain_s + fixed_s, plain_s + fixed_s

    def relaxed_s(self, num_blocks: int, zero: int, pairs: Pairs, usable: float) -> tuple[float, bool]:
        """The least seconds of the blocks over all pairs of options, and whether any pair fits: at each moment by itself.

        A program over two limits at once would take three options; the larger of two optima over one is below it.
        """
        fixed, block = self.fixed[zero], self.per_block[zero]
        chunk = num_blocks / self.frame.virtual_stages
        saved, whole = chunk * pairs.saved_bytes, chunk * block.whole_saved[pairs.index]
        spare = (fixed.step_copies + num_blocks * block.step_copies) / (1 + self.table.book.training.stack.allocator_share)
        always = num_blocks * block.states[pairs.index] + spare[pairs.index]
        buffers = np.maximum(block.zero_buffer[pairs.index].max(axis=0), fixed.zero_buffer)
        room = usable - (fixed.states + fixed.held + buffers)
        first_s, second_s = num_blocks * block.time_s[pairs.index]
        found = []
        for one in self._moments:
            workspace = block.whole_workspace[pairs.index].max(axis=0) if one.alone else pairs.workspace_bytes
            waiting = chunk * block.waiting[pairs.index].min(axis=0)
            temporaries = self._temporaries(workspace, (whole if one.alone else saved).max(axis=0), waiting, fixed)
            own = one.stashes * saved + one.remade * (whole - saved) + always
            share, fits = _least_share(own, room - temporaries - (one.stashes - self.stashes) * fixed.saved)
            times = np.where(fits, first_s + np.where(fits, share, 0.0) * (second_s - first_s), np.inf)
            found.append((float(times.min()), bool(fits.any())))
        return max(time_s for time_s, _ in found), all(fits for _, fits in found)

    def smallest(self, num_blocks: int) -> Column:
        """The mix and ZeRO stage with the lowest peak memory, whatever its time.

        It is all blocks on one option: of two that are mixed, the one that keeps less has the larger workspace already.
        """
        pure = pure_mixes(self.table.options(self.frame, self.rank), num_blocks, self.frame.virtual_stages)
        priced, fits = (self.priced(pure, zero) for zero in self.stages), self.host_fits(pure)
        rows = ((p, int(np.where(fits, p.allocated, np.inf).argmin())) for p in priced)
        return min((self.column(p, row) for p, row in rows), key=lambda column: column.memory_bytes)


def _of_equal_tail(priced: Priced, rows: Ints) -> list[Ints]:
    """`rows` in groups: the tail is that of a layout of the weights, of which there are few."""
    _, group = np.unique(np.round(priced.tail_s[rows], PICOSECOND), return_inverse=True)
    return [rows[group == one] for one in range(group.max(initial=-1) + 1)]


def _least_share(own: Array, room: Array) -> tuple[Array, Array]:
    """Of two options that need `own[0]` and `own[1]` bytes, the least share of the second with which both fit, and where they can."""
    first, second = own
    over = np.maximum(0.0, first - room)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(over > 0, over / (first - second), 0.0)
    return share, (over == 0) | ((second <= room) & (share <= 1.0))


def unbeaten_rows(values: Array) -> list[int]:
    """The rows that no other beats or equals in every column but the last; of rows that are equal the one with the least last."""
    kept: list[int] = []
    best = np.empty((len(values), values.shape[1] - 1))
    for row in np.lexsort(values.T[::-1]):
        if not (best[: len(kept)] <= values[row, :-1]).all(axis=1).any():
            best[len(kept)] = values[row, :-1]
            kept.append(int(row))
    return kept


def unbeaten(found: Sequence[Column]) -> list[Column]:
    """The columns that no other beats or equals in time, in tail and in what counts in the ramps; of equals the one with least memory."""
    values = np.array([[c.time_s, c.tail_s, c.plain_s, c.ramp_s, c.memory_bytes] for c in found]).reshape(-1, 5)
    return [found[index] for index in unbeaten_rows(values)]
