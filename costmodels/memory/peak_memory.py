"""The fullest moment of a rank whose gradients come and go: its actions one after the other, each
backward pass layer by layer.

`rank_memory` adds up classes, each at its most (EQUATIONS M6). Where gradients are freed after
every update, the first backward pass makes them while it frees activations, and with all forward
passes before it there is no moment that has both.

The bytes of a layer, and how many layers a run has, may be numbers or arrays of them: a search asks
for many mixes at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import groupby
from typing import Any

import numpy as np

from parplan.costmodels.schedules.actions import Action, ActionKind
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.models.operator_graph import LayerKind

Bytes = Any  # a number, or an array with one for each mix


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer on one rank: kept of a micro-batch, temporary in its passes, of its
    gradients, and of ZeRO.

    gathered   parameters, of this layer and the one that is gathered ahead
    reduced    whole gradients of one micro-batch: there at the end of the layer's backward pass,
               and as what is reduced until the next layer's are
    remade     what a recompute ahead of the gradient adds to what is kept of the micro-batch
    alone      temporary in a backward pass after that
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
    """`count` layers of a chunk, one after the other, each of which holds the same."""

    kind: LayerKind
    held: LayerBytes
    count: Bytes = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBytes:
    """Bytes of a rank that no layer's pass frees.

    sent          of what a stage hands on, or back, of a micro-batch: kept until the step is over
    shared_table  the head's gradient of a token table that the embedding shares: held until the
                  embedding's is there
    gathered      parameters that stay gathered through the passes, because their layer begins and
                  ends them
    reduced       the largest buffer of a reduction after the last backward pass
    """

    sent: Bytes = 0.0
    shared_table: Bytes = 0.0
    gathered: Bytes = 0.0
    reduced: Bytes = 0.0


@dataclass(frozen=True, slots=True)
class PeakPass:
    """The begin of a backward pass of a chunk, or of a recompute ahead of one, and what the rank
    holds then.

    stashes, remade   by chunk: micro-batches that it holds, and how many of them were recomputed
                      ahead
    sent              messages of the rank until then
    made              chunks whose gradients are there, the chunk itself not among them in its first
                      pass
    before            chunks by their last backward pass, the latest first
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

    def holds_no_less(self, other: PeakPass) -> bool:
        """Whether the level at this moment is at least the other's, whatever the bytes of each, and
        the pass the same.
        """
        alike = (self.chunk, self.backward, self.ahead, self.first, self.before) == (
            other.chunk,
            other.backward,
            other.ahead,
            other.first,
            other.before,
        )
        mine, theirs = ((*one.stashes, *one.remade, one.sent) for one in (self, other))
        return (
            alike
            and self.made >= other.made
            and all(a >= b for a, b in zip(mine, theirs, strict=True))
        )


def peak_bytes(
    strategy: Strategy,
    rank: int,
    layers: Mapping[LayerChoice, LayerBytes],
    throughout: ConstantBytes,
) -> float:
    """The most of activations, temporaries and gradients at once on a device of pipeline rank
    `rank`.
    """
    chunks = [
        [
            AlikeLayers(choice.kind, layers[choice], len(list(alike)))
            for choice, alike in groupby(chunk)
        ]
        for chunk in strategy.chunks(rank)
    ]
    return float(peak_of_runs(strategy.layout, rank, chunks, throughout))


def peak_of_runs(
    layout: ParallelLayout,
    rank: int,
    chunks: Sequence[Sequence[AlikeLayers]],
    throughout: ConstantBytes,
) -> Bytes:
    """The same of chunks that are runs of layers: the largest of the levels in every pass, and
    after the last.
    """
    saved, remade, gradients = (
        [sum(run.count * getattr(run.held, name) for run in chunk) for chunk in chunks]
        for name in ("saved", "remade", "gradients")
    )
    passes, sent = passes_of(layout, rank)
    found = sum(gradients) + sent * throughout.sent + throughout.reduced
    for one in passes:
        level = (
            throughout.gathered
            + one.sent * throughout.sent
            + sum(gradients[chunk] for chunk in one.made)
        )
        level = level + sum(held * of_one for held, of_one in zip(one.stashes, saved, strict=True))
        level = level + sum(held * of_one for held, of_one in zip(one.remade, remade, strict=True))
        reducing = _reducing(chunks, one.before)
        if not one.backward:
            found = np.maximum(
                found,
                level
                + reducing
                + reduce(np.maximum, (run.held.gathered for run in chunks[one.chunk])),
            )
            continue
        for level_bytes in _levels(one, chunks[one.chunk], level, reducing, throughout):
            found = np.maximum(found, level_bytes)
    return found


def _levels(
    one: PeakPass,
    chunk: Sequence[AlikeLayers],
    level: Bytes,
    reducing: Bytes,
    throughout: ConstantBytes,
) -> Iterator[Bytes]:
    """What is held while each layer of a chunk runs backward: of a run its first layer, its second
    and its last say all.
    """
    waits = {LayerKind.HEAD: throughout.shared_table, LayerKind.EMBEDDING: -throughout.shared_table}
    for run in reversed(chunk):
        held, there = run.held, np.asarray(run.count) > 0
        inside = held.gathered + np.maximum(
            held.alone if one.ahead else held.workspace, held.reduced
        )
        step = one.first * held.gradients - held.saved - one.ahead * held.remade
        yield np.where(there, level + inside + reducing, -np.inf)
        reducing = np.where(there & (np.asarray(held.reduced) > 0), held.reduced, reducing)
        later = np.maximum(step, (run.count - 1) * step)
        yield np.where(np.asarray(run.count) > 1, level + inside + reducing + later, -np.inf)
        level = level + run.count * step + waits.get(run.kind, 0.0)


def _reducing(chunks: Sequence[Sequence[AlikeLayers]], before: Iterable[int]) -> Bytes:
    """What is still reduced of the last layer that ran backward and reduces."""
    found: Bytes = 0.0
    for run in (run for chunk in reversed(tuple(before)) for run in reversed(chunks[chunk])):
        found = np.where(
            (np.asarray(run.count) > 0) & (np.asarray(run.held.reduced) > 0),
            run.held.reduced,
            found,
        )
    return found


@lru_cache(maxsize=4096)
def passes_of(layout: ParallelLayout, rank: int) -> tuple[tuple[PeakPass, ...], int]:
    """The passes of a rank of which one has the fullest moment, whatever the bytes, and how many
    messages it sends in a step.
    """
    stages = layout.stages_of(rank)
    ends = tuple((stage == 0, stage == layout.num_virtual_stages - 1) for stage in stages)
    return _passes(layout.orders()[rank], ends)


def _passes(
    order: tuple[Action, ...], ends: tuple[tuple[bool, bool], ...]
) -> tuple[tuple[PeakPass, ...], int]:
    kept: list[PeakPass] = []
    chunks = range(len(ends))
    stashes, remade = [0 for _ in chunks], [0 for _ in chunks]
    sent, made, before, ahead = 0, frozenset[int](), tuple[int, ...](), set[tuple[int, int]]()
    for action in order:
        chunk, micro_batch = action.chunk, (action.chunk, action.micro_batch)
        begins, is_last = ends[chunk]
        if action.work is ActionKind.FORWARD:
            stashes[chunk] += 1
            sent += not is_last
            continue
        backward = action.work is not ActionKind.RECOMPUTE
        if not backward:
            ahead.add(micro_batch)
            remade[chunk] += 1
        one = PeakPass(
            chunk,
            backward,
            backward and micro_batch in ahead,
            tuple(stashes),
            tuple(remade),
            sent,
            made,
            before,
        )
        if not any(other.holds_no_less(one) for other in kept):
            kept = [*(other for other in kept if not one.holds_no_less(other)), one]
        if backward:
            stashes[chunk] -= 1
            remade[chunk] -= one.ahead
            sent += not begins
            made, before = made | {chunk}, (chunk, *(other for other in before if other != chunk))
    return tuple(kept), sent
