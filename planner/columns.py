"""Stage columns: for one pipeline rank, every block count with its best ways to run, priced and within memory.

A rank runs its blocks on a mix of the catalogue's options (planner/mixes.py) at one ZeRO stage. The price is a sum over
layers, so the mixes of n blocks are priced at once, vectorised; they depend on the micro-batch and the sharding alone. Only
the points that no other point of the same rank and count beats become columns of the master (EQUATIONS I4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from costmodels.book import PriceBook
from costmodels.chunks.home import Home
from costmodels.chunks.memory import prices_of
from costmodels.chunks.price import BlockCost
from costmodels.mesh import Mesh
from costmodels.moments import Moment, moments
from costmodels.occupancy import occupied_bytes, peaks, sent_bytes, stashes, usable_bytes
from costmodels.passes import plain_and_ramp
from costmodels.recompute import Recompute
from costmodels.schedules import Schedule
from costmodels.sharding import Sharding
from costmodels.step import rank_edges, rank_receives
from costmodels.strategy import Frame, LayerChoice, Strategy
from planner.chunk_costs import HomeCosts, Tensors, block_costs, home_costs, host_share_bytes, tensors_of
from planner.fronts import Ints, front
from planner.homes import NOTHING, Homes, in_homes
from planner.host_plans import sends_activations, with_host
from planner.layer_plans import LayerOption, catalogue_of
from planner.mixes import Hull, Mixes, Pairs, column_of, exhaustive, hulls, make_mixes, option_pairs, pure_mixes, widest
from planner.request import Constraints
from profiles.model import LayerKind

Array = npt.NDArray[np.float64]
PICOSECOND = 12  # decimals of seconds
Mix = tuple[tuple[LayerOption, int], ...]
_Kind = tuple[int, Sharding, bool, bool]  # what options depend on


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run one rank: how many of its blocks on which option, at ZeRO stage `zero`.

    time_s of one micro-batch; tail_s after the last one; memory_bytes the peak of a device; redundant_bytes per device.
    plain_s, ramp_s: of time_s what there is without recompute, and in the ramps of the pipeline (costmodels/passes.py)
    homes: where the states of its blocks lie, of a frame in chunks
    """

    mix: Mix
    zero: int
    time_s: float
    tail_s: float
    memory_bytes: float
    redundant_bytes: float
    plain_s: float
    ramp_s: float
    homes: Homes = NOTHING

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.mix)


@dataclass(frozen=True, slots=True)
class Pace:
    """What a rank may take in a plan of a frame: `repeats` micro-batches and its tail in `room_s` seconds."""

    repeats: float
    room_s: float

    def within(self, time_s: Array, tail_s: Array | float) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self.repeats * time_s + tail_s <= self.room_s
        return found


class MixTable:
    """Catalogue and mixes by (micro-batch, sharding, chunks, number of blocks), each made once."""

    def __init__(self, book: PriceBook, pins: Constraints) -> None:
        self.book = book
        self.catalogue = catalogue_of(book, pins)
        self.offload, self.host_share_bytes = pins.offload or (), host_share_bytes(book.machine.cluster)
        self._zero_stages = pins.zero or (0, 1, 2, 3)
        self._known: dict[tuple[int, Sharding, bool, bool, int, int], Mixes] = {}
        self._hulls: dict[_Kind, tuple[Hull, ...]] = {}
        self._block_costs: dict[tuple[Mesh, int, int, Sharding], dict[Home, BlockCost]] = {}
        self._divisions: dict[_Kind, dict[Tensors, Sharding]] = {}
        self._tensors: dict[Sharding, Tensors] = {}
        self._homes: dict[tuple[Mesh, int, int, Sharding, int], HomeCosts] = {}
        self._pairs: dict[_Kind, Pairs] = {}
        self._whole: dict[tuple[int, Sharding], tuple[LayerOption, ...]] = {}
        self._sending: dict[tuple[int, Sharding], tuple[LayerOption, ...]] = {}
        self._blocks: dict[tuple[Mesh, int, Sharding, bool, bool, bool, bool, bool], dict[int, _PerBlock]] = {}

    def zero_choices(self, mesh: Mesh) -> tuple[int, ...]:
        """The ZeRO stages to choose from: without data parallelism there is nothing to shard, only to offload."""
        return self._zero_stages if mesh.dp > 1 or self.book.offloads_states else (0,)

    def zero_stages(self, frame: Frame) -> tuple[int, ...]:
        """Those of `zero_choices` that the frame's schedule can run: stage 3 frees what a split backward still needs, and would
        gather for a recompute ahead of the gradient once more than it is priced for. Chunks are sharded as with stage 3."""
        if frame.chunked:
            return (3,) if frame.mesh.dp > 1 else (0,)
        choices = self.zero_choices(frame.mesh)
        apart = frame.splits_backward or (frame.recomputes_ahead and frame.mesh.dp > 1)
        return tuple(zero for zero in choices if zero < 3) if apart else choices

    def _kind(self, frame: Frame, rank: int) -> _Kind:
        return frame.micro_batch_size, frame.sharding, frame.keeps_all(rank), sends_activations(frame, self.offload)

    def options(self, frame: Frame, rank: int = 0) -> tuple[LayerOption, ...]:
        """The options of the catalogue; where a rank keeps all, those without recompute, or Megatron's where none is allowed.

        Where blocks may send activations to the host, also the variants that do.
        """
        key = frame.micro_batch_size, frame.sharding
        if sends_activations(frame, self.offload):
            if key not in self._sending:
                self._sending[key] = with_host(self.catalogue.options(*key), frame.micro_batch_size, self.catalogue.book)
            return self._sending[key]
        if not frame.keeps_all(rank):
            return self.catalogue.options(*key)
        if key not in self._whole:
            again = self.book.recompute_operators
            kept = tuple(o for o in self.catalogue.options(*key) if not again(LayerKind.BLOCK, o.recompute))
            self._whole[key] = kept or (self.catalogue.preset(Recompute.NONE, *key),)
        return self._whole[key]

    def pairs(self, frame: Frame, rank: int) -> Pairs:
        """Every ordered pair of options, an option with itself included."""
        key = self._kind(frame, rank)
        if key not in self._pairs:
            self._pairs[key] = option_pairs(self.options(frame, rank))
        return self._pairs[key]

    def per_block(self, frame: Frame, rank: int) -> dict[int, _PerBlock]:
        """By ZeRO stage, what a block on each option costs in `frame`."""
        key = (
            frame.mesh, *self._kind(frame, rank), frame.splits_backward, frame.recomputes_ahead, frame.chunked)
        if key not in self._blocks:
            self._blocks[key] = {
                zero: _per_block(self.options(frame, rank), frame, zero, self.book) for zero in self.zero_stages(frame)}
        return self._blocks[key]

    def homes(self, frame: Frame, sharding: Sharding, num_blocks: int) -> HomeCosts:
        """What it costs to give the blocks of a rank homes, of a frame in chunks."""
        key = frame.mesh, frame.micro_batch_size, frame.num_micro_batches, sharding, num_blocks
        if key not in self._homes:
            self._homes[key] = home_costs(self.tensors(sharding), num_blocks, frame, self.block_costs(frame, sharding), self.book)
        return self._homes[key]

    def block_costs(self, frame: Frame, sharding: Sharding) -> dict[Home, BlockCost]:
        """What one block costs by home, of a frame in chunks, without padding."""
        key = frame.mesh, frame.micro_batch_size, frame.num_micro_batches, sharding
        if key not in self._block_costs:
            self._block_costs[key] = block_costs(frame, sharding, self.offload, self.book)
        return self._block_costs[key]

    def tensors(self, sharding: Sharding) -> Tensors:
        """The sizes of a block's tensors, divided as `sharding` does."""
        if sharding not in self._tensors:
            self._tensors[sharding] = tensors_of(sharding, self.book)
        return self._tensors[sharding]

    def hulls(self, frame: Frame, rank: int) -> tuple[Hull, ...]:
        """What mixes of real numbers of blocks reach (planner/mixes.py)."""
        key = self._kind(frame, rank)
        if key not in self._hulls:
            self._hulls[key] = hulls(self.options(frame, rank))
        return self._hulls[key]

    def divisions(self, frame: Frame, rank: int) -> dict[Tensors, Sharding]:
        """The ways to divide the weights that the options have, and one option's sharding for each."""
        key = self._kind(frame, rank)
        if key not in self._divisions:
            self._divisions[key] = {self.tensors(option.sharding): option.sharding for option in self.options(frame, rank)}
        return self._divisions[key]

    def get(self, frame: Frame, rank: int, num_blocks: int) -> Mixes:
        """Mixes of `num_blocks` blocks of one rank; with virtual stages every chunk has the same mix."""
        key = (*self._kind(frame, rank), frame.virtual_stages, num_blocks)
        if key not in self._known:
            self._known[key] = make_mixes(self.options(frame, rank), num_blocks, frame.virtual_stages)
        return self._known[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What a rank pays at one ZeRO stage besides its blocks."""

    time_s: float
    tail_s: float
    states: float
    ideal_states: float
    held: float
    saved: float  # of one micro-batch, by embedding and head
    ideal_held: float
    embedding_workspace: float
    head_workspace: float
    zero_buffer: float
    step_copies: float
    used_up: float  # what the head no longer keeps when the temporaries of other layers are there
    waiting: float  # what the head's weight gradient holds where it waits


@dataclass(frozen=True, slots=True, kw_only=True)
class _PerBlock:
    """What one block on each option of the catalogue costs at one ZeRO stage, by option; `waiting`: its weight gradient that waits.

    Zero where no recompute runs ahead: recompute_s; longer_s, by how much the backward is longer than the forward; whole_saved
    and whole_workspace, what is kept and temporary without recompute. Of a frame in chunks the compute alone (planner/chunk_columns.py)
    """

    time_s: Array
    recompute_s: Array
    longer_s: Array
    whole_saved: Array
    whole_workspace: Array
    tail_s: Array
    states: Array
    ideal_states: Array
    zero_buffer: Array
    step_copies: Array
    waiting: Array


def end_kinds(rank: int, frame: Frame) -> tuple[LayerKind, ...]:
    """Which of embedding and head a pipeline rank holds."""
    ends = (LayerKind.EMBEDDING, 0), (LayerKind.HEAD, frame.num_virtual_stages - 1)
    return tuple(kind for kind, stage in ends if frame.rank_of(stage) == rank)


def tied_ends(frame: Frame) -> tuple[int, ...]:
    """The two pipeline ranks that reduce the gradients of a tied embedding, none where one rank holds both copies."""
    first, last = frame.rank_of(0), frame.rank_of(frame.num_virtual_stages - 1)
    return (first, last) if first != last else ()


def fixed_price(rank: int, frame: Frame, zero: int, book: PriceBook) -> Fixed:
    """What `rank` pays for embedding, head and transfers."""
    b, mesh, sharding = frame.micro_batch_size, frame.mesh, frame.sharding
    time_s = rank_receives(rank, frame, book).value_s + rank_edges(frame, book).value_s
    outside = prices_of(frame, book)
    tail_s = outside.tied_reduction(mesh, sharding).value_s if book.tied and rank in tied_ends(frame) else 0.0
    table = book.shared_table_bytes(mesh, sharding)
    states = ideal = ideal_held = saved = used_up = waiting = 0.0
    held_bytes = sent_bytes(rank, frame, book) + table
    buffer = step_copies = 0
    workspaces = dict.fromkeys(LayerKind, -np.inf)
    for kind in end_kinds(rank, frame):
        data = outside.data_parallel(kind, b, mesh, sharding, zero)
        kept = book.activations(kind, b, sharding)
        held = outside.states(kind, mesh, sharding, zero)
        time_s += book.layer_time(kind, b, sharding).total_s + data.per_micro_batch_s
        tail_s += data.per_step_s
        states, ideal, step_copies = states + held.states.total, ideal + sum(held.ideal), step_copies + held.step_copies
        saved += kept.saved
        held_bytes += stashes(kind, rank, frame) * kept.saved
        ideal_held += stashes(kind, rank, frame) * kept.ideal_saved
        workspaces[kind], buffer = kept.workspace, max(buffer, held.zero_buffer)
        used_up += kept.saved * (kind is LayerKind.HEAD and not frame.splits_backward)
        waiting += book.waiting_bytes(kind, b, sharding) * (kind is LayerKind.HEAD and frame.splits_backward)
    workspaces[LayerKind.EMBEDDING] += book.table_workspace_bytes(mesh, sharding)
    return Fixed(
        time_s=time_s, tail_s=tail_s, states=states, ideal_states=ideal, held=held_bytes, saved=saved, ideal_held=ideal_held,
        zero_buffer=buffer,
        embedding_workspace=workspaces[LayerKind.EMBEDDING], head_workspace=workspaces[LayerKind.HEAD], used_up=used_up,
        step_copies=step_copies, waiting=waiting)


def _per_block(options: tuple[LayerOption, ...], frame: Frame, zero: int, book: PriceBook) -> _PerBlock:
    if frame.chunked:
        nothing = np.zeros(len(options))
        return _PerBlock(**{field.name: nothing for field in fields(_PerBlock)} | {"time_s": column_of(options, "time_s")})
    shardings = list(dict.fromkeys(option.sharding for option in options))
    own = np.array([shardings.index(option.sharding) for option in options])
    data = [book.data_parallel(LayerKind.BLOCK, frame.micro_batch_size, frame.mesh, sharding, zero) for sharding in shardings]
    held = [book.states(LayerKind.BLOCK, frame.mesh, sharding, zero) for sharding in shardings]
    waiting = [
        book.waiting_bytes(LayerKind.BLOCK, frame.micro_batch_size, sharding) if frame.splits_backward else 0.0 for sharding in shardings]
    timed = [book.layer_time(LayerKind.BLOCK, frame.micro_batch_size, o.sharding, o.recompute) for o in options if frame.recomputes_ahead]
    whole = [book.activations(LayerKind.BLOCK, frame.micro_batch_size, o.sharding) for o in options if frame.recomputes_ahead]
    none = [0.0] * len(options)
    return _PerBlock(
        recompute_s=np.array([time.recompute_s for time in timed] or none),
        longer_s=np.array([time.backward_s - time.forward_s for time in timed] or none),
        whole_saved=np.array([float(size.saved) for size in whole] or none),
        whole_workspace=np.array([float(size.workspace) for size in whole] or none),
        time_s=column_of(options, "time_s") + column_of(data, "per_micro_batch_s")[own], tail_s=column_of(data, "per_step_s")[own],
        states=np.array([float(layer.states.total) for layer in held])[own],
        ideal_states=np.array([sum(layer.ideal) for layer in held])[own],
        zero_buffer=column_of(held, "zero_buffer")[own], step_copies=column_of(held, "step_copies")[own],
        waiting=np.array(waiting)[own])


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Mixes of one block count at one ZeRO stage, by row: seconds as in `Column`, bytes to allocate, redundant bytes."""

    mixes: Mixes
    zero: int
    time_s: Array
    tail_s: Array
    plain_s: Array
    ramp_s: Array
    allocated: Array
    redundant: Array


class RankColumns:
    """The columns of one pipeline rank of a frame, made for one block count at a time."""

    def __init__(self, rank: int, frame: Frame, table: MixTable) -> None:
        self.rank, self.frame, self.table = rank, frame, table
        self.stages = table.zero_stages(frame)
        self.fixed = {zero: fixed_price(rank, frame, zero, table.book) for zero in self.stages}
        self.per_block = table.per_block(frame, rank)
        self.stashes = stashes(LayerKind.BLOCK, rank, frame)
        self._peaks = peaks(rank, frame) if frame.splits_backward else ()
        self._moments = moments(rank, frame) if frame.recomputes_ahead else (Moment(self.stashes),)

    def priced(self, mixes: Mixes, zero: int) -> Priced:
        fixed, block = self.fixed[zero], self.per_block[zero]
        counts = mixes.counts
        running = self.running(mixes, zero)
        buffers = np.maximum(widest(counts, block.zero_buffer), fixed.zero_buffer)
        held = fixed.states + counts @ block.states + self.stashes * mixes.saved_bytes + fixed.held
        ideal = fixed.ideal_states + counts @ block.ideal_states + self.stashes * mixes.ideal_saved_bytes + fixed.ideal_held
        allocated = held + running + buffers
        reserved = (fixed.step_copies + counts @ block.step_copies) / (1 + self.table.book.training.stack.allocator_share)
        time_s = counts @ block.time_s + fixed.time_s + mixes.last_s
        plain_s, ramp_s = self._plain_and_ramp(time_s, counts @ block.recompute_s, counts @ block.longer_s)
        return Priced(
            mixes=mixes, zero=zero, time_s=time_s, tail_s=counts @ block.tail_s + fixed.tail_s, plain_s=plain_s, ramp_s=ramp_s,
            allocated=allocated + reserved, redundant=allocated - ideal)

    def _plain_and_ramp(self, time_s: Array, recompute_s: Array, longer_s: Array) -> tuple[Array, Array]:
        return plain_and_ramp(self.frame.schedule, self.rank, self.frame.mesh.pp, time_s, recompute_s, longer_s)

    def running(self, mixes: Mixes, zero: int) -> Array:
        """What the fullest moment holds beyond states and the most stashes (costmodels/moments.py)."""
        fixed, block = self.fixed[zero], self.per_block[zero]
        saved, whole = mixes.saved_bytes, mixes.chunk_counts @ block.whole_saved
        inside = self._temporaries(mixes.workspace_bytes, saved, mixes.chunk_counts @ block.waiting, fixed) + mixes.window_bytes
        if not self.frame.recomputes_ahead:
            return inside
        alone = self._temporaries(widest(mixes.counts, block.whole_workspace), whole, np.zeros_like(saved), fixed)
        levels = [
            (one.stashes - self.stashes) * (saved + fixed.saved) + one.remade * (whole - saved) + (alone if one.alone else inside)
            for one in self._moments]
        found: Array = np.max(levels, axis=0)
        return found

    def _temporaries(self, workspace: Array, saved: Array, waiting: Array, fixed: Fixed) -> Array:
        """The largest of a layer, and with a split backward what weight gradients that wait hold (costmodels/occupancy.py)."""
        freed = 0.0 if self._peaks else saved
        of_layers = np.maximum(workspace, fixed.embedding_workspace - freed) - fixed.used_up
        found: Array = np.maximum(of_layers, fixed.head_workspace)
        if not self._peaks:
            return found
        fullest: Array = np.max([held * saved + waits * waiting for held, waits in self._peaks], axis=0)
        return found + fullest - self.stashes * saved + fixed.waiting

    def host_fits(self, mixes: Mixes) -> npt.NDArray[np.bool_]:
        """Which mixes a device's share of the host holds."""
        found: npt.NDArray[np.bool_] = self.stashes * mixes.host_bytes <= self.table.host_share_bytes
        return found

    def column(self, priced: Priced, row: int) -> Column:
        memory = occupied_bytes(float(priced.allocated[row]), self.frame.mesh, self.table.book)
        mix = tuple((option, int(n)) for option, n in zip(priced.mixes.options, priced.mixes.counts[row], strict=True) if n)
        return Column(
            mix, priced.zero, float(priced.time_s[row]), float(priced.tail_s[row]), float(memory), float(priced.redundant[row]),
            float(priced.plain_s[row]), float(priced.ramp_s[row]))

    def fastest(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """The mixes within `limit_bytes` that no other beats in time and in tail, nor in what counts in the ramps."""
        if self.frame.recomputes_ahead:
            return self._unbeaten(num_blocks, limit_bytes, "time_s", "tail_s", "plain_s", "ramp_s")
        return self._unbeaten(num_blocks, limit_bytes, "time_s", "tail_s")

    def leanest(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """Every mix within `limit_bytes` that no other beats in time, tail and redundant bytes together."""
        return self._unbeaten(num_blocks, limit_bytes, "time_s", "tail_s", "redundant")

    def _unbeaten(self, num_blocks: int, limit_bytes: float, *names: str) -> list[Column]:
        """Mixes that fit and that no other beats or equals in the values of `names`; of equals the one with least memory."""
        usable, found = usable_bytes(limit_bytes, self.frame.mesh, self.table.book), []
        for zero in self.stages:
            priced = self.priced(self.table.get(self.frame, self.rank, num_blocks), zero)
            fits = np.flatnonzero((priced.allocated <= usable) & self.host_fits(priced.mixes))
            for rows in _of_equal_tail(priced, fits) if self.frame.recomputes_ahead else (fits,):
                kept = rows[front(priced.time_s[rows], getattr(priced, names[-1])[rows])]
                found += [(priced, int(row)) for row in kept]
        if not found:
            return []
        values = np.array([[*(getattr(priced, name)[row] for name in names), priced.allocated[row]] for priced, row in found])
        return [self.column(*found[index]) for index in unbeaten_rows(values)]

    def relaxed(self, num_blocks: int, limit_bytes: float) -> list[Column]:
        """Per ZeRO stage a column that no mix of real numbers of blocks can beat within `limit_bytes`: a bound, not a plan.

        A linear program over one memory limit takes at most two options; for each two, the least share of the leaner one.
        Where the mixes are all that there are, as with one block a chunk, the best of them is the bound.
        """
        options = self.table.options(self.frame, self.rank)
        if exhaustive(options, -(-num_blocks // self.frame.virtual_stages)):
            return self.fastest(num_blocks, limit_bytes)
        usable, found = usable_bytes(limit_bytes, self.frame.mesh, self.table.book), []
        pairs = self.table.pairs(self.frame, self.rank)
        for zero in self.stages:
            time_s, fits = self.relaxed_s(num_blocks, zero, pairs, usable)
            tail_s = num_blocks * float(self.per_block[zero].tail_s.min()) + self.fixed[zero].tail_s
            if fits:
                plain_s, ramp_s = self._least_plain_and_ramp(num_blocks, zero, time_s)
                time_s += self.fixed[zero].time_s
                found.append(Column(((options[0], num_blocks),), zero, time_s, tail_s, 0.0, 0.0, plain_s, ramp_s))
        values = np.array([[c.time_s, c.tail_s, c.plain_s, c.ramp_s, 0.0] for c in found])
        return [found[index] for index in unbeaten_rows(values)] if found else []

    def _least_plain_and_ramp(self, num_blocks: int, zero: int, blocks_s: float) -> tuple[float, float]:
        """What no mix is below whose blocks take at least `blocks_s`: its least without recompute, of the ramps no more than that."""
        fixed_s, block = self.fixed[zero].time_s, self.per_block[zero]
        least_s = num_blocks * float((block.time_s - block.recompute_s).min())
        plain_s, _ = plain_and_ramp(self.frame.schedule, self.rank, self.frame.mesh.pp, blocks_s, blocks_s - least_s, blocks_s)
        return plain_s + fixed_s, plain_s + fixed_s

    def relaxed_s(self, num_blocks: int, zero: int, pairs: Pairs, usable: float) -> tuple[float, bool]:
        """The least seconds of the blocks over all pairs of options, and whether any pair fits: at each moment by itself.

        A program over two limits at once would take three options; the larger of two optima over one is below it.
        """
        fixed, block = self.fixed[zero], self.per_block[zero]
        chunk = num_blocks / self.frame.virtual_stages
        saved, whole = chunk * pairs.saved_bytes, chunk * block.whole_saved[pairs.index]
        spare = (fixed.step_copies + num_blocks * block.step_copies) / (1 + self.table.book.training.stack.allocator_share)
        always = num_blocks * block.states[pairs.index] + spare[pairs.index]
        buffers = np.maximum(block.zero_buffer[pairs.index].max(axis=0), fixed.zero_buffer)
        room = usable - (fixed.states + fixed.held + buffers)
        first_s, second_s = num_blocks * block.time_s[pairs.index]
        found = []
        for one in self._moments:
            workspace = block.whole_workspace[pairs.index].max(axis=0) if one.alone else pairs.workspace_bytes
            waiting = chunk * block.waiting[pairs.index].min(axis=0)
            temporaries = self._temporaries(workspace, (whole if one.alone else saved).max(axis=0), waiting, fixed)
            own = one.stashes * saved + one.remade * (whole - saved) + always
            share, fits = _least_share(own, room - temporaries - (one.stashes - self.stashes) * fixed.saved)
            times = np.where(fits, first_s + np.where(fits, share, 0.0) * (second_s - first_s), np.inf)
            found.append((float(times.min()), bool(fits.any())))
        return max(time_s for time_s, _ in found), all(fits for _, fits in found)

    def smallest(self, num_blocks: int) -> Column:
        """The mix and ZeRO stage with the lowest peak memory, whatever its time.

        It is all blocks on one option: of two that are mixed, the one that keeps less has the larger workspace already.
        """
        pure = pure_mixes(self.table.options(self.frame, self.rank), num_blocks, self.frame.virtual_stages)
        priced, fits = (self.priced(pure, zero) for zero in self.stages), self.host_fits(pure)
        rows = ((p, int(np.where(fits, p.allocated, np.inf).argmin())) for p in priced)
        return min((self.column(p, row) for p, row in rows), key=lambda column: column.memory_bytes)


def _of_equal_tail(priced: Priced, rows: Ints) -> list[Ints]:
    """`rows` in groups: the tail is that of a layout of the weights, of which there are few."""
    _, group = np.unique(np.round(priced.tail_s[rows], PICOSECOND), return_inverse=True)
    return [rows[group == one] for one in range(group.max(initial=-1) + 1)]


def _least_share(own: Array, room: Array) -> tuple[Array, Array]:
    """Of two options that need `own[0]` and `own[1]` bytes, the least share of the second with which both fit, and where they can."""
    first, second = own
    over = np.maximum(0.0, first - room)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(over > 0, over / (first - second), 0.0)
    return share, (over == 0) | ((second <= room) & (share <= 1.0))


def unbeaten_rows(values: Array) -> list[int]:
    """The rows that no other beats or equals in every column but the last; of rows that are equal the one with the least last."""
    kept: list[int] = []
    best = np.empty((len(values), values.shape[1] - 1))
    for row in np.lexsort(values.T[::-1]):
        if not (best[: len(kept)] <= values[row, :-1]).all(axis=1).any():
            best[len(kept)] = values[row, :-1]
            kept.append(int(row))
    return kept


def to_strategy(frame: Frame, columns: tuple[Column, ...]) -> Strategy:
    """The strategy that runs rank s on `columns[s]`: embedding first, blocks by option, head last."""
    stages = []
    for stage in range(frame.num_virtual_stages):
        rank = frame.rank_of(stage)
        column = columns[rank]
        blocks = [
            LayerChoice(
                LayerKind.BLOCK, option.recompute, column.zero, option.sharding if option.sharding != frame.sharding else None,
                on_host=option.on_host)
            for option, count in column.mix for _ in range(-(-count // frame.virtual_stages))
        ]
        shorter = (0, frame.num_virtual_stages - 1) if frame.equal_ranks else frame.stages_of(rank)[1:]
        if column.num_blocks % frame.virtual_stages and stage in shorter:
            blocks.pop()
        first = [LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, column.zero)] * (stage == 0)
        last = [LayerChoice(LayerKind.HEAD, Recompute.NONE, column.zero)] * (stage == frame.num_virtual_stages - 1)
        stages.append((*first, *blocks, *last))
    placed = in_homes(stages, frame, [column.homes for column in columns]) if frame.chunked else tuple(stages)
    return Strategy(frame=frame, stages=placed)


def shorter_ends(frame: Frame, num_layers: int) -> bool | None:
    """How virtual stages share the blocks: False equally, True with one block less on the first and on the last.

    The embedding and the head then take the place of a block, as in Llama 3 (arXiv 2407.21783, section 3.3.2). None when
    neither divides the blocks into whole stages.
    """
    if num_layers % frame.num_virtual_stages == 0:
        return False
    interleaved = frame.schedule is Schedule.INTERLEAVED
    return True if interleaved and (num_layers + 2) % frame.num_virtual_stages == 0 and frame.mesh.pp > 1 else None


def block_counts(rank: int, frame: Frame, num_layers: int, longest: int | None = None) -> Iterator[int]:
    """How many blocks one rank may hold: given by `shorter_ends` where ranks are equal, else from one a chunk to `longest`.

    None holds so few that the others would have to hold more than `longest`.
    """
    pp, v = frame.mesh.pp, frame.virtual_stages
    if pp == 1:
        yield num_layers
    elif frame.equal_ranks:
        missing = 2 if shorter_ends(frame, num_layers) else 0
        yield (num_layers + missing) // pp - (missing > 0 and rank in (0, pp - 1))
    else:
        most = min(num_layers - v * (pp - 1), longest or num_layers)
        yield from range(max(v, num_layers - (pp - 1) * most), most + 1)  # fewer would leave the others too many
