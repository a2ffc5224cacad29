"""The families of models that a config.json may name, and what sets each apart.

A key that a file leaves out has the default of the family's configuration class in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from parplan.profiles.models.blocks import NormLayout, QkNorm
from parplan.profiles.models.spec import Norm, Positions

GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu")
SILU = ("silu", "swish")
_RELU = ("relu",)


class Windows(StrEnum):
    """The blocks with a window where the file has no `layer_types`."""

    NONE = "none"
    ALL = "all"
    EVEN = "even"  # blocks 0, 2, 4, ...
    PATTERN = "pattern"  # all but each `sliding_window_pattern`-th
    LATER = "later"  # from `max_window_layers` on, with `use_sliding_window`
    CHUNKS = "chunks"  # those with positions stay within parts of a sequence
    UNROTATED = "unrotated"  # those without positions, with `use_sliding_window`


class DenseBlocks(StrEnum):
    """The blocks without experts in a model with experts."""

    NONE = "none"
    FIRST = "first"  # `first_k_dense_replace` of them
    NAMED = "named"  # `mlp_only_layers`, and those between each `decoder_sparse_step`-th
    BETWEEN = "between"  # those that `moe_layers` does not name, or between steps


class Shared(StrEnum):
    """The width of the network that all tokens pass beside the experts."""

    NONE = "none"
    COUNTED = "counted"  # their number times the width of an expert
    GATED = "gated"  # `shared_expert_intermediate_size`, with a gate
    ONE = "one"  # the width of an expert
    WIDTH = "width"  # `shared_intermediate_size`; without experts it is the dense network


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKeys:
    """The keys of the experts of a family."""

    number: tuple[str, ...] = ("num_local_experts", "num_experts")
    per_token: tuple[str, ...] = ("num_experts_per_tok",)
    width: tuple[str, ...] = ("moe_intermediate_size",)
    dense_width: tuple[str, ...] = ("intermediate_size",)
    dense: DenseBlocks = DenseBlocks.NONE
    shared: Shared = Shared.NONE
    bias: bool = False
    router_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The architecture of a model_type, and the defaults for keys that a file may leave out.

    key_bias         False: queries and values have a bias, keys have none
    qkv_bias         None: the key `bias_key` decides (`attention_bias` where it is absent)
    output_bias      None: the attention's output has a bias where queries have one
    extra_positions  rows of the position table that no token of a sequence uses
    qk_norm_key      the key that says whether there are norms of queries and keys
    unrotated        blocks in turns have no positions (`no_rope_layers`)
    dropout_key      the key whose default `dropout` is
    defaults         values of keys that the file may leave out
    fixed            keys that would change the architecture, each with the only value that the
                     graph expresses
    """

    norm: Norm = Norm.RMS_NORM
    positions: Positions = Positions.ROTARY
    gated_ffn: bool = True
    tied_embeddings: bool = False
    epsilon: float = 1e-6
    linear_bias: bool = False
    qkv_bias: bool | None = None
    key_bias: bool = True
    bias_key: str = "attention_bias"
    attention_bias: bool = False
    output_bias: bool | None = None
    parallel_residual: bool = False
    rotary_fraction: float = 1.0
    dropout: float = 0.0
    dropout_key: str = "resid_pdrop"
    activations: tuple[str, ...] = SILU
    extra_positions: int = 0
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_key: tuple[str, bool] | None = None
    norm_layout: NormLayout = NormLayout.PRE
    windows: Windows = Windows.NONE
    unrotated: bool = False
    experts: ExpertKeys | None = None
    latent: bool = False
    sinks: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)


_LAYER_NORM = Family(
    norm=Norm.LAYER_NORM,
    gated_ffn=False,
    epsilon=1e-5,
    linear_bias=True,
    output_bias=True,
    qkv_bias=True,
    activations=GELU,
)
_LEARNED = replace(_LAYER_NORM, positions=Positions.LEARNED, tied_embeddings=True)
_LLAMA = Family()
_WINDOWED = {"windows": Windows.LATER, "defaults": {"max_window_layers": 28}}
_QWEN2 = Family(qkv_bias=True, output_bias=False, **_WINDOWED)  # type: ignore[arg-type]
_QWEN3 = Family(qk_norm=QkNorm.HEAD, **_WINDOWED)  # type: ignore[arg-type]
_GEMMA2 = Family(
    tied_embeddings=True,
    activations=GELU,
    norm_layout=NormLayout.BOTH,
    windows=Windows.EVEN,
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "max_position_embeddings": 8192,
        "vocab_size": 256000,
    },
    fixed={"use_bidirectional_attention": False},
)
_DEEPSEEK = Family(
    latent=True,
    experts=ExpertKeys(
        number=("n_routed_experts",), dense=DenseBlocks.FIRST, shared=Shared.COUNTED
    ),
    fixed={"moe_layer_freq": 1},
)
_DEEPSEEK_V2 = replace(
    _DEEPSEEK,
    defaults={
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
)
_DEEPSEEK_V3 = replace(
    _DEEPSEEK,
    defaults={
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
)
_GLM = Family(
    attention_bias=True,
    output_bias=False,
    rotary_fraction=0.5,
    epsilon=1.5625e-07,
    defaults={"head_dim": 128, "num_key_value_heads": 2},
)
_ERNIE = Family(tied_embeddings=True, epsilon=1e-5, fixed={"use_bias": False})
_HUNYUAN = Family(
    epsilon=1e-5,
    qk_norm=QkNorm.HEAD,
    fixed={
        "mlp_bias": False,
        "norm_type": "rms",
        "use_cla": False,
        "use_mla": False,
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
    },
)
_OLMO2 = Family(epsilon=1e-5, qk_norm=QkNorm.WHOLE, norm_layout=NormLayout.POST)
_QWEN3_EXPERTS = ExpertKeys(number=("num_experts", "num_local_experts"), dense=DenseBlocks.NAMED)
_QWEN3_NEXT = Family(
    qk_norm=QkNorm.HEAD,
    rotary_fraction=0.25,
    experts=replace(_QWEN3_EXPERTS, shared=Shared.GATED),
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 2,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    fixed={"use_sliding_window": False},
)

FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "dots1": Family(
        qk_norm=QkNorm.HEAD,
        windows=Windows.LATER,
        experts=_DEEPSEEK.experts,
        defaults={
            "first_k_dense_replace": 0,
            "use_sliding_window": True,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        fixed={"moe_layer_freq": 1},
    ),
    "ernie4_5": replace(_ERNIE, defaults={"head_dim": 128, "rope_theta": 500000.0}),
    "ernie4_5_moe": replace(
        _ERNIE,
        experts=ExpertKeys(
            number=("moe_num_experts", "num_experts"),
            per_token=("moe_k", "num_experts_per_tok"),
            dense=DenseBlocks.FIRST,
            shared=Shared.COUNTED,
        ),
        defaults={
            "num_key_value_heads": 4,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "rope_theta": 500000.0,
        },
        fixed={**_ERNIE.fixed, "moe_layer_interval": 1},
    ),
    "falcon": Family(
        norm=Norm.LAYER_NORM,
        gated_ffn=False,
        tied_embeddings=True,
        epsilon=1e-5,
        qkv_bias=False,
        activations=GELU,
        defaults={"max_position_embeddings": 2048},
        fixed={"alibi": False, "apply_residual_connection_post_layernorm": False},
    ),
    "gemma": Family(
        tied_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        activations=GELU,
        defaults={"num_key_value_heads": 16, "head_dim": 256},
        fixed={"attention_bias": False, "use_bidirectional_attention": False},
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        qk_norm=QkNorm.HEAD,
        windows=Windows.PATTERN,
        defaults={
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
            "vocab_size": 262208,
            "rope_theta": 1e6,
        },
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, norm_layout=NormLayout.BOTH),
    "glm4_moe": replace(
        _GLM,
        attention_bias=False,
        epsilon=1e-5,
        qk_norm=QkNorm.HEAD,
        qk_norm_key=("use_qk_norm", False),
        experts=_DEEPSEEK.experts,
        defaults={
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 8,
        },
    ),
    "gpt2": replace(_LEARNED, dropout=0.1, fixed={"add_cross_attention": False}),
    "gpt_neox": replace(
        _LAYER_NORM,
        qkv_bias=None,
        attention_bias=True,
        output_bias=None,
        parallel_residual=True,
        rotary_fraction=0.25,
    ),
    "gpt_oss": Family(
        epsilon=1e-5,
        attention_bias=True,
        sinks=True,
        windows=Windows.EVEN,
        experts=ExpertKeys(
            per_token=("num_experts_per_tok", "experts_per_token"),
            width=("intermediate_size",),
            bias=True,
            router_bias=True,
        ),
        defaults={
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
        },
    ),
    "granite": _LLAMA,
    "granitemoe": replace(
        _LLAMA,
        experts=ExpertKeys(width=("intermediate_size",)),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "granitemoehybrid": replace(
        _LLAMA,
        experts=ExpertKeys(width=("intermediate_size",), shared=Shared.WIDTH),
        defaults={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
        },
        fixed={"normalization_function": "rmsnorm"},
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        experts=ExpertKeys(
            number=("num_experts",),
            per_token=("moe_topk",),
            width=("moe_intermediate_size", "intermediate_size"),
            shared=Shared.COUNTED,
        ),
        defaults={"num_shared_expert": 1},
        fixed={**_HUNYUAN.fixed, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0},
    ),
    "llama": _LLAMA,
    "llama4_text": Family(
        epsilon=1e-5,
        qk_norm=QkNorm.PLAIN,
        qk_norm_key=("use_qk_norm", True),
        windows=Windows.CHUNKS,
        unrotated=True,
        experts=ExpertKeys(
            width=("intermediate_size",),
            dense_width=("intermediate_size_mlp",),
            dense=DenseBlocks.BETWEEN,
            shared=Shared.ONE,
        ),
        defaults={
            "vocab_size": 202048,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
        },
    ),
    "minimax_m2": Family(
        qkv_bias=False,
        qk_norm=QkNorm.WHOLE,
        experts=ExpertKeys(width=("intermediate_size",)),
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        fixed={
            "attn_type_list": 1,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
            "use_qk_norm": True,
        },
    ),
    "mistral": Family(
        qkv_bias=False,
        windows=Windows.ALL,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "mixtral": Family(
        epsilon=1e-5,
        qkv_bias=False,
        windows=Windows.ALL,
        experts=ExpertKeys(width=("moe_intermediate_size", "intermediate_size")),
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1e6,
        },
    ),
    "nemotron_h": Family(
        positions=Positions.NONE,
        gated_ffn=False,
        epsilon=1e-5,
        qkv_bias=False,
        output_bias=False,
        activations=("relu2",),
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "chunk_size": 128,
        },
        fixed={"attention_bias": False, "num_nextn_predict_layers": 0},
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        windows=Windows.PATTERN,
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "max_position_embeddings": 2048,
            "rope_theta": 500000.0,
        },
    ),
    "opt": replace(
        _LEARNED,
        activations=_RELU,
        extra_positions=2,
        dropout=0.1,
        dropout_key="dropout",
        fixed={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "layerdrop": 0.0,
        },
    ),
    "phi3": Family(
        qkv_bias=False,
        epsilon=1e-5,
        windows=Windows.ALL,
        fixed={"attention_bias": False, "lm_head_bias": False},
    ),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(
        _QWEN2,
        bias_key="qkv_bias",
        qkv_bias=None,
        attention_bias=True,
        windows=Windows.NONE,
        experts=replace(_QWEN3_EXPERTS, shared=Shared.GATED),
        defaults={
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        fixed={"use_sliding_window": False},
    ),
    "qwen3": replace(_QWEN3, defaults={**_QWEN3.defaults, "head_dim": 128}),
    "qwen3_moe": replace(
        _QWEN3,
        windows=Windows.NONE,
        experts=_QWEN3_EXPERTS,
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        fixed={"use_sliding_window": False},
    ),
    "seed_oss": Family(
        attention_bias=True,
        output_bias=False,
        dropout=0.1,
        dropout_key="residual_dropout",
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        fixed={"attention_out_bias": False},
    ),
    "smollm3": Family(
        tied_embeddings=True,
        windows=Windows.UNROTATED,
        unrotated=True,
        defaults={
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "rope_theta": 2000000.0,
        },
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe_text": replace(
        _QWEN3_NEXT,
        defaults={**_QWEN3_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
    ),
    "qwen3_5_text": replace(_QWEN3_NEXT, experts=None),
    "stablelm": Family(
        norm=Norm.LAYER_NORM,
        epsilon=1e-5,
        rotary_fraction=0.25,
        qkv_bias=False,
        fixed={"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False},
    ),
    "starcoder2": replace(
        _LAYER_NORM,
        tied_embeddings=True,
        windows=Windows.ALL,
        defaults={"num_key_value_heads": 2},
        fixed={"use_bias": True, "norm_type": "layer_norm", "mlp_type": "default"},
    ),
    "whisper": replace(
        _LEARNED,
        key_bias=False,
        defaults={"max_position_embeddings": 448, "vocab_size": 51865},
        fixed={
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "use_weighted_layer_sum": False,
        },
    ),
}
ALIASES = {"kimi_k2": "deepseek_v3"}
# a configuration around that of a text model, and the family of that text
WRAPPERS = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
}
