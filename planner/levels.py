"""Levels of sub-pipelined tensor parallelism: where one applies, and which of them are worth a search.

Of the same candidate at two levels the faster is searched, where the times of a block decide whatever the number of blocks:
with e what two halves take longer than a whole, a level pays where (1 + e) x + exposed < x + 2 c (EQUATIONS P). Level 3 takes no
longer than 2, as it waits for less, and holds the same; level 0 always stays: it alone divides operators otherwise than Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from costmodels.book import PriceBook
from costmodels.recompute import Recompute
from costmodels.strategy import Frame
from profiles.model import LayerKind
from profiles.spec import ModelSpec

ROUNDING = 1e-9  # relative: the same sum in another order


def illegal_overlap(frame: Frame, model: ModelSpec) -> str | None:
    """Why a frame cannot run at its level, or None."""
    if not frame.tp_overlap:
        return None
    what = "sub-pipelined tensor parallelism"
    if frame.mesh.tp == 1:
        return f"{what} hides all-reduces over tp, tp is 1"
    if model.num_experts:
        return f"{what} is of blocks that end in all-reduces, those of {model.name} exchange tokens of experts too"
    if frame.sequence_parallel:
        return f"{what} hides an all-reduce under a half; sequence parallelism sends twice between halves, with a norm in between"
    if frame.splits_backward:
        return f"{what} runs whole backward passes, {frame.schedule} splits them"
    if frame.micro_batch_size % 2:
        return f"{what} runs a micro-batch as two halves, its size is {frame.micro_batch_size}"
    if frame.tp_overlap == 3 and model.num_layers < 2 * frame.num_virtual_stages:
        return f"level 3 of {what} goes from block to block, {frame.num_virtual_stages} stages of {model.num_layers} blocks hold one"
    return None


def paying(frames: Sequence[Frame], book: PriceBook) -> tuple[tuple[Frame, ...], tuple[tuple[Frame, str], ...]]:
    """The frames that are worth a search, and the others with their reason: the same frame is better at another level."""
    at: dict[Frame, list[int]] = {}
    for frame in frames:
        at.setdefault(replace(frame, tp_overlap=0), []).append(frame.tp_overlap)
    kept, dropped = [], []
    for frame in frames:
        others = at[replace(frame, tp_overlap=0)] if frame.tp_overlap else []
        better = next((level for level in others if level != frame.tp_overlap and _beats(replace(frame, tp_overlap=level), frame, book)), None)
        if better is None:
            kept.append(frame)
        else:
            dropped.append((frame, f"level {frame.tp_overlap} of sub-pipelined tensor parallelism takes as long as level {better} or longer"))
    return tuple(kept), tuple(dropped)


def _beats(one: Frame, other: Frame, book: PriceBook) -> bool:
    """Whether blocks take no longer at the level of `one`, whatever runs again and however few a stage holds; of equals the lower."""
    alone_s = sum(edge.value_s for edge in book.row_edges(one.micro_batch_size, one.sharding))
    times = [(_block_s(one, level, book), _block_s(other, level, book)) for level in Recompute]
    if all(abs(a - b) <= ROUNDING * b for a, b in times):
        return one.tp_overlap < other.tp_overlap
    return all(a + alone_s <= b * (1 + ROUNDING) for a, b in times)


def _block_s(frame: Frame, level: Recompute, book: PriceBook) -> float:
    return book.layer_time(LayerKind.BLOCK, frame.micro_batch_size, frame.sharding, level).total_s
