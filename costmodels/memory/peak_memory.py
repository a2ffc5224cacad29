"""The peak of a rank whose gradients come and go, from its actions layer by layer.

`rank_memory` adds up classes, each at its maximum (EQUATIONS M6). If gradients are freed after
every update, the first backward pass makes gradients while it frees activations: after all forward
passes no moment holds the maximum of both.

The bytes of a layer, and the number of layers of a run, may be numbers or arrays: a search asks for
many mixes at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import groupby, zip_longest
from operator import attrgetter, ge
from typing import Any

import numpy as np
import numpy.typing as npt

from parplan.costmodels.schedules.actions import Action, ActionKind
from parplan.costmodels.schedules.schedule import Schedule, actions
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

Array = npt.NDArray[np.float64]
Bytes = Any  # a number, or an array with one for each mix
# chunks whose gradients exist; stashes and remade micro-batches by chunk, and messages
_Held = tuple[frozenset[int], tuple[int, ...]]


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


_FIELDS = tuple(field.name for field in fields(LayerBytes))
_by_field = attrgetter(*_FIELDS)


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """A run of `count` consecutive layers of a chunk with equal bytes.

    Arrays [layer, mix] instead are the bytes of a row of different layers.
    """

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
    return float(peak_of_runs(strategy.layout, rank, chunks, constant).item())


def _besides(saved_bytes: float) -> AlikeLayers:
    return AlikeLayers(LayerKind.BLOCK, LayerBytes(saved=saved_bytes, workspace=0, gradients=0))


def peak_of_runs(
    layout: ParallelLayout,
    rank: int,
    chunks: Sequence[Sequence[AlikeLayers]],
    constant: ConstantBytes,
) -> Array:
    """The peak by mix over all passes of chunks that are runs of layers, and after the last."""
    shapes = [np.shape(run.held.saved) for chunk in chunks for run in chunk]
    mixes = max((shape[-1] for shape in shapes if shape), default=1)
    by_chunk = [_chunk_bytes(chunk, mixes) for chunk in chunks]
    saved, remade, gradients = (
        [each.total(name) for each in by_chunk] for name in ("saved", "remade", "gradients")
    )
    peak = sum(gradients) + passes_of(layout, rank)[1] * constant.sent + constant.reduced
    for alike in _passes_by_kind(layout, rank):
        levels = (
            constant.gathered
            + alike.sent * constant.sent
            + _over_chunks(alike.made, gradients)
            + _over_chunks(alike.stashes, saved)
            + _over_chunks(alike.remade, remade)
        )
        level = levels.max(axis=0)  # passes of one kind add the same bytes to their level
        peak_pass = alike.first
        reducing = np.zeros(mixes)
        for before in reversed(peak_pass.before):
            reducing = by_chunk[before].reducing(reducing)[-1]
        chunk = by_chunk[peak_pass.chunk]
        if peak_pass.backward:
            highest = _highest(peak_pass, chunk, level, reducing, constant.shared_table)
        else:
            highest = level + reducing + chunk.held.gathered.max(axis=0)
        peak = np.maximum(peak, highest)
    return np.asarray(peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AlikePasses:
    """Passes of one kind, as arrays [pass, 1] and by chunk [chunk, pass, 1]; see `PeakPass`."""

    first: PeakPass
    sent: Array
    made: Array
    stashes: Array
    remade: Array


@lru_cache(maxsize=4096)
def _passes_by_kind(layout: ParallelLayout, rank: int) -> tuple[_AlikePasses, ...]:
    by_kind: dict[Hashable, list[PeakPass]] = {}
    for peak_pass in passes_of(layout, rank)[0]:
        by_kind.setdefault(peak_pass.kind, []).append(peak_pass)
    return tuple(
        _AlikePasses(
            first=alike[0],
            sent=np.array([[each.sent] for each in alike], np.float64),
            made=_by_chunk(
                [[chunk in each.made for chunk in range(len(each.stashes))] for each in alike]
            ),
            stashes=_by_chunk([each.stashes for each in alike]),
            remade=_by_chunk([each.remade for each in alike]),
        )
        for alike in by_kind.values()
    )


def _by_chunk(by_pass: Sequence[Sequence[int]]) -> Array:
    return np.array(by_pass, np.float64).T[:, :, None]


def _over_chunks(counts: Array, held: Sequence[Array]) -> Array:
    """Sums counts [chunk, pass, 1] times bytes [mix] of each chunk."""
    total: Array = sum(n * each for n, each in zip(counts, held, strict=True))
    return total


@dataclass(frozen=True, slots=True)
class _ChunkBytes:
    """The runs of a chunk, the last first as backward passes take them.

    roles          embedding, block or head, by run
    held, count    bytes and number of layers, as arrays [run, mix]
    in_reduction   bytes in reduction before each run and, as last entry, after all runs: those of
                   the latest run that reduces, 0 before the first
    """

    roles: tuple[LayerKind, ...]
    held: LayerBytes
    count: Array
    in_reduction: Array

    def total(self, name: str) -> Array:
        """Sums a field of `LayerBytes` over all layers, the first run first."""
        by_run = self.count * getattr(self.held, name)
        return np.asarray(np.add.accumulate(by_run[::-1])[-1])

    def reducing(self, before: Array) -> Array:
        """Returns `in_reduction` if the bytes `before` are in reduction when the chunk begins."""
        return np.where(self.in_reduction > 0, self.in_reduction, before)


def _chunk_bytes(chunk: Sequence[AlikeLayers], mixes: int) -> _ChunkBytes:
    """Returns the runs of a chunk as arrays; a row of different layers becomes a run for each."""
    runs = chunk[::-1]
    sizes = [len(run.held.saved) if np.ndim(run.held.saved) > 1 else 1 for run in runs]
    table = np.empty((len(_FIELDS) + 1, sum(sizes), mixes))
    roles: list[LayerKind] = []
    for run, size in zip(runs, sizes, strict=True):
        rows = slice(len(roles), len(roles) + size)
        for values, of_run in zip(table, (*_by_field(run.held), run.count), strict=True):
            values[rows] = of_run[::-1] if np.ndim(of_run) > 1 else of_run
        roles += [run.kind.role] * size
    held = LayerBytes(**dict(zip(_FIELDS, table, strict=False)))
    return _ChunkBytes(tuple(roles), held, table[-1], _in_reduction(held.reduced, table[-1]))


def _in_reduction(reduced: Array, count: Array) -> Array:
    """Returns `_ChunkBytes.in_reduction`."""
    latest = np.zeros((len(reduced) + 1, reduced.shape[1]))
    if not reduced.any():
        return latest
    for run, (bytes_of, layers) in enumerate(zip(reduced, count, strict=True)):
        latest[run + 1] = np.where((layers > 0) & (bytes_of > 0), bytes_of, latest[run])
    return latest


def _highest(
    peak_pass: PeakPass, chunk: _ChunkBytes, level: Array, reducing: Array, shared_table: float
) -> Array:
    """The most bytes by mix while the layers of a chunk run backward.

    The first, second and last layer of a run include its peak.
    """
    held, count = chunk.held, chunk.count
    workspace = held.alone if peak_pass.ahead else held.workspace
    inside = held.gathered + np.maximum(workspace, held.reduced)
    step = (held.gradients if peak_pass.first else 0.0) - held.saved
    if peak_pass.ahead:
        step = step - held.remade
    waits = {LayerKind.HEAD: shared_table, LayerKind.EMBEDDING: -shared_table}
    steps = np.zeros((1 + 2 * len(count), count.shape[1]))
    steps[0] = level
    steps[1::2] = count * step
    steps[2::2] = np.array([waits.get(role, 0.0) for role in chunk.roles])[:, None]
    levels = np.add.accumulate(steps)[:-1:2] + inside
    in_reduction = chunk.reducing(reducing)
    highest = np.where(count >= 1, levels + in_reduction[:-1], -np.inf).max(axis=0)
    if (count > 1).any():
        later = np.maximum(step, (count - 1) * step)
        second = np.where(count >= 2, levels + in_reduction[1:] + later, -np.inf)
        highest = np.maximum(highest, second.max(axis=0))
    return np.asarray(highest)


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
    # by `PeakPass.kind`, the passes that no other dominates
    kept: dict[tuple[int, bool, bool, bool, tuple[int, ...]], list[_Held]] = {}
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
        is_ahead = backward and micro_batch in ahead
        held = made, (*stashes, *remade, sent)
        alike = kept.setdefault((chunk, backward, is_ahead, chunk not in made, before), [])
        if not any(_holds_no_less(rival, held) for rival in alike):
            alike[:] = [rival for rival in alike if not _holds_no_less(held, rival)]
            alike.append(held)
        if backward:
            stashes[chunk] -= 1
            remade[chunk] -= is_ahead
            sent += not begins
            made = made | {chunk}
            before = (chunk, *(earlier for earlier in before if earlier != chunk))
    num = len(ends)
    passes = (
        PeakPass(kind[0], kind[1], kind[2], held[:num], held[num:-1], held[-1], made, kind[4])
        for kind, alike in kept.items()
        for made, held in alike
    )
    return tuple(passes), sent


def _holds_no_less(first: _Held, second: _Held) -> bool:
    """True if a pass dominates another of its kind, whatever the bytes of each class."""
    return first[0] >= second[0] and all(map(ge, first[1], second[1]))
