"""The modules of a block that Megatron-Core recomputes or offloads by name, as operators.

The names are those of --recompute-modules and --offload-modules
(megatron/core/transformer/transformer_config.py of NVIDIA/Megatron-LM@d98e8a64dd). `mlp` is the
dense network of a block without experts, `moe` the whole mixture with its router and its shared
experts, `moe_act` the activation of its experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from parplan.profiles.models.operator_graph import LayerClass, Operator, OperatorKind

_QUERIES_AND_KEYS = ("qkv", "q", "q_down", "q_up", "kv_down", "kv_up")
_UP = ("q_norm", "q_up", "kv_norm", "kv_up", "rotary")
_DENSE = ("fc1", "activation", "fc2")
_ROUTED = ("router", "choice", "latent_down", "dispatch", *_DENSE, "combine", "latent_up")

Module = Callable[[Operator, bool], bool]  # whether it has an operator, of a block with experts


def _named(*names: str) -> Module:
    return lambda operator, _: operator.name in names


def _of_experts(*names: str) -> Module:
    return lambda operator, experts: experts and operator.name in names


def _is_shared(operator: Operator, _: bool) -> bool:
    return operator.name.startswith("shared_")


def _is_core(operator: Operator, _: bool) -> bool:
    return operator.kind is OperatorKind.ATTENTION


RECOMPUTED: Mapping[str, Module] = {
    "core_attn": _is_core,
    "layernorm": _named("norm1", "norm2"),
    "mla_up_proj": _named(*_UP),
    "mlp": lambda operator, experts: not experts and operator.name in _DENSE,
    "moe_act": _of_experts("activation"),
    "moe": lambda operator, experts: (
        experts and (operator.name in _ROUTED or _is_shared(operator, experts))
    ),
    "shared_experts": _is_shared,
}
OFFLOADED: Mapping[str, Module] = {
    "attn_norm": _named("norm1"),
    "qkv_linear": _named(*_QUERIES_AND_KEYS),
    "core_attn": _is_core,
    "attn_proj": _named("attention_out"),
    "mlp_norm": _named("norm2"),
    "expert_fc1": _of_experts("fc1"),
    "moe_act": _of_experts("activation"),
    "all": lambda _, __: True,
}


def named_modules(cell: str) -> tuple[str, ...]:
    """Returns the modules of a cell such as `selective [layernorm moe_act]`, none of others."""
    level, _, names = cell.partition(" ")
    words = tuple(re.findall(r"\w+", names))
    known = level == "selective" and all(word in RECOMPUTED for word in words)
    return words if known else ()


def module_operators(
    layer: LayerClass, modules: tuple[str, ...], of: Mapping[str, Module]
) -> tuple[str, ...]:
    """Returns the operators of a block that its `modules` have, in their order."""
    return tuple(
        operator.name
        for operator in layer.operators
        if any(of[module](operator, layer.has_experts) for module in modules)
    )
