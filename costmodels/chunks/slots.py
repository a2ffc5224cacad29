"""What a step does to the chunks of one device whatever is evicted, by slot: bytes that must be
there, and the ops around passes.

Slots are the moments and the gaps between them: gap 0, moment 0, gap 1, moment 1, ..., and the gap
behind the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from parplan.costmodels.chunks.accesses import GroupUses
from parplan.costmodels.chunks.chunk_operations import ChunkAction, ChunkedBlocks, ChunkOp
from parplan.costmodels.chunks.eviction import Residency
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.operators.kernels import FP32_BYTES

OpKey = tuple[
    ChunkAction, int, int, int
]  # what is done with which communication group of which group, and the moment


def moment_slot(moment: int) -> int:
    return 2 * moment + 1


def summed(count: int, held: Iterable[tuple[int, int, int]]) -> list[int]:
    """By slot the sum of what is held from one slot through another."""
    change = [0] * (count + 1)
    for first, last, size in held:
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change[:-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBytes:
    """Of one chunk its parameters and its gradients; `ranks` chunks are a communication group, of
    which a device owns one.
    """

    parameters: int
    gradients: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The communication groups of a device and when they are used in a step of `num_moments`
    moments.

    in_parameters: gradients are written over parameters; adds_up: those of several micro-batches
    are added up
    clean_copies: the host keeps what is fetched; else what is given up is moved there, and what it
    updated returns in fp32
    """

    groups: tuple[ChunkedBlocks, ...]
    uses: tuple[GroupUses, ...]
    num_moments: int
    sizes: ChunkBytes
    in_parameters: bool
    adds_up: bool
    clean_copies: bool = True

    @property
    def count(self) -> int:
        return 2 * self.num_moments + 1

    @property
    def gathers(self) -> bool:
        return self.sizes.ranks > 1

    def home(self, one: GroupUses) -> StateLocation:
        return self.groups[one.group].home

    def reduces_apart(self, one: GroupUses) -> bool:
        """Whether gradients are reduced into memory of their own: to be sent, or added to those of
        other micro-batches.
        """
        return self.gathers and (self.adds_up or self.home(one) is StateLocation.HOST)

    def needs(self) -> list[list[int]]:
        """By slot the own chunks of HOST blocks that must be there, by number."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for one in self.uses:
            if self.home(one) is StateLocation.HOST:
                for slot in self._needed(one):
                    found[slot].append(one.number)
        return found

    def _needed(self, one: GroupUses) -> Iterable[int]:
        """One rank uses chunks in place, and keeps those that have gradients already; to be
        gathered they are needed at the begin.
        """
        if self.gathers:
            return (moment_slot(span.first) for span in one.spans)
        slots = set(map(moment_slot, one.touched))
        if self.in_parameters:
            slots.update(
                slot
                for run in one.runs
                for slot in range(moment_slot(run.first), moment_slot(run.last) + 1)
            )
        return slots

    def chunk_bytes(self, always: int) -> list[int]:
        """By slot what chunks take of the device, but for those of HOST parameters; `always`:
        chunks that stay there.
        """
        return [always + own for own in summed(self.count, self._held())]

    def reduced_bytes(self) -> dict[int, int]:
        """By slot of a moment behind which gradients are reduced into memory of their own, the
        bytes of that.
        """
        apart = (one for one in self.uses if self.reduces_apart(one))
        return {moment_slot(run.last): self.sizes.gradients for one in apart for run in one.runs}

    def begun_bytes(self) -> list[int]:
        """By slot of a moment the gradients' memory that comes behind its pass, which makes the
        first of them.
        """
        found = [0] * self.count
        for one in self.uses:
            if self._makes_apart(one):
                for run in one.runs:
                    found[moment_slot(run.first)] += self.sizes.ranks * self.sizes.gradients
        return found

    def _makes_apart(self, one: GroupUses) -> bool:
        """Whether the gradients of a pass have memory of their own, until they are reduced or
        sent.
        """
        return not self.in_parameters and (self.gathers or self.home(one) is StateLocation.HOST)

    def _held(self) -> Iterator[tuple[int, int, int]]:
        """Gathered groups, and gradients on their way: (first slot, last slot, bytes)."""
        for one in self.uses:
            if self.gathers:
                whole = self.sizes.ranks * self.sizes.parameters
                yield from (
                    (moment_slot(span.first), moment_slot(span.last), whole) for span in one.spans
                )
            if self._makes_apart(one):
                whole = self.sizes.ranks * self.sizes.gradients
                yield from (
                    (moment_slot(run.first), moment_slot(run.last), whole) for run in one.runs
                )

    @property
    def on_host(self) -> int:
        """Which of the groups is that of HOST blocks."""
        return next(
            index for index, group in enumerate(self.groups) if group.home is StateLocation.HOST
        )

    def fetches(self, held: Iterable[Residency]) -> Iterator[tuple[int, ChunkOp]]:
        """(moment, what is fetched before it)."""
        for stay in held:
            moment = stay.first // 2
            yield (
                moment,
                ChunkOp(ChunkAction.FETCH, self.on_host, stay.chunk, self.sizes.parameters, moment),
            )

    def drops(self, held: Iterable[Residency]) -> Iterator[tuple[int, ChunkOp]]:
        """(moment, what is given up behind it)."""
        over = self._over()
        for stay in held:
            void = self.clean_copies or stay.last >= over[stay.chunk]
            yield (
                stay.last // 2,
                ChunkOp(
                    ChunkAction.DROP, self.on_host, stay.chunk, 0 if void else self.sizes.parameters
                ),
            )

    def _over(self) -> dict[int, int]:
        """By HOST chunk the slot from which on it is no parameter, because a gradient is in its
        place.
        """
        own = [one for one in self.uses if self.home(one) is StateLocation.HOST]
        if not self.in_parameters:
            return {one.number: self.count for one in own}
        return {
            one.number: moment_slot((one.spans[-1] if self.gathers else one.runs[0]).first)
            for one in own
        }

    def gathers_before(self) -> Iterator[tuple[int, ChunkOp]]:
        """(moment, what is gathered before it)."""
        if self.gathers:
            for one in self.uses:
                for span in one.spans:
                    yield (
                        span.first,
                        ChunkOp(
                            ChunkAction.GATHER,
                            one.group,
                            one.number,
                            self.sizes.ranks * self.sizes.parameters,
                            span.first,
                        ),
                    )

    def ops_behind(self) -> Iterator[tuple[int, ChunkOp]]:
        """(moment, what happens behind it): gathered groups are released, gradients reduced and
        sent.
        """
        for one in reversed(self.uses):
            released = [
                (span.last, ChunkOp(ChunkAction.RELEASE, one.group, one.number, 0))
                for span in one.spans
                if self.gathers
            ]
            reduced = [
                (
                    run.last,
                    ChunkOp(
                        ChunkAction.REDUCE,
                        one.group,
                        one.number,
                        self.sizes.ranks * self.sizes.gradients,
                        run.last,
                    ),
                )
                for run in one.runs
                if self.gathers
            ]
            yield from (*reduced, *released) if self.in_parameters else (*released, *reduced)
            yield from self._sends(one)

    def _sends(self, one: GroupUses) -> Iterator[tuple[int, ChunkOp]]:
        """Of HOST chunks behind every run, of OPTIMIZER chunks behind the last; those may take
        until the step's end.
        """
        home, size = self.home(one), self.sizes.gradients
        if home is StateLocation.HOST:
            yield from (
                (run.last, ChunkOp(ChunkAction.SEND, one.group, one.number, size, run.last))
                for run in one.runs
            )
        elif home is StateLocation.OPTIMIZER and one.runs:
            yield (
                one.runs[-1].last,
                ChunkOp(ChunkAction.SEND, one.group, one.number, size, self.num_moments),
            )

    def returns(self) -> tuple[ChunkOp, ...]:
        """What the host has updated comes back."""
        updated = (one for one in self.uses if self.home(one) is StateLocation.OPTIMIZER)
        size = (
            self.sizes.parameters
            if self.clean_copies
            else FP32_BYTES * self.groups[0].chunk_layout.chunk_elements
        )
        return tuple(ChunkOp(ChunkAction.RETURN, one.group, one.number, size) for one in updated)


def in_order(
    count: int, ops: Iterable[tuple[int, ChunkOp]], issued: Mapping[OpKey, int]
) -> list[tuple[ChunkOp, ...]]:
    """By moment the ops of it, in the order in which they are given; `issued`: of those that may
    begin earlier, or be over later.
    """
    found: list[list[ChunkOp]] = [[] for _ in range(count)]
    for moment, op in ops:
        at = issued.get((op.does, op.group, op.number, moment), op.issued)
        found[moment].append(op if at == op.issued else replace(op, issued=at))
    return [tuple(own) for own in found]
