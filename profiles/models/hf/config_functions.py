"""The functions and factors of a model from its configuration, which change none of its costs.

Left out: the scaling of rotary angles beyond the trained length, groups of experts, and corrections
of their balance.
"""

from __future__ import annotations

import math

from parplan.profiles.models.functions import Activations, Functions, RouterScores
from parplan.profiles.models.hf.config_reader import ConfigReader

ACTIVATIONS = {
    "gelu": Activations.GELU,
    "gelu_python": Activations.GELU,
    "gelu_new": Activations.GELU_TANH,
    "gelu_fast": Activations.GELU_TANH,
    "gelu_pytorch_tanh": Activations.GELU_TANH,
    "quick_gelu": Activations.QUICK_GELU,
    "silu": Activations.SILU,
    "swish": Activations.SILU,
    "relu": Activations.RELU,
    "relu2": Activations.RELU_SQUARED,
}
# of families whose files may leave the activation out, where it is not the usual one
_DEFAULT_ACTIVATIONS = {
    "falcon": "gelu",
    "gpt_neox": "gelu",
    "opt": "relu",
    "whisper": "gelu",
    "nemotron_h": "relu2",
    "gemma": "gelu_pytorch_tanh",
    "gemma2": "gelu_pytorch_tanh",
    "gemma3_text": "gelu_pytorch_tanh",
}
_SCALED_EMBEDDINGS = ("gemma", "gemma2", "gemma3_text")
_QUERY_SCALED = ("gemma2", "gemma3_text")
_GRANITE = ("granite", "granitemoe", "granitemoehybrid")
# scores, whether the weights are normed, their factor
_ROUTERS = {
    "deepseek_v2": (RouterScores.SOFTMAX, False, 1.0),
    "deepseek_v3": (RouterScores.SIGMOID, True, 2.5),
    "dots1": (RouterScores.SIGMOID, False, 1.0),
    "glm4_moe": (RouterScores.SIGMOID, True, 1.0),
    "llama4_text": (RouterScores.SIGMOID_INPUTS, False, 1.0),
    "nemotron_h": (RouterScores.SIGMOID, True, 1.0),
    "minimax_m2": (RouterScores.SIGMOID, True, 1.0),
    "qwen2_moe": (RouterScores.SOFTMAX, False, 1.0),
    "qwen3_next": (RouterScores.SOFTMAX, True, 1.0),
    "qwen3_moe": (RouterScores.SOFTMAX, False, 1.0),
}


def functions_of(
    reader: ConfigReader, family_name: str, activation: str | None, *, gated: bool, head_dim: int
) -> Functions:
    """Returns the functions and factors of a model of a family.

    activation   the name of its activation in the file
    """
    scores, normed, factor = _router(reader, family_name)
    granite = family_name in _GRANITE
    return Functions(
        activation=_activation(family_name, activation, gated=gated),
        score_factor=_score_factor(reader, family_name, head_dim),
        embedding_factor=_embedding_factor(reader, family_name),
        residual_factor=reader.number(("residual_multiplier",), 1.0) if granite else 1.0,
        logit_divisor=reader.number(("logits_scaling",), 1.0) if granite else 1.0,
        window_rope_theta=_window_theta(reader) if family_name == "gemma3_text" else 0.0,
        router_scores=scores,
        router_normed=normed,
        router_factor=factor,
    )


def _activation(family_name: str, given: str | None, *, gated: bool) -> Activations | None:
    """Returns the activation, None for the usual one."""
    if family_name == "gpt_oss":
        return Activations.BOUNDED_SILU
    name = given or _DEFAULT_ACTIVATIONS.get(family_name)
    usual = Activations.SILU if gated else Activations.GELU_TANH
    activation = ACTIVATIONS[name] if name else usual
    return None if activation is usual else activation


def _score_factor(reader: ConfigReader, family_name: str, head_dim: int) -> float:
    """Returns the factor of attention's scores, 0 for the usual one."""
    factor = 0.0
    if family_name in _QUERY_SCALED:
        factor = reader.number(("query_pre_attn_scalar",), 256.0) ** -0.5
    elif family_name in _GRANITE:
        factor = reader.number(("attention_multiplier",), 1.0)
    return 0.0 if factor == head_dim**-0.5 else factor


def _embedding_factor(reader: ConfigReader, family_name: str) -> float:
    if family_name in _SCALED_EMBEDDINGS:
        return math.sqrt(reader.integer(("hidden_size",)))
    return reader.number(("embedding_multiplier",), 1.0) if family_name in _GRANITE else 1.0


def _window_theta(reader: ConfigReader) -> float:
    """Returns the rotary base of blocks with a window (Gemma 3)."""
    _, inner = reader.find(("rope_parameters",))
    local = inner.get("sliding_attention") if isinstance(inner, dict) else None
    if isinstance(local, dict) and "rope_theta" in local:
        return float(local["rope_theta"])
    return reader.number(("rope_local_base_freq",), 10000.0)


def _router(reader: ConfigReader, family_name: str) -> tuple[RouterScores, bool, float]:
    has_experts = reader.find(("n_routed_experts",))[1] is not None
    if family_name not in _ROUTERS or (family_name == "nemotron_h" and not has_experts):
        return RouterScores.SOFTMAX, True, 1.0
    scores, normed, factor = _ROUTERS[family_name]
    if family_name != "deepseek_v2":  # its router in transformers never divides by the sum
        normed = reader.flag("norm_topk_prob", normed)
    return scores, normed, reader.number(("routed_scaling_factor",), factor)
