"""What the ranks of many frames have in common: options, mixes of them, and what a block costs, each made once."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.host_embedding import illegal_lookup
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Home
from parplan.costmodels.keyed_cache import Once
from parplan.costmodels.layers.chunked_layer import BlockCost
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceBook
from parplan.costmodels.strategy import Frame
from parplan.planner.deadline import NEVER, Deadline
from parplan.planner.host_options.host_variants import sends_activations, with_host
from parplan.planner.host_options.location_costs import (
    HomeCosts,
    Tensors,
    block_costs,
    home_costs,
    host_share_bytes,
    tensors_of,
)
from parplan.planner.layer_options.catalogue import LayerOption, catalogue_of
from parplan.planner.layer_options.mixes import (
    Hulls,
    Mixes,
    Pairs,
    hulls,
    make_mixes,
    option_pairs,
)
from parplan.planner.layer_options.overlap_levels import illegal_zero
from parplan.planner.request import Constraints
from parplan.planner.stage_columns.stage_prices import PerBlock, block_prices, unbeaten_options
from parplan.profiles.models.operator_graph import LayerKind

_Kind = tuple[int, Sharding, bool, bool]  # what options depend on


class MixTable:
    """Catalogue and mixes by (micro-batch, sharding, chunks, number of blocks), each made once."""

    def __init__(self, book: PriceBook, pins: Constraints, deadline: Deadline = NEVER) -> None:
        self.book = book
        self.catalogue = catalogue_of(book, pins)
        self.offload, self.host_share_bytes = pins.offload or (), host_share_bytes(book.machine.cluster)
        self._zero_stages = pins.zero or (0, 1, 2, 3)
        self.deadline, self.once = deadline, Once(deadline.check)

    def zero_choices(self, mesh: Mesh) -> tuple[int, ...]:
        """The ZeRO stages to choose from: without data parallelism there is nothing to shard, only to offload."""
        return self._zero_stages if mesh.dp > 1 or self.book.offloads_states else (0,)

    def zero_stages(self, frame: Frame) -> tuple[int, ...]:
        """Those of `zero_choices` that the frame's schedule can run. Chunks are sharded as with stage 3."""
        if frame.chunked:
            return (3,) if frame.mesh.dp > 1 else (0,)
        return tuple(zero for zero in self.zero_choices(frame.mesh) if not illegal_zero(frame, zero))

    def books_of_ends(self, frame: Frame, kind: LayerKind) -> tuple[PriceBook, ...]:
        """The prices that a rank may have whose first layer is of `kind`: of the embedding with its table on the device, and on the
        host where that is allowed and there is room for it."""
        book, mesh, looks_up = self.book, frame.mesh, kind is LayerKind.EMBEDDING and Offload.LOOKUP in self.offload
        if not looks_up or illegal_lookup(mesh, book.model.hidden_size, book.tied):
            return (book,)
        there = book.with_table(on_host=True)
        return (book, there) if there.lookup(1, mesh).host_bytes <= self.host_share_bytes else (book,)

    def _kind(self, frame: Frame, rank: int) -> _Kind:
        return frame.micro_batch_size, frame.sharding, frame.keeps_all(rank), sends_activations(frame, self.offload)

    def options(self, frame: Frame, rank: int = 0) -> tuple[LayerOption, ...]:
        """The options of the catalogue; where a rank keeps all, those without recompute, or Megatron's where none is allowed.

        Where blocks may send activations to the host, also the variants that do.
        """
        key = frame.micro_batch_size, frame.sharding
        if sends_activations(frame, self.offload):
            return self.once(
                ("sending", *key), lambda: with_host(self.catalogue.options(*key), frame.micro_batch_size, self.catalogue.book))
        if not frame.keeps_all(rank):
            return self.catalogue.options(*key)

        def whole() -> tuple[LayerOption, ...]:
            again = self.book.recompute_operators
            kept = tuple(o for o in self.catalogue.options(*key) if not again(LayerKind.BLOCK, o.recompute))
            return kept or (self.catalogue.preset(Recompute.NONE, *key),)

        return self.once(("whole", *key), whole)

    def placed(self, frame: Frame, rank: int, zero: int) -> tuple[LayerOption, ...]:
        """The options of a rank at one ZeRO stage."""
        return self.once(("placed", self._kind(frame, rank), zero), lambda: tuple(
            replace(option, zero=zero) for option in self.options(frame, rank)))

    def per_block(self, frame: Frame, rank: int) -> PerBlock:
        """What a block costs in `frame` on each option at each ZeRO stage."""
        key = frame.mesh, self._kind(frame, rank), frame.splits_backward, frame.recomputes_ahead, frame.chunked

        def make() -> PerBlock:
            every = (self.placed(frame, rank, zero) for zero in self.zero_stages(frame))
            return block_prices(tuple(chain.from_iterable(every)), frame, self.book)

        return self.once(("blocks", *key), make)

    def unbeaten_blocks(self, frame: Frame, rank: int) -> tuple[PerBlock, Pairs]:
        """The options at ZeRO stages that no other beats in every cost, what a block costs on each, and every ordered pair of them.

        A mix of blocks never gets worse by an option that costs no more in any way.
        """
        key = frame.mesh, self._kind(frame, rank), frame.splits_backward, frame.recomputes_ahead

        def make() -> tuple[PerBlock, Pairs]:
            block = self.per_block(frame, rank)
            kept = block if frame.recomputes_ahead else block.of(unbeaten_options(block))
            return kept, option_pairs(kept.options)

        return self.once(("unbeaten", *key), make)

    def homes(self, frame: Frame, sharding: Sharding, num_blocks: int) -> HomeCosts:
        """What it costs to give the blocks of a rank homes, of a frame in chunks."""
        key = frame.mesh, frame.micro_batch_size, frame.num_micro_batches, sharding, num_blocks
        return self.once(("homes", *key), lambda: home_costs(
            self.tensors(sharding), num_blocks, frame, self.block_costs(frame, sharding), self.book))

    def block_costs(self, frame: Frame, sharding: Sharding) -> dict[Home, BlockCost]:
        """What one block costs by home, of a frame in chunks, without padding."""
        key = frame.mesh, frame.micro_batch_size, frame.num_micro_batches, sharding
        return self.once(("block costs", *key), lambda: block_costs(frame, sharding, self.offload, self.book))

    def tensors(self, sharding: Sharding) -> Tensors:
        """The sizes of a block's tensors, divided as `sharding` does."""
        return self.once(("tensors", sharding), lambda: tensors_of(sharding, self.book))

    def hulls(self, frame: Frame, rank: int, tensors: Tensors) -> Hulls:
        """What mixes of real numbers of blocks with these `tensors` reach (planner/layer_options/mixes.py)."""
        return self.once(("hulls", self._kind(frame, rank), tensors), lambda: hulls(
            [option for option in self.options(frame, rank) if self.tensors(option.sharding) == tensors]))

    def divisions(self, frame: Frame, rank: int) -> dict[Tensors, Sharding]:
        """The ways to divide the weights that the options have, and one option's sharding for each."""
        return self.once(("divisions", self._kind(frame, rank)), lambda: {
            self.tensors(option.sharding): option.sharding for option in self.options(frame, rank)})

    def get(self, frame: Frame, rank: int, num_blocks: int, zero: int) -> Mixes:
        """Mixes of `num_blocks` blocks of one rank at one ZeRO stage; with virtual stages every chunk has the same mix."""
        mixes = self.once(("mixes", self._kind(frame, rank), frame.virtual_stages, num_blocks), lambda: make_mixes(
            self.options(frame, rank), num_blocks, frame.virtual_stages))
        return replace(mixes, options=self.placed(frame, rank, zero))
