"""Which of a device's memory figures a row reports, and of which pipeline rank: the predicted
figure to compare it with.

allocated   torch.cuda.max_memory_allocated: tensors alone
reserved    torch.cuda.max_memory_reserved: what the allocator took from the device
device      nvidia-smi: also the communicators and the context; what runs out
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


# what a memory_kind cell contains, first match first; torchtitan prints what is reserved, nanotron
# what is allocated
FIGURES = (
    (r"reserved|torchtitan", Figure.RESERVED),
    (r"alloc|active|nanotron|allocator", Figure.ALLOCATED),
)
# Megatron-LM's tests log on the last pipeline rank; every other figure is of the fullest
LAST_RANK = r"last[ -](PP |pipeline )?stage"


def figure_of(memory_kind: str) -> Figure:
    """The figure that a memory_kind cell names; an unnamed one is the whole device's, as nvidia-smi
    prints it.
    """
    return next(
        (figure for pattern, figure in FIGURES if re.search(pattern, memory_kind, re.IGNORECASE)),
        Figure.DEVICE,
    )


def measured_as(memory: RankMemory, figure: Figure) -> float:
    """Bytes of the device of one pipeline rank, counted as `figure` counts them."""
    return {
        Figure.ALLOCATED: memory.allocated,
        Figure.RESERVED: memory.reserved,
        Figure.DEVICE: memory.total,
    }[figure]


def predicted_gib(memory: Sequence[RankMemory], memory_kind: str) -> float:
    """What a row of that memory_kind would have measured on pipeline ranks that hold `memory`."""
    sizes = [measured_as(rank, figure_of(memory_kind)) for rank in memory]
    return (sizes[-1] if re.search(LAST_RANK, memory_kind) else max(sizes)) / GIB
