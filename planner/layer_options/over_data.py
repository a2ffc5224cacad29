"""Weights of blocks over the data-parallel ranks: the layouts that may have them.

In such a layout the operators of a block lie on a mesh of two axes. Over the data-parallel axis
each divides its batch, as in data parallelism, or its weight, as in tensor parallelism: then the
activations of all these ranks are gathered for it, and nobody reduces the weight's gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.divided_weights import illegal_over_data
from parplan.costmodels.operators.sharding import BATCH, PARTIAL
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.layer_options.layer_problem import may_recompute
from parplan.planner.layer_options.overlap_levels import illegal_zero
from parplan.planner.objective import Objective
from parplan.planner.request import Constraints, Request
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import US_PER_S, counted

ZERO_STAGES = (0, 1, 2, 3)


def with_weights_over_data(
    layouts: Sequence[ParallelLayout], request: Request, price_cache: PriceCache
) -> tuple[tuple[ParallelLayout, ...], tuple[tuple[ParallelLayout, str], ...]]:
    """Returns the layouts with those that divide weights over data, and the dropped ones.

    A block saves at most the time of its data parallelism so, and pays for at least one gather and
    one reduction of its activations. Where these take longer the layout is dropped, unless it is
    pinned. For the objectives memory and peak they may take the allowed slowdown besides. Raises
    ConfigError where they are pinned and no layout can have them.
    """
    pins, stack = request.constraints, request.training.stack
    allowed = pins.weights_over_data or ((False, True) if stack.weights_over_data else (False,))
    pinned = False not in allowed
    kept: list[ParallelLayout] = [] if pinned else list(layouts)
    if True not in allowed or pins.megatron_sharding:
        return tuple(kept), ()
    dropped: list[tuple[ParallelLayout, str]] = []
    known: dict[tuple[Mesh, int, bool], str | None] = {}
    illegal = Counter[str]()
    illegal_level = _illegal_levels(pins.resolved(stack), price_cache)
    for plain in layouts:
        if reason := illegal_over_data(plain, request.model) or illegal_level:
            illegal[reason] += 1
            continue
        layout = replace(plain, weights_over_data=True)
        key = plain.mesh, plain.micro_batch_size, plain.sequence_parallel
        if not pinned and key not in known:
            known[key] = _not_worth_it(plain, request, price_cache)
        unpaid = known.get(key)
        if unpaid is None:
            kept.append(layout)
        else:
            dropped.append((layout, unpaid))
    if pinned and not kept:
        raise _no_layout_error(illegal)
    return tuple(kept), tuple(dropped)


def _illegal_levels(pins: Constraints, price_cache: PriceCache) -> str | None:
    """Returns why blocks with weights over data have none of the pinned recompute levels, or None.

    They recompute each operator by itself.
    """
    operators = price_cache.layer(LayerKind.BLOCK, 1).operators
    alone = {operator.name for operator in operators if may_recompute(operator)}
    levels = [price_cache.recompute_operators(LayerKind.BLOCK, n) for n in pins.recompute or ()]
    if not levels or any(alone.issuperset(names) for names in levels):
        return None
    return "they recompute operators one by one, and dropout by itself draws other masks"


def _no_layout_error(illegal: Counter[str]) -> ConfigError:
    (reason, count), *_ = illegal.most_common()
    return ConfigError(
        f"--weights-over-data: of {counted(illegal.total(), 'candidate')} none can have them, "
        f"{count} because {reason}",
        hint="drop --weights-over-data, or the pins that leave only these candidates",
    )


def _not_worth_it(layout: ParallelLayout, request: Request, price_cache: PriceCache) -> str | None:
    """Returns why no block is faster with weights over data, or None."""
    sent_s = least_sent_s(layout, price_cache)
    saved_s = max(_data_parallel_s(layout, request.constraints, price_cache))
    if request.objective in (Objective.MEMORY, Objective.PEAK):
        block = price_cache.layer_time(LayerKind.BLOCK, layout.micro_batch_size, layout.sharding)
        saved_s += request.options.max_slowdown * block.total_s
    if sent_s < saved_s:
        return None
    return (
        f"a block with weights over dp {layout.mesh.dp} sends activations for "
        f"{sent_s * US_PER_S:,.0f} us, which may save {saved_s * US_PER_S:,.0f} us"
    )


def _data_parallel_s(
    layout: ParallelLayout, pins: Constraints, price_cache: PriceCache
) -> Iterator[float]:
    """Yields by ZeRO stage the exposed seconds of data parallelism of a block and micro-batch."""
    for zero in pins.zero or ZERO_STAGES:
        if not illegal_zero(layout, zero):
            data = price_cache.data_parallel(
                LayerKind.BLOCK, layout.micro_batch_size, layout.mesh, layout.sharding, zero
            )
            yield data.per_micro_batch_s + data.step.value_s / layout.num_micro_batches


def least_sent_s(layout: ParallelLayout, price_cache: PriceCache) -> float:
    """Returns the least seconds in which the ranks gather and reduce one tensor of a block."""
    over = layout.over_data
    inside = price_cache.inside(over.degrees)
    tokens = price_cache.graph(layout.micro_batch_size * over.data).block.input
    assert tokens is not None, "a block has an input"
    divided = ("sequence",) * (len(over.degrees) - 1)  # over the tensor-parallel ranks
    read = inside.moved(tokens, (BATCH, *divided), (None, *divided))
    returned = inside.moved(tokens, (PARTIAL, *divided), (BATCH, *divided))
    if price_cache.training.stack.overlap_tensor_parallel:
        read, returned = inside.under(read, float("inf")), inside.under(returned, float("inf"))
    return read.value_s + returned.value_s
