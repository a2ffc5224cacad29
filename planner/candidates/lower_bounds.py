"""Lower bounds of a layout before any column is made (EQUATIONS I5).

No plan of the layout can be below them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parplan.costmodels.chunks.chunk_memory import unchunked_prices
from parplan.costmodels.layers.chunked_layer import writes_over_parameters
from parplan.costmodels.layers.data_parallel import DataParallelTime
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import (
    stashes,
    usable_bytes,
)
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.hidden_recompute import hidden_passes
from parplan.costmodels.schedules.schedule import LAST_KEEPS_ALL
from parplan.costmodels.stage_costs import all_receives_s, rank_edges
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array
from parplan.planner.host_options.activation_options import ALL, named_operators
from parplan.planner.host_options.host_variants import may_offload_activations
from parplan.planner.layer_options.layer_option import WeightLayout
from parplan.planner.layer_options.over_data import least_sent_s
from parplan.planner.request import sizes_of
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_prices import end_costs, end_kinds
from parplan.profiles.models.operator_graph import LayerKind

MOST_AGAIN = 0.5  # of the seconds of a block: its forward pass again, beside both passes
ENDS = (LayerKind.EMBEDDING, LayerKind.HEAD)


@dataclass(frozen=True, slots=True)
class TimeBound:
    """Lower bounds in seconds.

    step_s    the closed form of a step
    block_s   one block and micro-batch
    total_s   bubble share of all layers together
    """

    step_s: float
    block_s: float
    total_s: float

    def longest_rank(self, layout: ParallelLayout, cut_s: float) -> int | None:
        """Returns the most blocks of a rank for a step below `cut_s`, or None without a limit."""
        repeats_s = (layout.num_micro_batches - 1) * self.block_s
        if cut_s == float("inf") or not repeats_s:
            return None
        return max(1, int((cut_s - self.total_s) / repeats_s) + 1)


def time_bound(layout: ParallelLayout, table: MixTable) -> TimeBound:
    """Returns the time bound with every layer at its fastest, with unlimited memory.

    The pace is at least the blocks of the fullest rank and at least the mean over the ranks. The
    tail is at least the seconds per step of the blocks of the fullest rank. Embedding, head,
    transfers and the ends of rows of halves are in the sum.
    """
    price_cache = table.price_cache
    mesh = layout.mesh
    share = bubble_share(layout, price_cache)
    block_s, block_tail_s = least_block_s(layout, table)
    ends_s = table.once(("ends", *_alike(layout, table)), lambda: _ends_s(layout, table))
    transfers_s = all_receives_s(layout, price_cache)
    edges_s = mesh.pp * rank_edges(layout, price_cache).value_s
    fullest = -(-price_cache.model.num_layers // mesh.pp)
    total_s = price_cache.model.num_layers * block_s + ends_s + transfers_s + edges_s
    pace_s = max(total_s / mesh.pp, fullest * block_s)
    step_s = (layout.num_micro_batches - share) * pace_s + share * total_s + fullest * block_tail_s
    return TimeBound(step_s, block_s, share * total_s)


def least_block_s(layout: ParallelLayout, table: MixTable) -> tuple[float, float]:
    """Least seconds of a block, per micro-batch and per step, with data parallelism."""
    return table.once(
        ("least block", layout.recomputes_ahead, *_alike(layout, table)),
        lambda: _least_block(layout, table),
    )


def least_end_bytes(rank: int, layout: ParallelLayout, table: MixTable) -> float:
    """Least bytes of the states of embedding and head of a rank, without gradients."""
    kinds = end_kinds(rank, layout)
    if not kinds:
        return 0.0

    def make() -> float:
        outside = unchunked_prices(layout, table.price_cache)
        return sum(
            min(
                states.total - states.gradients
                for ends in table.price_caches_of_ends(layout, (kind,))
                for zero in table.zero_stages(layout)
                for states in [
                    outside.states(
                        kind, layout.mesh, ends.own_sharding(kind, layout.sharding), zero
                    ).states
                ]
            )
            for kind in kinds
        )

    return table.once(("end bytes", kinds, *_alike(layout, table)), make)


def _alike(layout: ParallelLayout, table: MixTable) -> tuple[Hashable, ...]:
    """Returns all of a layout that the prices of its layers depend on."""
    return (
        layout.mesh,
        layout.micro_batch_size,
        layout.of_blocks,
        layout.chunked and layout.num_micro_batches,
        table.zero_ways(layout),
    )


def _ends_s(layout: ParallelLayout, table: MixTable) -> float:
    """Least seconds of embedding and head per micro-batch, which divide a tied table alike."""
    first_s, last_s = (_end_seconds(kind, layout, table) for kind in ENDS)
    if table.price_cache.tied:
        return min(first_s[division] + last_s[division] for division in first_s.keys() & last_s)
    return min(first_s.values()) + min(last_s.values())


def least_end_s(kind: LayerKind, layout: ParallelLayout, table: MixTable) -> float:
    """Least seconds of embedding or head per micro-batch."""
    return min(_end_seconds(kind, layout, table).values())


def _end_seconds(
    kind: LayerKind, layout: ParallelLayout, table: MixTable
) -> dict[WeightLayout, float]:
    """Least seconds of embedding or head per micro-batch, by division of the token table."""
    seconds: dict[WeightLayout, float] = {}
    for weight_layout, sharding, option_s in _end_ways(kind, layout, table):
        known_s = seconds.get(weight_layout, math.inf)
        least_s = min(
            _end_compute_s(kind, sharding, option_s, layout, ends)
            + _end_data_s(kind, sharding, layout, ends, table)
            for ends in table.tables_of_ends(layout, (kind,))
        )
        seconds[weight_layout] = min(known_s, least_s)
    return seconds


def _end_ways(
    kind: LayerKind, layout: ParallelLayout, table: MixTable
) -> Iterator[tuple[WeightLayout, Sharding, float]]:
    """Yields the division of the table, the sharding and the seconds of each way of an end."""
    b, sharding = layout.micro_batch_size, layout.sharding
    if table.catalogue.divides_ends(sharding):
        for option in table.catalogue.ends(kind, b, sharding):
            yield option.weight_layout, option.sharding, option.time_s
    else:
        yield frozenset(), sharding, table.price_cache.layer_time(kind, b, sharding).total_s


def _end_compute_s(
    kind: LayerKind,
    sharding: Sharding,
    option_s: float,
    layout: ParallelLayout,
    price_cache: PriceCache,
) -> float:
    """Seconds of embedding or head on the device, with its table in one place."""
    if not price_cache.looks_up(kind):
        return option_s
    return price_cache.layer_time(kind, layout.micro_batch_size, sharding).total_s


def _end_data_s(
    kind: LayerKind,
    sharding: Sharding,
    layout: ParallelLayout,
    price_cache: PriceCache,
    table: MixTable,
) -> float:
    """Least seconds of data parallelism of embedding or head per micro-batch."""
    outside = unchunked_prices(layout, price_cache)
    data_s = math.inf
    for zero in table.zero_stages(layout):
        if zero < 2 and not price_cache.looks_up(kind):
            return 0.0  # ZeRO 0 and 1 communicate once a step
        data = outside.data_parallel(kind, layout.micro_batch_size, layout.mesh, sharding, zero)
        data_s = min(data_s, data.per_micro_batch_s)
    return data_s


def _least_block(layout: ParallelLayout, table: MixTable) -> tuple[float, float]:
    """Least seconds of a block, per micro-batch and per step, with data parallelism.

    Where operators have several shardings, whose windows differ, data parallelism counts as hidden.
    """
    if layout.chunked:
        return _least_chunked_block(layout, table)
    b, catalogue = layout.micro_batch_size, table.catalogue
    if layout.weights_over_data:
        return _least_over_data_s(layout, table)
    hidden_s = _always_recomputed_s(layout, table)
    fastest_s = catalogue.fastest_s(b, layout.of_blocks)
    if catalogue.divides(layout.of_blocks):
        data = _least_hidden_data(layout, table)
    else:
        ways = [
            table.price_cache.data_parallel(LayerKind.BLOCK, b, layout.mesh, layout.of_blocks, *way)
            for way in table.zero_ways(layout)
        ]
        data = dict.fromkeys(fastest_s, _least_data(ways))
    return (
        min(fastest_s[each] - hidden_s + data[each].per_micro_batch_s for each in fastest_s),
        min(data[each].per_step_s for each in fastest_s),
    )


def _least_over_data_s(layout: ParallelLayout, table: MixTable) -> tuple[float, float]:
    """Least seconds of a block that divides weights over data, per micro-batch and per step.

    Its products have the tokens of all data-parallel ranks and a part of the weight. A sequence
    takes no less compute than in the best micro-batch of data parallelism with at most as many
    tokens, where products have the whole weight. Each tensor that divided weights read is gathered
    and reduced once, and the other weights have data parallelism. No operator is priced for this,
    so that layouts that lose cost little.
    """
    catalogue, plain = table.catalogue, layout.sharding

    together = layout.micro_batch_size * layout.mesh.dp

    def make() -> float:
        return min(
            min(catalogue.fastest_s(size, plain).values()) / size
            for size in sizes_of(table.price_cache.training)
            if size <= together
        )

    least_s = table.once(("least of a sequence", plain, together), make)
    alone_s = layout.micro_batch_size * least_s
    sent_s = least_sent_s(layout, table.price_cache)
    data = _least_hidden_data(layout, table)
    return (
        alone_s
        + min(sent_s * catalogue.reads_over_data(w) + data[w].per_micro_batch_s for w in data),
        min(each.per_step_s for each in data.values()),
    )


@dataclass(frozen=True, slots=True)
class _LeastData:
    """The least seconds of data parallelism of a block, at any ZeRO stage for each."""

    per_micro_batch_s: float
    per_step_s: float


def _least_data(ways: Sequence[DataParallelTime]) -> _LeastData:
    return _LeastData(
        min(way.per_micro_batch_s for way in ways), min(way.per_step_s for way in ways)
    )


def _least_hidden_data(layout: ParallelLayout, table: MixTable) -> dict[WeightLayout, _LeastData]:
    """Least seconds of data parallelism of a block by layout of its weights, where most is hidden.

    They depend on no micro-batch size.
    """
    ways, sharding = table.zero_ways(layout), layout.of_blocks

    def make() -> dict[WeightLayout, _LeastData]:
        hidden = table.price_cache.hidden_data_parallel
        return {
            each: _least_data([hidden(LayerKind.BLOCK, layout.mesh, divided, *way) for way in ways])
            for each in table.catalogue.weight_layouts(sharding)
            for divided in [table.catalogue.with_weight_layout(each, sharding)]
        }

    return table.once(("hidden data", layout.mesh, sharding, ways), make)


def _least_chunked_block(layout: ParallelLayout, table: MixTable) -> tuple[float, float]:
    """Least seconds of a block in chunks, per micro-batch and per step.

    They are its compute, and its collectives where all shardings have one window. Copies and
    updates count as hidden.
    """
    catalogue = table.catalogue
    per_micro_batch_s: list[float] = []
    for weight_layout, fastest_s in catalogue.fastest_s(
        layout.micro_batch_size, layout.of_blocks
    ).items():
        costs = table.block_costs(
            layout, catalogue.with_weight_layout(weight_layout, layout.of_blocks)
        ).values()
        gathered_s = (
            0.0
            if catalogue.divides(layout.of_blocks)
            else min(cost.forward_s + cost.backward_s for cost in costs)
        )
        per_micro_batch_s.append(fastest_s + gathered_s)
    return min(per_micro_batch_s), 0.0


def _always_recomputed_s(layout: ParallelLayout, table: MixTable) -> float:
    """Seconds of recompute that pins force on every block and that may be hidden.

    A schedule with recompute ahead may hide them, or leave them out on its last stage. It is 0
    where the bounds have no recompute.
    """
    catalogue = table.catalogue
    b = layout.micro_batch_size
    if not layout.recomputes_ahead or catalogue.divides(layout.of_blocks):
        return 0.0
    return min(
        table.price_cache.layer_time(LayerKind.BLOCK, b, layout.of_blocks, level).recompute_s
        for level in catalogue.levels
    )


def ahead_bounds_s(layout: ParallelLayout, usual_s: float, table: MixTable) -> Iterator[float]:
    """Yields lower bounds of a schedule with recompute ahead, of which the last asks for options.

    `usual_s` is a bound of the 1F1B of the same layout within the same memory. Every plan of the
    schedule is a plan of 1F1B that needs no less memory. That does not hold where pins exclude
    plans of 1F1B that are allowed on the last stage: then there is no bound.
    """
    if layout.schedule in LAST_KEEPS_ALL and Recompute.NONE not in table.catalogue.levels:
        return
    yield usual_s * least_ahead(layout, MOST_AGAIN)
    block = table.per_block(layout, 0)
    yield usual_s * least_ahead(layout, float((block.recompute_s / block.time_s).max()))


def least_ahead(layout: ParallelLayout, share: float) -> float:
    """Returns the least ratio of a schedule with recompute ahead to its 1F1B.

    costmodels/schedules/hidden_recompute.py takes off at most the recompute of e + 1 passes of the
    slowest rank and of one pass of each other rank. With r <= q t in every block, where q is
    `share`, and sum t <= P max t,

        T >= T_1F1B (1 - q (P + e) / (M - 1 + P))
    """
    ranks = layout.mesh.pp
    hidden = hidden_passes(layout.schedule)
    return 1 - share * (ranks + hidden) / (layout.num_micro_batches - 1 + ranks)


def in_reach(table: MixTable, limit_bytes: float) -> bool:
    """Returns whether devices and hosts together can hold the states of the model once.

    Each device has `limit_bytes`; the hosts count where offload is allowed. Otherwise no candidate
    fits.
    """
    price_cache = table.price_cache
    cluster = price_cache.machine.cluster
    training = price_cache.training
    parameters, gradients, optimizer = price_cache.ideal_states(1)
    least = parameters + optimizer + (0.0 if training.stack.frees_gradients else gradients)
    host_bytes = table.host_share_bytes if table.offload else 0.0
    return least <= cluster.num_gpus * (limit_bytes + host_bytes)


def least_kept_bytes(layout: ParallelLayout, table: MixTable) -> float:
    """Returns the least saved bytes of any block and micro-batch on its device."""
    return _least_kept_bytes(layout, table, sends=may_offload_activations(layout, table.offload))


def _least_kept_bytes(layout: ParallelLayout, table: MixTable, *, sends: bool) -> float:
    """Returns the least saved bytes of any block and micro-batch.

    With `sends` they are those on the device, otherwise those on device and host together: bytes
    that one of them does not hold are on the other.
    """

    def make() -> float:
        price_cache = table.price_cache
        least_levels = table.catalogue.least_levels
        levels = (Recompute.NONE,) if layout.splits_backward else least_levels
        offload = (ALL,) if sends else ()
        return min(
            price_cache.ideal_saved_bytes(
                LayerKind.BLOCK,
                layout.micro_batch_size,
                layout.sharding,
                level,
                named_operators(offload, level, price_cache),
            )
            for level in levels
        )

    return table.once(
        ("kept", layout.micro_batch_size, layout.sharding, layout.splits_backward, sends), make
    )


def may_fit(layout: ParallelLayout, table: MixTable, limit_bytes: float) -> bool:
    """Returns whether the blocks fit `limit_bytes` at their most sharding and recompute.

    The workspace of blocks is left out, and there is no catalogue: it rules out most candidates
    that are far too large.
    """
    usable = usable_bytes(limit_bytes, layout.mesh, table.price_cache)
    pp = layout.mesh.pp
    states = {zero: _block_bytes(layout, zero, table) for zero in table.zero_stages(layout)}
    kept = least_kept_bytes(layout, table)
    anywhere = _least_kept_bytes(layout, table, sends=False)
    share = table.host_share_bytes if layout.chunked or kept < anywhere else 0.0
    num_layers = table.price_cache.model.num_layers
    in_flight = np.array([[stashes(LayerKind.BLOCK, rank, layout)] for rank in range(pp)])
    in_flight = in_flight / layout.virtual_stages
    fewest = fewest_blocks(layout, num_layers)
    device, both = np.array(list(states.values())).T  # by ZeRO stage

    def enough(ends: Array) -> bool:
        """True if the ranks hold all blocks beside `ends`, by rank and ZeRO stage."""
        room = usable - ends
        on_device = room / np.maximum(device + in_flight * kept, 1.0)  # the host may hold all
        on_both = (room + share) / (both + in_flight * anywhere)
        most = np.floor(np.where(room > 0, np.minimum(on_device, on_both), 0.0)).max(axis=1)
        return bool((most >= fewest).all() and most.sum() >= num_layers)

    none = np.zeros((pp, len(states)))
    if not enough(none):
        return False
    # Where half of the room is enough, embedding and head are not priced: their price takes longer
    # than the candidates that it rules out.
    if enough(none + usable / 2):
        return True
    if table.catalogue.divides_ends(layout.sharding):
        return enough(none + _divided_ends_bytes(layout, table)[:, None])
    ends = none.copy()
    for rank in {0, layout.rank_of(layout.num_virtual_stages - 1)}:
        ends[rank] = [ends_bytes(rank, layout, zero, table) for zero in states]
    return enough(ends)


def _divided_ends_bytes(layout: ParallelLayout, table: MixTable) -> Array:
    """Least bytes of embedding and head by rank, whichever way they are divided."""
    ends = np.zeros(layout.mesh.pp)
    for rank in {0, layout.rank_of(layout.num_virtual_stages - 1)}:
        ends[rank] = least_end_bytes(rank, layout, table)
    return ends


def fewest_blocks(layout: ParallelLayout, num_layers: int) -> Array:
    """Returns by rank the least number of blocks; unequal ranks all have the same."""
    ranks = range(layout.mesh.pp if layout.equal_ranks else 1)
    return np.array([next(block_counts(rank, layout, num_layers), 0) for rank in ranks], np.float64)


def _block_bytes(layout: ParallelLayout, zero: int, table: MixTable) -> tuple[float, float]:
    """Least bytes of the states of a block on its device, and on device and host together."""
    if not layout.chunked:
        state_bytes = min(
            float(table.price_cache.states(LayerKind.BLOCK, layout.mesh, way, zero).states.total)
            for way in divisions_of_weights(layout, table)
        )
        return state_bytes, state_bytes

    def make() -> tuple[float, float]:
        costs = [
            cost
            for weight_layout in table.catalogue.fastest_s(layout.micro_batch_size, layout.sharding)
            for cost in table.block_costs(
                layout, table.catalogue.with_weight_layout(weight_layout, layout.sharding)
            ).values()
        ]
        return min(float(cost.device.total) for cost in costs), min(
            float(cost.device.total + cost.host.total) for cost in costs
        )

    in_parameters = writes_over_parameters(table.price_cache.training, layout.num_micro_batches)
    return table.once(
        ("states", layout.mesh, layout.micro_batch_size, layout.sharding, in_parameters), make
    )


def divisions_of_weights(layout: ParallelLayout, table: MixTable) -> tuple[Sharding, ...]:
    """Returns the shardings that divide the weights of a block in the ways with the least bytes.

    Megatron's divides all over the tensor-parallel ranks. Over data-parallel ranks as well no way
    has the least bytes at every ZeRO stage.
    """
    if not layout.weights_over_data:
        return (layout.sharding,)
    return table.once(
        ("divisions of weights", layout.of_blocks),
        lambda: tuple(
            table.catalogue.with_weight_layout(each, layout.of_blocks)
            for each in table.catalogue.weight_layouts(layout.of_blocks)
        ),
    )


def ends_bytes(rank: int, layout: ParallelLayout, zero: int, table: MixTable) -> float:
    """Least bytes of embedding and head of a rank at the peak."""
    kinds = end_kinds(rank, layout)
    if not kinds:
        return 0.0
    prices = (
        end_costs(rank, layout, zero, ends) for ends in table.price_caches_of_ends(layout, kinds)
    )
    return min(fixed.states + fixed.held + max(0.0, fixed.head_workspace) for fixed in prices)


def _ways(kind: LayerKind, layout: ParallelLayout, table: MixTable) -> tuple[PriceCache, ...]:
    """Returns the prices with each way to run a layer alone."""
    if kind is LayerKind.BLOCK:
        return (table.price_cache,)
    return table.price_caches_of_ends(layout, (kind,))


def redundancy_bound_bytes(layout: ParallelLayout, table: MixTable) -> float:
    """Returns a lower bound of the redundant bytes of the cluster.

    Every layer has its leanest ZeRO stage, recompute, sharding and state location, and one
    micro-batch of saved tensors.
    """
    price_cache = table.price_cache
    b = layout.micro_batch_size
    mesh = layout.mesh
    sharding = layout.sharding
    stages = table.zero_stages(layout)
    options = {*table.options(layout), *table.options(layout, mesh.pp - 1)}
    stored = 0.0
    divisions = divisions_of_weights(layout, table)
    for kind, count in (
        (LayerKind.BLOCK, price_cache.model.num_layers),
        (LayerKind.EMBEDDING, 1),
        (LayerKind.HEAD, 1),
    ):
        held = [
            unchunked_prices(layout, ends).states(kind, mesh, ends.own_sharding(kind, way), zero)
            for ends in _ways(kind, layout, table)
            for way in (divisions if kind is LayerKind.BLOCK else (sharding,))
            for zero in stages
        ]
        there: list[float] = [states.states.total for states in held]
        if layout.chunked and kind is LayerKind.BLOCK:
            there = [_block_bytes(layout, zero, table)[0] for zero in stages]
        stored += count * min(
            total - sum(states.ideal) for total, states in zip(there, held, strict=True)
        )
    kept = price_cache.model.num_layers * min(
        option.saved_bytes - option.ideal_saved_bytes for option in options
    )
    buffers = 0
    if not layout.chunked:
        buffers = min(
            price_cache.states(LayerKind.BLOCK, mesh, division, *way).zero_buffer
            for division in divisions
            for way in table.zero_ways(layout)
        )
    workspace = min(option.workspace_bytes for option in options)
    at_head = min(
        max(workspace - head.saved_bytes, head.workspace_bytes)
        for head in table.catalogue.ends(LayerKind.HEAD, b, sharding)
    )
    temporaries = (mesh.pp - 1) * workspace + at_head + mesh.pp * buffers
    return mesh.ranks_per_stage * (stored + kept + temporaries)
