"""Lower bounds of a layout before any column is made (EQUATIONS I5): no plan of the layout can be
below them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import ge

from parplan.costmodels.chunks.chunk_memory import prices_of
from parplan.costmodels.layers.chunked_layer import writes_over_parameters
from parplan.costmodels.layers.model_states import ideal_states
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import stashes, usable_bytes
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.hidden_recompute import hidden_passes
from parplan.costmodels.schedules.schedule import LAST_KEEPS_ALL
from parplan.costmodels.stage_costs import rank_edges, rank_receives
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.host_options.activation_options import ALL, named_operators
from parplan.planner.host_options.host_variants import sends_activations
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_prices import end_kinds, fixed_price
from parplan.profiles.models.operator_graph import LayerKind

ENDS = (LayerKind.EMBEDDING, LayerKind.HEAD)


@dataclass(frozen=True, slots=True)
class TimeBound:
    """Seconds: the closed form is at least `step_s`, one block at least `block_s`, all layers
    together `total_s`.
    """

    step_s: float
    block_s: float
    total_s: float

    def longest_rank(self, layout: ParallelLayout, cut_s: float) -> int | None:
        """How many blocks a rank may hold before the layout takes `cut_s` or more; None when there
        is no such limit.
        """
        repeats_s = (layout.num_micro_batches - 1) * self.block_s
        if cut_s == float("inf") or not repeats_s:
            return None
        return max(1, int((cut_s - self.total_s) / repeats_s) + 1)


def time_bound(layout: ParallelLayout, table: MixTable) -> TimeBound:
    """Every layer on its fastest way to run, memory unlimited.

    The pace is at least the fullest rank's blocks and at least the mean over the ranks; the tail at
    least what the blocks of the fullest rank cost once a step. Embedding, head, transfers and the
    ends of rows of halves are in the sum.
    """
    price_cache, mesh = table.price_cache, layout.mesh
    share, (block_s, block_tail_s) = bubble_share(layout, price_cache), _least_block(layout, table)
    ends_s = sum(
        min(_end_s(kind, layout, ends, table) for ends in table.price_caches_of_ends(layout, kind))
        for kind in ENDS
    )
    transfers_s = sum(rank_receives(rank, layout, price_cache).value_s for rank in range(mesh.pp))
    edges_s = mesh.pp * rank_edges(layout, price_cache).value_s
    fullest = -(-price_cache.model.num_layers // mesh.pp)
    total_s = price_cache.model.num_layers * block_s + ends_s + transfers_s + edges_s
    pace_s = max(total_s / mesh.pp, fullest * block_s)
    step_s = (layout.num_micro_batches - share) * pace_s + share * total_s + fullest * block_tail_s
    return TimeBound(step_s, block_s, share * total_s)


def _end_s(
    kind: LayerKind, layout: ParallelLayout, price_cache: PriceCache, table: MixTable
) -> float:
    """Seconds of embedding or head at least, per micro-batch."""
    b, mesh, sharding, outside = (
        layout.micro_batch_size,
        layout.mesh,
        layout.sharding,
        prices_of(layout, price_cache),
    )
    data_s = min(
        outside.data_parallel(kind, b, mesh, sharding, zero).per_micro_batch_s
        for zero in table.zero_stages(layout)
    )
    return price_cache.layer_time(kind, b, sharding).total_s + data_s


def _least_block(layout: ParallelLayout, table: MixTable) -> tuple[float, float]:
    """Seconds of a block at least, per micro-batch and per step, with data parallelism.

    Where operators may be divided in several ways, whose windows differ, data parallelism counts as
    hidden.
    """
    price_cache, b, mesh, catalogue = (
        table.price_cache,
        layout.micro_batch_size,
        layout.mesh,
        table.catalogue,
    )
    per_micro_batch_s, per_step_s = [], []
    if layout.chunked:
        return _least_chunked_block(layout, table)
    hidden_s = _always_recomputed_s(layout, table)
    for weight_layout, fastest_s in catalogue.fastest_s(b, layout.sharding).items():
        for zero in table.zero_stages(layout):
            if not catalogue.divides(layout.sharding):
                data = price_cache.data_parallel(LayerKind.BLOCK, b, mesh, layout.sharding, zero)
            else:
                data = price_cache.hidden_data_parallel(
                    LayerKind.BLOCK,
                    mesh,
                    catalogue.with_weight_layout(weight_layout, layout.sharding),
                    zero,
                )
            per_micro_batch_s.append(fastest_s - hidden_s + data.per_micro_batch_s)
            per_step_s.append(data.per_step_s)
    return min(per_micro_batch_s), min(per_step_s)


def _least_chunked_block(layout: ParallelLayout, table: MixTable) -> tuple[float, float]:
    """The same of a block in chunks: its compute, and collectives where they have one window;
    copies and updates count as hidden.
    """
    catalogue, per_micro_batch_s = table.catalogue, list[float]()
    for weight_layout, fastest_s in catalogue.fastest_s(
        layout.micro_batch_size, layout.sharding
    ).items():
        costs = table.block_costs(
            layout, catalogue.with_weight_layout(weight_layout, layout.sharding)
        ).values()
        gathered_s = (
            0.0
            if catalogue.divides(layout.sharding)
            else min(cost.forward_s + cost.backward_s for cost in costs)
        )
        per_micro_batch_s.append(fastest_s + gathered_s)
    return min(per_micro_batch_s), 0.0


def _always_recomputed_s(layout: ParallelLayout, table: MixTable) -> float:
    """What pins make every block recompute and a schedule with recompute ahead may hide, or not do
    on its last stage.
    """
    catalogue, b = table.catalogue, layout.micro_batch_size
    if not layout.recomputes_ahead or catalogue.divides(
        layout.sharding
    ):  # those bounds are without recompute
        return 0.0
    return min(
        table.price_cache.layer_time(LayerKind.BLOCK, b, layout.sharding, level).recompute_s
        for level in catalogue.levels
    )


def ahead_bound_s(layout: ParallelLayout, usual_s: float, table: MixTable) -> float:
    """A lower bound of a schedule with recompute ahead from `usual_s`, one of the same layout's
    1F1B within the same memory.

    Every plan of it is one of 1F1B, for which it needs no less memory, and
    costmodels/schedules/hidden_recompute.py takes off at most the recompute of e + 1 passes of the
    slowest rank and of one of the others. With r <= q t in every block, and sum t <= P max t,

        T >= T_1F1B (1 - q (P + e) / (M - 1 + P))

    None of this holds where pins exclude plans of 1F1B that the last stage is allowed: then 0.
    """
    if layout.schedule in LAST_KEEPS_ALL and Recompute.NONE not in table.catalogue.levels:
        return 0.0
    block = table.per_block(layout, 0)
    share = float((block.recompute_s / block.time_s).max())
    ranks, hidden = layout.mesh.pp, hidden_passes(layout.schedule)
    return usual_s * (1 - share * (ranks + hidden) / (layout.num_micro_batches - 1 + ranks))


def in_reach(table: MixTable, limit_bytes: float) -> bool:
    """Whether `limit_bytes` of every device, and the hosts where they may keep something, hold the
    states of the model once.

    Where not, nothing fits, whatever the candidate.
    """
    price_cache = table.price_cache
    cluster, training = price_cache.machine.cluster, price_cache.training
    parameters, gradients, optimizer = ideal_states(
        price_cache.graph(1).num_parameters, 1, training
    )
    least = parameters + optimizer + (0.0 if training.stack.frees_gradients else gradients)
    return least <= cluster.num_gpus * (limit_bytes + table.host_share_bytes * bool(table.offload))


def least_kept_bytes(layout: ParallelLayout, table: MixTable) -> float:
    """What any block keeps at least of a micro-batch on its device."""
    return _least_kept_bytes(layout, table, sends=sends_activations(layout, table.offload))


def _least_kept_bytes(layout: ParallelLayout, table: MixTable, *, sends: bool) -> float:
    """The same, or with `sends` False on device and host together: what is not kept by the one is
    by the other.
    """

    def make() -> float:
        price_cache, levels = (
            table.price_cache,
            (Recompute.NONE,) if layout.splits_backward else table.catalogue.least_levels,
        )
        return min(
            price_cache.activations(
                LayerKind.BLOCK,
                layout.micro_batch_size,
                layout.sharding,
                level,
                named_operators((ALL,) * sends, level, price_cache),
            ).ideal_saved
            for level in levels
        )

    return table.once(
        ("kept", layout.micro_batch_size, layout.sharding, layout.splits_backward, sends), make
    )


def may_fit(layout: ParallelLayout, table: MixTable, limit_bytes: float) -> bool:
    """Whether the blocks can be within `limit_bytes` when each is divided, recomputed and sharded
    as much as it can be.

    Without the workspace of blocks, and without a catalogue: it rules out most candidates that are
    far too large.
    """
    usable, pp = usable_bytes(limit_bytes, layout.mesh, table.price_cache), layout.mesh.pp
    states = {zero: _block_bytes(layout, zero, table) for zero in table.zero_stages(layout)}
    kept, anywhere = least_kept_bytes(layout, table), _least_kept_bytes(layout, table, sends=False)
    share = table.host_share_bytes if layout.chunked or kept < anywhere else 0.0
    fewest = [
        next(block_counts(rank, layout, table.price_cache.model.num_layers), 0)
        for rank in range(pp)
    ]

    def most_blocks(rank: int, ends: Callable[[int], float]) -> int:
        in_flight, most = stashes(LayerKind.BLOCK, rank, layout) / layout.virtual_stages, 0
        for zero, (device, both) in states.items():
            room = usable - ends(zero)
            if room > 0:  # the host may keep all
                most = max(
                    most,
                    int(
                        min(
                            room / max(device + in_flight * kept, 1.0),
                            (room + share) / (both + in_flight * anywhere),
                        )
                    ),
                )
        return most

    def enough(ends: Callable[[int, int], float]) -> bool:
        most = [most_blocks(rank, partial(ends, rank)) for rank in range(pp)]
        return all(map(ge, most, fewest)) and sum(most) >= table.price_cache.model.num_layers

    if not enough(lambda *_: 0.0):
        return False
    # where half of the room is enough, embedding and head are not asked: they cost more to price
    # than they rule out
    return enough(lambda *_: usable / 2) or enough(
        lambda rank, zero: ends_bytes(rank, layout, zero, table)
    )


def _block_bytes(layout: ParallelLayout, zero: int, table: MixTable) -> tuple[float, float]:
    """The least bytes of the states of a block on its device, and on device and host together."""
    if not layout.chunked:
        own = float(
            table.price_cache.states(
                LayerKind.BLOCK, layout.mesh, layout.sharding, zero
            ).states.total
        )
        return own, own

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


def ends_bytes(rank: int, layout: ParallelLayout, zero: int, table: MixTable) -> float:
    """What embedding and head of a rank hold at least at the peak."""
    kinds = end_kinds(rank, layout)
    if not kinds:
        return 0.0
    found = (
        fixed_price(rank, layout, zero, ends)
        for ends in table.price_caches_of_ends(layout, kinds[0])
    )
    return min(fixed.states + fixed.held + max(0.0, fixed.head_workspace) for fixed in found)


def redundancy_bound_bytes(layout: ParallelLayout, table: MixTable) -> float:
    """Redundant bytes of the cluster: every layer at its leanest ZeRO stage, recompute, sharding
    and home, one stash a layer.
    """
    price_cache, b, mesh, sharding = (
        table.price_cache,
        layout.micro_batch_size,
        layout.mesh,
        layout.sharding,
    )
    stages = table.zero_stages(layout)
    options = {*table.options(layout), *table.options(layout, mesh.pp - 1)}
    stored = 0.0
    for kind, count in (
        (LayerKind.BLOCK, price_cache.model.num_layers),
        (LayerKind.EMBEDDING, 1),
        (LayerKind.HEAD, 1),
    ):
        held = [
            prices_of(layout, ends).states(kind, mesh, sharding, zero)
            for ends in table.price_caches_of_ends(layout, kind)
            for zero in stages
        ]
        there = (
            [_block_bytes(layout, zero, table)[0] for zero in stages]
            if layout.chunked and kind is LayerKind.BLOCK
            else [states.states.total for states in held]
        )
        stored += count * min(
            total - sum(states.ideal) for total, states in zip(there, held, strict=True)
        )
    kept = price_cache.model.num_layers * min(
        option.saved_bytes - option.ideal_saved_bytes for option in options
    )
    buffers = (
        0
        if layout.chunked
        else min(
            price_cache.states(LayerKind.BLOCK, mesh, sharding, zero).zero_buffer for zero in stages
        )
    )
    head, workspace = (
        price_cache.activations(LayerKind.HEAD, b, sharding),
        min(option.workspace_bytes for option in options),
    )
    temporaries = (
        (mesh.pp - 1) * workspace + max(workspace - head.saved, head.workspace) + mesh.pp * buffers
    )
    return mesh.ranks_per_stage * (stored + kept + temporaries)
