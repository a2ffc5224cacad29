"""The blocks that run as two halves of a micro-batch, whose all-reduces hide under each other.

Merak's sub-pipelined tensor parallelism: arXiv 2206.04959, section 4.3.
"""

from __future__ import annotations

from functools import lru_cache

from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph

# other operators have weights whose gradients are sums, or stand behind a sum that is under way
RUN_IN_HALVES = frozenset(
    {"norm1", "qkv", "rotary", "attention", "attention_out", "residual1"}
    | {"norm2", "fc1", "activation", "fc2", "residual2"}
)


@lru_cache(maxsize=64)
def whole_in_halves(model: ModelSpec, training: TrainingSpec) -> str | None:
    """Returns what keeps a block of a model from running as two halves, None where nothing does."""
    block = build_graph(model, training, micro_batch_size=2).block
    names = {operator.name for operator in block.operators if not operator.is_adapter}
    others = sorted(name for name in names - RUN_IN_HALVES if not name.endswith("_lora_sum"))
    if others:
        return f"blocks that have {', '.join(others)}"
    return None if "norm2" in names else "blocks of one norm"
