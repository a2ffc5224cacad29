"""Families whose blocks no row of a table expresses: the key that says so, and what it means.

Without these rows their modules would be traced, which takes minutes for a large one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parplan.profiles.errors import ConfigError

_INDEXED = ("index_topk", "attention reads the tokens that an indexer picks")
_DEEPSTACK = ("vision_config.deepstack_visual_indexes", "blocks add features of the tower's blocks")
_TOWER = ("vision_config", "its tower is not described, the text_config is")
_LINEAR = ("layer_types", "blocks with linear attention")
_SHORT = ("conv_L_cache", "blocks with short convolutions")
_PER_LAYER = ("hidden_size_per_layer_input", "every block adds an embedding of its own")
NOT_DESCRIBED: Mapping[str, tuple[str, str]] = {
    "bamba": ("mamba_d_state", "state space and attention with rotary positions in turns"),
    "deepseek_v32": _INDEXED,
    "falcon_h1": ("mamba_d_ssm", "state space and attention side by side in a block"),
    "gemma3n": ("altup_num_inputs", "a token is several streams (AltUp)"),
    "gemma3n_text": ("altup_num_inputs", "a token is several streams (AltUp)"),
    "gemma4": _PER_LAYER,
    "gemma4_text": _PER_LAYER,
    "glm_moe_dsa": _INDEXED,
    "jamba": ("mamba_d_state", "state-space blocks of the first Mamba"),
    "kimi_linear": ("linear_attn_config", "blocks with linear attention"),
    "lfm2": _SHORT,
    "lfm2_moe": _SHORT,
    "longcat_flash": ("zero_expert_num", "experts that compute nothing"),
    "minimax": _LINEAR,
    "qwen3_5": _TOWER,
    "qwen3_5_moe": _TOWER,
    "qwen3_vl": _DEEPSTACK,
    "qwen3_vl_moe": _DEEPSTACK,
    "zamba2": ("mamba_d_state", "blocks that share their attention"),
}


def require_described(config: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a configuration of a family that is not described, by its key."""
    model_type = str(config.get("model_type"))
    if model_type not in NOT_DESCRIBED:
        return
    name, meaning = NOT_DESCRIBED[model_type]
    value: Any = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    stated = f"model_type is {model_type!r}" if value is None else f"{name} is {value!r}"
    raise ConfigError(
        f"{where}: {stated}: {meaning}, which the operator graph does not have ({name})",
        hint="--trace plans the module itself, without expert parallelism",
    )
