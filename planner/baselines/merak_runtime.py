"""Merak's runtime as a list of strategies: on equal stages its schedules, each with the least recompute of its knob that fits.

Its parts can be left out one by one, so that a benchmark can say what each of them gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceBook
from parplan.costmodels.schedules.schedule import Schedule, legal
from parplan.costmodels.strategy import TP_OVERLAP_LEVELS, Frame, Strategy
from parplan.planner.baselines.stage_aware import Room, every_knob, stage_aware
from parplan.planner.baselines.uniform_strategies import (
    counted_ends,
    equal_blocks,
    megatron_frames,
    megatron_meshes,
    strategies,
)
from parplan.planner.layer_options.overlap_levels import illegal_full_recompute, illegal_overlap

ZEROS = (0, 1)


def one_chunk_frames(book: PriceBook) -> Iterator[Frame]:
    """Megatron-LM's frames with one model chunk a rank: 1F1B, or no pipeline."""
    meshes = megatron_meshes(book.model, book.machine.cluster, book.training)
    frames = chain.from_iterable(megatron_frames(mesh, book.model, book.training) for mesh in meshes)
    yield from (frame for frame in frames if frame.virtual_stages == 1)


def shifted(frames: Iterable[Frame]) -> Iterator[Frame]:
    """The same on the shifted critical path, where it is legal."""
    for frame in frames:
        if not legal(Schedule.SCP, frame.mesh.pp, frame.num_micro_batches, 1):
            yield replace(frame, schedule=Schedule.SCP)


def last_keeps_all(frames: Iterable[Frame], num_layers: int) -> Iterator[Strategy]:
    """Every block recomputed but for those of the last stage, on equal stages, by ZeRO stage."""
    for frame, blocks, zero in _equal(frames, num_layers):
        yield stage_aware(frame, blocks, (*blocks[:-1], 0), zero)


def overlapped(frames: Iterable[Frame], book: PriceBook) -> Iterator[Frame]:
    """The same at every level of sub-pipelined tensor parallelism that they can run at."""
    for frame in frames:
        levels = (replace(frame, tp_overlap=level) for level in TP_OVERLAP_LEVELS[1:])
        yield from (found for found in levels if not illegal_overlap(found, book.model))


def least_recompute(frames: Iterable[Frame], book: PriceBook, limit_bytes: float) -> Iterator[Strategy]:
    """Every frame with the least of the knob that fits; where nothing fits, all of it: the leanest."""
    for frame, blocks, zero in _equal(frames, book.model.num_layers):
        counts = Room(frame, blocks, zero, book, limit_bytes).least_knob() or every_knob(blocks, frame)[-1]
        if not any(counts) or not illegal_full_recompute(frame.tp_overlap, book.model):
            yield stage_aware(frame, blocks, counts, zero)


def without_pipeline(frames: Iterable[Frame], book: PriceBook) -> Iterator[Strategy]:
    """The frames that have no stages: every block recomputed, or none."""
    for frame in frames:
        levels = (Recompute.NONE,) if illegal_full_recompute(frame.tp_overlap, book.model) else (Recompute.NONE, Recompute.FULL)
        if frame.mesh.pp == 1:
            yield from strategies((frame,), book.model.num_layers, ZEROS, levels)


def _equal(frames: Iterable[Frame], num_layers: int) -> Iterator[tuple[Frame, tuple[int, ...], int]]:
    for frame in frames:
        for ends in counted_ends(num_layers, frame.mesh.pp) if frame.mesh.pp > 1 else ():
            for zero in ZEROS if frame.mesh.dp > 1 else ZEROS[:1]:
                yield frame, equal_blocks(frame, num_layers, ends), zero


def merak_strategies(book: PriceBook, limit_bytes: float) -> tuple[Strategy, ...]:
    """The whole runtime: its schedule and 1F1B with the knob, or no pipeline; tensor parallelism sub-pipelined or not."""
    plain = tuple(one_chunk_frames(book))
    frames = (*plain, *overlapped(plain, book))
    return (*without_pipeline(frames, book), *least_recompute((*frames, *shifted(frames)), book, limit_bytes))
