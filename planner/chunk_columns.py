"""Columns of a rank whose blocks' states are held in chunks: every mix of recompute with every way to give the blocks homes.

A row is a mix, as in planner/columns.py, a cell a row with one of the homes; both limits, of the device and of its share of
the host's memory, and the price are sums over the two, so that all cells are priced at once. Which states leave the device
first is no rule but a choice: all counts of HOST and OPTIMIZER blocks are tried (EQUATIONS O6).

    t = max(C + A, I, O)       C compute, A collectives, I and O copies to the device and from it, of one micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from costmodels.occupancy import occupied_bytes, usable_bytes
from costmodels.strategy import Frame
from planner.chunk_costs import HomeCosts, Tensors, host_share_bytes, tensors_of
from planner.columns import Column, MixTable, Priced, RankColumns
from planner.fronts import Array, Ints, front
from planner.mixes import Mixes, pure_mixes

LEVELS = 24  # of room, at which the relaxation is solved: it takes each homes' room for the next larger of them


def _levels(room: Array) -> Iterator[tuple[float, float]]:
    """Intervals (low, high] that hold all of `room`, about as many values in each."""
    levels = np.unique(np.quantile(room, np.linspace(0, 1, LEVELS + 1), method="higher")) if len(room) else room
    yield from zip((-np.inf, *levels[:-1]), levels, strict=True)


@dataclass(frozen=True, slots=True)
class _Cells:
    """`rows` of `priced` against all homes: what fits, as indices of rows and of homes."""

    priced: Priced
    rows: Ints
    costs: HomeCosts
    row: Ints
    home: Ints
    allocated: Array


class ChunkColumns:
    """The columns of one pipeline rank of a frame in chunks, made for one block count at a time."""

    def __init__(self, rank: int, frame: Frame, table: MixTable) -> None:
        self.rank, self.frame, self.table, self.compute = rank, frame, table, RankColumns(rank, frame, table)
        (self.zero,) = table.zero_stages(frame)
        self.host_share_bytes = host_share_bytes(table.book.machine.cluster)

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """The cells within both limits that no other beats in time and in tail."""
        found = []
        usable = usable_bytes(limit_bytes, self.frame.mesh, self.table.book)
        for cells in self._cells(self.table.get(self.frame, self.rank, num_blocks), num_blocks, usable):
            time_s, tail_s = self._seconds(cells, usable)
            kept = front(time_s, tail_s)
            found += [self._column(cells, int(cell), float(time_s[cell]), float(tail_s[cell])) for cell in kept]
        best = front(np.array([c.time_s for c in found]), np.array([c.tail_s for c in found])) if found else ()
        return [found[index] for index in best]

    def smallest(self, num_blocks: int) -> Column:
        """The cell with the lowest peak of a device within its share of the host, whatever its time."""
        pure = pure_mixes(self.table.options(self.frame, self.rank), num_blocks, self.frame.virtual_stages)
        found = []
        for cells in self._cells(pure, num_blocks, np.inf):
            cell = int(cells.allocated.argmin())
            time_s, tail_s = self._seconds(cells, float(cells.allocated[cell]))
            found.append(self._column(cells, cell, float(time_s[cell]), float(tail_s[cell])))
        return min(found, key=lambda column: column.memory_bytes)

    def relaxed(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """Columns that no mix of real numbers of blocks with any homes can beat within `limit_bytes`: a bound, not a plan."""
        usable, compute = usable_bytes(limit_bytes, self.frame.mesh, self.table.book), self.compute
        pairs, fixed = self.table.pairs(self.frame, self.rank), compute.fixed[self.zero]
        found = []
        for costs, _ in self._homes(num_blocks):
            room = usable - costs.always_bytes - costs.working_bytes
            least_s = np.full(len(room), np.inf)
            for low, high in _levels(room[costs.host_bytes <= self.host_share_bytes]):
                blocks_s, fits = compute.relaxed_s(num_blocks, self.zero, pairs, high)
                least_s[(room > low) & (room <= high)] = blocks_s if fits else np.inf
            least_s[costs.host_bytes > self.host_share_bytes] = np.inf
            held = 1 + np.maximum(0.0, room) / costs.block_bytes
            time_s = self._micro_batch_s(least_s + fixed.time_s, costs, np.arange(len(room)), held)
            tail_s = costs.once_s + fixed.tail_s
            within = np.flatnonzero(np.isfinite(time_s))
            found += [
                self._bound(num_blocks, costs, int(home), float(time_s[home]), float(tail_s[home]))
                for home in within[front(time_s[within], tail_s[within])]]
        return found

    def _bound(self, num_blocks: int, costs: HomeCosts, home: int, time_s: float, tail_s: float) -> Column:
        option = self.table.options(self.frame, self.rank)[0]
        return Column(((option, num_blocks),), self.zero, time_s, tail_s, 0.0, 0.0, time_s, time_s, costs.homes[home])

    def _homes(self, num_blocks: int) -> Iterator[tuple[HomeCosts, Tensors]]:
        """What homes cost, of each way to divide the weights."""
        options = self.table.options(self.frame, self.rank)
        for tensors, sharding in {tensors_of(option.sharding, self.table.book): option.sharding for option in options}.items():
            yield self.table.homes(self.frame, sharding, num_blocks), tensors

    def _cells(self, mixes: Mixes, num_blocks: int, usable: float) -> Iterator[_Cells]:
        """What fits, by the way to divide the weights that all blocks of a row share."""
        priced, used = self.compute.priced(mixes, self.zero), mixes.counts > 0
        kinds = [tensors_of(option.sharding, self.table.book) for option in mixes.options]
        for costs, tensors in self._homes(num_blocks):
            other = np.array([kind != tensors for kind in kinds])
            rows = np.flatnonzero(~used[:, other].any(axis=1))
            rows = rows[front(priced.time_s[rows], priced.allocated[rows])]
            allocated = priced.allocated[rows][:, None] + costs.always_bytes + costs.working_bytes
            row, home = np.nonzero((allocated <= usable) & (costs.host_bytes <= self.host_share_bytes))
            if len(row):
                yield _Cells(priced, rows[row], costs, row, home, allocated[row, home])

    def _seconds(self, cells: _Cells, usable: float) -> tuple[Array, Array]:
        """Of each cell the seconds of a micro-batch and after the last one."""
        held = 1 + (usable - cells.allocated) / cells.costs.block_bytes
        tail_s = cells.priced.tail_s[cells.rows] + cells.costs.once_s[cells.home]
        return self._micro_batch_s(cells.priced.time_s[cells.rows], cells.costs, cells.home, held), tail_s

    def _micro_batch_s(self, compute_s: Array, costs: HomeCosts, home: Ints, held: Array) -> Array:
        """t of the module's head, with what the host adds up; `held` HOST blocks stay on the device from a pass to the next."""
        passes, on_host = self.frame.num_micro_batches, costs.on_host[home]
        swept = on_host + (2 * passes - 1) * np.maximum(0.0, on_host - held)  # costmodels/chunks/price.py, `fetches`
        missed = swept / np.maximum(on_host, 1) / passes  # of a HOST block in a micro-batch
        copied_s = np.maximum(missed * costs.fetch_s[home], costs.send_s[home])
        return np.maximum(compute_s + costs.gathered_s[home], copied_s) + (1 - 1 / passes) * costs.added_s[home]

    def _column(self, cells: _Cells, cell: int, time_s: float, tail_s: float) -> Column:
        book, home = self.table.book, cells.costs.homes[cells.home[cell]]
        memory = occupied_bytes(float(cells.allocated[cell]), self.frame.mesh, book)
        column = self.compute.column(cells.priced, int(cells.rows[cell]))
        return replace(column, time_s=time_s, tail_s=tail_s, memory_bytes=memory, plain_s=time_s, ramp_s=time_s, homes=home)


Columns = RankColumns | ChunkColumns


def rank_columns(rank: int, frame: Frame, table: MixTable) -> Columns:
    """The columns of a pipeline rank of any frame."""
    return ChunkColumns(rank, frame, table) if frame.chunked else RankColumns(rank, frame, table)
