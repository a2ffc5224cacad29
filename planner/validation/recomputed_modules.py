"""The modules of a block that Megatron-Core recomputes by name, as operators of the graph.

The names are those of --recompute-modules (megatron/core/transformer/transformer_config.py of
NVIDIA/Megatron-LM@d98e8a64dd). `mlp` is the dense network of a block without experts, `moe` the
whole mixture with its router and its shared experts, `moe_act` the activation of its experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from parplan.profiles.models.operator_graph import LayerClass, Operator, OperatorKind

_UP = ("q_norm", "q_up", "kv_norm", "kv_up", "rotary")
_DENSE = ("fc1", "activation", "fc2")
_ROUTED = ("router", "choice", "dispatch", *_DENSE, "combine")


def _is_shared(operator: Operator) -> bool:
    return operator.name.startswith("shared_")


# the module -> whether it has an operator, of a block with experts or without
MODULES: Mapping[str, Callable[[Operator, bool], bool]] = {
    "core_attn": lambda operator, _: operator.kind is OperatorKind.ATTENTION,
    "layernorm": lambda operator, _: operator.name in ("norm1", "norm2"),
    "mla_up_proj": lambda operator, _: operator.name in _UP,
    "mlp": lambda operator, experts: not experts and operator.name in _DENSE,
    "moe_act": lambda operator, experts: experts and operator.name == "activation",
    "moe": lambda operator, experts: experts and (operator.name in _ROUTED or _is_shared(operator)),
    "shared_experts": lambda operator, _: _is_shared(operator),
}


def named_modules(cell: str) -> tuple[str, ...]:
    """Returns the modules of a cell such as `selective [layernorm moe_act]`, none of others."""
    level, _, names = cell.partition(" ")
    words = tuple(re.findall(r"\w+", names))
    known = level == "selective" and all(word in MODULES for word in words)
    return words if known else ()


def module_operators(layer: LayerClass, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the operators of a block that its recomputed modules have, in their order."""
    return tuple(
        operator.name
        for operator in layer.operators
        if any(MODULES[module](operator, layer.has_experts) for module in modules)
    )
