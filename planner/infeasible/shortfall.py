"""When nothing fits: the shortfall of the leanest plan, its stage, and the smallest cluster."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from parplan.costmodels.chunks.chunk_memory import device_memory
from parplan.costmodels.layers.chunked_layer import Chunking
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import enumerate_candidates
from parplan.planner.candidates.lower_bounds import in_reach, may_fit
from parplan.planner.host_options.state_locations import has_chunks
from parplan.planner.layer_options.over_data import with_weights_over_data
from parplan.planner.plan.error_band import memory_margin
from parplan.planner.request import Constraints, Request, SearchOptions, sizes_of
from parplan.planner.stage_columns.block_counts import block_counts, to_strategy
from parplan.planner.stage_columns.chunk_columns import rank_columns
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.stack import Stack
from parplan.profiles.units import GIB, MIB, gib

STATE_BYTES = 24  # bytes of a parameter on the host with padding, more than any location needs
# Micro-batches for each virtual stage: the pipeline is full, and no pass is the first and the last
# of its chunk.
FILLED = 4
EXPLAINED_S = 60.0  # limit of the explanation: the shortfall and the GPUs that are enough
ROUNDING = 2.0**-40  # relative precision of bytes in a bisection
UNTRIED = "how many are enough was not searched to the end"
MOST_TIMES_LARGER = 64  # largest multiple of the requested GPUs that is tried


def limit_bytes(cluster: Cluster, stack: Stack, options: SearchOptions) -> float:
    """Bytes that a plan may fill on a device: the explicit limit, or capacity less the margin."""
    if options.memory_limit_bytes is not None:
        return float(min(options.memory_limit_bytes, cluster.device.memory_bytes))
    return cluster.device.memory_bytes * (1 - memory_margin(stack, options))


def price_cache_of(request: Request) -> PriceCache:
    """Returns an empty price cache for the request."""
    machine = machine_for(request.cluster)
    zero_ranks = request.constraints.zero_ranks
    chunking = Chunking(communication=request.constraints.chunk_communication)
    return PriceCache(
        request.model,
        request.training,
        machine,
        zero_ranks=zero_ranks,
        chunking=chunking,
        sizes=sizes_of(request.training),
    )


def mix_table(request: Request) -> MixTable:
    """Returns the table of mixes for the request, which ends with its deadline."""
    constraints = request.constraints.resolved(request.training.stack)
    return MixTable(price_cache_of(request), constraints, request.options.deadline)


@dataclass(frozen=True, slots=True)
class _LeastPeakCandidate:
    """The layout whose fullest rank needs the fewest bytes, that rank, and all columns."""

    layout: ParallelLayout
    rank: int
    columns: tuple[StageColumn, ...]

    @property
    def column(self) -> StageColumn:
        return self.columns[self.rank]

    @property
    def looks_up(self) -> bool:
        return any(column.looks_up for column in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The leanest plan of a request that does not fit.

    need_bytes: bytes of its fullest stage
    limit_bytes: bytes that a plan may fill on a device
    text: both in words
    host_bytes: memory of a node's host with which something fits the devices; None where no host
    is large enough or offload is not allowed
    """

    need_bytes: float
    limit_bytes: float
    text: str
    host_bytes: int | None = None


class _Ranks:
    """The ranks of a layout, and the most blocks that each can hold."""

    def __init__(self, layout: ParallelLayout, table: MixTable) -> None:
        num_layers = table.price_cache.model.num_layers
        self.columns = cache(lambda rank: rank_columns(rank, layout, table))
        self.counts = cache(lambda rank: tuple(block_counts(rank, layout, num_layers)))
        self.deadline = table.deadline
        self.smallest = cache(self._smallest)

    def _smallest(self, rank: int, count: int) -> StageColumn:
        """The column of `count` blocks with the fewest bytes, which grow with the count."""
        self.deadline.check()
        return self.columns(rank).smallest(count)

    def most_blocks(self, rank: int, limit: float) -> int:
        """Number of blocks that fit a device of `limit` bytes, 0 when not even the fewest do."""
        counts = self.counts(rank)
        within = bisect_right(
            counts, limit, key=lambda count: self.smallest(rank, count).memory_bytes
        )
        return counts[within - 1] if within else 0


def _fits(layout: ParallelLayout, table: MixTable, limit: float) -> bool:
    if not may_fit(layout, table, limit):
        return False
    ranks, held = _Ranks(layout, table), 0
    for rank in range(layout.mesh.pp):
        most = ranks.most_blocks(rank, limit)
        if not most:
            return False
        held += most
    return held >= table.price_cache.model.num_layers


def _leanest_of(layout: ParallelLayout, table: MixTable) -> _LeastPeakCandidate:
    """The split of the blocks whose fullest rank needs least, by bisection to 1 MiB."""
    num_layers, pp = table.price_cache.model.num_layers, layout.mesh.pp
    ranks = _Ranks(layout, table)
    even = -(-num_layers // pp)
    low = 0.0
    high = max(
        ranks.smallest(rank, min(even, ranks.counts(rank)[-1])).memory_bytes for rank in range(pp)
    )
    while high - low > max(MIB, ROUNDING * high):
        table.deadline.check()
        middle = (low + high) / 2
        most = [ranks.most_blocks(rank, middle) for rank in range(pp)]
        low, high = (low, middle) if all(most) and sum(most) >= num_layers else (middle, high)
    held = [ranks.most_blocks(rank, high) for rank in range(pp)]
    fullest = max(range(pp), key=lambda rank: ranks.smallest(rank, held[rank]).memory_bytes)
    for rank in range(pp):
        if rank != fullest:  # the other ranks need not be full
            held[rank] -= min(held[rank] - 1, sum(held) - num_layers)
    return _LeastPeakCandidate(layout, fullest, tuple(map(ranks.smallest, range(pp), held)))


def _least_memory_layouts(request: Request) -> Iterator[ParallelLayout]:
    """Yields the layouts that can be leanest, one per mesh, level of sub-pipelining and chunks.

    Each has the smallest micro-batch, the leanest virtual stages and sequence parallelism.
    """
    seen: dict[object, ParallelLayout] = {}
    legal = enumerate_candidates(request).layouts
    layouts, _ = with_weights_over_data(legal, request, price_cache_of(request))
    for layout in layouts:
        alike = (
            layout.mesh,
            layout.tp_overlap,
            layout.chunked,
            layout.access,
            layout.weights_over_data,
        )
        known = seen.get(alike)
        if known is None or _thirst(layout) < _thirst(known):
            seen[alike] = layout
    yield from seen.values()


def _thirst(layout: ParallelLayout) -> tuple[int, bool, int, bool]:
    """Orders the layouts of one mesh by memory; of virtual stages many need less than few."""
    return (
        layout.micro_batch_size,
        layout.virtual_stages > 1,
        -layout.virtual_stages,
        not layout.sequence_parallel,
    )


def _leanest(request: Request) -> _LeastPeakCandidate | None:
    table = mix_table(request)
    leanest = (_leanest_of(layout, table) for layout in _least_memory_layouts(request))
    return min(leanest, key=lambda lean: lean.column.memory_bytes, default=None)


def least_peak_bytes(request: Request) -> float | None:
    """Bytes of the fullest rank of the leanest plan, to 1 MiB; None when no candidate is legal.

    Raises OutOfTimeError. A tied embedding, whose ends must shard alike, can make the least peak of
    a search a little larger.
    """
    lean = _leanest(request)
    return None if lean is None else lean.column.memory_bytes


def smallest_cluster(request: Request, limit: float) -> int | None:
    """The smallest number of GPUs on which some plan fits, in whole nodes beyond the cluster.

    None within the range. Pinned degrees other than tp are dropped: they belong to the requested
    number of GPUs. Raises OutOfTimeError.
    """
    cluster = request.cluster
    constraints = replace(request.constraints, pp=None, dp=None)
    for nodes in range(cluster.nodes + 1, MOST_TIMES_LARGER * cluster.nodes + 1):
        larger = replace(request, cluster=replace(cluster, nodes=nodes), constraints=constraints)
        table = mix_table(larger)
        layouts = _least_memory_layouts(larger)
        if in_reach(table, limit) and any(_fits(layout, table, limit) for layout in layouts):
            return larger.cluster.num_gpus
    return None


def shortfall(request: Request) -> Shortfall:
    """Returns the leanest plan, its fullest stage, its missing bytes and their largest part.

    Raises OutOfTimeError.
    """
    model, cluster = request.model, request.cluster
    options = request.options
    limit = limit_bytes(cluster, request.training.stack, options)
    lean = _leanest(request)
    assert lean is not None, "there are legal layouts"
    need = lean.column.memory_bytes
    price_cache = price_cache_of(request)
    margin = ""
    if options.memory_limit_bytes is None:
        margin = f" with --memory-margin {memory_margin(request.training.stack, options):g}"
    host = enough_host_bytes(request, limit)
    return Shortfall(
        need_bytes=need,
        limit_bytes=limit,
        host_bytes=host,
        text=(
            f"{model.name} does not fit on {cluster.num_gpus} x {cluster.device.name}: the "
            f"leanest plan ({lean.layout.mesh}, "
            f"zero {lean.column.zero}, {_recompute_of(lean.column, price_cache)} recompute, "
            f"micro-batch {lean.layout.micro_batch_size}{_homes(lean)}) "
            f"needs {gib(need):.1f} GiB on stage {lean.rank}, {gib(limit):.1f} usable{margin}: "
            f"{gib(need - limit):.1f} GiB short; "
            f"the largest part is "
            f"{_largest_part(lean, price_cache)}{_host_text(host, cluster, request.constraints)}"
        ),
    )


def _homes(lean: _LeastPeakCandidate) -> str:
    """Text on the fullest stage's blocks off the device, and on the token table."""
    homes, count = lean.column.homes, lean.column.num_blocks
    table = ", the token table on the host" if lean.looks_up else ""
    blocks = (
        f", {homes.host} of {count} blocks on the host and the optimizer of {homes.optimizer}"
        if lean.layout.chunked
        else ""
    )
    return blocks + table


def _host_text(enough: int | None, cluster: Cluster, pins: Constraints) -> str:
    """Text on the host memory that would be enough, where offload in chunks is allowed."""
    if not has_chunks(pins.offload):
        return ""
    if enough is None:
        return "; no larger host helps"
    return (
        f"; it would fit with {gib(enough):,.0f} GiB of host memory a node, there are "
        f"{gib(cluster.host_memory_bytes):,.0f}"
    )


def enough_host_bytes(request: Request, limit: float) -> int | None:
    """Bytes of a node's host that are enough for its devices, to 1 GiB; None where none are.

    Found by bisection. Raises OutOfTimeError.
    """
    if not has_chunks(request.constraints.offload):
        return None
    table = mix_table(request)
    most = -(-STATE_BYTES * table.price_cache.graph(1).num_parameters // GIB)
    layouts = [layout for layout in _least_memory_layouts(request) if layout.chunked]

    def fitting(host_gib: int) -> list[ParallelLayout]:
        table.host_share_bytes = host_gib * GIB / request.cluster.gpus_per_node
        return [layout for layout in layouts if _fits(layout, table, limit)]

    layouts = fitting(most)
    if not layouts:
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        still_fitting = fitting(middle)
        if still_fitting:
            high, layouts = middle, still_fitting
        else:
            low = middle
    return high * GIB


def _largest_part(lean: _LeastPeakCandidate, price_cache: PriceCache) -> str:
    limit_bytes = 2 * lean.column.memory_bytes if lean.layout.chunked else None
    as_large = replace(price_cache.chunking, limit_bytes=limit_bytes)
    price_cache = price_cache.with_table(on_host=lean.looks_up).within(as_large)
    memory = device_memory(to_strategy(_shorter(lean.layout), lean.columns), lean.rank, price_cache)
    parts = {
        "states (parameters, gradients, optimizer)": memory.states.total,
        "activations": memory.activations,
        "temporaries": memory.temporaries,
        "reserve (context, communicators, allocator)": memory.reserve,
    }
    name = max(parts, key=lambda part: parts[part])
    return f"{name}, {gib(parts[name]):.1f} GiB"


def _shorter(layout: ParallelLayout) -> ParallelLayout:
    """A chunked layout with fewer micro-batches, with which it holds about as much."""
    enough = FILLED * layout.num_virtual_stages
    return (
        replace(layout, num_micro_batches=min(layout.num_micro_batches, enough))
        if layout.chunked
        else layout
    )


def unexplained_error(request: Request, why: str = "the time was over") -> InfeasibleError:
    """The error of a search without time left to explain why nothing fits."""
    cluster = request.cluster
    return InfeasibleError(
        f"{request.model.name} does not fit on {cluster.num_gpus} x {cluster.device.name}; how "
        f"much it is short was not searched, {why}",
        hint=f"use more GPUs or pin less: {UNTRIED}",
    )


def no_cluster_text(cluster: Cluster) -> str:
    """The hint when no number of GPUs is enough."""
    return f"no cluster up to {MOST_TIMES_LARGER * cluster.num_gpus} GPUs fits; use a larger device"


def _recompute_of(column: StageColumn, price_cache: PriceCache) -> str:
    """`none`, `full`, or the operators by name, for each option of the column."""
    levels = {
        price_cache.recompute_operators(LayerKind.BLOCK, level): level.value
        for level in reversed(Recompute)
    }
    used = (
        price_cache.recompute_operators(LayerKind.BLOCK, option.recompute)
        for option, _ in column.mix
    )
    return " and ".join(levels.get(operators, ", ".join(operators)) for operators in used)
