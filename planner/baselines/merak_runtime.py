"""Merak's runtime as a list of strategies.

Each of its schedules has the least recompute of its knob that fits. The parts of the runtime can be
left out one by one, so that a benchmark can measure the gain of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule, legal
from parplan.costmodels.strategy import TP_OVERLAP_LEVELS, ParallelLayout, Strategy
from parplan.planner.baselines.stage_aware import StageAwareRoom, every_knob, stage_aware
from parplan.planner.baselines.uniform_strategies import (
    counted_ends,
    equal_blocks,
    megatron_layouts,
    megatron_meshes,
    strategies,
)
from parplan.planner.layer_options.overlap_levels import illegal_full_recompute, illegal_overlap

ZEROS = (0, 1)
MERAK_STACK = "megatron-lm-2021"  # its facts: sequences are whole, and so are experts
Choice = tuple[ParallelLayout, tuple[int, ...], int]  # with the blocks of stages, and ZeRO


def one_chunk_layouts(price_cache: PriceCache) -> Iterator[ParallelLayout]:
    """Yields Megatron-LM's layouts with one model chunk a rank: 1F1B, or no pipeline."""
    meshes = megatron_meshes(MERAK_STACK, price_cache, ep=(1,))
    layouts = chain.from_iterable(
        megatron_layouts(mesh, price_cache.model, price_cache.training) for mesh in meshes
    )
    yield from (layout for layout in layouts if layout.virtual_stages == 1)


def shifted(layouts: Iterable[ParallelLayout]) -> Iterator[ParallelLayout]:
    """Yields the layouts under the schedule of the shifted critical path, where it is legal."""
    for layout in layouts:
        if not legal(Schedule.SCP, layout.mesh.pp, layout.num_micro_batches, 1):
            yield replace(layout, schedule=Schedule.SCP)


def last_keeps_all(choices: Iterable[Choice]) -> Iterator[Strategy]:
    """Yields strategies that recompute every block except those of the last stage."""
    for layout, blocks, zero in choices:
        yield stage_aware(layout, blocks, (*blocks[:-1], 0), zero)


def overlapped(
    layouts: Iterable[ParallelLayout], price_cache: PriceCache
) -> Iterator[ParallelLayout]:
    """Yields the layouts at every legal level of sub-pipelined tensor parallelism."""
    for layout in layouts:
        levels = (replace(layout, tp_overlap=level) for level in TP_OVERLAP_LEVELS[1:])
        yield from (
            legal_layout
            for legal_layout in levels
            if not illegal_overlap(legal_layout, price_cache.model, price_cache.training)
        )


def least_recompute(
    choices: Iterable[Choice], price_cache: PriceCache, limit_bytes: float
) -> Iterator[Strategy]:
    """Yields every choice with the least of the knob that fits, or all of it where none fits."""
    for layout, blocks, zero in choices:
        counts = (
            StageAwareRoom(layout, blocks, zero, price_cache, limit_bytes).least_knob()
            or every_knob(blocks, layout)[-1]
        )
        if not any(counts) or not illegal_full_recompute(layout.tp_overlap, price_cache.model):
            yield stage_aware(layout, blocks, counts, zero)


def without_pipeline(
    layouts: Iterable[ParallelLayout], price_cache: PriceCache, zeros: Sequence[int] = ZEROS
) -> Iterator[Strategy]:
    """Yields the layouts without stages: every block recomputed, or none."""
    for layout in layouts:
        levels = (
            (Recompute.NONE,)
            if illegal_full_recompute(layout.tp_overlap, price_cache.model)
            else (Recompute.NONE, Recompute.FULL)
        )
        if layout.mesh.pp == 1:
            yield from strategies((layout,), price_cache.model.num_layers, zeros, levels)


def equal_stages(layouts: Iterable[ParallelLayout], num_layers: int) -> Iterator[Choice]:
    """Yields the layouts that have a pipeline, on stages of equal length."""
    for layout in layouts:
        for ends in counted_ends(num_layers, layout.mesh.pp) if layout.mesh.pp > 1 else ():
            for zero in ZEROS if layout.mesh.dp > 1 else ZEROS[:1]:
                yield layout, equal_blocks(layout, num_layers, ends), zero


def merak_strategies(price_cache: PriceCache, limit_bytes: float) -> tuple[Strategy, ...]:
    """Returns the strategies of the whole runtime, at every level of sub-pipelining."""
    plain = tuple(one_chunk_layouts(price_cache))
    layouts = (*plain, *overlapped(plain, price_cache))
    return (
        *without_pipeline(layouts, price_cache),
        *least_recompute(
            equal_stages((*layouts, *shifted(layouts)), price_cache.model.num_layers),
            price_cache,
            limit_bytes,
        ),
    )
