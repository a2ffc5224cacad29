"""Columns of a rank whose blocks' states are held in chunks: a mix of recompute and homes of its blocks, chosen together.

Which states leave the device first is no rule but a choice: all counts of HOST and of OPTIMIZER blocks are tried (EQUATIONS O6),
within the memory of the device and its share of the host's. For each the best mix: of two that are on the front of seconds and
bytes, the slower leaves more room for parameters that need not be fetched again.

    t = max(C + A, I, O) + H       of one micro-batch: compute, collectives, copies to the device and from it, what the host adds up
    I = [h + (2 M - 1) max(0, h - c)] / (h M) i     h HOST blocks with room for c of them, i to fetch all (costmodels/chunks/price.py)

C grows along the front and I falls, so that the best mix is where they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from costmodels.memory import owned_parameters
from costmodels.occupancy import occupied_bytes, usable_bytes
from costmodels.strategy import Frame
from planner.chunk_costs import HomeCosts, Tensors, host_share_bytes
from planner.columns import Column, MixTable, Priced, RankColumns, end_kinds, least_share
from planner.fronts import Array, Ints, front
from planner.mixes import Mixes, pure_mixes
from profiles.model import LayerKind

STEPS = 128  # of what mixes may allocate, at which the relaxation is solved


@dataclass(frozen=True, slots=True)
class _Rows:
    """The mixes that share one way to divide the weights, fastest first, each with less memory than those before it.

    allocated: without chunks, in a pass of a block; at_ends: in one of embedding or head
    """

    priced: Priced
    rows: Ints
    costs: HomeCosts
    allocated: Array
    at_ends: Array

    @property
    def compute_s(self) -> Array:
        return self.priced.time_s[self.rows]

    def needed(self, row: Ints, home: Ints) -> Array:
        """Bytes of the device at its fullest, of rows with homes."""
        states, working = self.costs.always_bytes[home], self.costs.working_bytes[home]
        found: Array = states + np.maximum(self.allocated[row] + working, self.at_ends[row])
        return found


class ChunkColumns:
    """The columns of one pipeline rank of a frame in chunks, made for one block count at a time."""

    def __init__(self, rank: int, frame: Frame, table: MixTable) -> None:
        self.rank, self.frame, self.table, self.compute = rank, frame, table, RankColumns(rank, frame, table)
        (self.zero,) = table.zero_stages(frame)
        self.host_share_bytes = host_share_bytes(table.book.machine.cluster)
        self._ends_s = self.compute.fixed[self.zero].tail_s

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """The mixes and homes within both limits that no other beats in time and in tail."""
        usable, found = usable_bytes(limit_bytes, self.frame.mesh, self.table.book), []
        for rows in self._rows(self.table.get(self.frame, self.rank, num_blocks), num_blocks):
            row, home, time_s = self._best_rows(rows, usable)
            kept = front(time_s, rows.costs.once_s[home])
            found += [self._column(rows, int(row[i]), int(home[i]), float(time_s[i])) for i in kept]
        return _unbeaten(found)

    def _best_rows(self, rows: _Rows, usable: float) -> tuple[Ints, Ints, Array]:
        """Of all homes with which something fits the fastest row, the homes, and the seconds of a micro-batch."""
        home, last = np.flatnonzero(rows.costs.host_bytes <= self.host_share_bytes), np.intp(len(rows.rows) - 1)
        home = home[rows.needed(np.full(len(home), last), home) <= usable]
        fits = _first(len(rows.rows), len(home), lambda row: rows.needed(row, home) <= usable)
        meet = np.maximum(fits, _first(len(rows.rows), len(home), lambda row: self._waits(rows, row, home, usable) <= 0))
        before = np.maximum(fits, meet - 1)
        found_s = [self._seconds(rows, row, home, usable) for row in (before, meet)]
        row = np.where(found_s[0] <= found_s[1], before, meet)
        return row, home, np.minimum(*found_s)

    def _waits(self, rows: _Rows, row: Ints, home: Ints, usable: float) -> Array:
        """By how much the copies of a micro-batch take longer than its compute: less from row to row."""
        held = (usable - rows.needed(row, home)) / rows.costs.block_bytes
        found: Array = self._copied_s(rows.costs, home, held) - rows.compute_s[row] - rows.costs.gathered_s[home]
        return found

    def _seconds(self, rows: _Rows, row: Ints, home: Ints, usable: float) -> Array:
        costs = rows.costs
        waits = np.maximum(0.0, self._waits(rows, row, home, usable))
        found: Array = rows.compute_s[row] + costs.gathered_s[home] + waits + self._added_s(costs)[home]
        return found

    def _added_s(self, costs: HomeCosts) -> Array:
        found: Array = (1 - 1 / self.frame.num_micro_batches) * costs.added_s
        return found

    def _copied_s(self, costs: HomeCosts, home: Ints, held: Array) -> Array:
        """Copies of a micro-batch, where there is room for `held` HOST blocks beside the one that runs."""
        passes, on_host = self.frame.num_micro_batches, costs.host[home]
        swept = on_host + (2 * passes - 1) * np.maximum(0.0, on_host - 1 - np.maximum(0.0, held))
        found: Array = np.maximum(swept / (np.maximum(on_host, 1) * passes) * costs.fetch_s[home], costs.send_s[home])
        return found

    def smallest(self, num_blocks: int) -> Column:
        """The mix and homes with the lowest peak of a device within its share of the host, whatever their time."""
        found = []
        for rows in self._rows(self._pure(num_blocks), num_blocks):
            home = np.flatnonzero(rows.costs.host_bytes <= self.host_share_bytes)
            row = np.full(len(home), len(rows.rows) - 1)
            needed = rows.needed(row, home)
            least = int(needed.argmin())
            time_s = self._seconds(rows, row[least:least + 1], home[least:least + 1], float(needed[least]))
            found.append(self._column(rows, int(row[least]), int(home[least]), float(time_s[0])))
        return min(found, key=lambda column: column.memory_bytes)

    def relaxed(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """Columns that no mix of real numbers of blocks, with any homes, can beat within `limit_bytes`: a bound, not a plan.

        Whatever mixes allocate is in one of a few intervals: there compute takes at least what it does with as much as its end, and
        copies what they do with the room that its beginning leaves.
        """
        usable, found = usable_bytes(limit_bytes, self.frame.mesh, self.table.book), []
        steps = list(self._steps(num_blocks))
        for costs, _ in self._homes(num_blocks):
            least_s = np.full(len(costs.host), np.inf)
            room = np.where(costs.host_bytes <= self.host_share_bytes, usable - costs.always_bytes - costs.working_bytes, -np.inf)
            home = np.arange(len(room))
            for begin, compute_s in steps:
                copied_s = self._copied_s(costs, home, (room - begin) / costs.block_bytes)
                time_s = np.maximum(compute_s + costs.gathered_s, copied_s) + self._added_s(costs)
                least_s = np.where(room >= begin, np.minimum(least_s, time_s), least_s)
            home = np.flatnonzero(np.isfinite(least_s))
            found += [self._bound(num_blocks, costs, int(i), float(least_s[i])) for i in home[front(least_s[home], costs.once_s[home])]]
        return _unbeaten(found)

    def _steps(self, num_blocks: int) -> Iterator[tuple[float, float]]:
        """Intervals of what the fullest pass of a block may allocate without chunks: their beginnings, and the least seconds in each."""
        pure = self._pure(num_blocks)
        allocated = self._in_blocks(self.compute.priced(pure, self.zero))
        ends = np.linspace(float(allocated.min()), float(allocated.max()), STEPS)
        for begin, end in zip((ends[0], *ends), (*ends, np.inf), strict=True):
            time_s = self._least_s(num_blocks, end)
            if np.isfinite(time_s):
                yield float(begin), time_s

    def _least_s(self, num_blocks: int, allocated: float) -> float:
        """The least seconds of compute of two options, of which any share is run, that allocate so much (`RankColumns.relaxed_s`)."""
        pairs, fixed, compute = self.table.pairs(self.frame, self.rank), self.compute.fixed[self.zero], self.compute
        chunk = num_blocks / self.frame.virtual_stages
        room = allocated - (fixed.states + fixed.held + self._lasting_bytes() - fixed.used_up + pairs.workspace_bytes)
        share, fits = least_share(compute.stashes * chunk * pairs.saved_bytes, room)
        first_s, second_s = num_blocks * compute.per_block[self.zero].time_s[pairs.index]
        return float(np.where(fits, first_s + np.where(fits, share, 0.0) * (second_s - first_s), np.inf).min()) + fixed.time_s

    def _bound(self, num_blocks: int, costs: HomeCosts, home: int, time_s: float) -> Column:
        option, tail_s = self.table.options(self.frame, self.rank)[0], float(costs.once_s[home]) + self._ends_s
        return Column(((option, num_blocks),), self.zero, time_s, tail_s, 0.0, 0.0, time_s, time_s, costs.homes(home))

    def _pure(self, num_blocks: int) -> Mixes:
        return pure_mixes(self.table.options(self.frame, self.rank), num_blocks, self.frame.virtual_stages)

    def _homes(self, num_blocks: int) -> Iterator[tuple[HomeCosts, Tensors]]:
        """What homes cost, for each way to divide the weights."""
        for tensors, sharding in self.table.divisions(self.frame, self.rank).items():
            yield self.table.homes(self.frame, sharding, num_blocks), tensors

    def _rows(self, mixes: Mixes, num_blocks: int) -> Iterator[_Rows]:
        priced, used = self.compute.priced(mixes, self.zero), mixes.counts > 0
        allocated, kinds = self._in_blocks(priced), [self.table.tensors(option.sharding) for option in mixes.options]
        for costs, tensors in self._homes(num_blocks):
            other = np.array([kind != tensors for kind in kinds])
            rows = np.flatnonzero(~used[:, other].any(axis=1))
            if len(rows):
                rows = rows[front(priced.time_s[rows], allocated[rows])]
                rows = rows[priced.allocated[rows] <= np.minimum.accumulate(priced.allocated[rows])]
                yield _Rows(priced, rows, costs, allocated[rows], priced.allocated[rows])

    def _in_blocks(self, priced: Priced) -> Array:
        """What the fullest pass of a block allocates without chunks (costmodels/chunks/room.py): `priced` also has what the ends need."""
        fixed, mixes = self.compute.fixed[self.zero], priced.mixes
        temporaries = self.compute.running(mixes, self.zero) + fixed.zero_buffer
        found: Array = priced.allocated - temporaries + mixes.workspace_bytes - fixed.used_up + self._lasting_bytes()
        return found

    def _lasting_bytes(self) -> float:
        """Of the head in passes of blocks: its gradient until it is reduced, behind the stage's backward pass."""
        book, sharding = self.table.book, self.frame.sharding
        if LayerKind.HEAD not in end_kinds(self.rank, self.frame) or not self.zero:
            return 0.0
        own = owned_parameters(book.layer(LayerKind.HEAD, 1), sharding, with_tied=book.counts_tied(self.frame.mesh))
        return float(book.training.gradient_precision.num_bytes * own)

    def _column(self, rows: _Rows, row: int, home: int, time_s: float) -> Column:
        tail_s = float(rows.costs.once_s[home]) + self._ends_s
        needed = float(rows.needed(np.array([row]), np.array([home]))[0])
        return replace(
            self.compute.column(rows.priced, int(rows.rows[row])), time_s=time_s, tail_s=tail_s, plain_s=time_s, ramp_s=time_s,
            memory_bytes=occupied_bytes(needed, self.frame.mesh, self.table.book), homes=rows.costs.homes(home))


Columns = RankColumns | ChunkColumns


def rank_columns(rank: int, frame: Frame, table: MixTable) -> Columns:
    """The columns of a pipeline rank of any frame."""
    return ChunkColumns(rank, frame, table) if frame.chunked else RankColumns(rank, frame, table)


def _first(count: int, size: int, holds: Callable[[Ints], npt.NDArray[np.bool_]]) -> Ints:
    """Of `size` searches over 0 .. `count` - 1 the first at which `holds`, which then does at all that follow; the last where none does."""
    low, high = np.zeros(size, np.int64), np.full(size, count - 1)
    while (low < high).any():
        middle = (low + high) // 2
        there = holds(middle)
        low, high = np.where(there, low, middle + 1), np.where(there, middle, high)
    return low


def _unbeaten(found: list[Column]) -> list[Column]:
    """Those that no other beats in time and in tail."""
    if not found:
        return []
    return [found[index] for index in front(np.array([c.time_s for c in found]), np.array([c.tail_s for c in found]))]
