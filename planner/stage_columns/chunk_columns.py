"""Columns of a rank whose blocks' states are held in chunks: a mix of recompute and homes of its
blocks, chosen together.

Which states leave the device first is no rule but a choice: all counts of HOST and of OPTIMIZER
blocks are tried (EQUATIONS O3, O6), within the memory of the device and its share of the host's,
each with the best mix (planner/host_options/chunk_mixes.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from parplan.costmodels.chunks.chunk_budget import SHARD_GRADIENT_BYTES, uncounted_bytes
from parplan.costmodels.layers.model_states import ideal_states, owned_parameters
from parplan.costmodels.memory.rank_memory import occupied_bytes, usable_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints, undominated_rows
from parplan.planner.host_options.chunk_mixes import ChunkMixes, OffloadedActivations
from parplan.planner.host_options.location_costs import LocationCosts, Tensors
from parplan.planner.layer_options.mixes import Mixes, column_of, pure_mixes, skyline
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.embedding_columns import EitherTable
from parplan.planner.stage_columns.mix_prices import MixPrices, PricedMixes
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_column import RankTimeLimit, StageColumn, unbeaten_rows
from parplan.planner.stage_columns.stage_prices import end_kinds
from parplan.profiles.models.operator_graph import LayerKind

LEAN_STEP = 1 / 256  # of one copy of the states
STEPS = 128  # of what mixes may allocate, at which the relaxation is solved
ENDLESS = 2.0**60  # bytes
SHARES = 64  # of the host that are left for activations, in the relaxation
MOST_SENDING = (
    16  # mixes with activations on the host that are tried with all homes, evenly along their front
)


class ChunkColumns:
    """The columns of one pipeline rank of a layout in chunks, made for one block count at a
    time.
    """

    def __init__(
        self, rank: int, layout: ParallelLayout, table: MixTable, ends: PriceCache | None = None
    ) -> None:
        self.rank, self.layout, self.table, self.compute = (
            rank,
            layout,
            table,
            MixPrices(rank, layout, table, ends),
        )
        (self.zero,) = table.zero_stages(layout)
        self.fixed = self.compute.fixed[self.zero]
        self.host_share_bytes = table.host_share_bytes - self.fixed.host

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[StageColumn]:
        """The mixes and homes within both limits that no other beats in time and in tail."""
        usable, found = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache), []
        for mixes, priced, rows in self._mixes(
            self.table.get(self.layout, self.rank, num_blocks, self.zero), num_blocks
        ):
            row, home, time_s = mixes.best(usable, self.host_share_bytes)
            for i in undominated_rows(time_s, mixes.costs.once_s[home]):
                found.append(
                    self._column(mixes, priced, rows, (int(row[i]), int(home[i])), float(time_s[i]))
                )
        return _unbeaten(found)

    def leanest(
        self, num_blocks: int, limit_bytes: float, pace: RankTimeLimit
    ) -> list[StageColumn]:
        """The mixes, homes and budgets within both limits and `pace` that no other beats in time,
        tail and redundant bytes together.

        A budget is what the mix needs at its fullest, or that and the room in which copies run
        beside compute. Activations that are kept are one copy: redundant is the rest of the budget,
        less one copy of the states (EQUATIONS R2). Bytes are compared in steps of
        `lean_step_bytes`.
        """
        usable, found = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache), []
        mixes, ideal = (
            self.table.get(self.layout, self.rank, num_blocks, self.zero),
            self._ideal_states(num_blocks),
        )
        step = lean_step_bytes(self.layout, self.table.price_cache)
        for own, priced, rows in self._mixes(mixes, num_blocks, pace):
            kept = self.fixed.ideal_held + self.compute.stashes * mixes.ideal_saved_bytes[rows]
            row, home, budget, time_s = own.budgets(usable, self.host_share_bytes)
            tail_s, redundant = (
                own.costs.once_s[home] + self.fixed.tail_s,
                budget - kept[row] - ideal,
            )
            within = np.flatnonzero(pace.within(time_s, tail_s))
            if not len(within):
                continue
            steps = np.ceil(redundant / step)
            within = within[skyline(home[within], time_s[within], steps[within])]
            for i in within[
                unbeaten_rows(np.stack([steps, time_s, tail_s, redundant], axis=1)[within])
            ]:
                found.append(
                    replace(
                        self._column(
                            own, priced, rows, (int(row[i]), int(home[i])), float(time_s[i])
                        ),
                        redundant_bytes=float(redundant[i]),
                        memory_bytes=occupied_bytes(
                            float(budget[i]), self.layout.mesh, self.table.price_cache
                        ),
                    )
                )
        values = np.array(
            [
                (np.ceil(c.redundant_bytes / step), c.time_s, c.tail_s, c.redundant_bytes)
                for c in found
            ]
        ).reshape(-1, 4)
        return [found[index] for index in unbeaten_rows(values)]

    def _ideal_states(self, num_blocks: int) -> float:
        """One copy of the states of embedding, head and so many blocks, of which the ranks of a
        stage have equal parts.
        """
        price_cache = self.table.price_cache
        whole = owned_parameters(price_cache.layer(LayerKind.BLOCK, 1), Sharding())
        return self.fixed.ideal_states + num_blocks * sum(
            ideal_states(whole, self.layout.mesh.ranks_per_stage, price_cache.training)
        )

    def smallest(self, num_blocks: int) -> StageColumn:
        """The mix and homes with the lowest peak of a device within its share of the host, whatever
        their time.
        """
        found = []
        for mixes, priced, rows in self._mixes(self._pure(num_blocks), num_blocks):
            last = len(rows) - 1
            sent_bytes = mixes.sent.host_bytes[last] if mixes.sent else 0.0
            home = np.flatnonzero(mixes.costs.host_bytes + sent_bytes <= self.host_share_bytes)
            if not len(home):
                continue
            row = np.full(len(home), last)
            needed = mixes.needed(row, home)
            least = np.array([needed.argmin()])
            time_s = float(mixes.seconds(row[least], home[least], needed[least])[0])
            found.append(
                self._column(mixes, priced, rows, (int(row[least][0]), int(home[least][0])), time_s)
            )
        return min(found, key=lambda column: column.memory_bytes)

    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """Columns that no mix of real numbers of blocks, with any homes, can beat within
        `limit_bytes`: a bound, not a plan.

        What a mix allocates is in one of many intervals: its compute takes at least what any does
        that allocates as much as the end of the interval, and its copies what they take with the
        room that the beginning leaves. So is what the host has left for what a mix sends there
        beside the states of any homes.
        """
        usable, found = usable_bytes(limit_bytes, self.layout.mesh, self.table.price_cache), []
        allocated = self._in_blocks(self.compute.priced(self._pure(num_blocks), self.zero))
        ends = np.linspace(float(allocated.min()), float(allocated.max()), STEPS)
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
            _, home, time_s = mixes.best(usable, self.host_share_bytes)
            found += [
                self._bound(num_blocks, costs, int(home[i]), float(time_s[i]))
                for i in undominated_rows(time_s, costs.once_s[home])
            ]
        return _unbeaten(found)

    def _left(self, costs: LocationCosts) -> Array:
        """The share of the host that is left beside the states of blocks with any homes."""
        return np.clip(1 - costs.host_bytes / max(1.0, self.host_share_bytes), 0.0, 1.0)

    def _least_s(self, num_blocks: int, allocated: Array, tensors: Tensors) -> Array:
        """The least seconds of compute of any real numbers of blocks on each option that allocate
        so much, infinity where none do.

        By what is allocated and, where blocks may send activations, by share of the host that is
        left for those. Of options with at most some workspace, the lower convex hull of kept bytes
        and seconds. With a price of every byte that goes to the host, what is left when as much as
        there is room for is not paid for (a Lagrangian bound): the largest over all prices.
        """
        always = self._outside_bytes + self._lasting_bytes((LayerKind.HEAD,)) - self.fixed.used_up
        in_flight, reached = (
            self.compute.stashes * num_blocks / self.layout.virtual_stages,
            self.table.hulls(self.layout, self.rank, tensors),
        )
        shares = np.linspace(0.0, 1.0, SHARES + 1 if len(reached.prices) > 1 else 1)
        least_s = reached.least_s(allocated - always, in_flight)
        paid_s = np.multiply.outer(reached.prices, shares * self.host_share_bytes / in_flight)
        found: Array = (
            num_blocks * np.max(least_s[:, :, None] - paid_s[:, None, :], axis=0)
            + self.fixed.time_s
        )
        return found

    def _pure(self, num_blocks: int) -> Mixes:
        return pure_mixes(
            self.table.placed(self.layout, self.rank, self.zero),
            num_blocks,
            self.layout.virtual_stages,
        )

    def _homes(self, num_blocks: int) -> Iterator[tuple[LocationCosts, Tensors]]:
        """What homes cost, for each way to divide the weights."""
        for tensors, sharding in self.table.divisions(self.layout, self.rank).items():
            yield self.table.homes(self.layout, sharding, num_blocks), tensors

    def _mixes(
        self, mixes: Mixes, num_blocks: int, pace: RankTimeLimit | None = None
    ) -> Iterator[tuple[ChunkMixes, PricedMixes, Ints]]:
        """By way to divide the weights, which all blocks of a mix share, the front of the mixes,
        and which rows of `priced` they are.

        Mixes that send activations to the host are apart from the others. pace: of those within it,
        the front has all that no other beats in time, in what it allocates and in what of that is
        no ideal activation together.
        """
        priced, used = self.compute.priced(mixes, self.zero), mixes.counts > 0
        numbers = uncounted_bytes(self.layout, self.rank, num_blocks, self.table.price_cache)
        allocated, kinds = (
            self._in_blocks(priced),
            [self.table.tensors(option.sharding) for option in mixes.options],
        )
        for costs, tensors in self._homes(num_blocks):
            alike = ~used[:, [kind != tensors for kind in kinds]].any(axis=1)
            for sends in (False, True):
                rows = np.flatnonzero(alike & ((mixes.host_bytes > 0) == sends))
                if pace:
                    rows = rows[pace.within(priced.time_s[rows], 0.0)]
                    step = lean_step_bytes(self.layout, self.table.price_cache)
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
                    rows = (
                        rows[
                            priced.allocated[rows] <= np.minimum.accumulate(priced.allocated[rows])
                        ]
                        if len(rows)
                        else rows
                    )
                if not len(rows):
                    continue
                if sends and len(rows) > MOST_SENDING:
                    rows = rows[np.linspace(0, len(rows) - 1, MOST_SENDING).astype(np.int64)]
                yield (
                    ChunkMixes(
                        self.layout,
                        costs,
                        priced.time_s[rows],
                        allocated[rows] + numbers,
                        priced.allocated[rows]
                        + numbers
                        + self._handed_bytes
                        + self._gathered_bytes
                        + self._lasting_bytes((LayerKind.HEAD,)),
                        self._outside_bytes
                        + numbers
                        + self._lasting_bytes((LayerKind.EMBEDDING, LayerKind.HEAD)),
                        self._sent(mixes, rows) if sends else None,
                    ),
                    priced,
                    rows,
                )

    def _sent(self, mixes: Mixes, rows: Ints) -> OffloadedActivations:
        out_s, back_s = (
            mixes.counts[rows] @ column_of(mixes.options, name) for name in ("out_s", "back_s")
        )
        return OffloadedActivations(
            host_bytes=self.compute.stashes * mixes.host_bytes[rows], out_s=out_s, back_s=back_s
        )

    def _in_blocks(self, priced: PricedMixes) -> Array:
        """What the fullest pass of a block allocates without chunks
        (costmodels/chunks/chunk_budget.py); `priced` also has what the ends need.
        """
        temporaries = self.compute.running(priced.mixes, self.zero) + self.fixed.zero_buffer
        beyond = (
            self._handed_bytes
            + self._lasting_bytes((LayerKind.HEAD,))
            + self._gathered_bytes
            - self.fixed.used_up
        )
        found: Array = (
            priced.allocated
            - temporaries
            + priced.mixes.workspace_bytes
            + priced.mixes.window_bytes
            + beyond
        )
        return found

    @property
    def _handed_bytes(self) -> float:
        """The activation that a layer hands on."""
        layout, boundary = (
            self.layout,
            self.table.price_cache.graph(self.layout.micro_batch_size).block.input,
        )
        return float(
            layout.sharding.local_bytes(boundary, layout.sharding.boundary) if boundary else 0
        )

    @property
    def _outside_bytes(self) -> float:
        """Of embedding and head in passes of blocks: states, and what they keep."""
        return self.fixed.states + self.fixed.held + self._gathered_bytes

    @cached_property
    def _gathered_bytes(self) -> float:
        """What stays gathered of an embedding and a head that are one unit."""
        price_cache = self.table.price_cache
        joined = self.zero == 3 and price_cache.tied and self.layout.mesh.pp == 1
        return float(
            price_cache.training.precision.num_bytes
            * sum(map(self._parameters, end_kinds(self.rank, self.layout)))
            * joined
        )

    def _lasting_bytes(self, kinds: Sequence[LayerKind]) -> float:
        """Gradients of embedding or head that are reduced, until the stage's backward pass is over;
        the head's in passes of blocks.
        """
        there = [
            kind for kind in end_kinds(self.rank, self.layout) if kind in kinds and self.zero == 3
        ]
        return float(SHARD_GRADIENT_BYTES * sum(map(self._parameters, there)))

    def _parameters(self, kind: LayerKind) -> int:
        price_cache = self.compute.ends
        return owned_parameters(
            price_cache.layer(kind, 1),
            self.layout.sharding,
            with_tied=price_cache.counts_tied(self.layout.mesh),
        )

    def _column(
        self,
        mixes: ChunkMixes,
        priced: PricedMixes,
        rows: Ints,
        cell: tuple[int, int],
        time_s: float,
    ) -> StageColumn:
        row, home = cell
        needed = float(mixes.needed(np.array([row]), np.array([home]))[0])
        return replace(
            self.compute.column(priced, int(rows[row])),
            time_s=time_s,
            tail_s=float(mixes.costs.once_s[home]) + self.fixed.tail_s,
            plain_s=time_s,
            ramp_s=time_s,
            homes=mixes.costs.homes(home),
            memory_bytes=occupied_bytes(needed, self.layout.mesh, self.table.price_cache),
        )

    def _bound(
        self, num_blocks: int, costs: LocationCosts, home: int, time_s: float
    ) -> StageColumn:
        option, tail_s = (
            self.table.options(self.layout, self.rank)[0],
            float(costs.once_s[home]) + self.fixed.tail_s,
        )
        homes, looks_up = costs.homes(home), self.compute.looks_up
        return StageColumn(
            ((option, num_blocks),),
            self.zero,
            time_s,
            tail_s,
            0.0,
            0.0,
            time_s,
            time_s,
            homes,
            looks_up,
        )


def lean_step_bytes(layout: ParallelLayout, price_cache: PriceCache) -> float:
    """Redundant bytes of a device that are too few to tell columns apart: a share of what it has of
    one copy of the states.
    """
    return LEAN_STEP * sum(
        ideal_states(
            price_cache.graph(1).num_parameters, layout.mesh.num_ranks, price_cache.training
        )
    )


Columns = RankColumns | ChunkColumns | EitherTable


def rank_columns(rank: int, layout: ParallelLayout, table: MixTable) -> Columns:
    """The columns of a pipeline rank of any frame."""
    make = ChunkColumns if layout.chunked else RankColumns
    first, *_ = (*end_kinds(rank, layout), LayerKind.BLOCK)
    here, *there = (
        make(rank, layout, table, ends) for ends in table.price_caches_of_ends(layout, first)
    )
    return EitherTable(here, *there) if there else here


def _unbeaten(found: Sequence[StageColumn]) -> list[StageColumn]:
    """Those that no other beats in time and in tail."""
    values = np.array([(column.time_s, column.tail_s) for column in found]).reshape(-1, 2)
    return [found[index] for index in undominated_rows(*values.T)]
