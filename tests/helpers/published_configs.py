"""Published config.json files of models, with the keys that say what the model is."""

from __future__ import annotations

from tests.helpers.published_towers import LLAMA4, PIXTRAL, QWEN2_5_VL, QWEN2_VL, SIGLIP

_HYBRID_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def _llama_like(model_type, hidden, ffn, layers, heads, kv_heads, vocab, context, **keys):
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "initializer_range": 0.02,
        **keys,
    }


def _qwen(model_type, *shape, **keys):
    return _llama_like(
        model_type,
        *shape,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        use_sliding_window=False,
        attention_dropout=0.0,
        **keys,
    )


def _qwen3(*shape, **keys):
    return _qwen(
        "qwen3",
        *shape,
        151936,
        40960,
        head_dim=128,
        attention_bias=False,
        rope_scaling=None,
        **keys,
    )


def _qwen3_moe(hidden, ffn, layers, heads, width):
    return _qwen(
        "qwen3_moe",
        *(hidden, ffn, layers, heads, 4, 151936, 40960),
        head_dim=128,
        attention_bias=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=width,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        router_aux_loss_coef=0.001,
    )


def _deepseek(model_type, hidden, ffn, layers, heads, vocab, context, **keys):
    return _llama_like(
        model_type,
        *(hidden, ffn, layers, heads, heads, vocab, context),
        hidden_act="silu",
        attention_bias=False,
        attention_dropout=0.0,
        rms_norm_eps=1e-6,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_layer_freq=1,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        **keys,
    )


def _gpt_oss(layers, experts):
    return {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "attention_bias": True,
        "tie_word_embeddings": False,
        "swiglu_limit": 7.0,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "quantization_config": {"quant_method": "mxfp4"},
    }


def _gemma2(hidden, ffn, layers, heads, kv_heads, head_dim, scalar=256):
    return {
        "model_type": "gemma2",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
    }


def _gemma3(hidden, ffn, layers, heads, kv_heads, head_dim, scalar=256):
    """Its text lies beside a vision tower."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": scalar,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    return {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 256,
        "image_token_index": 262144,
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "initializer_range": 0.02,
    }


def _llama4(experts, step, *, qk_norm):
    """Its text lies beside a vision tower."""
    text = {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 202048,
        "max_position_embeddings": 262144,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": step,
        "attention_chunk_size": 8192,
        "no_rope_layers": [],
        "use_qk_norm": qk_norm,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "for_llm_compressor": False,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    return {"model_type": "llama4", "text_config": text, "vision_config": LLAMA4}


def _qwen_vl(model_type, vision):
    """Its text lies around the tower, as in the published files."""
    return _qwen(
        model_type,
        *(3584, 18944, 28, 28, 4, 152064, 32768),
        max_window_layers=28,
        sliding_window=32768,
        vision_config=vision,
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        vision_token_id=151654,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    )


def _mistral3():
    text = _llama_like(
        "mistral",
        *(5120, 32768, 40, 32, 8, 131072, 131072),
        head_dim=128,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=1e9,
        sliding_window=None,
        attention_dropout=0.0,
    )
    return {
        "model_type": "mistral3",
        "text_config": text,
        "vision_config": PIXTRAL,
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
        "vision_feature_layer": -1,
    }


def _glm(model_type):
    return _llama_like(
        model_type,
        *(4096, 13696, 40, 32, 2, 151552, 131072),
        head_dim=128,
        attention_bias=True,
        attention_dropout=0.0,
        partial_rotary_factor=0.5,
        rms_norm_eps=1.5625e-07,
        hidden_act="silu",
    )


def _glm4_moe(hidden, ffn, width, layers, experts, dense, *, qk_norm, factor):
    return _llama_like(
        "glm4_moe",
        *(hidden, ffn, layers, 96, 8, 151552, 131072),
        head_dim=128,
        attention_bias=True,
        use_qk_norm=qk_norm,
        moe_intermediate_size=width,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=dense,
        num_nextn_predict_layers=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=factor,
        partial_rotary_factor=0.5,
        rope_theta=1000000,
        hidden_act="silu",
        rms_norm_eps=1e-5,
    )


def _olmo2(*shape):
    return _llama_like(
        "olmo2",
        *shape,
        100352,
        4096,
        rope_theta=500000,
        rms_norm_eps=1e-6,
        attention_bias=False,
        hidden_act="silu",
    )


_FALCON = {
    "model_type": "falcon",
    "vocab_size": 65024,
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "bias": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "layer_norm_epsilon": 1e-5,
    "multi_query": True,
    "parallel_attn": True,
}

CONFIGS = {
    "qwen2.5-7b": _qwen("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, max_window_layers=28),
    "qwen2.5-32b": _qwen("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072, max_window_layers=64),
    "qwen2.5-72b": _qwen("qwen2", 8192, 29568, 80, 64, 8, 152064, 131072, max_window_layers=80),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, max_window_layers=36),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8, max_window_layers=40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8, max_window_layers=64),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 94, 64, 1536),
    "qwen2-57b-a14b": _qwen(
        "qwen2_moe",
        *(3584, 18944, 28, 28, 4, 151936, 131072),
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        num_experts=64,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        norm_topk_prob=False,
        mlp_only_layers=[],
        max_window_layers=28,
    ),
    "mistral-7b": _llama_like(
        "mistral",
        *(4096, 14336, 32, 32, 8, 32000, 32768),
        sliding_window=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    ),
    "mixtral-8x22b": _llama_like(
        "mixtral",
        *(6144, 16384, 56, 48, 8, 32000, 65536),
        num_local_experts=8,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        rope_theta=1000000,
        sliding_window=None,
        router_aux_loss_coef=0.001,
    ),
    "deepseek-v2": _deepseek(
        "deepseek_v2",
        *(5120, 12288, 60, 128, 102400, 163840),
        q_lora_rank=1536,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
        scoring_func="softmax",
        aux_loss_alpha=0.001,
        seq_aux=True,
    ),
    "deepseek-v2-lite": _deepseek(
        "deepseek_v2",
        *(2048, 10944, 27, 16, 102400, 163840),
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    ),
    "deepseek-v3": _deepseek(
        "deepseek_v3",
        *(7168, 18432, 61, 128, 129280, 163840),
        q_lora_rank=1536,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        num_nextn_predict_layers=1,
        n_group=8,
        topk_group=4,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        ep_size=1,
        quantization_config={"quant_method": "fp8"},
    ),
    "kimi-k2": _deepseek(
        "kimi_k2",
        *(7168, 18432, 61, 64, 163840, 131072),
        q_lora_rank=1536,
        moe_intermediate_size=2048,
        n_routed_experts=384,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        rope_theta=50000.0,
        n_group=1,
        routed_scaling_factor=2.827,
        topk_group=1,
    ),
    "moonlight-16b-a3b": _deepseek(
        "deepseek_v3",
        *(2048, 11264, 27, 16, 163840, 8192),
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        rope_theta=50000.0,
        n_group=1,
        routed_scaling_factor=2.446,
        topk_group=1,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, 256),
    "gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, 128, 144),
    "gemma-3-4b": _gemma3(2560, 10240, 34, 8, 4, 256),
    "gemma-3-12b": _gemma3(3840, 15360, 48, 16, 8, 256),
    "gemma-3-27b": _gemma3(5376, 21504, 62, 32, 16, 128, 168),
    "glm-4-9b": _glm("glm"),
    "glm-4-9b-0414": _glm("glm4"),
    "glm-4.5": _glm4_moe(5120, 12288, 1536, 92, 160, 3, qk_norm=True, factor=2.5),
    "glm-4.5-air": _glm4_moe(4096, 10944, 1408, 46, 128, 1, qk_norm=False, factor=1.0),
    "olmo-2-7b": _olmo2(4096, 11008, 32, 32, 32),
    "olmo-2-13b": _olmo2(5120, 13824, 40, 40, 40),
    "olmo-2-32b": _olmo2(5120, 27648, 64, 40, 8),
    "phi-3-mini": _llama_like(
        "phi3",
        *(3072, 8192, 32, 32, 32, 32064, 4096),
        sliding_window=2047,
        original_max_position_embeddings=4096,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    ),
    "phi-4": _llama_like(
        "phi3",
        *(5120, 17920, 40, 40, 10, 100352, 16384),
        sliding_window=None,
        original_max_position_embeddings=16384,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        rms_norm_eps=1e-5,
        rope_theta=250000,
    ),
    "granite-3-8b": _llama_like(
        "granite",
        *(4096, 12800, 40, 32, 8, 49155, 4096),
        attention_bias=False,
        mlp_bias=False,
        attention_multiplier=0.0078125,
        embedding_multiplier=12.0,
        logits_scaling=16.0,
        residual_multiplier=0.22,
        rms_norm_eps=1e-5,
        rope_theta=10000,
    )
    | {"tie_word_embeddings": True},
    "granite-3-3b-a800m": _llama_like(
        "granitemoe",
        *(1536, 512, 32, 24, 8, 49155, 4096),
        attention_bias=False,
        num_local_experts=40,
        num_experts_per_tok=8,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=6.0,
        residual_multiplier=0.22,
        rms_norm_eps=1e-6,
        router_aux_loss_coef=0.0,
    )
    | {"tie_word_embeddings": True},
    "falcon-7b": {
        **_FALCON,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "new_decoder_architecture": False,
    },
    "falcon-40b": {
        **_FALCON,
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": _HYBRID_8B,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "expand": 2,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "vocab_size": 131072,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "residual_in_fp32": False,
        "rescale_prenorm_residual": True,
        "time_step_min": 0.001,
        "time_step_max": 0.1,
        "rms_norm_eps": 1e-5,
    },
    "qwen2-vl-7b": _qwen_vl("qwen2_vl", QWEN2_VL),
    "qwen2.5-vl-7b": _qwen_vl("qwen2_5_vl", QWEN2_5_VL),
    "mistral-small-3.1-24b": _mistral3(),
    "whisper-large-v3": {
        "model_type": "whisper",
        "d_model": 1280,
        "encoder_layers": 32,
        "decoder_layers": 32,
        "num_hidden_layers": 32,
        "encoder_attention_heads": 20,
        "decoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "vocab_size": 51866,
        "activation_function": "gelu",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "apply_spec_augment": False,
        "scale_embedding": False,
        "use_weighted_layer_sum": False,
        "tie_word_embeddings": True,
    },
    "llama4-scout": _llama4(16, 1, qk_norm=True),
    "llama4-maverick": _llama4(128, 2, qk_norm=False),
}
