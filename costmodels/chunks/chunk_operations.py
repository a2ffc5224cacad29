"""The chunk schedule of one device: what is moved, gathered and reduced around every block's pass
(EQUATIONS O4, O5, O7).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parplan.costmodels.chunks.chunk_layout import ChunkLayout
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.schedules.actions import ActionKind


class ChunkAction(StrEnum):
    """What happens to the chunk that this rank owns of a communication group, or to the group.

    DROP     the device's copy of a parameter chunk is given up; the host has the same, or is priced
             to get it
    FETCH    a parameter chunk comes to the device
    GATHER   all chunks of the group come together on every rank; RELEASE: those are given up
    REDUCE   the gradients of the group are reduced and scattered, each rank has those of its own
             chunk
    SEND     the gradients of the own chunk go to the host
    RETURN   parameters that the host has updated come to the device
    """

    DROP = "drop"
    FETCH = "fetch"
    GATHER = "gather"
    RELEASE = "release"
    REDUCE = "reduce"
    SEND = "send"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class ChunkOp:
    """On communication group `number` of the chunks of `group` (an index of `RankChunks.groups`).

    num_bytes: that move between host and device, or of the whole group that is gathered or reduced
    issued: the moment at which a FETCH or GATHER may begin at the earliest, one before that which
    needs it where there is room; the last
        moment under which a REDUCE or SEND may still run, one after that behind which it is done
        where there is room for it to be late
    """

    does: ChunkAction
    group: int
    number: int
    num_bytes: int
    issued: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPass:
    """One pass of a block of the rank, forward or backward, of one micro-batch, and what is done
    before it and after it.

    Chunks take the gradients that autograd made behind the pass, before what is `after` it: only
    then is there memory for them.
    stage: the virtual stage; block: its number in the model; device_bytes: all that tensors hold of
    the device during it
    chunk_bytes: what chunks hold of it, their parameters, gathered groups, gradients and optimizer
    states, until all behind it is done
    """

    work: ActionKind
    stage: int
    micro_batch: int
    block: int
    before: tuple[ChunkOp, ...]
    after: tuple[ChunkOp, ...]
    device_bytes: int
    chunk_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedBlocks:
    """Blocks of one pipeline rank whose states have the same home, and where their parameters
    lie.
    """

    home: StateLocation
    blocks: tuple[int, ...]
    chunk_layout: ChunkLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChunks:
    """All chunks of one device and what happens to them in a step; alike on all data-parallel
    ranks.

    in_parameters: gradients are written over the parameters that they are of (one micro-batch a
    step, 16-bit gradients)
    closing: after the last backward pass, around the update
    most_bytes: what tensors hold of the device at the fullest moment of the step, between passes
    too
    """

    groups: tuple[ChunkedBlocks, ...]
    moments: tuple[BlockPass, ...]
    closing: tuple[ChunkOp, ...]
    in_parameters: bool
    device_bytes: int
    smallest_bytes: int
    most_bytes: int = 0

    def moved(self, does: ChunkAction) -> int:
        """Bytes of all ops of a kind in a step."""
        inside = (op for moment in self.moments for op in (*moment.before, *moment.after))
        return sum(op.num_bytes for op in (*inside, *self.closing) if op.does is does)

    @property
    def in_bytes(self) -> int:
        """From the host to the device in a step."""
        return self.moved(ChunkAction.FETCH) + self.moved(ChunkAction.RETURN)

    @property
    def out_bytes(self) -> int:
        """From the device to the host in a step."""
        return self.moved(ChunkAction.SEND) + self.moved(ChunkAction.DROP)
