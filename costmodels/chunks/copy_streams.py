"""A step of one device with chunks on four streams: compute, copies to the device, copies from it,
collectives (EQUATIONS O6).

Each stream does one thing after the other, in the order of the schedule:

    FETCH     begins when the moment begins at which it may, `ChunkOp.issued`
    GATHER    the same, and not before the own chunk has come
    a pass    begins when the pass before it is over and all that it needs has come
    REDUCE    begins when its pass is over; SEND the same, and not before the gradients are reduced
              both are over before the pass behind `ChunkOp.issued` begins: their memory is counted
              until then

Compute runs as if no other device were waited for: what it waits here for copies is what a pass of
its stage takes longer than compute. In the update, host and device each go through their chunks; a
chunk that was updated returns while the next one is.

Left out: what copies and collectives cost the compute that they run under; what the host takes to
add gradients up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from parplan.costmodels.chunks.chunk_operations import BlockPass, ChunkAction, ChunkOp, RankChunks
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.schedules.actions import ActionKind

ActionKey = tuple[ActionKind, int, int]  # F or B, virtual stage, micro-batch


class Stream(StrEnum):
    IN = "in"
    OUT = "out"
    COLLECTIVES = "collectives"


_STREAM = {
    ChunkAction.FETCH: Stream.IN,
    ChunkAction.RETURN: Stream.IN,
    ChunkAction.SEND: Stream.OUT,
    ChunkAction.GATHER: Stream.COLLECTIVES,
    ChunkAction.REDUCE: Stream.COLLECTIVES,
}
_BEFORE = {
    ChunkAction.GATHER: ChunkAction.FETCH,
    ChunkAction.SEND: ChunkAction.REDUCE,
}  # what an op on the same group waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCosts:
    """Seconds and rates of one device.

    forward_s, backward_s: of one pass, by block number, backward with its recompute
    ends_s: of passes of embedding and head, by (F or B, virtual stage): before the first block of
    the stage's pass, and behind the last in_bytes_per_s, out_bytes_per_s: between host and device;
    gather_s, reduce_s: of one communication group device_adam_s, host_adam_s: of one own chunk
    waits_for_all: no chunk is updated before all gradients are there (clipping, loss scaling)
    """

    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    in_bytes_per_s: float
    out_bytes_per_s: float
    ends_s: Mapping[tuple[ActionKind, int], tuple[float, float]] = field(default_factory=dict)
    gather_s: float = 0.0
    reduce_s: float = 0.0
    device_adam_s: float = 0.0
    host_adam_s: float = 0.0
    waits_for_all: bool = True

    def op_s(self, op: ChunkOp) -> float:
        """Seconds of an op alone on its stream."""
        rates = {Stream.IN: self.in_bytes_per_s, Stream.OUT: self.out_bytes_per_s}
        stream = _STREAM[op.does]
        return (
            op.num_bytes / rates[stream]
            if stream in rates
            else {ChunkAction.GATHER: self.gather_s, ChunkAction.REDUCE: self.reduce_s}[op.does]
        )

    def pass_s(self, moment: BlockPass) -> float:
        return (self.backward_s if moment.work is ActionKind.BACKWARD else self.forward_s)[
            moment.block
        ]


@dataclass(frozen=True, slots=True)
class Transfer:
    """An op as it ran."""

    op: ChunkOp
    stream: Stream
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """What the streams of one device did in a step.

    actions_s: by action of the rank's list, what compute waits in it beyond its own seconds
    tail_s: from the last pass to the last chunk that was updated, or came back
    compute_s: of all passes; step_s: compute, all waits and the tail
    transfers: in the order in which they were begun, those of the update among them
    """

    actions_s: Mapping[ActionKey, float]
    tail_s: float
    compute_s: float
    step_s: float
    transfers: tuple[Transfer, ...]

    def busy_s(self, stream: Stream) -> float:
        """Seconds in which a stream did something."""
        return sum(each.end_s - each.start_s for each in self.transfers if each.stream is stream)


def exposed(chunks: RankChunks, costs: StreamCosts) -> Exposed:
    """What compute waits for, action by action, and the tail around the update."""
    run = _StreamClocks(chunks, costs)
    for index in range(len(chunks.moments)):
        run.moment(index)
    passes_s = run.clock_s
    end_s = run.update()
    return Exposed(
        actions_s=run.waited_s,
        tail_s=end_s - passes_s,
        compute_s=run.compute_s,
        step_s=end_s,
        transfers=tuple(run.transfers),
    )


class _StreamClocks:
    """The clocks of the streams, and what is under way."""

    def __init__(self, chunks: RankChunks, costs: StreamCosts) -> None:
        self.clock_s = self.compute_s = 0.0
        self.waited_s: dict[ActionKey, float] = {}
        self.transfers: list[Transfer] = []
        self._chunks, self._costs = chunks, costs
        self._free_s = dict.fromkeys(Stream, 0.0)
        self._done_s: dict[
            tuple[ChunkAction, int, int], float
        ] = {}  # when the last such op of a communication group was over
        self._late_s: dict[
            int, float
        ] = {}  # by moment, when all is over that may run under it at the latest
        self._issued = _by_issue(chunks.moments)
        self._ends = _ends(chunks.moments)

    def moment(self, index: int) -> None:
        """One pass of a block, and of embedding or head in the same action before or behind it."""
        moment, (begins, ends) = self._chunks.moments[index], self._ends[index]
        key = moment.work, moment.stage, moment.micro_batch
        outside_s = self._costs.ends_s.get((moment.work, moment.stage), (0.0, 0.0))
        if begins:
            self._compute(outside_s[0])
        for op in self._issued[index]:
            self._start(op, self.clock_s)
        self._wait(
            key,
            max(
                (self._done_s[_key(op)] for op in moment.before if op.does in _STREAM), default=0.0
            ),
        )
        self._compute(self._costs.pass_s(moment))
        for op in moment.after:
            if op.does in _STREAM:
                self._late_s[op.issued] = max(
                    self._late_s.get(op.issued, 0.0), self._start(op, self.clock_s)
                )
        self._wait(key, self._late_s.get(index, 0.0))
        if ends:
            self._compute(outside_s[1])

    def update(self) -> float:
        """When all chunks are updated and back: the host begins with those that return."""
        begin_s = max(self.clock_s, self._free_s[Stream.COLLECTIVES])
        if self._costs.waits_for_all:
            begin_s = max(begin_s, self._free_s[Stream.OUT])
        host_s, returns = (
            begin_s,
            {
                (op.group, op.number): op
                for op in self._chunks.closing
                if op.does is ChunkAction.RETURN
            },
        )
        count = {
            home: sum(
                group.chunk_layout.num_groups for group in self._chunks.groups if group.home is home
            )
            for home in StateLocation
        }
        for (group, number), op in sorted(
            returns.items(), key=lambda each: self._done_s.get((ChunkAction.SEND, *each[0]), 0.0)
        ):
            host_s = (
                max(host_s, self._done_s.get((ChunkAction.SEND, group, number), 0.0))
                + self._costs.host_adam_s
            )
            self._start(op, host_s)
        host_s = max(host_s, begin_s if self._costs.waits_for_all else self._free_s[Stream.OUT])
        host_s += self._costs.host_adam_s * count[StateLocation.HOST]
        return max(
            begin_s + self._costs.device_adam_s * count[StateLocation.DEVICE],
            host_s,
            *self._free_s.values(),
        )

    def _compute(self, seconds: float) -> None:
        self.clock_s += seconds
        self.compute_s += seconds

    def _wait(self, key: ActionKey, until_s: float) -> None:
        waited_s = max(0.0, until_s - self.clock_s)
        self.waited_s[key] = self.waited_s.get(key, 0.0) + waited_s
        self.clock_s += waited_s

    def _start(self, op: ChunkOp, ready_s: float) -> float:
        """Put an op on its stream; when it is over."""
        before = _BEFORE.get(op.does)
        if before is not None:
            ready_s = max(ready_s, self._done_s.get((before, op.group, op.number), 0.0))
        stream = _STREAM[op.does]
        start_s = max(ready_s, self._free_s[stream])
        end_s = start_s + self._costs.op_s(op)
        self._free_s[stream] = self._done_s[_key(op)] = end_s
        self.transfers.append(Transfer(op, stream, start_s, end_s))
        return end_s


def _key(op: ChunkOp) -> tuple[ChunkAction, int, int]:
    return op.does, op.group, op.number


def _by_issue(moments: Sequence[BlockPass]) -> list[list[ChunkOp]]:
    """By moment what may begin with it, in the order in which it is needed."""
    found: list[list[ChunkOp]] = [[] for _ in moments]
    for moment in moments:
        for op in moment.before:
            if op.does in _STREAM:
                found[op.issued].append(op)
    return found


def _ends(moments: Sequence[BlockPass]) -> list[tuple[bool, bool]]:
    """By moment whether it is the first of its action, and the last."""
    keys = [(moment.work, moment.stage, moment.micro_batch) for moment in moments]
    return [
        (index == 0 or keys[index - 1] != key, index == len(keys) - 1 or keys[index + 1] != key)
        for index, key in enumerate(keys)
    ]
