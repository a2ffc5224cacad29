"""Options, mixes and block costs that the ranks of many layouts share, each made once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, product

import numpy as np

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.host_embedding import illegal_host_embedding
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access, StateLocation
from parplan.costmodels.keyed_cache import KeyedCache, RecentCache
from parplan.costmodels.layers.chunked_layer import BlockCost
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.model_layers import Ends
from parplan.costmodels.layers.model_states import OwnZero
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.deadline import NEVER, Deadline
from parplan.planner.dominance import Ints
from parplan.planner.host_options.host_variants import may_offload_activations, with_host
from parplan.planner.host_options.location_costs import (
    LocationCosts,
    Tensors,
    block_costs,
    host_share_bytes,
    location_costs,
    tensors_of,
)
from parplan.planner.layer_options.catalogue import catalogue_of
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.layer_options.mixes import (
    Mixes,
    MixHulls,
    OptionPairs,
    averaged_options,
    exhaustive,
    hulls,
    make_mixes,
    option_pairs,
    staged_mixes,
)
from parplan.planner.layer_options.overlap_levels import illegal_zero
from parplan.planner.layer_options.zero_ways import ZeroWay, zero_ways
from parplan.planner.request import Constraints
from parplan.planner.stage_columns.corner_prices import corner_prices
from parplan.planner.stage_columns.stage_prices import BlockCosts, block_prices, unbeaten_options
from parplan.profiles.models.operator_graph import LayerKind

MOST_MIXES = 64  # numbers of blocks whose mixes are held at once

_Kind = tuple[int, Sharding, bool, bool, Access]  # the arguments of options


class StageTable:
    """The tables that the ranks of many layouts share, for any layers, each made once."""

    def __init__(
        self, price_cache: LayerPriceCache, pins: Constraints, deadline: Deadline = NEVER
    ) -> None:
        self.price_cache = price_cache
        self.offload = pins.offload or ()
        self.host_share_bytes = host_share_bytes(price_cache.machine.cluster)
        self.stage_recompute = pins.recompute_first_stage
        self._zero_stages = pins.zero or (0, 1, 2, 3)
        self.deadline = deadline
        self.once = KeyedCache(deadline.check)

    def zero_choices(self, mesh: Mesh) -> tuple[int, ...]:
        """Returns the ZeRO stages to choose from.

        Without data parallelism there is nothing to shard, only to offload.
        """
        return self._zero_stages if mesh.replicas > 1 or self.price_cache.offloads_states else (0,)

    def zero_stages(self, layout: ParallelLayout) -> tuple[int, ...]:
        """Returns the stages of `zero_choices` that the layout's schedule can run.

        Chunks are sharded as with stage 3.
        """
        if layout.chunked:
            return (3,) if layout.mesh.dp > 1 else (0,)
        return tuple(
            zero for zero in self.zero_choices(layout.mesh) if not illegal_zero(layout, zero)
        )


class MixTable(StageTable):
    """Catalogue and mixes by (micro-batch, sharding, chunks, number of blocks), each made once."""

    price_cache: PriceCache

    def __init__(
        self, price_cache: PriceCache, pins: Constraints, deadline: Deadline = NEVER
    ) -> None:
        super().__init__(price_cache, pins, deadline)
        self.catalogue = catalogue_of(price_cache, pins)
        self.recent = RecentCache(MOST_MIXES, deadline.check)
        self._zero_by_operator = pins.zero_by_operator

    def zero_ways(self, layout: ParallelLayout) -> tuple[ZeroWay, ...]:
        """Returns the ZeRO stages of a block's operators to choose from, alike ones first."""
        stages = self.zero_stages(layout)
        alike: tuple[ZeroWay, ...] = tuple((zero, ()) for zero in stages)
        if not self._zero_by_operator or layout.chunked or layout.weights_over_data:
            return alike
        key = layout.mesh, layout.micro_batch_size, layout.num_micro_batches, layout.sharding
        return self.once(
            ("zero ways", *key, stages), lambda: alike + zero_ways(layout, stages, self.price_cache)
        )

    def price_caches_of_ends(
        self, layout: ParallelLayout, kinds: tuple[LayerKind, ...]
    ) -> tuple[PriceCache, ...]:
        """Returns the prices that a rank with the layers `kinds` besides blocks may have.

        Tensor parallelism divides embedding and head in one of several ways, alike where they share
        a table. The table is on the device, or on the host if that is allowed and has room for it.
        """
        tables = self.tables_of_ends(layout, kinds)
        if not (kinds and self.catalogue.divides_ends(layout.sharding)):
            return tables
        key = kinds, layout.micro_batch_size, layout.sharding
        divided = self.once(("ends", *key), lambda: tuple(self._divided_ends(*key)))
        return self.once(
            ("divided tables", *key, tables),
            lambda: tuple(table.with_ends(ends) for table in tables for ends in divided),
        )

    def tables_of_ends(
        self, layout: ParallelLayout, kinds: tuple[LayerKind, ...]
    ) -> tuple[PriceCache, ...]:
        """Returns the prices with each location of the token table that layers `kinds` may have."""
        price_cache, mesh = self.price_cache, layout.mesh
        has_table = LayerKind.EMBEDDING in kinds or (kinds and price_cache.tied)
        if not (has_table and Offload.LOOKUP in self.offload) or illegal_host_embedding(
            mesh, price_cache.model.hidden_size, price_cache.tied
        ):
            return (price_cache,)
        there = price_cache.with_table(on_host=True)
        sharding, zero = layout.sharding, max(self.zero_stages(layout))
        host = sum(there.states(kind, mesh, sharding, zero).host for kind in kinds)
        return (price_cache, there) if host <= self.host_share_bytes else (price_cache,)

    def _divided_ends(
        self, kinds: tuple[LayerKind, ...], micro_batch_size: int, sharding: Sharding
    ) -> Iterator[Ends]:
        """Yields every way to divide embedding and head of a rank."""
        ways = [self.catalogue.ends(kind, micro_batch_size, sharding) for kind in kinds]
        for options in product(*ways):
            if not self.price_cache.tied or len({option.weight_layout for option in options}) == 1:
                yield tuple((option.kind, option.sharding) for option in options)

    def _kind(self, layout: ParallelLayout, rank: int) -> _Kind:
        return (
            layout.micro_batch_size,
            layout.of_blocks,
            layout.keeps_all(rank),
            may_offload_activations(layout, self.offload),
            layout.access,
        )

    def options(self, layout: ParallelLayout, rank: int = 0) -> tuple[LayerOption, ...]:
        """Returns the options of a rank.

        Of blocks that are used an operator at a time, they are those whose recompute needs the
        parameters of one part of the block at a time (costmodels/layers/block_parts.py).
        """
        if layout.access is Access.BLOCK:
            return self._options(layout, rank)

        def apart(option: LayerOption) -> bool:
            passes = self.price_cache.part_passes(
                LayerKind.BLOCK, layout.access, option.recompute, backward=True
            )
            return all(len(each.reads) == 1 for each in passes)

        return self.once(
            ("options by part", self._kind(layout, rank)),
            lambda: tuple(filter(apart, self._options(layout, rank))),
        )

    def _options(self, layout: ParallelLayout, rank: int) -> tuple[LayerOption, ...]:
        """Returns the options of the catalogue.

        A rank that recomputes nothing has those without recompute, or Megatron's if none is
        allowed. If blocks may offload activations, the variants that do are included.
        """
        key = layout.micro_batch_size, layout.of_blocks
        if may_offload_activations(layout, self.offload):
            return self.once(
                ("sending", *key),
                lambda: with_host(
                    self.catalogue.options(*key),
                    layout.micro_batch_size,
                    self.catalogue.price_cache,
                ),
            )
        if not layout.keeps_all(rank):
            return self.catalogue.options(*key)

        def whole() -> tuple[LayerOption, ...]:
            recomputed = self.price_cache.recompute_operators
            without = tuple(
                option
                for option in self.catalogue.options(*key)
                if not recomputed(LayerKind.BLOCK, option.recompute)
            )
            return without or (self.catalogue.preset(Recompute.NONE, *key),)

        return self.once(("whole", *key), whole)

    def placed(
        self, layout: ParallelLayout, rank: int, zero: int, own_zero: OwnZero = ()
    ) -> tuple[LayerOption, ...]:
        """Returns the options of a rank at one ZeRO stage, with another for some operators."""
        return self.once(
            ("placed", self._kind(layout, rank), zero, own_zero),
            lambda: tuple(
                replace(option, zero=zero, own_zero=own_zero)
                for option in self.options(layout, rank)
            ),
        )

    def per_block(self, layout: ParallelLayout, rank: int) -> BlockCosts:
        """Returns the costs of a block in `layout` on each option at each ZeRO stage."""
        key = (
            layout.mesh,
            self._kind(layout, rank),
            layout.splits_backward,
            layout.recomputes_ahead,
            layout.chunked,
            self.zero_ways(layout),
        )

        def make() -> BlockCosts:
            every = (self.placed(layout, rank, *way) for way in self.zero_ways(layout))
            return block_prices(tuple(chain.from_iterable(every)), layout, self.price_cache)

        return self.once(("blocks", *key), make)

    def corners(self, layout: ParallelLayout, rank: int) -> BlockCosts | None:
        """Returns costs of a block whose averages bound every option, without any option.

        None where the options are more than choices for the operators. The costs have no
        workspace.
        """
        if layout.chunked or may_offload_activations(layout, self.offload):
            return None
        keeps_all, sharding = layout.keeps_all(rank), layout.of_blocks
        corners = self.catalogue.corners(layout.micro_batch_size, sharding, keeps_all=keeps_all)
        if not corners:
            return None
        key = layout.mesh, layout.micro_batch_size, sharding, keeps_all, self.zero_ways(layout)
        return self.once(
            ("corners", *key),
            lambda: corner_prices(
                corners, layout, self.zero_ways(layout), self.catalogue, self.price_cache
            ),
        )

    def unbeaten_blocks(
        self, layout: ParallelLayout, rank: int, *, every: bool = False
    ) -> BlockCosts:
        """Returns block costs on undominated options at ZeRO stages.

        No mix gets worse by an option that costs no more in any way. Of any lists of recomputed
        operators they are those that an average of blocks may need, or `every` one.
        """
        block = self.per_block(layout, rank)
        if not every and self.catalogue.by_operator:
            block = self._averaged(block)
        if layout.recomputes_ahead:
            return block
        return self.once(("unbeaten", block), lambda: block.of(unbeaten_options(block)))

    def _averaged(self, block: BlockCosts) -> BlockCosts:
        """Returns the costs of the options that an average of blocks may need."""

        def make() -> BlockCosts:
            return block.of([block.options[i] for i in averaged_options(block.options)])

        return self.once(("averaged", block), make)

    def averages(self, layout: ParallelLayout, rank: int) -> tuple[BlockCosts, OptionPairs]:
        """Returns block costs whose averages bound every mix, and all ordered pairs of them.

        Any list of recomputed operators is above an average of others, with the least workspace
        that it may have (`averaged_options`).
        """
        block = self.per_block(layout, rank)

        def make() -> tuple[BlockCosts, OptionPairs]:
            some = block
            if self.catalogue.by_operator:
                least = averaged_options(block.options)
                options = tuple(
                    replace(block.options[i], workspace_bytes=workspace)
                    for i, workspace in least.items()
                )
                some = replace(block.of([block.options[i] for i in least]), options=options)
            if not layout.recomputes_ahead:
                some = some.of(unbeaten_options(some))
            pairs = option_pairs(some.options)
            if self.catalogue.by_operator:
                pairs = pairs.at(_worth_mixing(some, pairs.index))
            self.deadline.count(pairs.index, pairs.saved_bytes, pairs.workspace_bytes)
            return some, pairs

        return self.once(("averages", block), make)

    def tries_every_list(self, layout: ParallelLayout, rank: int, total: int) -> bool:
        """Returns whether mixes of `total` blocks have every undominated option in every number.

        The fewer options that an average may need are looked at first.
        """
        return all(
            exhaustive(self.unbeaten_blocks(layout, rank, every=every).options, total)
            for every in (False, True)
        )

    def homes(self, layout: ParallelLayout, sharding: Sharding, num_blocks: int) -> LocationCosts:
        """Returns the costs of placing the blocks of a rank, for a layout in chunks."""
        key = (
            layout.mesh,
            layout.micro_batch_size,
            layout.num_micro_batches,
            sharding,
            num_blocks,
            layout.access,
        )
        return self.once(
            ("homes", *key),
            lambda: location_costs(
                self.tensors(sharding),
                num_blocks,
                layout,
                self.block_costs(layout, sharding),
                self.price_cache,
            ),
        )

    def block_costs(
        self, layout: ParallelLayout, sharding: Sharding
    ) -> dict[StateLocation, BlockCost]:
        """Returns the cost of one block by location, without padding, for a layout in chunks."""
        key = layout.mesh, layout.micro_batch_size, layout.num_micro_batches, sharding
        return self.once(
            ("block costs", *key),
            lambda: block_costs(layout, sharding, self.offload, self.price_cache),
        )

    def tensors(self, sharding: Sharding) -> Tensors:
        """Returns the sizes of a block's tensors, divided by `sharding`."""
        return self.once(("tensors", sharding), lambda: tensors_of(sharding, self.price_cache))

    def hulls(self, layout: ParallelLayout, rank: int, tensors: Tensors) -> MixHulls:
        """Returns the hulls of mixes of real numbers of blocks with these `tensors`.

        (planner/layer_options/mixes.py)
        """
        return self.once(
            ("hulls", self._kind(layout, rank), tensors),
            lambda: hulls(
                [
                    option
                    for option in self.options(layout, rank)
                    if self.tensors(option.sharding) == tensors
                ]
            ),
        )

    def divisions(self, layout: ParallelLayout, rank: int) -> dict[Tensors, Sharding]:
        """Returns the divisions of the weights that options have, with one sharding for each."""
        return self.once(
            ("divisions", self._kind(layout, rank)),
            lambda: {
                self.tensors(option.sharding): option.sharding
                for option in self.options(layout, rank)
            },
        )

    def staged(self, layout: ParallelLayout, rank: int, num_blocks: int, counts: range) -> Mixes:
        """Returns the mixes of `num_blocks` blocks with given counts of recomputed blocks.

        Blocks that recompute alike have one option at one ZeRO stage.
        """
        ways = self.zero_ways(layout)

        def make() -> Mixes:
            placed = (self.placed(layout, rank, *way) for way in ways)
            return staged_mixes(tuple(chain.from_iterable(placed)), num_blocks, counts)

        return self.once(("staged", self._kind(layout, rank), ways, num_blocks, counts), make)

    def get(self, layout: ParallelLayout, rank: int, num_blocks: int, zero: int) -> Mixes:
        """Returns the mixes of `num_blocks` blocks of one rank at one ZeRO stage.

        With virtual stages every chunk has the same mix.
        """
        options = self.options(layout, rank)
        some: Sequence[int] = range(len(options))
        total = -(-num_blocks // layout.virtual_stages)
        if self.catalogue.by_operator and not self.tries_every_list(layout, rank, total):
            some = self.once(("some", options), lambda: tuple(averaged_options(options)))
        mixes = self.once(
            ("mixes", self._kind(layout, rank), layout.virtual_stages, num_blocks),
            lambda: make_mixes(tuple(options[i] for i in some), num_blocks, layout.virtual_stages),
        )
        placed = self.placed(layout, rank, zero)
        return replace(mixes, options=tuple(placed[i] for i in some))


def _worth_mixing(block: BlockCosts, index: Ints) -> Ints:
    """Returns the pairs whose first option is faster in some way, and options with themselves."""
    first, second = index
    faster = first == second
    for seconds in (block.time_s, block.tail_s, block.time_s - block.recompute_s):
        faster = faster | (seconds[first] < seconds[second])
    return np.flatnonzero(faster)
