"""The fine-tuning of a measured row: the adapters that it states, or those of its framework."""

from __future__ import annotations

import re

from parplan.planner.validation.row_cells import Row, whole
from parplan.profiles.models.fine_tuning import ALL_LINEAR, FineTuning

# LoRA of Megatron-Bridge (src/megatron/bridge/peft/lora.py: dim 32 on all products of attention and
# feed-forward network), where neither the row nor its recipe says otherwise
DEFAULT_RANK = 32
_RANK = re.compile(r"\brank[- ](\d+)\b|\bLoRA dim (\d+)\b|\br=(\d+)\b", re.IGNORECASE)


def fine_tuning_of(row: Row) -> FineTuning | None:
    """Returns the adapters of a row whose run trains them, None for one that trains all weights."""
    if not re.search(r"lora|peft", row["run_type"], re.IGNORECASE):
        return None
    stated = _RANK.search(row["notes"])
    noted = int(next(filter(None, stated.groups()))) if stated else DEFAULT_RANK
    targets = row.get("lora_targets") or ALL_LINEAR
    return FineTuning(lora_rank=whole(row, "lora_rank", noted), lora_targets=tuple(targets.split()))
