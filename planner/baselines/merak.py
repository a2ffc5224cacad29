"""Merak's runtime as a list of strategies: on equal stages its schedules, each with the least recompute of its knob that fits.

Its parts can be left out one by one, so that a benchmark can say what each of them gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from costmodels.book import PriceBook
from costmodels.recompute import Recompute
from costmodels.schedules import Schedule, legal
from costmodels.strategy import Frame, Strategy
from planner.baselines.space import counted_ends, equal_blocks, megatron_frames, megatron_meshes, strategies
from planner.baselines.stage_aware import Room, every_knob, stage_aware

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


def least_recompute(frames: Iterable[Frame], book: PriceBook, limit_bytes: float) -> Iterator[Strategy]:
    """Every frame with the least of the knob that fits; where nothing fits, all of it: the leanest."""
    for frame, blocks, zero in _equal(frames, book.model.num_layers):
        counts = Room(frame, blocks, zero, book, limit_bytes).least_knob() or every_knob(blocks, frame)[-1]
        yield stage_aware(frame, blocks, counts, zero)


def _equal(frames: Iterable[Frame], num_layers: int) -> Iterator[tuple[Frame, tuple[int, ...], int]]:
    for frame in frames:
        for ends in counted_ends(num_layers, frame.mesh.pp) if frame.mesh.pp > 1 else ():
            for zero in ZEROS if frame.mesh.dp > 1 else ZEROS[:1]:
                yield frame, equal_blocks(frame, num_layers, ends), zero


def merak_strategies(book: PriceBook, limit_bytes: float) -> tuple[Strategy, ...]:
    """The whole runtime: its schedule with the knob, 1F1B with the knob where there are too few micro-batches, and no pipeline."""
    frames = tuple(one_chunk_frames(book))
    alone = strategies((frame for frame in frames if frame.mesh.pp == 1), book.model.num_layers, ZEROS, (Recompute.NONE, Recompute.FULL))
    return (*alone, *least_recompute((*frames, *shifted(frames)), book, limit_bytes))
