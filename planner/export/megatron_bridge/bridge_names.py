"""Megatron-Bridge's names of Megatron-LM's arguments: paths of its ConfigContainer.

Read in NVIDIA-NeMo/Megatron-Bridge at 067f987df0, version 0.7.0: src/megatron/bridge/training/
config.py, mixed_precision.py, comm_overlap.py and models/gpt_provider.py, and the map of
scripts/translate_mlm_to_bridge.py. A switch is always written, for a recipe may have it on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from parplan.planner.export.fields.arguments import Argument, Facts, Words, read_number, reading
from parplan.planner.export.fields.spellings import NULL, spelled, switched, valued
from parplan.planner.export.files.nested_file import read_flag, unpriced
from parplan.planner.export.megatron.megatron_arguments import TABLE as MEGATRON_TABLE
from parplan.planner.export.megatron.megatron_arguments import (
    read_main_gradients,
    read_second_moment,
    read_wide,
)
from parplan.planner.export.megatron.megatron_model import MODEL_TABLE as MEGATRON_MODEL
from parplan.profiles.models.functions import Activations
from parplan.profiles.models.spec import ModelSpec, Norm, Precision
from parplan.profiles.product_formats import ProductFormat

_VALUES = {
    "--tensor-model-parallel-size": "model.tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "model.pipeline_model_parallel_size",
    "--pipeline-model-parallel-layout": "model.pipeline_model_parallel_layout",
    "--num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "--decoder-first-pipeline-num-layers": "model.num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "model.num_layers_in_last_pipeline_stage",
    "--context-parallel-size": "model.context_parallel_size",
    "--cp-comm-type": "model.cp_comm_type",
    "--hierarchical-context-parallel-sizes": "model.hierarchical_context_parallel_sizes",
    "--expert-model-parallel-size": "model.expert_model_parallel_size",
    "--expert-tensor-parallel-size": "model.expert_tensor_parallel_size",
    "--data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "--num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "--recompute-granularity": "model.recompute_granularity",
    "--recompute-modules": "model.recompute_modules",
    "--offload-modules": "model.offload_modules",
    "--recompute-method": "model.recompute_method",
    "--recompute-num-layers": "model.recompute_num_layers",
    "--micro-batch-size": "train.micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--optimizer": "optimizer.optimizer",
    "--moe-expert-capacity-factor": "model.moe_expert_capacity_factor",
    "--moe-token-dispatcher-type": "model.moe_token_dispatcher_type",
    "--ckpt-format": "checkpoint.ckpt_format",
}
_LAYOUT = "model.pipeline_model_parallel_layout"
_SWITCHES = {
    "--account-for-embedding-in-pipeline-split": "model.account_for_embedding_in_pipeline_split",
    "--account-for-loss-in-pipeline-split": "model.account_for_loss_in_pipeline_split",
    "--sequence-parallel": "model.sequence_parallel",
    "--fine-grained-activation-offloading": "model.fine_grained_activation_offloading",
    "--use-tp-pp-dp-mapping": "dist.use_tp_pp_dp_mapping",
    "--use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "--use-megatron-fsdp": "ddp.use_megatron_fsdp",
    "--overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "--overlap-param-gather": "ddp.overlap_param_gather",
    "--moe-grouped-gemm": "model.moe_grouped_gemm",
    "--overlap-moe-expert-parallel-comm": "model.overlap_moe_expert_parallel_comm",
}
_DEFAULTS: Mapping[str, Words] = {
    "model.tensor_model_parallel_size": ("1",),
    "model.pipeline_model_parallel_size": ("1",),
    "model.context_parallel_size": ("1",),
    "model.expert_model_parallel_size": ("1",),
    "model.virtual_pipeline_model_parallel_size": NULL,
    "model.pipeline_model_parallel_layout": NULL,
    "model.recompute_granularity": NULL,
    "model.recompute_method": NULL,
    "model.recompute_num_layers": NULL,
}
# the registered functions of mixed_precision.py, and the words of perf_recipes/_common.py for them
_MIXES: Mapping[str, tuple[Precision, ProductFormat | None, bool]] = {
    "bf16_mixed": (Precision.BF16, None, False),
    "fp16_mixed": (Precision.FP16, None, False),
    "bf16_with_fp8_delayed_scaling_mixed": (Precision.BF16, ProductFormat.FP8_DELAYED, True),
    "bf16_with_fp8_current_scaling_mixed": (Precision.BF16, ProductFormat.FP8_CURRENT, True),
    "bf16_with_fp8_subchannel_scaling_mixed": (Precision.BF16, ProductFormat.FP8_BLOCK, False),
    "bf16_with_mxfp8_mixed": (Precision.BF16, ProductFormat.MXFP8, True),
    "bf16_with_nvfp4_mixed": (Precision.BF16, ProductFormat.NVFP4, True),
}
_SHORT = {
    "bf16": "bf16_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}


def _mix(settings: Any) -> Words | None:
    wanted = (settings.precision, settings.products)
    return next(((name,) for name, mix in _MIXES.items() if mix[:2] == wanted), None)


def _read_mix(words: Words, _: Facts) -> Facts:
    if words == ("MixedPrecisionConfig",):  # its own settings say it
        return {"precision": Precision.FP32, "products": None, "narrow_weights": False}
    name = words[0].replace("-", "_")
    name = _SHORT.get(name, name)
    if name not in _MIXES:
        raise ValueError(f"one of {', '.join(_MIXES)} is priced")
    precision, products, narrow = _MIXES[name]
    facts: Facts = {"precision": precision, "products": products, "narrow_weights": narrow}
    if precision is Precision.FP16:  # grad_reduce_in_fp32=False there
        facts["gradient_precision"] = Precision.FP16
    return facts


def _half(precision: Precision) -> Callable[[Words, Facts], Facts]:
    """Returns the reading of the switch of a 16-bit precision."""
    return lambda words, _: {"precision": precision} if read_flag(words) else {}


def _read_fp8(words: Words, facts: Facts) -> Facts:
    """Reads the format of narrow products, which scale by the tensor where no recipe is said."""
    if words[0] in ("null", "None"):
        return {"products": None}
    return {"products": facts.get("products") or ProductFormat.FP8_CURRENT}


def _fused(run: Any) -> Words:
    return ("true",) if run.fused_loss else ("false",)


def sequence(path: str) -> Argument:
    """Returns the row of the tokens of a sequence under a path."""
    return Argument(
        name=path,
        facts=("seq_length",),
        write=lambda run: (f"{run.seq_length}",),
        read=lambda words, _: {"seq_length": read_number(words)},
    )


def _layout_of_stages(row: Argument) -> Callable[[Words, Facts], Facts]:
    """Returns the reading of a layout, which says nothing without a pipeline."""
    return lambda words, facts: row.read(words, facts) if facts.get("pp", 1) > 1 else {}


def _gradients(words: Words, _: Facts) -> Facts:
    return {"gradient_precision": Precision.FP32 if read_flag(words) else Precision.BF16}


def _moments(words: Words, _: Facts) -> Facts:
    if "bfloat16" in words[0]:
        return {"state_precision": MOMENTS}
    return {}


# settings that change time or memory and that have a price with these words alone
_UNPRICED = (
    ("model.cpu_offloading_num_layers", "null", "0"),
    ("model.window_size", "null"),
    ("model.hybrid_layer_pattern", "null"),
    ("model.experimental_attention_variant", "null"),
    ("optimizer.optimizer_cpu_offload", "false"),
    ("train.rampup_batch_size", "null"),
    ("peft", "null", "none"),
    ("model.transformer_impl", "transformer_engine"),
    ("model.fp8_wgrad", "true"),
)
_BY_NAME = {row.name: row for row in MEGATRON_TABLE}
MOMENTS = _BY_NAME["--exp-avg-dtype"].read(("bf16",), {})["state_precision"]
_OVERLAP = _BY_NAME["--tp-comm-overlap"]
_OWN: tuple[Argument, ...] = (
    sequence("model.seq_length"),
    sequence("dataset.seq_length"),  # run_recipe.py takes this one where both are said
    switched(_OVERLAP, "model.tp_comm_overlap"),
    reading("comm_overlap.tp_comm_overlap", switched(_OVERLAP, "").read),
    reading(
        "comm_overlap.overlap_moe_expert_parallel_comm",
        switched(_BY_NAME["--overlap-moe-expert-parallel-comm"], "").read,
    ),
    # setup takes a distributed optimizer where either of the two asks for it
    replace(
        switched(_BY_NAME["--use-distributed-optimizer"], "optimizer.use_distributed_optimizer"),
        read=lambda words, facts: (
            {"zero": max(1, facts.get("zero", 0))} if read_flag(words) else {}
        ),
    ),
    Argument(
        name="mixed_precision",
        facts=("precision", "products"),
        write=_mix,
        read=_read_mix,
        source="src/megatron/bridge/training/mixed_precision.py",
    ),
    reading("mixed_precision.bf16", _half(Precision.BF16)),
    reading("mixed_precision.fp16", _half(Precision.FP16)),
    reading("mixed_precision.fp8", _read_fp8),
    reading("mixed_precision.grad_reduce_in_fp32", _gradients),
    reading("mixed_precision.fp8_recipe", valued(_BY_NAME["--fp8-recipe"], "").read),
    reading(
        "mixed_precision.fp8_param_gather", lambda words, _: {"narrow_weights": read_flag(words)}
    ),
    Argument(
        name="model.cross_entropy_loss_fusion",
        facts=("fused_loss",),
        write=_fused,
        read=lambda words, _: {"fused_loss": read_flag(words)},
    ),
    *(unpriced(path, *words) for path, *words in _UNPRICED),
    reading("optimizer.exp_avg_dtype", _moments),
    reading("optimizer.exp_avg_sq_dtype", read_second_moment),
    reading("optimizer.main_grads_dtype", read_main_gradients),
    reading("optimizer.main_params_dtype", read_wide),
    reading("model.attention_backend", valued(_BY_NAME["--attention-backend"], "").read),
)
TABLE: tuple[Argument, ...] = (
    *(
        replace(row, read=_layout_of_stages(row)) if row.name == _LAYOUT else row
        for row in spelled(MEGATRON_TABLE, _VALUES, _SWITCHES, {}, _DEFAULTS)
    ),
    *_OWN,
)

_SHAPE = {
    "--num-layers": "model.num_layers",
    "--hidden-size": "model.hidden_size",
    "--num-attention-heads": "model.num_attention_heads",
    "--kv-channels": "model.kv_channels",
    "--ffn-hidden-size": "model.ffn_hidden_size",
    "--vocab-size": "tokenizer.vocab_size",
    "--make-vocab-size-divisible-by": "model.make_vocab_size_divisible_by",
    "--norm-epsilon": "model.layernorm_epsilon",
    "--position-embedding-type": "model.position_embedding_type",
    "--rotary-base": "model.rotary_base",
    "--rotary-percent": "model.rotary_percent",
    "--attention-dropout": "model.attention_dropout",
    "--hidden-dropout": "model.hidden_dropout",
    "--mtp-num-layers": "model.mtp_num_layers",
    "--num-experts": "model.num_moe_experts",
    "--moe-router-topk": "model.moe_router_topk",
    "--moe-ffn-hidden-size": "model.moe_ffn_hidden_size",
    "--moe-shared-expert-intermediate-size": "model.moe_shared_expert_intermediate_size",
    "--moe-router-score-function": "model.moe_router_score_function",
    "--moe-router-topk-scaling-factor": "model.moe_router_topk_scaling_factor",
}
_SHAPE_SWITCHES = {
    "--add-qkv-bias": "model.add_qkv_bias",
    "--qk-layernorm": "model.qk_layernorm",
}
_SHAPE_INVERTED = {
    "--disable-bias-linear": "model.add_bias_linear",
    "--untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights",
}
_SHAPE_BY_NAME = {row.name: row for row in MEGATRON_MODEL}
_SHAPE_BY_NAME = {row.name: row for row in MEGATRON_MODEL}


def _activation(spec: ModelSpec) -> Words:
    if spec.functions.activation is Activations.RELU_SQUARED:
        return ("squared_relu",)
    return ("silu",) if spec.gated_ffn else ("gelu",)


def _read_activation(words: Words, _: Facts) -> Facts:
    name = words[0].removeprefix("torch.nn.functional.")
    return {"activation": Activations.RELU_SQUARED} if name in ("squared_relu", "relu2") else {}


def _read_norm(words: Words, _: Facts) -> Facts:
    """Reads the names of Megatron-Core and of NeMo, such as `RMSNorm` and `layernorm1p`."""
    name = words[0].lower()
    if not name.startswith(("rmsnorm", "layernorm")):
        raise ValueError("RMSNorm or LayerNorm is priced")
    return {"norm": Norm.RMS_NORM if name.startswith("rms") else Norm.LAYER_NORM}


def _read_released(words: Words, _: Facts) -> Facts:
    """Reads a released model's name; a class of Megatron-Bridge's has sizes of its own."""
    return {"released": words[0]} if "/" in words[0] else {}


def _experts_at(spec: ModelSpec) -> Words | None:
    """Returns 1 for each block with experts and 0 for others, None where all have them."""
    kinds = [int(kind.experts) for kind in spec.block_kinds]
    if not spec.num_experts or all(kinds):
        return None
    return (f"[{','.join(map(str, kinds))}]",)


MODEL_TABLE: tuple[Argument, ...] = (
    reading("model", _read_released),
    reading("model.hf_model_id", _read_released),
    *spelled(MEGATRON_MODEL, _SHAPE, _SHAPE_SWITCHES, _SHAPE_INVERTED, {}),
    Argument(
        name="model.num_query_groups",
        facts=("num_kv_heads",),
        write=_SHAPE_BY_NAME["--num-query-groups"].write,
        read=lambda words, _: {} if words == NULL else {"num_kv_heads": read_number(words)},
    ),
    replace(_SHAPE_BY_NAME["--normalization"], name="model.normalization", read=_read_norm),
    switched(_SHAPE_BY_NAME["--swiglu"], "model.gated_linear_unit"),
    Argument(
        name="model.activation_func",
        facts=("functions",),
        write=_activation,
        read=_read_activation,
        source="src/megatron/bridge/utils/activation_map.py",
    ),
    replace(_SHAPE_BY_NAME["--moe-layer-freq"], name="model.moe_layer_freq", write=_experts_at),
)
