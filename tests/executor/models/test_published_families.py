"""The executor's blocks compute what transformers' modules of published families compute.

Each family is read from its configuration, so that the reader's functions and factors are tested
too. The weights are those of transformers, in the executor's layout.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parplan.profiles.models.blocks import NormLayout
from parplan.profiles.models.huggingface import entry_from_config
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import NEUTRAL, AttentionKernel
from tests.helpers.executor_world import reference_layers, require_same_as_theirs

SEQ_LENGTH = 24
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    **SHAPE,
    **ROUTED,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
del LATENT["head_dim"]
GEMMA = {**SHAPE, "num_hidden_layers": 4, "sliding_window": 6, "query_pre_attn_scalar": 12}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "deepseek-v2": ("deepseek_v2", {**LATENT, "q_lora_rank": 16, "routed_scaling_factor": 1.5}),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 16}),
    "gpt-oss": (
        "gpt_oss",
        {
            **SHAPE,
            **WINDOWS,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "gemma-2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma-3": ("gemma3_text", {**GEMMA, "layer_types": WINDOWS["layer_types"]}),
    "qwen3-moe": (
        "qwen3_moe",
        {**SHAPE, **ROUTED, "num_experts": 4, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            **{key: value for key, value in SHAPE.items() if key != "head_dim"},
            **ROUTED,
            "num_experts": 4,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "glm-4.5": (
        "glm4_moe",
        {
            **SHAPE,
            **ROUTED,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "llama-4": (
        "llama4_text",
        {
            **SHAPE,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 6,
            "no_rope_layers": [1, 1, 0],
            "pad_token_id": 0,
        },
    ),
    "glm-4": ("glm4", {**SHAPE, "partial_rotary_factor": 1.0, "pad_token_id": 0}),
    "olmo-2": ("olmo2", {key: value for key, value in SHAPE.items() if key != "head_dim"}),
    "qwen3": ("qwen3", SHAPE),
    "granite": (
        "granite",
        {
            **{key: value for key, value in SHAPE.items() if key != "head_dim"},
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
}
NORMS = {
    NormLayout.PRE: {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    NormLayout.POST: {
        "post_norm1": "post_attention_layernorm",
        "post_norm2": "post_feedforward_layernorm",
    },
    NormLayout.BOTH: {
        "norm1": "input_layernorm",
        "post_norm1": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "post_norm2": "post_feedforward_layernorm",
    },
}
GLM4_NORMS = {
    "norm1": "input_layernorm",
    "post_norm1": "post_self_attn_layernorm",
    "norm2": "post_attention_layernorm",
    "post_norm2": "post_mlp_layernorm",
}


def _pairs(rows: Tensor, dim: int) -> Tensor:
    """Rows of rotated features as halves, which DeepSeek and GLM-4 have as neighbours."""
    first, second = rows.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return torch.cat((first, second), dim)


def _copy_latent(ours: nn.Module, attention: nn.Module, model: ModelSpec) -> None:
    latent = model.latent
    query = getattr(attention, "q_b_proj", None) or attention.q_proj
    plain, turned = query.weight.unflatten(0, (-1, model.head_dim)).split(
        (latent.nope_head_dim, latent.rope_head_dim), dim=1
    )
    joined = torch.cat((plain, _pairs(turned, 1)), dim=1).flatten(0, 1)
    (ours.q_up if latent.q_rank else ours.q).weight.copy_(joined)
    if latent.q_rank:
        ours.q_down.weight.copy_(attention.q_a_proj.weight)
        ours.q_norm.weight.copy_(attention.q_a_layernorm.weight)
    down = attention.kv_a_proj_with_mqa.weight
    compressed, turned = down.split((latent.kv_rank, latent.rope_head_dim))
    ours.kv_down.weight.copy_(torch.cat((compressed, _pairs(turned, 0))))
    ours.kv_norm.weight.copy_(attention.kv_a_layernorm.weight)
    ours.kv_up.weight.copy_(attention.kv_b_proj.weight)


def _copy_attention(ours: nn.Module, attention: nn.Module, model: ModelSpec) -> None:
    for name, parameter in ours.qkv.named_parameters():
        parts = (getattr(attention, f"{of}_proj").get_parameter(name) for of in "qkv")
        query, key, value = (
            part.unflatten(0, (model.num_kv_heads, -1, model.head_dim)) for part in parts
        )
        if model.name in ("glm-4", "llama-4"):
            query, key = _pairs(query, 2), _pairs(key, 2)
        parameter.copy_(torch.cat((query, key, value), dim=1).flatten(0, 2))
    for of in "qk":
        if hasattr(attention, f"{of}_norm"):
            weight = getattr(attention, f"{of}_norm").weight
            getattr(ours.qk_norm, f"{of}_weight").copy_(
                weight + (1 if model.name == "gemma-3" else 0)
            )
    if model.sinks:
        ours.attention.sinks.copy_(attention.sinks)


def _copy_network(ours: nn.Module, mlp: nn.Module, prefix: str = "") -> None:
    if hasattr(mlp, "gate_up_proj"):
        gate, up = mlp.gate_up_proj.weight.chunk(2)
    else:
        gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    getattr(ours, f"{prefix}fc1").weight.copy_(torch.stack((gate, up), dim=1).flatten(0, 1))
    getattr(ours, f"{prefix}fc2").weight.copy_(mlp.down_proj.weight)


def _copy_dense(ours: nn.Module, mlp: nn.Module, _: ModelSpec) -> None:
    _copy_network(ours, mlp)


def _copy_experts(ours: nn.Module, mlp: nn.Module, model: ModelSpec) -> None:
    router = mlp.router if hasattr(mlp, "router") else mlp.gate
    ours.mixture.router.load_state_dict(dict(router.named_parameters()), strict=True)
    experts, held = mlp.experts, ours.mixture.experts
    if model.expert_bias:
        held.fc1.weight.copy_(experts.gate_up_proj.flatten(0, 1))
        held.fc1.bias.copy_(experts.gate_up_proj_bias.t())
        held.fc2.weight.copy_(experts.down_proj.transpose(1, 2).flatten(0, 1))
        held.fc2.bias.copy_(experts.down_proj_bias.t())
    elif model.name == "llama-4":
        gate_up = experts.gate_up_proj.unflatten(2, (2, -1)).transpose(2, 3)
        held.fc1.weight.copy_(gate_up.flatten(2).flatten(0, 1))
        held.fc2.weight.copy_(experts.down_proj.transpose(1, 2).flatten(0, 1))
    else:
        gate_up = experts.gate_up_proj.unflatten(1, (2, -1)).permute(0, 3, 2, 1)
        held.fc1.weight.copy_(gate_up.flatten(2).flatten(0, 1))
        held.fc2.weight.copy_(experts.down_proj.flatten(0, 1))
    if hasattr(mlp, "shared_experts"):
        _copy_network(ours, mlp.shared_experts, "shared_")
    if hasattr(mlp, "shared_expert"):
        _copy_network(ours, mlp.shared_expert, "shared_")
    if hasattr(mlp, "shared_expert_gate"):
        ours.shared_gate.weight.copy_(mlp.shared_expert_gate.weight)


def _copy(layers: nn.ModuleDict, theirs: nn.Module, model: ModelSpec) -> None:
    one = 1 if model.name.startswith("gemma") else 0  # Gemma adds 1 to the weight of a norm
    layers["embedding"].tokens.weight.copy_(theirs.model.embed_tokens.weight)
    layers["head"].norm.weight.copy_(theirs.model.norm.weight + one)
    layers["head"].lm_head.weight.copy_(theirs.lm_head.weight)
    names = GLM4_NORMS if model.name == "glm-4" else NORMS[model.norm_layout]
    for place, block in enumerate(theirs.model.layers):
        ours = layers[f"block{place}"]
        for name, given in names.items():
            getattr(ours, name).weight.copy_(getattr(block, given).weight + one)
        copy_attention = _copy_latent if model.latent is not None else _copy_attention
        copy_attention(ours, block.self_attn, model)
        ours.attention_out.load_state_dict(block.self_attn.o_proj.state_dict())
        network = block.feed_forward if hasattr(block, "feed_forward") else block.mlp
        (_copy_experts if hasattr(ours, "mixture") else _copy_dense)(ours, network, model)


@pytest.mark.parametrize("kernel", list(AttentionKernel))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_what_transformers_computes_with_the_same_weights(name, kernel):
    transformers = pytest.importorskip("transformers")
    model_type, config = FAMILIES[name]
    described = entry_from_config({"model_type": model_type, **config}, f"{name}/config.json").spec
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **config), attn_implementation="eager"
    )
    training = TrainingSpec(
        global_batch_size=2, seq_length=SEQ_LENGTH, attention=kernel, stack=NEUTRAL
    )
    layers = reference_layers(described, training, 0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            # biases and norms away from 0 and 1, scores beyond soft caps
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        _copy(layers, theirs, described)

    require_same_as_theirs(layers, theirs, torch.randint(1, 128, (2, SEQ_LENGTH)))
