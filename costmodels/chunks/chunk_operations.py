"""The chunk schedule of one device: operations around every pass (EQUATIONS O4, O5, O7)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parplan.costmodels.chunks.chunk_layout import ChunkLayout
from parplan.costmodels.host.state_location import ChunkCommunication, StateLocation
from parplan.costmodels.layers.block_parts import WHOLE, PartPass
from parplan.costmodels.schedules.actions import ActionKind


class ChunkAction(StrEnum):
    """An action on the rank's own chunk of a communication group, or on the whole group.

    DROP       free the device's copy of a parameter chunk; the host has the same copy, or the price
               counts the copy to the host
    FETCH      copy a parameter chunk to the device
    GATHER     collect all chunks of the group on every rank
    RELEASE    free the gathered chunks
    REDUCE     reduce-scatter the gradients of the group; each rank receives those of its own chunk
    SEND       copy the gradients of the own chunk to the host
    RETURN     copy parameters that the host has updated to the device
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
    """An action on communication group `number` of the chunks of `group`.

    group        index of `RankChunks.groups`
    num_bytes    bytes copied between host and device, or bytes of the gathered or reduced group
    issued       earliest moment at which a FETCH or GATHER may begin: one moment before its use if
                 there is room; latest moment at which a REDUCE or SEND may still run: one moment
                 after the gradients' pass if there is room
    """

    does: ChunkAction
    group: int
    number: int
    num_bytes: int
    issued: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPass:
    """One pass of a block or of a part of it, with the operations before and after it.

    Chunks take the gradients that autograd made after the pass, before the operations in `after`:
    only then is there memory for them.

    stage           the virtual stage
    block           the block's number in the model
    access          the part of the block that passes (costmodels/layers/block_parts.py)
    device_bytes    bytes of all tensors on the device during the pass
    chunk_bytes     bytes of chunks until the operations after the pass are done: parameters,
                    gathered groups, gradients and optimizer states
    """

    work: ActionKind
    stage: int
    micro_batch: int
    block: int
    before: tuple[ChunkOp, ...]
    after: tuple[ChunkOp, ...]
    device_bytes: int
    chunk_bytes: int = 0
    access: PartPass = WHOLE

    def __str__(self) -> str:
        return pass_name(self.work, self.block, self.micro_batch)


def pass_name(work: ActionKind, block: int | None, micro_batch: int) -> str:
    """Returns the name of a block's pass for messages."""
    direction = "backward" if work is ActionKind.BACKWARD else "forward"
    return f"{direction} pass of block {block}, micro-batch {micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedBlocks:
    """Blocks of one pipeline rank whose states have one location, and their chunk layout.

    parts    tensors of each part of each block; empty where a block is one part
    """

    home: StateLocation
    blocks: tuple[int, ...]
    chunk_layout: ChunkLayout
    parts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChunks:
    """All chunks of one device and their operations in a step, equal on all data-parallel ranks.

    in_parameters    gradients overwrite their parameters (one micro-batch per step, 16-bit
                     gradients)
    closing          operations after the last backward pass, around the update
    most_bytes       bytes of tensors on the device at the peak of the step, also between passes
    communication    how data-parallel ranks gather and reduce the chunks of a group
    """

    groups: tuple[ChunkedBlocks, ...]
    moments: tuple[BlockPass, ...]
    closing: tuple[ChunkOp, ...]
    in_parameters: bool
    device_bytes: int
    smallest_bytes: int
    most_bytes: int = 0
    communication: ChunkCommunication = ChunkCommunication.GROUP

    def moved(self, does: ChunkAction) -> int:
        """Bytes of all operations with one action in a step."""
        inside = (op for moment in self.moments for op in (*moment.before, *moment.after))
        return sum(op.num_bytes for op in (*inside, *self.closing) if op.does is does)

    @property
    def in_bytes(self) -> int:
        """Bytes from the host to the device in a step."""
        return self.moved(ChunkAction.FETCH) + self.moved(ChunkAction.RETURN)

    @property
    def out_bytes(self) -> int:
        """Bytes from the device to the host in a step."""
        return self.moved(ChunkAction.SEND) + self.moved(ChunkAction.DROP)
