"""The passes of a chunk schedule: their parts, their early operations, and their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parplan.costmodels.chunks.chunk_operations import (
    BlockPass,
    ChunkAction,
    ChunkedBlocks,
    ChunkOp,
)


def parts_of_tensors(group: ChunkedBlocks, block: int) -> list[int]:
    """Returns the part of each tensor of a block."""
    index = group.blocks.index(block)
    counts = group.parts[index] if group.parts else (group.chunk_layout.counts[index],)
    return [part for part, count in enumerate(counts) for _ in range(count)]


def is_early(op: ChunkOp, index: int) -> bool:
    """Returns True for an operation before pass `index` that is issued at an earlier pass."""
    return op.does in (ChunkAction.FETCH, ChunkAction.GATHER) and 0 <= op.issued < index


def issued_early(moments: Sequence[BlockPass]) -> dict[int, list[ChunkOp]]:
    """Returns by pass the fetches and gathers that it issues for a later pass."""
    issued: dict[int, list[ChunkOp]] = {}
    for index, moment in enumerate(moments):
        for op in moment.before:
            if is_early(op, index):
                issued.setdefault(op.issued, []).append(op)
    return issued


def pass_text(block_pass: tuple[Any, ...] | None, part: int | None) -> str:
    if block_pass is None:
        return "no more"
    work, stage, micro_batch, block = block_pass
    of_part = f", part {part}" if part else ""
    return f"{stage}{work}{micro_batch} of block {block}{of_part}"
