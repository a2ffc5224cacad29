"""Bytes and operations of a device's chunks by slot, independent of evictions.

Slots are the moments and the gaps between them: gap 0, moment 0, gap 1, moment 1, ..., and the gap
after the last moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from parplan.costmodels.chunks.accesses import GroupUses
from parplan.costmodels.chunks.chunk_operations import ChunkAction, ChunkedBlocks, ChunkOp
from parplan.costmodels.chunks.eviction import Residency
from parplan.costmodels.host.state_location import ChunkCommunication, StateLocation
from parplan.costmodels.operators.kernels import FP32_BYTES

OpKey = tuple[ChunkAction, int, int, int]  # action, group, communication group, moment


def moment_slot(moment: int) -> int:
    return 2 * moment + 1


def summed_by_slot(count: int, held: Iterable[tuple[int, int, int]]) -> list[int]:
    """Sums by slot the sizes that are held from one slot to another."""
    change = [0] * (count + 1)
    for first, last, size in held:
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change[:-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBytes:
    """Bytes of the parameters and the gradients of one chunk.

    ranks                                         chunks of a communication group, of which a
                                                  device owns one
    gathered_parameters, gathered_gradients       of a whole group
    """

    parameters: int
    gradients: int
    ranks: int
    gathered_parameters: int
    gathered_gradients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The communication groups of a device and their uses in a step of `num_moments` moments.

    in_parameters    gradients overwrite parameters
    adds_up          gradients of several micro-batches are added up
    clean_copies     the host keeps copies of fetched parameters; else evicted parameters are copied
                     to the host, and parameters that the host updated return in fp32
    communication    one chunk after the other, gradients are reduced through one buffer at once
    """

    groups: tuple[ChunkedBlocks, ...]
    uses: tuple[GroupUses, ...]
    num_moments: int
    sizes: ChunkBytes
    in_parameters: bool
    adds_up: bool
    clean_copies: bool = True
    communication: ChunkCommunication = ChunkCommunication.GROUP

    @property
    def count(self) -> int:
        return 2 * self.num_moments + 1

    @property
    def gathers(self) -> bool:
        return self.sizes.ranks > 1

    def home(self, use: GroupUses) -> StateLocation:
        return self.groups[use.group].home

    def reduces_apart(self, use: GroupUses) -> bool:
        """True if gradients are reduced into separate memory.

        They are then sent, or added to those of other micro-batches. One chunk after the other,
        they are added where they are.
        """
        adds_up = self.adds_up and not self.single
        return self.gathers and (adds_up or self.home(use) is StateLocation.HOST)

    @property
    def single(self) -> bool:
        """True if gradients wait in autograd's tensors until their chunk is reduced."""
        single = self.communication is ChunkCommunication.SINGLE
        return single and self.gathers and not self.in_parameters

    @property
    def fresh_bytes(self) -> int:
        """Bytes of a group's gradients that are not yet reduced or sent."""
        single = self.communication is ChunkCommunication.SINGLE
        return self.sizes.gradients if single else self.sizes.gathered_gradients

    def needs(self) -> list[list[int]]:
        """Returns for each slot the numbers of the own chunks of HOST blocks that it needs."""
        chunks: list[list[int]] = [[] for _ in range(self.count)]
        for use in self.uses:
            if self.home(use) is StateLocation.HOST:
                for slot in self._needed(use):
                    chunks[slot].append(use.number)
        return chunks

    def _needed(self, use: GroupUses) -> Iterable[int]:
        """Returns the slots that need a group's own chunk on the device.

        One rank uses chunks in place, and keeps those that already hold gradients. A chunk to be
        gathered is needed at the beginning.
        """
        if self.gathers:
            return (moment_slot(span.first) for span in use.spans)
        slots = set(map(moment_slot, use.touched))
        if self.in_parameters:
            slots.update(
                slot
                for run in use.runs
                for slot in range(moment_slot(run.first), moment_slot(run.last) + 1)
            )
        return slots

    def chunk_bytes(self, always: int) -> list[int]:
        """Bytes of chunks on the device by slot, without HOST parameters.

        always    bytes of chunks that stay on the device
        """
        return [always + held for held in summed_by_slot(self.count, self._held())]

    def reduced_bytes(self) -> dict[int, int]:
        """Bytes of separate memory for reduced gradients, by slot of a run's last moment."""
        apart = (use for use in self.uses if self.reduces_apart(use))
        return {moment_slot(run.last): self.sizes.gradients for use in apart for run in use.runs}

    def begun_bytes(self) -> list[int]:
        """Bytes of gradient memory that is allocated after a moment's pass, by slot.

        The pass makes the first gradients of that memory.
        """
        begun = [0] * self.count
        for use in self.uses:
            if self._makes_apart(use):
                for run in use.runs:
                    begun[moment_slot(run.first)] += self.fresh_bytes
        return begun

    def _makes_apart(self, use: GroupUses) -> bool:
        """True if gradients of a pass have separate memory until they are reduced or sent."""
        return not self.in_parameters and (self.gathers or self.home(use) is StateLocation.HOST)

    def _held(self) -> Iterator[tuple[int, int, int]]:
        """Yields (first slot, last slot, bytes) of gathered groups and gradients in transit."""
        for use in self.uses:
            if self.gathers:
                whole = self.sizes.gathered_parameters
                yield from (
                    (moment_slot(span.first), moment_slot(span.last), whole) for span in use.spans
                )
            if self._makes_apart(use):
                whole = self.fresh_bytes
                yield from (
                    (moment_slot(run.first), moment_slot(run.last), whole) for run in use.runs
                )

    @property
    def on_host(self) -> int:
        """The index of the group of HOST blocks."""
        return next(
            index for index, group in enumerate(self.groups) if group.home is StateLocation.HOST
        )

    def fetches(self, held: Iterable[Residency]) -> Iterator[tuple[int, ChunkOp]]:
        """Yields (moment, fetch before it)."""
        for stay in held:
            moment = stay.first // 2
            size = self.sizes.parameters
            yield moment, ChunkOp(ChunkAction.FETCH, self.on_host, stay.chunk, size, moment)

    def drops(self, held: Iterable[Residency]) -> Iterator[tuple[int, ChunkOp]]:
        """Yields (moment, drop after it)."""
        over = self._over()
        for stay in held:
            void = self.clean_copies or stay.last >= over[stay.chunk]
            size = 0 if void else self.sizes.parameters
            yield stay.last // 2, ChunkOp(ChunkAction.DROP, self.on_host, stay.chunk, size)

    def _over(self) -> dict[int, int]:
        """Returns for each HOST chunk the first slot at which it holds no parameters.

        A gradient overwrites them there.
        """
        on_host = [use for use in self.uses if self.home(use) is StateLocation.HOST]
        if not self.in_parameters:
            return {use.number: self.count for use in on_host}
        return {
            use.number: moment_slot((use.spans[-1] if self.gathers else use.runs[0]).first)
            for use in on_host
        }

    def gathers_before(self) -> Iterator[tuple[int, ChunkOp]]:
        """Yields (moment, gather before it)."""
        if not self.gathers:
            return
        size = self.sizes.gathered_parameters
        for use in self.uses:
            for span in use.spans:
                op = ChunkOp(ChunkAction.GATHER, use.group, use.number, size, span.first)
                yield span.first, op

    def ops_behind(self) -> Iterator[tuple[int, ChunkOp]]:
        """Yields (moment, operation after it): releases, reductions and sends."""
        size = self.sizes.gathered_gradients
        for use in reversed(self.uses):
            if self.gathers:
                released = [
                    (span.last, ChunkOp(ChunkAction.RELEASE, use.group, use.number, 0))
                    for span in use.spans
                ]
                reduced = [
                    (run.last, ChunkOp(ChunkAction.REDUCE, use.group, use.number, size, run.last))
                    for run in use.runs
                ]
                yield from (*reduced, *released) if self.in_parameters else (*released, *reduced)
            yield from self._sends(use)

    def _sends(self, use: GroupUses) -> Iterator[tuple[int, ChunkOp]]:
        """Yields the sends: of HOST chunks after every run, of OPTIMIZER chunks after the last.

        The latter may take until the end of the step.
        """
        location = self.home(use)
        size = self.sizes.gradients
        if location is StateLocation.HOST:
            yield from (
                (run.last, ChunkOp(ChunkAction.SEND, use.group, use.number, size, run.last))
                for run in use.runs
            )
        elif location is StateLocation.OPTIMIZER and use.runs:
            op = ChunkOp(ChunkAction.SEND, use.group, use.number, size, self.num_moments)
            yield use.runs[-1].last, op

    def returns(self) -> tuple[ChunkOp, ...]:
        """Returns the copies of parameters that the host has updated."""
        updated = (use for use in self.uses if self.home(use) is StateLocation.OPTIMIZER)
        size = (
            self.sizes.parameters
            if self.clean_copies
            else FP32_BYTES * self.groups[0].chunk_layout.chunk_elements
        )
        return tuple(ChunkOp(ChunkAction.RETURN, use.group, use.number, size) for use in updated)


def in_order(
    count: int, ops: Iterable[tuple[int, ChunkOp]], issued: Mapping[OpKey, int]
) -> list[tuple[ChunkOp, ...]]:
    """Returns the operations of each moment in the given order.

    issued    the moments of operations that may begin earlier or end later
    """
    by_moment: list[list[ChunkOp]] = [[] for _ in range(count)]
    for moment, op in ops:
        at = issued.get((op.does, op.group, op.number, moment), op.issued)
        by_moment[moment].append(op if at == op.issued else replace(op, issued=at))
    return [tuple(ops_of_moment) for ops_of_moment in by_moment]
