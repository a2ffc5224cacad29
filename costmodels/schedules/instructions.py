"""The instruction list of every pipeline rank: its computations, and its messages in order.

An action list names computations alone. A message follows the computation that makes it, and both
ends have the messages between them in one order, so that no rank waits for ever, not even where
every send waits for its receiver. A receive is posted when its sender sends, which may be some
computations before its own.

Two messages between two ranks that meet are one exchange, which both ranks post as one batched
operation. They meet where each rank computes nothing between the message that it makes and the one
that it waits for:

    rank s      F5  [send a5, receive g2]  B2
    rank s + 1  B2  [send g2, receive a5]  F5

Neither rank could go on without the other's message, so an exchange delays nothing. With M
micro-batches, rank s of P has M - (P - 1 - s) exchanges with the next rank under 1F1B and early
recompute. A recompute ahead of a gradient lies between the messages, so its gradient comes alone:
last-no-recompute has M - 2 exchanges between the last two ranks, and the shifted critical path has
M - 3 between each two of the last four (Lai et al. 2023, Merak, arXiv:2206.04959).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from parplan.costmodels.schedules.actions import ActionKind, parse_row

_RETURNS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)


@dataclass(frozen=True, slots=True)
class StagePass:
    """One pass of one micro-batch through a virtual stage."""

    stage: int
    work: ActionKind
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One end of a message.

    gradient   True for gradients, which go back; False for activations, which go on
    sends      True at the end that sends
    stage      virtual stage at this end
    peer       pipeline rank at the other end
    """

    gradient: bool
    sends: bool
    stage: int
    micro_batch: int
    peer: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two messages with one rank that are posted as one operation."""

    send: Message
    receive: Message


Instruction = StagePass | Message | Exchange


class _Made(NamedTuple):
    """A message by the virtual stage that makes it."""

    gradient: bool
    stage: int
    micro_batch: int

    @property
    def reader(self) -> int:
        """The virtual stage that waits for it."""
        return self.stage + (-1 if self.gradient else 1)


def instruction_lists(rows: Sequence[str]) -> tuple[tuple[Instruction, ...], ...]:
    """Returns the instructions of every rank, from the CSV lines of all ranks.

    The lines are those that `check_rows` accepts. Raises ConfigError for a line without form.
    """
    lists = [[StagePass(*entry) for entry in parse_row(row, rank)] for rank, row in enumerate(rows)]
    rank_of = {each.stage: rank for rank, row in enumerate(lists) for each in row}
    return _Lists(lists, rank_of).completed()


class _Lists:
    """Instruction lists as they grow, all ranks at once."""

    def __init__(self, rows: Sequence[Sequence[StagePass]], rank_of: dict[int, int]) -> None:
        self._rows = rows
        self._rank_of = rank_of
        self._last = max(rank_of)
        self._lists: list[list[Instruction]] = [[] for _ in rows]
        self._posted: set[_Made] = set()
        self._partner = self._partners()
        self._waiting: set[_Made] = set()

    def completed(self) -> tuple[tuple[Instruction, ...], ...]:
        """Lets each rank in turn do one computation that can run, until none is left."""
        rest = [list(reversed(row)) for row in self._rows]
        while any(rest):
            moved = [self._advance(rank, row) for rank, row in enumerate(rest) if row]
            assert any(moved), "the action lists wait for each other"
        return tuple(map(tuple, self._lists))

    def _advance(self, rank: int, rest: list[StagePass]) -> bool:
        """Does the rank's next computation, after the recomputes in front of it."""
        place = next(
            i for i in reversed(range(len(rest))) if rest[i].work is not ActionKind.RECOMPUTE
        )
        computation = rest[place]
        awaited = self._awaited(computation)
        if awaited is not None and awaited not in self._posted:
            return False
        self._lists[rank] += reversed(rest[place:])
        del rest[place:]
        made = self._made(computation)
        if made is not None:
            self._post(made)
        return True

    def _post(self, made: _Made) -> None:
        """Posts a message at both ends, or waits for the other message of its exchange."""
        here, there = self._rank_of[made.stage], self._rank_of[made.reader]
        partner = self._partner.get(made)
        if partner is None:
            if here != there:
                self._lists[here].append(self._end(made, sends=True))
                self._lists[there].append(self._end(made, sends=False))
            self._posted.add(made)
        elif partner not in self._waiting:
            self._waiting.add(made)
        else:
            for rank, sent, received in ((here, made, partner), (there, partner, made)):
                exchange = Exchange(self._end(sent, sends=True), self._end(received, sends=False))
                self._lists[rank].append(exchange)
            self._posted |= {made, partner}

    def _end(self, made: _Made, *, sends: bool) -> Message:
        """Returns a message as the rank has it that sends it, or the one that receives it."""
        stage, other = (made.stage, made.reader) if sends else (made.reader, made.stage)
        return Message(
            gradient=made.gradient,
            sends=sends,
            stage=stage,
            micro_batch=made.micro_batch,
            peer=self._rank_of[other],
        )

    def _made(self, computation: StagePass) -> _Made | None:
        stage, work = computation.stage, computation.work
        if work is ActionKind.FORWARD and stage < self._last:
            return _Made(False, stage, computation.micro_batch)
        if work in _RETURNS and stage > 0:
            return _Made(True, stage, computation.micro_batch)
        return None

    def _awaited(self, computation: StagePass) -> _Made | None:
        stage, work = computation.stage, computation.work
        if work is ActionKind.FORWARD and stage > 0:
            return _Made(False, stage - 1, computation.micro_batch)
        if work in _RETURNS and stage < self._last:
            return _Made(True, stage + 1, computation.micro_batch)
        return None

    def _partners(self) -> dict[_Made, _Made]:
        """Returns the other message of each message that goes out in an exchange."""
        meeting = {pair for row in self._rows for pair in self._candidates(row)}
        return {sent: received for sent, received in meeting if (received, sent) in meeting}

    def _candidates(self, row: Sequence[StagePass]) -> Iterator[tuple[_Made, _Made]]:
        """Yields the messages that a rank sends and awaits with nothing between, of one peer."""
        for before, after in pairwise(row):
            sent, received = self._made(before), self._awaited(after)
            if sent is None or received is None:
                continue
            ends = {self._rank_of[sent.stage], self._rank_of[sent.reader]}
            if len(ends) == 2 and ends == {
                self._rank_of[received.stage],
                self._rank_of[received.reader],
            }:
                yield sent, received
