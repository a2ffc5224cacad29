"""ZeRO stages of the operators of a block that are worth a place beside one stage for all.

The search asks for them with --zero-by-operator. A block then has two stages, one of them for some
of its weight matrices. Compute hides as much of one block's communication as of another's, so that
it pays to send a part for every block rather than the whole for some. Buffers of stage 3 are the
largest of any block, so that it pays to gather few operators at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations

from parplan.costmodels.layers.model_states import OwnZero
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import lower_hull
from parplan.profiles.models.operator_graph import LayerKind

ZeroWay = tuple[int, OwnZero]  # the ZeRO stage of a block, and of operators that have another


def zero_ways(
    layout: ParallelLayout, stages: tuple[int, ...], price_cache: PriceCache
) -> tuple[ZeroWay, ...]:
    """Returns the ways with two of `stages` that are on a lower hull with one stage for all.

    A hull is that of (seconds of a step, bytes of states) of a block that is divided as `layout`
    divides it. There is one for each limit on the bytes of the buffers.
    """
    if layout.mesh.replicas == 1 or price_cache.model.num_experts:
        return ()
    alike: list[ZeroWay] = [(stage, ()) for stage in stages]
    ways = [*alike, *_two_stages(stages, price_cache)]
    points: list[tuple[float, float, int]] = []
    mesh, sharding = layout.mesh, layout.sharding
    buffers: list[int] = []
    for number, way in enumerate(ways):
        data = price_cache.data_parallel(
            LayerKind.BLOCK, layout.micro_batch_size, mesh, sharding, *way
        )
        held = price_cache.states(LayerKind.BLOCK, mesh, sharding, *way)
        step_s = layout.num_micro_batches * data.per_micro_batch_s + data.per_step_s
        points.append((step_s, float(held.states.total), number))
        buffers.append(held.zero_buffer)
    kept = {
        number
        for most in set(buffers)
        for number in lower_hull(point for point in points if buffers[point[2]] <= most)
    }
    return tuple(ways[number] for number in sorted(kept) if number >= len(alike))


def _two_stages(stages: tuple[int, ...], price_cache: PriceCache) -> Iterator[ZeroWay]:
    """Yields ways to give some of the block's weight matrices a higher stage than the others."""
    matrices = [
        operator.name
        for operator in price_cache.graph(1).block.operators
        if any(len(parameter.dims) > 1 for parameter in operator.parameters)
    ]
    some = [combinations(matrices, count) for count in range(1, len(matrices))]
    for names in chain.from_iterable(some):
        for lower, higher in combinations(sorted(stages), 2):
            yield lower, tuple((name, higher) for name in names)
