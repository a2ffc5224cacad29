"""The precision in which an optimizer keeps its states of 16-bit parameters: copies and moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class StatePrecision(StrEnum):
    """Precision of the optimizer's states of 16-bit parameters."""

    FP32 = "fp32"
    BF16_MOMENTS = "bf16-moments"
    FP8_MOMENTS = "fp8-moments"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class StateBytes16:
    """Bytes of the copy of a 16-bit parameter that the optimizer updates, and of one moment.

    Without a copy it updates the parameter itself.
    """

    master: int
    moment: int


# bf16-moments: DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), Megatron-LM
# (--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16). fp8-moments: the
# same flags with fp8, whose scale is that of a tensor. bf16: all states in the parameters'
# type, as torch.optim.AdamW keeps them for bf16 parameters (torchtitan's training.dtype bfloat16,
# torchtune's dtype: bf16).
STATES: Mapping[StatePrecision, StateBytes16] = MappingProxyType(
    {
        StatePrecision.FP32: StateBytes16(master=4, moment=4),
        StatePrecision.BF16_MOMENTS: StateBytes16(master=4, moment=2),
        StatePrecision.FP8_MOMENTS: StateBytes16(master=4, moment=1),
        StatePrecision.BF16: StateBytes16(master=0, moment=2),
    }
)
