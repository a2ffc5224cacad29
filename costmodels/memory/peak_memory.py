"""The peak of a rank whose gradients come and go, from its actions layer by layer.

`rank_memory` adds up classes, each at its maximum (EQUATIONS M6). If gradients are freed after
every update, the first backward pass makes gradients while it frees activations: after all forward
passes no moment holds the maximum of both.

The bytes of a layer, and the number of layers of a run, may be numbers or arrays: a search asks for
many mixes at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import chain, groupby, zip_longest
from operator import ge
from typing import Any

import numpy as np

from parplan.costmodels.schedules.actions import Action, ActionKind
from parplan.costmodels.schedules.schedule import Schedule, actions
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

Bytes = Any  # a number, or an array with one for each mix


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer on one rank.

    saved        saved tensors of a micro-batch
    workspace    temporaries of its passes
    gradients    its gradients
    gathered     parameters of this layer and of the one that is gathered ahead
    reduced      whole gradients of one micro-batch: from the end of the layer's backward pass, and
                 as input of their reduction until the next layer's gradients exist
    remade       bytes that a recompute ahead of the gradient adds to `saved`
    alone        temporaries of a backward pass after such a recompute
    """

    saved: Bytes
    workspace: Bytes
    gradients: Bytes
    gathered: Bytes = 0.0
    reduced: Bytes = 0.0
    remade: Bytes = 0.0
    alone: Bytes = 0.0


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """A run of `count` consecutive layers of a chunk with equal bytes."""

    kind: LayerKey
    held: LayerBytes
    count: Bytes = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBytes:
    """Bytes of a rank that no layer's pass frees.

    sent            a message of one micro-batch to another stage, kept until the end of the step
    shared_table    the head's gradient of a token table that the embedding shares, kept until the
                    embedding's gradient exists
    gathered        parameters that stay gathered because their layer begins and ends the passes
    reduced         the largest buffer of a reduction after the last backward pass
    """

    sent: Bytes = 0.0
    shared_table: Bytes = 0.0
    gathered: Bytes = 0.0
    reduced: Bytes = 0.0


@dataclass(frozen=True, slots=True)
class PeakPass:
    """The begin of a backward pass of a chunk, or of a recompute ahead of one.

    stashes    micro-batches that the rank holds, by chunk
    remade     micro-batches among them that were recomputed ahead, by chunk
    sent       messages that the rank has sent
    made       chunks whose gradients exist, without the chunk itself in its first pass
    before     chunks by their last backward pass, latest first
    """

    chunk: int
    backward: bool
    ahead: bool
    stashes: tuple[int, ...]
    remade: tuple[int, ...]
    sent: int
    made: frozenset[int]
    before: tuple[int, ...]

    @property
    def first(self) -> bool:
        return self.chunk not in self.made

    @property
    def kind(self) -> Hashable:
        """All that decides the bytes that its layers add one by one."""
        return self.chunk, self.backward, self.ahead, self.first, self.before

    @property
    def _held(self) -> tuple[int, ...]:
        return *self.stashes, *self.remade, self.sent

    def holds_no_less(self, rival: PeakPass) -> bool:
        """True if this pass dominates another of its kind, whatever the bytes of each class."""
        return self.made >= rival.made and all(map(ge, self._held, rival._held))


def peak_bytes(
    strategy: Strategy,
    rank: int,
    layers: Mapping[LayerChoice, LayerBytes],
    constant: ConstantBytes,
    besides: Sequence[float] = (),
) -> float:
    """The peak of activations, temporaries and gradients on a device of pipeline rank `rank`.

    besides    bytes that each of its chunks saves of a micro-batch besides its layers, if any
    """
    chunks = [
        [
            *([_besides(beside)] if beside else []),
            *(
                AlikeLayers(choice.kind, layers[choice], len(list(alike)))
                for choice, alike in groupby(chunk)
            ),
        ]
        for chunk, beside in zip_longest(strategy.chunks(rank), besides)
    ]
    return float(peak_of_runs(strategy.layout, rank, chunks, constant))


def _besides(saved_bytes: float) -> AlikeLayers:
    return AlikeLayers(LayerKind.BLOCK, LayerBytes(saved=saved_bytes, workspace=0, gradients=0))


def peak_of_runs(
    layout: ParallelLayout,
    rank: int,
    chunks: Sequence[Sequence[AlikeLayers]],
    constant: ConstantBytes,
) -> Bytes:
    """The peak over all passes of chunks that are runs of layers, and after the last pass."""
    saved = [sum(run.count * run.held.saved for run in chunk) for chunk in chunks]
    remade = [sum(run.count * run.held.remade for run in chunk) for chunk in chunks]
    gradients = [sum(run.count * run.held.gradients for run in chunk) for chunk in chunks]
    passes, sent = passes_of(layout, rank)
    peak = sum(gradients) + sent * constant.sent + constant.reduced
    fullest: dict[Hashable, tuple[PeakPass, Bytes]] = {}
    for peak_pass in passes:  # passes of one kind add the same bytes to their level
        level = (
            constant.gathered
            + peak_pass.sent * constant.sent
            + sum(gradients[chunk] for chunk in peak_pass.made)
        )
        level = level + sum(n * held for n, held in zip(peak_pass.stashes, saved, strict=True))
        level = level + sum(n * held for n, held in zip(peak_pass.remade, remade, strict=True))
        _, known = fullest.get(peak_pass.kind, (peak_pass, level))
        fullest[peak_pass.kind] = peak_pass, np.maximum(level, known)
    for peak_pass, level in fullest.values():
        reducing = _reducing(chunks, peak_pass.before)
        if not peak_pass.backward:
            peak = np.maximum(
                peak,
                level
                + reducing
                + reduce(np.maximum, (run.held.gathered for run in chunks[peak_pass.chunk])),
            )
            continue
        for level_bytes in _levels(peak_pass, chunks[peak_pass.chunk], level, reducing, constant):
            peak = np.maximum(peak, level_bytes)
    return peak


def _levels(
    peak_pass: PeakPass,
    chunk: Sequence[AlikeLayers],
    level: Bytes,
    reducing: Bytes,
    constant: ConstantBytes,
) -> Iterator[Bytes]:
    """Yields the bytes held while the layers of a chunk run backward.

    The first, second and last layer of a run include its peak.
    """
    waits = {LayerKind.HEAD: constant.shared_table, LayerKind.EMBEDDING: -constant.shared_table}
    for run in reversed(chunk):
        held = run.held
        workspace = held.alone if peak_pass.ahead else held.workspace
        inside = held.gathered + np.maximum(workspace, held.reduced)
        step = (held.gradients if peak_pass.first else 0.0) - held.saved
        if peak_pass.ahead:
            step = step - held.remade
        yield _where(run.count, 1, level + inside + reducing)
        reducing = np.where(_reduces(run), held.reduced, reducing)
        if not (isinstance(run.count, int) and run.count == 1):
            later = np.maximum(step, (run.count - 1) * step)
            yield _where(run.count, 2, level + inside + reducing + later)
        level = level + run.count * step + waits.get(run.kind.role, 0.0)


def _where(count: Bytes, least: int, level: Bytes) -> Bytes:
    """Returns the level where a run has at least so many layers."""
    if isinstance(count, int):
        return level if count >= least else -np.inf
    return np.where(np.asarray(count) >= least, level, -np.inf)


def _reduces(run: AlikeLayers) -> Bytes:
    return (np.asarray(run.count) > 0) & (np.asarray(run.held.reduced) > 0)


def _reducing(chunks: Sequence[Sequence[AlikeLayers]], before: Iterable[int]) -> Bytes:
    reducing: Bytes = 0.0
    for run in (run for chunk in reversed(tuple(before)) for run in reversed(chunks[chunk])):
        reducing = np.where(_reduces(run), run.held.reduced, reducing)
    return reducing


@lru_cache(maxsize=4096)
def passes_of(layout: ParallelLayout, rank: int) -> tuple[tuple[PeakPass, ...], int]:
    """Returns the passes of a rank that include its peak for all layer sizes.

    The second value is the number of messages that the rank sends in a step.
    """
    stages = layout.stages_of(rank)
    ends = tuple((stage == 0, stage == layout.num_virtual_stages - 1) for stage in stages)
    if layout.schedule is Schedule.CUSTOM:
        return _passes(layout.orders()[rank], ends)
    return _passes_of_schedule(
        layout.schedule,
        rank,
        layout.mesh.pp,
        layout.num_micro_batches,
        layout.virtual_stages,
        ends,
    )


@lru_cache(maxsize=4096)
def _passes_of_schedule(
    schedule: Schedule,
    rank: int,
    num_ranks: int,
    num_micro_batches: int,
    virtual_stages: int,
    ends: tuple[tuple[bool, bool], ...],
) -> tuple[tuple[PeakPass, ...], int]:
    """Returns the passes of a rank, shared by layouts of a schedule whose meshes differ."""
    order = actions(schedule, rank, num_ranks, num_micro_batches, virtual_stages)
    return _passes(order, ends)


def _passes(
    order: tuple[Action, ...], ends: tuple[tuple[bool, bool], ...]
) -> tuple[tuple[PeakPass, ...], int]:
    kept: dict[Hashable, list[PeakPass]] = {}  # by kind
    chunks = range(len(ends))
    stashes = [0 for _ in chunks]
    remade = [0 for _ in chunks]
    sent = 0
    made = frozenset[int]()
    before = tuple[int, ...]()
    ahead = set[tuple[int, int]]()
    for action in order:
        chunk = action.chunk
        micro_batch = (chunk, action.micro_batch)
        begins, is_last = ends[chunk]
        if action.work is ActionKind.FORWARD:
            stashes[chunk] += 1
            sent += not is_last
            continue
        backward = action.work is not ActionKind.RECOMPUTE
        if not backward:
            ahead.add(micro_batch)
            remade[chunk] += 1
        peak_pass = PeakPass(
            chunk,
            backward,
            backward and micro_batch in ahead,
            tuple(stashes),
            tuple(remade),
            sent,
            made,
            before,
        )
        alike = kept.get(peak_pass.kind, [])
        if not any(rival.holds_no_less(peak_pass) for rival in alike):
            left = (rival for rival in alike if not peak_pass.holds_no_less(rival))
            kept[peak_pass.kind] = [*left, peak_pass]
        if backward:
            stashes[chunk] -= 1
            remade[chunk] -= peak_pass.ahead
            sent += not begins
            made = made | {chunk}
            before = (chunk, *(earlier for earlier in before if earlier != chunk))
    return tuple(chain.from_iterable(kept.values())), sent
