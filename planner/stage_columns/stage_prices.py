"""Costs of a pipeline rank besides its blocks at one ZeRO stage, and of a block on each option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import numpy as np

from parplan.costmodels.chunks.chunk_memory import unchunked_prices
from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.data_parallel import DataParallelTime
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache, LayerStates
from parplan.costmodels.layers.layer_times import ActivationBytes
from parplan.costmodels.memory.rank_memory import sent_bytes, stashes
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.stage_costs import rank_edges, rank_receives, shared_reduction
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.layer_options.mixes import Mixes, column_of, widest_mixes
from parplan.planner.stage_columns.stage_contents import StageContents
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

Prices = TypeVar("Prices", bound=LayerPriceCache)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCosts:
    """Costs of a rank at one ZeRO stage besides its blocks: embedding, head and transfers."""

    time_s: float
    tail_s: float
    states: float
    gradients: float  # part of the states
    ideal_states: float
    held: float
    saved: float  # saved tensors of embedding and head for one micro-batch
    ideal_held: float
    embedding_workspace: float
    head_workspace: float
    zero_buffer: float
    step_copies: float
    used_up: float  # saved tensors of the head, free during the temporaries of other layers
    waiting: float  # tensors of the head's weight gradient while it waits
    host: float  # host bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockCosts:
    """Costs of one block on each of `options`, which have ZeRO stages; one value per option.

    waiting            the weight gradient of a split backward pass, while it waits
    recompute_s        the recompute
    longer_s           the backward pass less the forward pass
    whole_saved        saved tensors without recompute
    whole_workspace    temporaries without recompute

    All but `waiting` of these are zero for schedules without recompute ahead of the gradient. A
    layout in chunks has the compute alone (planner/stage_columns/chunk_columns.py).
    """

    options: tuple[LayerOption, ...]
    time_s: Array
    recompute_s: Array
    longer_s: Array
    whole_saved: Array
    whole_workspace: Array
    tail_s: Array
    states: Array
    gradients: Array
    ideal_states: Array
    zero_buffer: Array
    gathered_bytes: Array
    reduced_bytes: Array
    reduced_after_bytes: Array
    step_copies: Array
    waiting: Array

    @cached_property
    def _index(self) -> dict[LayerOption, int]:
        return {option: index for index, option in enumerate(self.options)}

    def of(self, options: Sequence[LayerOption]) -> BlockCosts:
        """Returns the costs of some of the options, in their order."""
        return self._once(tuple(options), lambda: self._of(tuple(options)))

    def _of(self, options: tuple[LayerOption, ...]) -> BlockCosts:
        rows = [self._index[option] for option in options]
        return BlockCosts(options=options, **{name: getattr(self, name)[rows] for name in _ARRAYS})

    @cached_property
    def _once(self) -> KeyedCache:
        return KeyedCache()

    @cached_property
    def of_rank(self) -> Array:
        """The costs that add up over the blocks of a rank, by option and cost."""
        return np.stack([getattr(self, name) for name in _OF_RANK], axis=1)

    @cached_property
    def of_chunk(self) -> Array:
        """The costs that add up over the blocks of its longest chunk, by option and cost."""
        return np.stack([self.waiting, self.whole_saved], axis=1)


_BUFFERS = ("zero_buffer", "gathered_bytes", "reduced_bytes", "reduced_after_bytes")
_ARRAYS = tuple(field.name for field in fields(BlockCosts) if field.name != "options")


def end_kinds(rank: int, layout: ParallelLayout) -> tuple[LayerKind, ...]:
    """Returns the kinds, embedding and head, that a pipeline rank holds."""
    ends = (LayerKind.EMBEDDING, 0), (LayerKind.HEAD, layout.num_virtual_stages - 1)
    return tuple(kind for kind, stage in ends if layout.rank_of(stage) == rank)


def tied_ends(layout: ParallelLayout) -> tuple[int, ...]:
    """Returns the two pipeline ranks that reduce the gradients of a tied embedding.

    None if one rank holds both copies.
    """
    first, last = layout.rank_of(0), layout.rank_of(layout.num_virtual_stages - 1)
    return (first, last) if first != last else ()


def end_costs(
    rank: int,
    layout: ParallelLayout,
    zero: int,
    price_cache: LayerPriceCache,
    contents: StageContents | None = None,
) -> EndCosts:
    """Returns the costs of `rank` for embedding, head and transfers.

    contents    its layers, None where all cuts of the model are alike
    """
    b = layout.micro_batch_size
    mesh = layout.mesh
    sharding = layout.sharding
    outside = unchunked_prices(layout, price_cache)
    besides = 0.0
    if contents is None:
        ends: tuple[LayerKey, ...] = end_kinds(rank, layout)
        time_s = rank_receives(rank, layout, price_cache).value_s
        shared = price_cache.shared_parameters if rank in tied_ends(layout) else ()
    else:
        ends = contents.ends(price_cache)
        time_s = contents.received_s(layout, price_cache) + contents.made_s(b, price_cache)
        shared = contents.shared(price_cache) if mesh.pp > 1 else ()
        besides = contents.besides_bytes(b, price_cache)
    time_s += rank_edges(layout, price_cache).value_s
    table_sharding = sharding if contents else _table_sharding(ends, sharding, price_cache)
    tail_s = sum(shared_reduction(each, table_sharding, layout, outside).value_s for each in shared)
    table = price_cache.shared_table_bytes(mesh, table_sharding)
    states = gradients = ideal = saved = used_up = waiting = host = 0.0
    ideal_held = stashes(LayerKind.BLOCK, rank, layout) * besides
    held_bytes = table + ideal_held
    held_bytes += sent_bytes(rank, layout, price_cache, contents.layers_of if contents else None)
    buffer = step_copies = 0
    workspaces = dict.fromkeys(LayerKind, -np.inf)
    for kind in ends:
        own = price_cache.own_sharding(kind, sharding)
        end = _end_price(kind, own, zero, layout, price_cache)
        size, held = end.size, end.held
        time_s += end.compute_s + end.data.per_micro_batch_s
        tail_s += end.data.per_step_s
        states += held.states.total
        gradients += held.states.gradients
        ideal += sum(held.ideal)
        step_copies += held.step_copies
        saved += size.saved
        host += held.host
        held_bytes += stashes(kind.role, rank, layout) * size.saved
        ideal_held += stashes(kind.role, rank, layout) * size.ideal_saved
        workspaces[kind.role] = size.workspace
        buffer = max(buffer, held.zero_buffer)
        if kind.role is LayerKind.HEAD and layout.splits_backward:
            waiting += price_cache.waiting_bytes(kind, b, own)
        elif kind.role is LayerKind.HEAD:
            used_up += size.saved
    workspaces[LayerKind.EMBEDDING] += price_cache.table_workspace_bytes(mesh, table_sharding)
    return EndCosts(
        time_s=time_s,
        tail_s=tail_s,
        states=states,
        gradients=gradients,
        ideal_states=ideal,
        held=held_bytes,
        saved=saved,
        ideal_held=ideal_held,
        zero_buffer=buffer,
        embedding_workspace=workspaces[LayerKind.EMBEDDING],
        head_workspace=workspaces[LayerKind.HEAD],
        used_up=used_up,
        step_copies=step_copies,
        waiting=waiting,
        host=host,
    )


@dataclass(frozen=True, slots=True)
class _EndPrice:
    """The prices of embedding or head, of one way and ZeRO stage."""

    compute_s: float
    data: DataParallelTime
    size: ActivationBytes
    held: LayerStates


def _end_price(
    kind: LayerKey, own: Sharding, zero: int, layout: ParallelLayout, price_cache: LayerPriceCache
) -> _EndPrice:
    b, mesh = layout.micro_batch_size, layout.mesh
    outside = unchunked_prices(layout, price_cache)

    def make() -> _EndPrice:
        return _EndPrice(
            price_cache.layer_time(kind, b, own).total_s,
            outside.data_parallel(kind, b, mesh, own, zero),
            price_cache.activations(kind, b, own),
            outside.states(kind, mesh, own, zero),
        )

    key = kind, own, zero, b, mesh, layout.chunked, price_cache.offload
    return price_cache.once(("end price", *key), make)


def _table_sharding(
    ends: tuple[LayerKey, ...], sharding: Sharding, price_cache: LayerPriceCache
) -> Sharding:
    """Returns the sharding of the rank's first layer that has the token table."""
    return price_cache.own_sharding(ends[0], sharding) if ends else sharding


def unbeaten_ends(
    rank: int, layout: ParallelLayout, stages: Sequence[int], ways: Sequence[Prices]
) -> list[Prices]:
    """Returns the ways of a rank's embedding and head that no other dominates.

    ways    the prices with each; the first of equals remains

    Ways with different divisions or locations of a table that another rank holds too are all kept.
    """
    if len(ways) == 1:
        return list(ways)
    values = np.array([_end_values(rank, layout, stages, way) for way in ways])
    tied = rank in tied_ends(layout)
    kinds = end_kinds(rank, layout)
    tables = [
        (way.table_division(kinds[0], layout.sharding), way.offload) if tied else () for way in ways
    ]
    no_worse = np.asarray((values[:, None] <= values[None, :]).all(axis=2))
    return [
        way
        for i, way in enumerate(ways)
        if not any(
            no_worse[j, i] and tables[j] == tables[i] and (not no_worse[i, j] or j < i)
            for j in range(len(ways))
            if j != i
        )
    ]


def _end_values(
    rank: int, layout: ParallelLayout, stages: Sequence[int], way: LayerPriceCache
) -> list[float]:
    """Returns the costs of embedding and head at all ZeRO stages; less of each is never worse."""
    values: list[float] = []
    b, mesh = layout.micro_batch_size, layout.mesh
    for kind in end_kinds(rank, layout):
        own = way.own_sharding(kind, layout.sharding)
        size = way.activations(kind, b, own)
        waiting = way.waiting_bytes(kind, b, own) if layout.splits_backward else 0.0
        table = way.table_workspace_bytes(mesh, own)
        values.extend((size.saved, size.workspace + table, waiting))
        for zero in stages:
            end = _end_price(kind, own, zero, layout, way)
            held, states = end.held, end.held.states
            values.extend((end.compute_s + end.data.per_micro_batch_s, end.data.per_step_s))
            values.extend((states.total, states.gradients, states.total - states.gradients))
            values.extend((held.zero_buffer, held.step_copies))
    return values


def block_prices(
    options: tuple[LayerOption, ...], layout: ParallelLayout, price_cache: LayerPriceCache
) -> BlockCosts:
    """Returns the costs of a block of `layout` on each option at its ZeRO stage."""
    time_s = column_of(options, "time_s")
    outside = [not (layout.chunked and option.kind.in_chunks) for option in options]
    if not any(outside):
        zeros = dict.fromkeys(_ARRAYS, np.zeros(len(options)))
        return BlockCosts(options=options, **zeros | {"time_s": time_s})
    priced = _priced_alone(options, layout, price_cache)
    if all(outside):
        return priced
    # layers in chunks have their states in the costs of locations
    alone = {name: np.where(outside, getattr(priced, name), 0.0) for name in _ARRAYS}
    return BlockCosts(
        options=options, **alone | {"time_s": np.where(outside, priced.time_s, time_s)}
    )


def _priced_alone(
    options: tuple[LayerOption, ...], layout: ParallelLayout, price_cache: LayerPriceCache
) -> BlockCosts:
    """Returns the costs of blocks that are not in chunks."""
    price_cache = unchunked_prices(layout, price_cache)
    time_s = column_of(options, "time_s")
    b = layout.micro_batch_size
    mesh = layout.mesh
    each = [(o.kind, (o.sharding, o.zero, o.own_zero)) for o in options]
    ways = list(dict.fromkeys(each))
    numbers = {key: number for number, key in enumerate(ways)}
    way = np.array([numbers[key] for key in each], np.int64)
    data = [price_cache.data_parallel(kind, b, mesh, *way_of) for kind, way_of in ways]
    held = [price_cache.states(kind, mesh, *way_of) for kind, way_of in ways]
    waiting = [
        price_cache.waiting_bytes(kind, b, sharding) if layout.splits_backward else 0.0
        for kind, (sharding, _, _) in ways
    ]
    timed = [
        price_cache.layer_time(o.kind, b, o.sharding, o.recompute)
        for o in options
        if layout.recomputes_ahead
    ]
    whole = [
        price_cache.activations(o.kind, b, o.sharding) for o in options if layout.recomputes_ahead
    ]
    none = [0.0] * len(options)
    return BlockCosts(
        options=options,
        recompute_s=np.array([time.recompute_s for time in timed] or none),
        longer_s=np.array([time.backward_s - time.forward_s for time in timed] or none),
        whole_saved=np.array([float(size.saved) for size in whole] or none),
        whole_workspace=np.array([float(size.workspace) for size in whole] or none),
        time_s=time_s + column_of(data, "per_micro_batch_s")[way],
        tail_s=column_of(data, "per_step_s")[way],
        states=np.array([float(layer.states.total) for layer in held])[way],
        gradients=np.array([float(layer.states.gradients) for layer in held])[way],
        ideal_states=np.array([sum(layer.ideal) for layer in held])[way],
        **{name: column_of(held, name)[way] for name in _BUFFERS},
        step_copies=column_of(held, "step_copies")[way],
        waiting=np.array(waiting)[way],
    )


def unbeaten_options(block: BlockCosts) -> tuple[LayerOption, ...]:
    """Returns the options that no other with the same layout of the weights dominates.

    All costs are compared; the first of equals remains.
    """
    weight_layouts = list(dict.fromkeys(option.weight_layout for option in block.options))
    per_option = [
        column_of(block.options, name)
        for name in ("saved_bytes", "workspace_bytes", "host_bytes", "last_s")
    ]
    ideal = column_of(block.options, "ideal_saved_bytes")
    values = np.stack(
        [
            block.time_s,
            block.tail_s,
            block.states,
            block.states - block.ideal_states,
            block.states - block.gradients,
            block.zero_buffer,
            block.step_copies,
            block.waiting,
            per_option[0] - ideal,
            *per_option,
        ]
    )
    no_worse = (values[:, :, None] <= values[:, None, :]).all(axis=0)  # [one, other]
    first = np.arange(len(block.options))
    numbers = {layout: number for number, layout in enumerate(weight_layouts)}
    weight_layout = np.array([numbers[option.weight_layout] for option in block.options])
    alike = weight_layout[:, None] == weight_layout[None, :]
    beats = no_worse & alike & (~no_worse.T | (first[:, None] < first[None, :]))
    return tuple(
        option
        for option, beaten in zip(block.options, beats.any(axis=0), strict=True)
        if not beaten
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixCosts:
    """Costs of the blocks of mixes, by row.

    `waiting` and `whole_saved` are those of the longest chunk, `zero_buffer` is the largest.
    """

    time_s: Array
    tail_s: Array
    recompute_s: Array
    longer_s: Array
    states: Array
    ideal_states: Array
    step_copies: Array
    waiting: Array
    whole_saved: Array
    zero_buffer: Array


_OF_RANK = ("time_s", "tail_s", "recompute_s", "longer_s", "states", "ideal_states", "step_copies")


def sums_of(mixes: Mixes, every: BlockCosts) -> MixCosts:
    """Returns the sums over the blocks of mixes, whose options are among those of `every`."""
    block = every.of(mixes.options)
    totals = mixes.counts.astype(np.float64) @ block.of_rank
    chunk = mixes.chunk_counts.astype(np.float64) @ block.of_chunk
    return MixCosts(
        **dict(zip(_OF_RANK, totals.T, strict=True)),
        waiting=chunk[:, 0],
        whole_saved=chunk[:, 1],
        zero_buffer=widest_mixes(mixes.counts, block.zero_buffer),
    )
