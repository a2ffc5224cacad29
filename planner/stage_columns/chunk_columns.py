"""Columns of a rank with chunks: mixes of its blocks and locations of their states.

They are chosen together: all counts of HOST and of OPTIMIZER blocks are tried (EQUATIONS O3, O6)
within the memory of the device and its share of the host's memory, each with its best mix
(planner/host_options/chunk_mixes.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from parplan.costmodels.chunks.chunk_budget import (
    SHARD_GRADIENT_BYTES,
    handed_bytes,
    uncounted_bytes,
)
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.model_states import ideal_states, owned_parameters
from parplan.costmodels.memory.rank_memory import occupied_bytes, usable_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints, undominated_rows
from parplan.planner.host_options.chunk_mixes import (
    ChunkMixes,
    OffloadedActivations,
    widest_first,
)
from parplan.planner.host_options.location_costs import LocationCosts, Tensors
from parplan.planner.layer_options.mixes import Mixes, column_of, lean_mixes, skyline
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.embedding_columns import AnyEnds
from parplan.planner.stage_columns.mix_prices import MixPrices, PricedMixes
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_column import (
    Mix,
    RankTimeLimit,
    StageColumn,
    unbeaten_rows,
)
from parplan.planner.stage_columns.stage_prices import end_kinds, tied_ends, unbeaten_ends
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

LEAN_STEP = 1 / 256  # share of one copy of the states
STEPS = 128  # intervals of allocated bytes in the relaxation
ENDLESS = 2.0**60  # bytes
Where = npt.NDArray[np.bool_]
SHARES = 64  # shares of the host that are left for activations, in the relaxation
# mixes with offloaded activations that are tried with all locations, evenly along their front
MOST_SENDING = 16


class LocatedColumns(ABC):
    """The columns of one rank of a layout in chunks, for layers of any kind.

    compute    the prices of the rank without its chunks
    """

    def __init__(self, compute: MixPrices) -> None:
        self.compute = compute
        self.rank, self.layout = compute.rank, compute.layout
        (self.zero,) = compute.table.zero_stages(compute.layout)
        self.fixed = compute.fixed[self.zero]
        self.host_share_bytes = compute.table.host_share_bytes - self.fixed.host

    @property
    def price_cache(self) -> LayerPriceCache:
        return self.compute.table.price_cache

    @abstractmethod
    def _every(self, num_blocks: int) -> Mixes:
        """Returns the mixes to choose from."""

    @abstractmethod
    def _pure(self, num_blocks: int) -> Mixes:
        """Returns mixes among which the leanest is."""

    @abstractmethod
    def _located(self, priced: PricedMixes) -> Iterator[tuple[LocationCosts, Where]]:
        """Yields the costs of locations, each with the mixes that have them."""

    @abstractmethod
    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """Returns columns of a bound on all choices within a limit."""

    @abstractmethod
    def _outside(self, kinds: Sequence[LayerKind]) -> Sequence[LayerKey]:
        """Returns the layers outside of chunks, where they have a role of `kinds`."""

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]:
        """Returns the mixes and locations within both limits, undominated in time and in tail."""
        usable = usable_bytes(limit_bytes, self.layout.mesh, self.price_cache)
        columns = []
        for mixes, priced, rows in self._mixes(self._every(num_blocks), num_blocks):
            row, location, time_s = mixes.best(usable, self.host_share_bytes)
            for i in undominated_rows(time_s, mixes.costs.once_s[location]):
                cell = int(row[i]), int(location[i])
                columns.append(self._column(mixes, priced, rows, cell, float(time_s[i])))
        return _unbeaten(columns)

    def smallest(self, num_blocks: int) -> StageColumn:
        """Returns the mix and locations with the lowest peak of a device, for any time.

        They fit the device's share of the host.
        """
        columns = []
        for mixes, priced, rows in self._mixes(self._pure(num_blocks), num_blocks):
            last = len(rows) - 1
            sent_bytes = mixes.sent.host_bytes[last] if mixes.sent else 0.0
            location = np.flatnonzero(mixes.costs.host_bytes + sent_bytes <= self.host_share_bytes)
            if not len(location):
                continue
            row = np.full(len(location), last)
            needed = mixes.needed(row, location)
            least = np.array([needed.argmin()])
            time_s = float(mixes.seconds(row[least], location[least], needed[least])[0])
            cell = int(row[least][0]), int(location[least][0])
            columns.append(self._column(mixes, priced, rows, cell, time_s))
        return min(columns, key=lambda column: column.memory_bytes)

    def _mixes(
        self, mixes: Mixes, num_blocks: int, pace: RankTimeLimit | None = None
    ) -> Iterator[tuple[ChunkMixes, PricedMixes, Ints]]:
        """Yields the front of the mixes for each division of the weights, and its rows of `priced`.

        All blocks of a mix share one way. Mixes that offload activations have a separate front.
        With a `pace`, the front is over the mixes within it: undominated in time, in allocated
        bytes, and in bytes that are no ideal activations together.
        """
        priced = self.compute.priced(mixes, self.zero)
        uncounted = uncounted_bytes(self.layout, self.rank, num_blocks, self.compute.ends)
        allocated = self._in_blocks(priced)
        for costs, alike in self._located(priced):
            for sends in (False, True):
                rows = np.flatnonzero(alike & ((mixes.host_bytes > 0) == sends))
                if pace:
                    rows = rows[pace.within(priced.time_s[rows], 0.0)]
                    step = lean_step_bytes(self.layout, self.price_cache)
                    beyond = allocated[rows] - self.compute.stashes * mixes.ideal_saved_bytes[rows]
                    values = [
                        np.ceil(beyond / step),
                        np.ceil(allocated[rows] / step),
                        priced.time_s[rows],
                        beyond,
                    ]
                    rows = rows[unbeaten_rows(np.stack(values, axis=1))]
                else:
                    rows = rows[undominated_rows(priced.time_s[rows], allocated[rows])]
                    if len(rows):
                        least = np.minimum.accumulate(priced.allocated[rows])
                        rows = rows[priced.allocated[rows] <= least]
                if not len(rows):
                    continue
                if sends and len(rows) > MOST_SENDING:
                    rows = rows[np.linspace(0, len(rows) - 1, MOST_SENDING).astype(np.int64)]
                yield (
                    ChunkMixes(
                        self.layout,
                        costs,
                        priced.time_s[rows],
                        allocated[rows] + uncounted,
                        priced.allocated[rows]
                        + uncounted
                        + self._handed_bytes
                        + self._gathered_bytes
                        + self._lasting_bytes((LayerKind.HEAD,)),
                        self._outside_bytes
                        + uncounted
                        + self._lasting_bytes((LayerKind.EMBEDDING, LayerKind.HEAD)),
                        self._sent(mixes, rows) if sends else None,
                    ),
                    priced,
                    rows,
                )

    def _sent(self, mixes: Mixes, rows: Ints) -> OffloadedActivations:
        counts = mixes.counts[rows]
        return OffloadedActivations(
            host_bytes=self.compute.stashes * mixes.host_bytes[rows],
            out_s=counts @ column_of(mixes.options, "out_s"),
            back_s=counts @ column_of(mixes.options, "back_s"),
        )

    def _in_blocks(self, priced: PricedMixes) -> Array:
        """Bytes of the fullest pass of a block without chunks (costmodels/chunks/chunk_budget.py).

        `priced` also has the bytes of the ends.
        """
        temporaries = self.compute.running(priced.mixes, self.zero) + self.fixed.zero_buffer
        beyond = (
            self._handed_bytes
            + self._lasting_bytes((LayerKind.HEAD,))
            + self._gathered_bytes
            - self.fixed.used_up
        )
        in_blocks: Array = (
            priced.allocated
            - temporaries
            + priced.mixes.workspace_bytes
            + priced.mixes.window_bytes
            + beyond
        )
        return in_blocks

    @property
    def _handed_bytes(self) -> float:
        """Bytes of the activation between two layers."""
        return float(handed_bytes(self.layout, self.price_cache))

    @property
    def _outside_bytes(self) -> float:
        """Bytes of embedding and head in passes of blocks: states and saved tensors."""
        return self.fixed.states + self.fixed.held + self._gathered_bytes

    @cached_property
    def _gathered_bytes(self) -> float:
        """Bytes that stay gathered of layers outside of chunks that are one unit."""
        price_cache, mesh = self.price_cache, self.layout.mesh
        if self.zero != 3:
            return 0.0
        joined = (k for k in self._outside(tuple(LayerKind)) if price_cache.stays_gathered(k, mesh))
        parameters = sum(map(self._parameters, joined))
        return float(price_cache.training.precision.num_bytes * parameters)

    def _lasting_bytes(self, kinds: Sequence[LayerKind]) -> float:
        """Bytes of reduced gradients of some layers until the stage's backward pass ends.

        Those of the head exist in passes of blocks.
        """
        if self.zero != 3:
            return 0.0
        return float(SHARD_GRADIENT_BYTES * sum(map(self._parameters, self._outside(kinds))))

    def _parameters(self, kind: LayerKey) -> int:
        price_cache = self.compute.ends
        return owned_parameters(
            price_cache.layer(kind, 1),
            price_cache.own_sharding(kind, self.layout.sharding),
            with_tied=price_cache.counts_tied(self.layout.mesh),
        )

    def _ordered(self, mix: Mix) -> Mix:
        """Returns the blocks of a column in the order in which its bytes were counted."""
        return mix

    def _column(
        self,
        mixes: ChunkMixes,
        priced: PricedMixes,
        rows: Ints,
        cell: tuple[int, int],
        time_s: float,
    ) -> StageColumn:
        row, location = cell
        needed = float(mixes.needed(np.array([row]), np.array([location]))[0])
        column = self.compute.column(priced, int(rows[row]))
        return replace(
            column,
            mix=self._ordered(column.mix),
            time_s=time_s,
            tail_s=float(mixes.costs.once_s[location]) + float(priced.tail_s[rows[row]]),
            plain_s=time_s,
            ramp_s=time_s,
            homes=mixes.costs.homes(location),
            memory_bytes=occupied_bytes(needed, self.layout.mesh, self.price_cache),
        )


class ChunkColumns(LocatedColumns):
    """The columns of one rank of equal blocks, made for one block count at a time."""

    def __init__(
        self, rank: int, layout: ParallelLayout, table: MixTable, ends: PriceCache | None = None
    ) -> None:
        super().__init__(MixPrices(rank, layout, table, ends))
        self.table = table

    def _every(self, num_blocks: int) -> Mixes:
        return widest_first(self.table.get(self.layout, self.rank, num_blocks, self.zero))

    def _pure(self, num_blocks: int) -> Mixes:
        options = self.table.placed(self.layout, self.rank, self.zero)
        return widest_first(lean_mixes(options, num_blocks, self.layout.virtual_stages))

    def _ordered(self, mix: Mix) -> Mix:
        if any(option.host_bytes for option, _ in mix):
            return mix
        return tuple(sorted(mix, key=lambda each: -each[0].workspace_bytes))

    def _homes(self, num_blocks: int) -> Iterator[tuple[LocationCosts, Tensors]]:
        """Yields the costs of locations, for each way to divide the weights."""
        for tensors, sharding in self.table.divisions(self.layout, self.rank).items():
            yield self.table.homes(self.layout, sharding, num_blocks), tensors

    def _located(self, priced: PricedMixes) -> Iterator[tuple[LocationCosts, Where]]:
        """Yields the costs of locations for each division of the weights, with its mixes."""
        used: npt.NDArray[np.bool_] = priced.mixes.counts > 0
        num_blocks = int(priced.mixes.counts[0].sum())
        kinds = [self.table.tensors(option.sharding) for option in priced.mixes.options]
        for costs, tensors in self._homes(num_blocks):
            others = used[:, [kind != tensors for kind in kinds]]
            yield costs, np.logical_not(np.any(others, axis=1))

    def _outside(self, kinds: Sequence[LayerKind]) -> Sequence[LayerKey]:
        return [kind for kind in end_kinds(self.rank, self.layout) if kind in kinds]

    def leanest(
        self, num_blocks: int, limit_bytes: float, pace: RankTimeLimit
    ) -> list[StageColumn]:
        """Returns the mixes, locations and budgets within both limits and `pace`.

        They are undominated in time, tail and redundant bytes together. A budget is the peak of the
        mix, or the peak and the room in which copies run beside compute. Saved activations are one
        copy: redundant is the rest of the budget, less one copy of the states (EQUATIONS R2). Bytes
        are compared in steps of `lean_step_bytes`.
        """
        price_cache = self.table.price_cache
        usable = usable_bytes(limit_bytes, self.layout.mesh, price_cache)
        every = self._every(num_blocks)
        ideal = self._ideal_states(num_blocks)
        step = lean_step_bytes(self.layout, price_cache)
        columns = []
        for mixes, priced, rows in self._mixes(every, num_blocks, pace):
            saved = self.fixed.ideal_held + self.compute.stashes * every.ideal_saved_bytes[rows]
            row, location, budget, time_s = mixes.budgets(usable, self.host_share_bytes)
            tail_s = mixes.costs.once_s[location] + self.fixed.tail_s
            redundant = budget - saved[row] - ideal
            within = np.flatnonzero(pace.within(time_s, tail_s))
            if not len(within):
                continue
            steps = np.ceil(redundant / step)
            within = within[skyline(location[within], time_s[within], steps[within])]
            values = np.stack([steps, time_s, tail_s, redundant], axis=1)
            for i in within[unbeaten_rows(values[within])]:
                cell = int(row[i]), int(location[i])
                memory = occupied_bytes(float(budget[i]), self.layout.mesh, price_cache)
                columns.append(
                    replace(
                        self._column(mixes, priced, rows, cell, float(time_s[i])),
                        redundant_bytes=float(redundant[i]),
                        memory_bytes=memory,
                    )
                )
        values = np.array(
            [
                (np.ceil(c.redundant_bytes / step), c.time_s, c.tail_s, c.redundant_bytes)
                for c in columns
            ]
        ).reshape(-1, 4)
        return [columns[index] for index in unbeaten_rows(values)]

    def _ideal_states(self, num_blocks: int) -> float:
        """Bytes of one copy of the states of embedding, head and `num_blocks` blocks.

        The ranks of a stage have equal parts of it.
        """
        price_cache = self.table.price_cache
        whole = owned_parameters(price_cache.layer(LayerKind.BLOCK, 1), Sharding())
        return self.fixed.ideal_states + num_blocks * sum(
            ideal_states(whole, self.layout.mesh.ranks_per_stage, price_cache.training)
        )

    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """Returns columns of a bound on all mixes of real numbers of blocks, with any locations.

        The bytes of a mix lie in one of many intervals. Its compute takes no less than that of any
        mix with the bytes of the interval's end, and its copies take the seconds with the room that
        the interval's beginning leaves. The rest of the host for offloaded activations, beside the
        states of any locations, is treated in the same way.
        """
        usable = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache)
        columns: list[StageColumn] = []
        pure = self._pure(num_blocks)
        allocated = self._in_blocks(self.compute.priced(pure, self.zero))
        workspace = pure.workspace_bytes
        least = float((allocated - workspace).min() + workspace.min())
        ends = np.linspace(least, float(allocated.max()), STEPS)
        begins = np.insert(ends, 0, ends[0])[::-1]
        for costs, tensors in self._homes(num_blocks):
            compute_s = self._least_s(num_blocks, np.append(ends, ENDLESS)[::-1], tensors)
            some = np.isfinite(compute_s[:, -1])
            mixes = ChunkMixes(
                self.layout,
                costs,
                compute_s[some],
                begins[some],
                np.full(some.sum(), -np.inf),
                -np.inf,
                share=np.ceil(self._left(costs) * (compute_s.shape[1] - 1)).astype(np.int64),
            )
            _, location, time_s = mixes.best(usable, self.host_share_bytes)
            columns += [
                self._bound(num_blocks, costs, int(location[i]), float(time_s[i]))
                for i in undominated_rows(time_s, costs.once_s[location])
            ]
        return _unbeaten(columns)

    def _left(self, costs: LocationCosts) -> Array:
        """Share of the host that is left beside the states of blocks, by way to place them."""
        return np.clip(1 - costs.host_bytes / max(1.0, self.host_share_bytes), 0.0, 1.0)

    def _least_s(self, num_blocks: int, allocated: Array, tensors: Tensors) -> Array:
        """Least seconds of compute of any real numbers of blocks on each option.

        By allocated bytes, infinity if no mix has so few; and by share of the host that is left for
        activations, if blocks may offload them. They come from the lower convex hulls of saved
        bytes and seconds, one for each workspace limit. A price for every offloaded byte bounds the
        host's share (a Lagrangian bound): the price of the free bytes is subtracted, and the
        largest result over all prices counts.
        """
        always = self._outside_bytes + self._lasting_bytes((LayerKind.HEAD,)) - self.fixed.used_up
        in_flight = self.compute.stashes * num_blocks / self.layout.virtual_stages
        freed = float(-(-num_blocks // self.layout.virtual_stages))
        hulls = self.table.hulls(self.layout, self.rank, tensors)
        shares = np.linspace(0.0, 1.0, SHARES + 1 if len(hulls.prices) > 1 else 1)
        least_s = hulls.least_s(allocated - always, in_flight, freed)
        paid_s = np.multiply.outer(hulls.prices, shares * self.host_share_bytes / in_flight)
        block_s = np.max(least_s[:, :, None] - paid_s[:, None, :], axis=0)
        compute_s: Array = num_blocks * block_s + self.fixed.time_s
        return compute_s

    def _bound(
        self, num_blocks: int, costs: LocationCosts, location: int, time_s: float
    ) -> StageColumn:
        option = self.table.options(self.layout, self.rank)[0]
        return StageColumn(
            mix=((option, num_blocks),),
            zero=self.zero,
            time_s=time_s,
            tail_s=float(costs.once_s[location]) + self.fixed.tail_s,
            memory_bytes=0.0,
            redundant_bytes=0.0,
            plain_s=time_s,
            ramp_s=time_s,
            homes=costs.homes(location),
            ends=self.compute.ends.ends,
            table=self.compute.tied_table,
            looks_up=self.compute.looks_up,
        )


def lean_step_bytes(layout: ParallelLayout, price_cache: LayerPriceCache) -> float:
    """Redundant bytes of a device that are too few to distinguish columns.

    They are a share of its part of one copy of the states.
    """
    return LEAN_STEP * sum(price_cache.ideal_states(layout.mesh.num_ranks))


Columns = RankColumns | LocatedColumns | AnyEnds


def rank_columns(rank: int, layout: ParallelLayout, table: MixTable) -> Columns:
    """Returns the columns of a pipeline rank of any layout, the same object at each call."""
    make = ChunkColumns if layout.chunked else RankColumns

    def both() -> Columns:
        kinds, stages = end_kinds(rank, layout), table.zero_stages(layout)
        ways = table.price_caches_of_ends(layout, kinds)
        if len(ways) > 1 and layout.mesh.tp > 1:
            tied = rank in tied_ends(layout)
            alike = layout.mesh, layout.micro_batch_size, layout.sharding, stages
            ways = table.once(
                ("ways", kinds, tied, *alike, layout.splits_backward, layout.chunked),
                lambda: tuple(unbeaten_ends(rank, layout, stages, ways)),
            )
        columns = [make(rank, layout, table, ends) for ends in ways]
        return AnyEnds(columns) if len(columns) > 1 else columns[0]

    return table.once(("columns", rank, layout), both)


def _unbeaten(columns: Sequence[StageColumn]) -> list[StageColumn]:
    """Returns the columns that are undominated in time and in tail."""
    values = np.array([(column.time_s, column.tail_s) for column in columns]).reshape(-1, 2)
    return [columns[index] for index in undominated_rows(*values.T)]
