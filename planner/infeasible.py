"""When nothing fits: how much the leanest plan is short, on which stage, and the smallest cluster on which one would fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from costmodels.book import PriceBook
from costmodels.memory import ideal_states
from costmodels.recompute import Recompute
from costmodels.strategy import Frame
from planner.band import memory_margin
from planner.columns import Column, MixTable, RankColumns, block_counts
from planner.request import Constraints, SearchOptions
from planner.space import enumerate_space
from profiles.errors import InfeasibleError
from profiles.hardware import Cluster
from profiles.measured import machine_for
from profiles.model import LayerKind
from profiles.spec import ModelSpec, TrainingSpec
from profiles.stack import Stack
from profiles.units import MIB, gib

MOST_TIMES_LARGER = 64  # how far beyond the asked number of GPUs the smallest fitting one is looked for


def limit_bytes(cluster: Cluster, stack: Stack, options: SearchOptions) -> float:
    """What a plan may fill of a device: the explicit limit, or the capacity less the margin."""
    if options.memory_limit_bytes is not None:
        return float(min(options.memory_limit_bytes, cluster.device.memory_bytes))
    return cluster.device.memory_bytes * (1 - memory_margin(stack, options))


@dataclass(frozen=True, slots=True)
class _Leanest:
    """The frame whose fullest rank needs the fewest bytes, that rank, and its column."""

    frame: Frame
    rank: int
    column: Column


def _leanest_of(frame: Frame, table: MixTable) -> _Leanest:
    """The split of the blocks whose fullest rank needs least, by bisection over the memory limit, to 1 MiB."""
    num_layers = table.book.model.num_layers
    ranks = [RankColumns(rank, frame, table) for rank in range(frame.mesh.pp)]
    counts = [tuple(block_counts(rank, frame, num_layers)) for rank in range(frame.mesh.pp)]
    smallest = cache(lambda rank, count: ranks[rank].smallest(count))  # grows with the count

    def most_blocks(rank: int, limit: float) -> int:
        within = bisect_right(counts[rank], limit, key=lambda count: smallest(rank, count).memory_bytes)
        return counts[rank][within - 1] if within else 0

    even = -(-num_layers // frame.mesh.pp)
    low, high = 0.0, max(smallest(rank, min(even, counts[rank][-1])).memory_bytes for rank in range(frame.mesh.pp))
    while high - low > MIB:
        middle = (low + high) / 2
        most = [most_blocks(rank, middle) for rank in range(frame.mesh.pp)]
        low, high = (low, middle) if all(most) and sum(most) >= num_layers else (middle, high)
    fullest = max(range(frame.mesh.pp), key=lambda rank: smallest(rank, most_blocks(rank, high)).memory_bytes)
    return _Leanest(frame, fullest, smallest(fullest, most_blocks(fullest, high)))


def _least_memory_frames(model: ModelSpec, cluster: Cluster, training: TrainingSpec, pins: Constraints) -> Iterator[Frame]:
    """The frames that can be leanest: per mesh the smallest micro-batch, without virtual stages, sequence parallel."""
    seen: dict[object, Frame] = {}
    for frame in enumerate_space(model, cluster, training, pins).frames:
        known = seen.get(frame.mesh)
        if known is None or _thirst(frame) < _thirst(known):
            seen[frame.mesh] = frame
    yield from seen.values()


def _thirst(frame: Frame) -> tuple[int, bool, int, bool]:
    """Orders the frames of one mesh by the memory they need: of virtual stages many hold less than few, one least."""
    return frame.micro_batch_size, frame.virtual_stages > 1, -frame.virtual_stages, not frame.sequence_parallel


def _leanest(model: ModelSpec, cluster: Cluster, training: TrainingSpec, pins: Constraints) -> _Leanest | None:
    table = MixTable(PriceBook(model, training, machine_for(cluster)), pins)
    found = (_leanest_of(frame, table) for frame in _least_memory_frames(model, cluster, training, pins))
    return min(found, key=lambda lean: lean.column.memory_bytes, default=None)


def least_peak_bytes(model: ModelSpec, cluster: Cluster, training: TrainingSpec, pins: Constraints) -> float | None:
    """The bytes that the fullest rank of the leanest plan needs, to 1 MiB, or None when no candidate is legal.

    A tied embedding, whose ends must shard alike, can make the least that a search reaches a little larger.
    """
    lean = _leanest(model, cluster, training, pins)
    return None if lean is None else lean.column.memory_bytes


def smallest_cluster(
    model: ModelSpec, cluster: Cluster, training: TrainingSpec, pins: Constraints, limit: float,
) -> int | None:
    """The smallest number of GPUs, in whole nodes beyond `cluster`, on which some plan fits, or None within the range.

    Pinned degrees other than tp are dropped: they belong to the number of GPUs that was asked for.
    """
    pins = replace(pins, pp=None, dp=None)
    book = PriceBook(model, training, machine_for(cluster))
    num_parameters = book.graph(1).num_parameters
    for nodes in range(cluster.nodes + 1, MOST_TIMES_LARGER * cluster.nodes + 1):
        larger = replace(cluster, nodes=nodes)
        if sum(ideal_states(num_parameters, larger.num_gpus, training)) > limit:
            continue
        lean = _leanest(model, larger, training, pins)
        if lean and lean.column.memory_bytes <= limit:
            return larger.num_gpus
    return None


def infeasible_error(
    model: ModelSpec, cluster: Cluster, training: TrainingSpec, pins: Constraints, options: SearchOptions,
) -> InfeasibleError:
    """The error that says what binds: the leanest plan, its fullest stage, the bytes it is short, and a way out."""
    limit = limit_bytes(cluster, training.stack, options)
    lean = _leanest(model, cluster, training, pins)
    assert lean is not None, "there are legal frames"
    mesh = lean.frame.mesh
    need, book = lean.column.memory_bytes, PriceBook(model, training, machine_for(cluster))
    margin = "" if options.memory_limit_bytes is not None else f" with --memory-margin {memory_margin(training.stack, options):g}"
    message = (
        f"{model.name} does not fit on {cluster.num_gpus} x {cluster.device.name}: the leanest plan ({mesh}, "
        f"zero {lean.column.zero}, {_recompute_of(lean.column, book)} recompute, micro-batch {lean.frame.micro_batch_size}) "
        f"needs {gib(need):.1f} GiB on stage {lean.rank}, {gib(limit):.1f} usable{margin}: {gib(need - limit):.1f} GiB short")
    enough = smallest_cluster(model, cluster, training, pins, limit)
    if enough:
        return InfeasibleError(message, hint=f"{enough} GPUs are enough (--gpus {enough})")
    return InfeasibleError(message, hint=f"no cluster up to {MOST_TIMES_LARGER * cluster.num_gpus} GPUs fits; use a larger device")


def _recompute_of(column: Column, book: PriceBook) -> str:
    """`none`, `full`, or the operators by name, for each option of the column."""
    levels = {book.recompute_operators(LayerKind.BLOCK, level): level.value for level in reversed(Recompute)}
    used = (book.recompute_operators(LayerKind.BLOCK, option.recompute) for option, _ in column.mix)
    return " and ".join(levels.get(again, ", ".join(again)) for again in used)
