"""Stage columns: for one pipeline rank, every block count with its best ways to run, priced and within memory.

A rank runs its blocks on counts (none, selective, full) of the recompute levels, in that order, and one ZeRO stage. The
price is a sum over layers, so the counts that add up to n are enumerated exactly, vectorised, and cached: they depend on
the micro-batch and the tensor parallelism alone. Only the points that no other point of the same rank and count beats
become columns of the master (EQUATIONS I4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from costmodels.book import PriceBook
from costmodels.mesh import Mesh
from costmodels.occupancy import occupied_bytes, stashes, usable_bytes
from costmodels.recompute import Recompute
from costmodels.step import rank_receives
from costmodels.strategy import Frame, LayerChoice, Strategy
from planner.request import Constraints
from profiles.model import LayerKind

Array = npt.NDArray[np.float64]
LEVELS = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run one rank: `counts` blocks by recompute level (of the whole rank), at ZeRO stage `zero`.

    time_s of one micro-batch; tail_s after the last one; memory_bytes the peak of a device; redundant_bytes per device.
    """

    counts: tuple[int, ...]
    zero: int
    time_s: float
    tail_s: float
    memory_bytes: float
    redundant_bytes: float

    @property
    def num_blocks(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Mixes:
    """All counts of recompute levels that add up to n blocks, fastest first, with their sums for one micro-batch.

    Time is that of all n blocks, saved bytes are those of one (the longest) chunk of the rank.
    """

    counts: npt.NDArray[np.int64]
    time_s: Array
    saved_bytes: Array
    ideal_saved_bytes: Array
    workspace_bytes: Array


def compositions(total: int, levels: tuple[bool, ...]) -> npt.NDArray[np.int64]:
    """Every tuple of three non-negative counts that adds up to `total`, with zeros where a level is not allowed."""
    first, second = np.meshgrid(np.arange(total + 1), np.arange(total + 1), indexing="ij")
    third = total - first - second
    counts = np.stack([first, second, third], axis=-1).reshape(-1, 3)
    allowed = (counts >= 0).all(axis=1)
    for index, permitted in enumerate(levels):
        if not permitted:
            allowed &= counts[:, index] == 0
    return counts[allowed]


class MixTable:
    """Mixes by (micro-batch, sharding, chunks, number of blocks), each made once."""

    def __init__(self, book: PriceBook, pins: Constraints) -> None:
        self.book = book
        self._zero_stages = pins.zero or (0, 1, 2, 3)
        self._levels = tuple(pins.recompute is None or level in pins.recompute for level in LEVELS)
        self._known: dict[tuple[object, ...], Mixes] = {}

    def zero_choices(self, mesh: Mesh) -> tuple[int, ...]:
        """The ZeRO stages to choose from: without data parallelism there is nothing to shard."""
        return self._zero_stages if mesh.dp > 1 else (0,)

    @property
    def allowed_levels(self) -> tuple[Recompute, ...]:
        return tuple(level for level, allowed in zip(LEVELS, self._levels, strict=True) if allowed)

    def get(self, frame: Frame, num_blocks: int) -> Mixes:
        """Mixes of `num_blocks` blocks of one rank; with virtual stages every chunk has the same mix."""
        key = (frame.micro_batch_size, frame.sharding, frame.virtual_stages, num_blocks)
        if key not in self._known:
            self._known[key] = self._make(frame, num_blocks)
        return self._known[key]

    def _make(self, frame: Frame, num_blocks: int) -> Mixes:
        b, sharding = frame.micro_batch_size, frame.sharding
        times = np.array([self.book.layer_time(LayerKind.BLOCK, b, sharding, level).total_s for level in LEVELS])
        sizes = [self.book.activations(LayerKind.BLOCK, b, sharding, level) for level in LEVELS]
        chunk = compositions(-(-num_blocks // frame.virtual_stages), self._levels)
        counts = chunk * frame.virtual_stages
        if num_blocks % frame.virtual_stages:  # the shorter chunk lacks a block of its last level
            last = chunk.shape[1] - 1 - (chunk[:, ::-1] > 0).argmax(axis=1)
            counts[np.arange(len(counts)), last] -= 1
        time_s, saved = counts @ times, chunk @ np.array([float(size.saved) for size in sizes])
        order = np.lexsort((saved, time_s))
        return Mixes(
            counts=counts[order], time_s=time_s[order], saved_bytes=saved[order],
            ideal_saved_bytes=(chunk @ np.array([size.ideal_saved for size in sizes]))[order],
            workspace_bytes=((counts > 0) * np.array([float(size.workspace) for size in sizes])).max(axis=1)[order])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fixed:
    """What a rank pays at one ZeRO stage besides the compute of its blocks; blocks scale with their number."""

    time_s: float
    block_time_s: float
    tail_s: float
    block_tail_s: float
    states: float
    block_states: float
    ideal_states: float
    block_ideal_states: float
    ends_held: float
    ends_ideal_held: float
    embedding_workspace: float
    head_workspace: float
    zero_buffer: float
    step_copies: float
    block_step_copies: float
    used_up: float  # what the head no longer keeps when the temporaries of other layers are there


def end_kinds(rank: int, pp: int) -> tuple[LayerKind, ...]:
    """Which of embedding and head a pipeline rank holds."""
    return (LayerKind.EMBEDDING,) * (rank == 0) + (LayerKind.HEAD,) * (rank == pp - 1)


def _fixed(rank: int, frame: Frame, zero: int, book: PriceBook) -> _Fixed:
    b, mesh, sharding = frame.micro_batch_size, frame.mesh, frame.sharding
    block = book.data_parallel(LayerKind.BLOCK, b, mesh, sharding, zero)
    of_block = book.states(LayerKind.BLOCK, mesh, sharding, zero)
    buffer, step_copies = of_block.zero_buffer, 0
    time_s = rank_receives(rank, frame, book).value_s
    tail_s = book.tied_reduction(mesh, sharding).value_s if book.tied and mesh.pp > 1 and rank in (0, mesh.pp - 1) else 0.0
    ends_states = ends_ideal = ends_held = ends_ideal_held = used_up = 0.0
    workspaces = dict.fromkeys(LayerKind, -np.inf)
    for kind in end_kinds(rank, mesh.pp):
        data = book.data_parallel(kind, b, mesh, sharding, zero)
        kept = book.activations(kind, b, sharding)
        held = book.states(kind, mesh, sharding, zero)
        time_s += book.layer_time(kind, b, sharding).total_s + data.per_micro_batch_s
        tail_s += data.per_step_s
        ends_states, ends_ideal, step_copies = ends_states + held.states.total, ends_ideal + sum(held.ideal), step_copies + held.step_copies
        ends_held += stashes(kind, rank, frame) * kept.saved
        ends_ideal_held += stashes(kind, rank, frame) * kept.ideal_saved
        workspaces[kind], buffer = kept.workspace, max(buffer, held.zero_buffer)
        used_up += kept.saved * (kind is LayerKind.HEAD)
    return _Fixed(
        time_s=time_s, block_time_s=block.per_micro_batch_s, tail_s=tail_s, block_tail_s=block.per_step_s,
        states=ends_states, block_states=of_block.states.total, ideal_states=ends_ideal, block_ideal_states=sum(of_block.ideal),
        ends_held=ends_held, ends_ideal_held=ends_ideal_held, zero_buffer=buffer,
        embedding_workspace=workspaces[LayerKind.EMBEDDING], head_workspace=workspaces[LayerKind.HEAD], used_up=used_up,
        step_copies=step_copies, block_step_copies=of_block.step_copies)


class RankColumns:
    """The columns of one pipeline rank of a frame, made for one block count at a time."""

    def __init__(self, rank: int, frame: Frame, table: MixTable) -> None:
        self.rank, self.frame, self.table = rank, frame, table
        self.stages = table.zero_choices(frame.mesh)
        self._fixed = {zero: _fixed(rank, frame, zero, table.book) for zero in self.stages}
        self._stashes = stashes(LayerKind.BLOCK, rank, frame)

    def _priced(self, num_blocks: int, zero: int) -> tuple[Mixes, Array, Array, Array, float]:
        """Mixes with their time, bytes to allocate and redundant bytes, and the tail, at ZeRO stage `zero`."""
        fixed, mixes = self._fixed[zero], self.table.get(self.frame, num_blocks)
        of_layers = np.maximum(mixes.workspace_bytes, fixed.embedding_workspace - mixes.saved_bytes) - fixed.used_up
        temporaries = np.maximum(of_layers, fixed.head_workspace) + fixed.zero_buffer
        states = fixed.states + num_blocks * fixed.block_states
        held = self._stashes * mixes.saved_bytes + fixed.ends_held
        ideal = fixed.ideal_states + num_blocks * fixed.block_ideal_states + self._stashes * mixes.ideal_saved_bytes + fixed.ends_ideal_held
        allocated = states + held + temporaries
        time_s = mixes.time_s + fixed.time_s + num_blocks * fixed.block_time_s
        reserved = (fixed.step_copies + num_blocks * fixed.block_step_copies) / (1 + self.table.book.training.stack.allocator_share)
        return mixes, time_s, allocated + reserved, allocated - ideal, fixed.tail_s + num_blocks * fixed.block_tail_s

    def _column(self, mixes: Mixes, index: int, zero: int, time_s: float, tail_s: float, allocated: float, redundant: float) -> Column:
        memory = occupied_bytes(allocated, self.frame.mesh, self.table.book)
        counts = tuple(int(count) for count in mixes.counts[index])
        return Column(counts, zero, float(time_s), float(tail_s), float(memory), float(redundant))

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """Per ZeRO stage the fastest mix within `limit_bytes`; the tails of ZeRO stages differ, so none is left out."""
        usable = usable_bytes(limit_bytes, self.frame.mesh, self.table.book)
        found = []
        for zero in self.stages:
            mixes, time_s, allocated, redundant, tail_s = self._priced(num_blocks, zero)
            fits = allocated <= usable
            if fits.any():
                best = int(fits.argmax())
                found.append(self._column(mixes, best, zero, time_s[best], tail_s, allocated[best], redundant[best]))
        return _undominated(found, key=lambda c: (c.time_s, c.tail_s))

    def leanest(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """Every mix within `limit_bytes` that no other beats in time, tail and redundant bytes together."""
        usable = usable_bytes(limit_bytes, self.frame.mesh, self.table.book)
        found = []
        for zero in self.stages:
            mixes, time_s, allocated, redundant, tail_s = self._priced(num_blocks, zero)
            fits = np.flatnonzero(allocated <= usable)
            lowest = np.minimum.accumulate(redundant[fits]) if len(fits) else fits
            front = fits[np.concatenate(([True], redundant[fits][1:] < lowest[:-1]))] if len(fits) else fits
            found += [self._column(mixes, i, zero, time_s[i], tail_s, allocated[i], redundant[i]) for i in front]
        return _undominated(found, key=lambda c: (c.time_s, c.tail_s, c.redundant_bytes))

    def smallest(self, num_blocks: int) -> Column:
        """The mix and ZeRO stage with the lowest peak memory, whatever its time."""
        found = []
        for zero in self.stages:
            mixes, time_s, allocated, redundant, tail_s = self._priced(num_blocks, zero)
            best = int(allocated.argmin())
            found.append(self._column(mixes, best, zero, time_s[best], tail_s, allocated[best], redundant[best]))
        return min(found, key=lambda column: column.memory_bytes)


def _undominated(columns: list[Column], key: Callable[[Column], tuple[float, ...]]) -> list[Column]:
    """The columns that no other beats or equals in every criterion; of equals the one with least memory."""
    ranked = sorted(columns, key=lambda column: (*key(column), column.memory_bytes))
    kept: list[Column] = []
    for column in ranked:
        if not any(all(a <= b for a, b in zip(key(other), key(column), strict=True)) for other in kept):
            kept.append(column)
    return kept


def to_strategy(frame: Frame, columns: tuple[Column, ...]) -> Strategy:
    """The strategy that runs rank s on `columns[s]`: embedding first, blocks by recompute level, head last."""
    pp, stages = frame.mesh.pp, []
    for stage in range(frame.num_virtual_stages):
        column = columns[stage % pp]
        blocks = [
            LayerChoice(LayerKind.BLOCK, level, column.zero)
            for level, count in zip(LEVELS, column.counts, strict=True) for _ in range(-(-count // frame.virtual_stages))
        ]
        if column.num_blocks % frame.virtual_stages and stage in (0, frame.num_virtual_stages - 1):
            blocks.pop()
        first = [LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, column.zero)] * (stage == 0)
        last = [LayerChoice(LayerKind.HEAD, Recompute.NONE, column.zero)] * (stage == frame.num_virtual_stages - 1)
        stages.append((*first, *blocks, *last))
    return Strategy(frame=frame, stages=tuple(stages))


def shorter_ends(frame: Frame, num_layers: int) -> bool | None:
    """How virtual stages share the blocks: False equally, True with one block less on the first and on the last.

    The embedding and the head then take the place of a block, as in Llama 3 (arXiv 2407.21783, section 3.3.2). None when
    neither divides the blocks into whole stages.
    """
    if num_layers % frame.num_virtual_stages == 0:
        return False
    return True if (num_layers + 2) % frame.num_virtual_stages == 0 and frame.mesh.pp > 1 else None


def block_counts(rank: int, frame: Frame, num_layers: int, longest: int | None = None) -> Iterator[int]:
    """How many blocks one rank may hold: given by `shorter_ends` with virtual stages, else from one to `longest`."""
    pp = frame.mesh.pp
    if pp == 1:
        yield num_layers
    elif frame.virtual_stages > 1:
        missing = 2 if shorter_ends(frame, num_layers) else 0
        yield (num_layers + missing) // pp - (missing > 0 and rank in (0, pp - 1))
    else:
        yield from range(1, min(num_layers - pp + 1, longest or num_layers) + 1)
