"""The predicted memory figure that compares with the figure that a row reports.

allocated   torch.cuda.max_memory_allocated: tensors alone
reserved    torch.cuda.max_memory_reserved: memory that the allocator took from the device
device      nvidia-smi: reserved memory, communicators and context; this is the one that runs out
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

from parplan.costmodels.memory.rank_memory import RankMemory
from parplan.profiles.units import GIB


class Figure(StrEnum):
    ALLOCATED = "allocated"
    RESERVED = "reserved"
    DEVICE = "device"


# patterns of a memory_kind cell, first match first; torchtitan prints reserved memory, nanotron
# allocated memory
FIGURES = (
    (r"reserved|torchtitan", Figure.RESERVED),
    (r"alloc|active|nanotron|allocator", Figure.ALLOCATED),
)
# Megatron-LM's tests log on the last pipeline rank; every other figure is of the fullest
LAST_RANK = r"last[ -](PP |pipeline )?stage"


def figure_of(memory_kind: str) -> Figure:
    """Returns the figure that a memory_kind cell names, by default that of the whole device."""
    return next(
        (figure for pattern, figure in FIGURES if re.search(pattern, memory_kind, re.IGNORECASE)),
        Figure.DEVICE,
    )


def measured_as(memory: RankMemory, figure: Figure) -> float:
    """Bytes of one pipeline rank's device, counted as `figure` counts them."""
    return {
        Figure.ALLOCATED: memory.allocated,
        Figure.RESERVED: memory.reserved,
        Figure.DEVICE: memory.total,
    }[figure]


def predicted_gib(memory: Sequence[RankMemory], memory_kind: str) -> float:
    """GiB that a row of this memory_kind would report for pipeline ranks that hold `memory`."""
    sizes = [measured_as(rank, figure_of(memory_kind)) for rank in memory]
    return (sizes[-1] if re.search(LAST_RANK, memory_kind) else max(sizes)) / GIB
