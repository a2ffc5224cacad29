"""One device's step with chunks on four streams (EQUATIONS O6).

The streams are compute, copies to the device, copies to the host, and collectives. Each runs its
operations one after the other in the order of the schedule:

    FETCH     begins with the moment `ChunkOp.issued`
    GATHER    begins with that moment, and not before the own chunk has come
    a pass    begins when the previous pass has ended and all its inputs have come
    REDUCE    begins at the end of its pass
    SEND      begins at the end of its pass, and not before the gradients are reduced

REDUCE and SEND end before the pass after `ChunkOp.issued` begins, since their memory is counted
until then.

Compute runs as if it waited for no other device: its waits for copies here lengthen the pass of its
stage. In the update, host and device update their chunks at the same time; an updated chunk returns
during the update of the next one.

Leaves out: the slowdown of compute by copies and collectives that run beside it, and the host's
time to add gradients up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from parplan.costmodels.chunks.chunk_operations import BlockPass, ChunkAction, ChunkOp, RankChunks
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.schedules.actions import ActionKind

ActionKey = tuple[ActionKind, int, int]  # F or B, virtual stage, micro-batch

PartKey = tuple[ActionKind, int, bool]  # F or B, part of a block, whether it is a rerun


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
# the earlier operation on the same group that an operation waits for
_BEFORE = {ChunkAction.GATHER: ChunkAction.FETCH, ChunkAction.SEND: ChunkAction.REDUCE}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCosts:
    """Seconds and rates of one device.

    forward_s, backward_s              one pass, by block number; backward includes recompute
    parts_s                            one access of a pass, by block number; empty where a pass is
                                       one
    ends_s                             passes of embedding and head by (F or B, virtual stage):
                                       before the first block of the stage's pass, and after the
                                       last
    in_bytes_per_s, out_bytes_per_s    copies to the device and to the host
    gather_s, reduce_s                 one communication group
    device_adam_s, host_adam_s         one own chunk
    waits_for_all                      no chunk is updated before all gradients exist (clipping,
                                       loss scaling)
    """

    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    parts_s: Mapping[int, Mapping[PartKey, float]] = field(default_factory=dict)
    in_bytes_per_s: float
    out_bytes_per_s: float
    ends_s: Mapping[tuple[ActionKind, int], tuple[float, float]] = field(default_factory=dict)
    gather_s: float = 0.0
    reduce_s: float = 0.0
    device_adam_s: float = 0.0
    host_adam_s: float = 0.0
    waits_for_all: bool = True

    def op_s(self, op: ChunkOp) -> float:
        """Seconds of an operation alone on its stream."""
        rates = {Stream.IN: self.in_bytes_per_s, Stream.OUT: self.out_bytes_per_s}
        stream = _STREAM[op.does]
        if stream in rates:
            return op.num_bytes / rates[stream]
        return {ChunkAction.GATHER: self.gather_s, ChunkAction.REDUCE: self.reduce_s}[op.does]

    def pass_s(self, moment: BlockPass) -> float:
        if moment.block in self.parts_s:
            access = moment.access
            return self.parts_s[moment.block][moment.work, access.part, access.rerun]
        by_block = self.backward_s if moment.work is ActionKind.BACKWARD else self.forward_s
        return by_block[moment.block]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One operation with its start and end."""

    op: ChunkOp
    stream: Stream
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRun:
    """Waits and transfers of one device in a step.

    actions_s    compute's waits by action of the rank's list, beyond its own seconds
    tail_s       from the last pass to the last chunk that was updated or returned
    compute_s    all passes
    step_s       compute, all waits and the tail
    transfers    operations in the order of their starts, including those of the update
    """

    actions_s: Mapping[ActionKey, float]
    tail_s: float
    compute_s: float
    step_s: float
    transfers: tuple[Transfer, ...]

    def busy_s(self, stream: Stream) -> float:
        """Seconds in which a stream is busy."""
        return sum(each.end_s - each.start_s for each in self.transfers if each.stream is stream)


def run_streams(chunks: RankChunks, costs: StreamCosts) -> StreamRun:
    """Returns compute's waits by action, and the tail around the update."""
    run = _StreamClocks(chunks, costs)
    for index in range(len(chunks.moments)):
        run.moment(index)
    passes_s = run.clock_s
    end_s = run.update()
    return StreamRun(
        actions_s=run.waited_s,
        tail_s=end_s - passes_s,
        compute_s=run.compute_s,
        step_s=end_s,
        transfers=tuple(run.transfers),
    )


class _StreamClocks:
    """The clocks of the streams and the operations that run."""

    def __init__(self, chunks: RankChunks, costs: StreamCosts) -> None:
        self.clock_s = self.compute_s = 0.0
        self.waited_s: dict[ActionKey, float] = {}
        self.transfers: list[Transfer] = []
        self._chunks, self._costs = chunks, costs
        self._free_s = dict.fromkeys(Stream, 0.0)
        # end of the last such operation of a communication group
        self._done_s: dict[tuple[ChunkAction, int, int], float] = {}
        # by moment, the end of the operations that may run under it at the latest
        self._late_s: dict[int, float] = {}
        self._issued = _by_issue(chunks.moments)
        self._ends = _ends(chunks.moments)

    def moment(self, index: int) -> None:
        """Runs one pass of a block, with embedding or head before or after it in its action."""
        moment = self._chunks.moments[index]
        begins, ends = self._ends[index]
        key = moment.work, moment.stage, moment.micro_batch
        outside_s = self._costs.ends_s.get((moment.work, moment.stage), (0.0, 0.0))
        if begins:
            self._compute(outside_s[0])
        for op in self._issued[index]:
            self._start(op, self.clock_s)
        done_s = (self._done_s[_key(op)] for op in moment.before if op.does in _STREAM)
        self._wait(key, max(done_s, default=0.0))
        self._compute(self._costs.pass_s(moment))
        for op in moment.after:
            if op.does in _STREAM:
                late_s = self._late_s.get(op.issued, 0.0)
                self._late_s[op.issued] = max(late_s, self._start(op, self.clock_s))
        self._wait(key, self._late_s.get(index, 0.0))
        if ends:
            self._compute(outside_s[1])

    def update(self) -> float:
        """Returns the time when all chunks are updated and back.

        The host begins with the chunks that return.
        """
        begin_s = max(self.clock_s, self._free_s[Stream.COLLECTIVES])
        if self._costs.waits_for_all:
            begin_s = max(begin_s, self._free_s[Stream.OUT])
        host_s = begin_s
        returns = {
            (op.group, op.number): op
            for op in self._chunks.closing
            if op.does is ChunkAction.RETURN
        }
        count = {
            location: sum(
                group.chunk_layout.num_groups
                for group in self._chunks.groups
                if group.home is location
            )
            for location in StateLocation
        }
        sent_s = {key: self._done_s.get((ChunkAction.SEND, *key), 0.0) for key in returns}
        for key in sorted(returns, key=sent_s.__getitem__):
            host_s = max(host_s, sent_s[key]) + self._costs.host_adam_s
            self._start(returns[key], host_s)
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
        """Starts an operation on its stream and returns its end."""
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
    """Returns the operations that may begin with each moment, in the order of their use."""
    issued: list[list[ChunkOp]] = [[] for _ in moments]
    for moment in moments:
        for op in moment.before:
            if op.does in _STREAM:
                issued[op.issued].append(op)
    return issued


def _ends(moments: Sequence[BlockPass]) -> list[tuple[bool, bool]]:
    """Returns for each moment whether it is the first and the last of its action."""
    keys = [(moment.work, moment.stage, moment.micro_batch) for moment in moments]
    return [
        (index == 0 or keys[index - 1] != key, index == len(keys) - 1 or keys[index + 1] != key)
        for index, key in enumerate(keys)
    ]
