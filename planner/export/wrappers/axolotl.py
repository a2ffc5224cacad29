"""axolotl: the keys of its YAML.

Names, defaults and conditions were read in axolotl-ai-cloud/axolotl at 067b021c8b: schemas/ and
distributed.py of src/axolotl/utils, and core/builders/base.py. It loads parameters in the type of
training; its FSDP is that of transformers, with sizes of accelerate's ParallelismConfig.
"""

from __future__ import annotations

from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Given,
    Words,
    read_number,
    reading,
)
from parplan.planner.export.files.nested_file import flag, read_flag, unpriced
from parplan.planner.export.hugging_face.accelerate_arguments import read_strategy
from parplan.planner.export.hugging_face.hf_trainer_arguments import (
    ATTENTION,
    attention_row,
    optimizer_row,
)
from parplan.planner.export.wrappers.wrapper import Wrapper, fact, fixed, passed
from parplan.planner.export.wrappers.wrapper_names import AXOLOTL_NAMES
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.stack import AttentionKernel, ContextForm

_FSDP = "fsdp_config."
_CONTEXT = ("sequence_parallel_degree", "context_parallel_size")
# schemas/enums.py (RingAttnFunc); batch_ring and batch_stripe do not balance causal attention
_RINGS = {"varlen_llama3": ContextForm.ALL_GATHER, "batch_zigzag": ContextForm.RING}


def _read_bf16(words: Words, _: Facts) -> Facts:
    """Reads `auto` as true: every GPU with bf16 has it on."""
    on = words == ("auto",) or read_flag(words)
    return {} if on else {"precision": Precision.FP32, "narrow_states": False}


def _read_fp16(words: Words, _: Facts) -> Facts:
    return {"precision": Precision.FP16, "narrow_states": False} if read_flag(words) else {}


def _read_plain(words: Words, _: Facts) -> Facts:
    """Reads `bfloat16`, which trains without mixed precision."""
    if not read_flag(words):
        return {}
    return {"precision": Precision.BF16, "narrow_states": True, "mixed": False}


def _read_tf32(words: Words, facts: Facts) -> Facts:
    if words[0].lower() != "false" and facts["precision"] is Precision.FP32:
        raise ValueError("products of fp32 are priced without it")
    return {}


def _read_adapter(words: Words, _: Facts) -> Facts:
    if words[0]:
        raise ValueError("adapters have no price here, training of all parameters has")
    return {}


def _read_batch(words: Words, facts: Facts) -> Facts:
    """Reads the sequences that a GPU has in a step (config/__init__.py, normalize_config)."""
    return {"accumulation": int(read_number(words)) // facts["micro_batch_size"]}


def _size(name: str, fact_name: str) -> Argument:
    return reading(name, lambda words, _: {fact_name: read_number(words)})


def _kernel(name: str, kernel: AttentionKernel) -> Argument:
    return fact(name, attention=kernel)


_BATCH = (
    _size("micro_batch_size", "micro_batch_size"),
    reading("batch_size", _read_batch),
    _size("sequence_len", "seq_length"),
    reading("sample_packing", lambda words, _: {"packed": read_flag(words)}),
    *passed("pad_to_sequence_len", "eval_sample_packing", "multipack_real_batches"),
)
_TRAINING = (
    reading("bf16", _read_bf16),
    reading("fp16", _read_fp16),
    reading("bfloat16", _read_plain),
    unpriced("float16", "false"),
    unpriced("float32", "false"),
    reading("tf32", _read_tf32),
    optimizer_row("optimizer"),
    fact("gradient_checkpointing", recompute=Recompute.FULL),
    reading("adapter", _read_adapter),
)
_ATTENTION = (
    _kernel("flash_attention", AttentionKernel.FLASH),
    _kernel("sdp_attention", AttentionKernel.FLASH),
    _kernel("eager_attention", AttentionKernel.UNFUSED),
    attention_row("attn_implementation", ATTENTION),
    *(
        fixed(name, "is another kernel of attention")
        for name in (
            "xformers_attention",
            "flex_attention",
            "sage_attention",
            "s2_attention",
            "flash_optimum",
        )
    ),
)
_SIZES = (
    _size("dp_shard_size", "shards"),
    _size("dp_replicate_size", "copies"),
    _size("tensor_parallel_size", "tp"),
    *(_size(name, "cp") for name in _CONTEXT),
    reading("ring_attn_func", lambda words, _: {"context_form": _ring(words[0])}),
    *passed("heads_k_stride"),
    unpriced("expert_parallel_size", "1"),
)
_SHARDING = (
    flag(f"{_FSDP}offload_params", "states_on_host"),
    reading(f"{_FSDP}sharding_strategy", read_strategy),
    unpriced("fsdp_version", "1", "2"),
    *passed("ddp", "device_map", "ddp_timeout", "ddp_find_unused_parameters"),
)
_KERNELS = tuple(
    fixed(name, "changes kernels of the step")
    for name in (
        *("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm"),
        *("liger_swiglu", "liger_cross_entropy", "liger_fused_linear_cross_entropy"),
        *("liger_rms_norm_gated", "liger_use_token_scaling", "cut_cross_entropy"),
        *("flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_mlp"),
        *("flash_attn_fuse_qkv", "unsloth_cross_entropy_loss", "unsloth_rms_norm"),
        *("unsloth_rope", "chunked_cross_entropy", "tiled_mlp", "use_kernels", "torch_compile"),
        *("deepcompile", "fused_attn_kernel", "scaling_softmax", "fp32_norms", "use_eaft"),
        *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"),
    )
)
_METHODS = tuple(
    fixed(name, "is another kind of training")
    for name in (
        *("rl", "reward_model", "process_reward_model", "kd_trainer", "dpo_beta"),
        *("relora", "relora_steps", "lisa_n_layers", "unfrozen_parameters", "use_pose"),
        *("rl_beta", "orpo_alpha", "simpo_gamma", "kto_desirable_weight", "noisy_embedding_alpha"),
        *("batch_flattening", "dynamic_checkpoint", "trainer_cls", "shrink_embeddings"),
        *("activation_offloading", "layer_offloading", "selective_checkpointing"),
        "plugins",
    )
)


def _ring(word: str) -> ContextForm:
    if word not in _RINGS:
        raise ValueError(f"it has no price, {', '.join(_RINGS)} have")
    return _RINGS[word]


def completed(given: tuple[Given, ...]) -> tuple[Given, ...]:
    """Returns keys without the prefix of older releases, and FSDP where it has a section."""
    plain = tuple(_without_prefix(each) for each in given)
    rings = next((each for each in plain if each.name in _CONTEXT and each.words != ("1",)), None)
    if rings and any(each.name.partition(".")[0] == "deepspeed" for each in plain):
        raise ConfigError(
            f"{rings.where}: {rings.name} beside deepspeed has no price", hint="use fsdp_config"
        )
    section = next((each for each in plain if each.name.startswith(_FSDP)), None)
    named = any(each.name == "fsdp" for each in plain)
    if section is None or named:
        return plain
    return (Given("fsdp", ("true",), section.where), *plain)


def _without_prefix(given: Given) -> Given:
    return replace(given, name=given.name.replace(f"{_FSDP}fsdp_", _FSDP))


def derived(facts: Facts, num_gpus: int) -> Facts:
    """Returns the facts with the sizes that are left out (_get_parallel_config_kwargs).

    Raises ConfigError for sizes that do not run, or have no price.
    """
    facts = dict(facts)
    packed = facts.pop("packed", False)
    inside = facts.get("tp", 1) * facts.get("cp", 1)
    shards, copies = facts.get("shards", 1), facts.get("copies", 1)
    if (shards > 1 or copies > 1) and not facts.get("zero"):
        raise ConfigError(
            "dp_shard_size and dp_replicate_size have a price with FSDP alone",
            hint="add fsdp_config",
        )
    if shards > 1 and copies == 1 and num_gpus % (inside * shards) == 0:
        facts["copies"] = num_gpus // (inside * shards)
    if shards == 1:
        facts.pop("shards", None)
    if facts.get("cp", 1) > 1 and not packed and "context_form" not in facts:
        raise ConfigError(
            "context_parallel_size without sample_packing runs batch_ring, which has no price",
            hint=f"price ring_attn_func {' or '.join(_RINGS)}",
        )
    return facts


AXOLOTL = Wrapper(
    name="axolotl",
    source="axolotl-ai-cloud/axolotl at 067b021c8b",
    rows=(
        *_BATCH,
        *_TRAINING,
        *_ATTENTION,
        *_SIZES,
        *_SHARDING,
        *_KERNELS,
        *_METHODS,
    ),
    refused=("trl", "ebft", "qat", "kd", "quantization", "peft"),
    defaults={
        "micro_batch_size": 1,
        "accumulation": 1,
        "seq_length": 512,
        "precision": Precision.BF16,
        "optimizer": Optimizer.ADAM,
        "recompute": Recompute.NONE,
        "narrow_states": True,
    },
    harmless=(AXOLOTL_NAMES,),
    marks=frozenset(
        (
            *("base_model", "sequence_len", "sample_packing", "micro_batch_size", "num_epochs"),
            *("dataset_prepared_path", "val_set_size", "pad_to_sequence_len", "dp_shard_size"),
            *(
                "adapter",
                "datasets",
                "special_tokens",
                "train_on_inputs",
                "base_model_config",
                "model_type",
            ),
        )
    ),
    enough=2,
    programs=(r"axolotl\s+train", r"axolotl\.cli\.train"),
    spelled={
        "per_device_train_batch_size": "micro_batch_size",
        "optim": "optimizer",
        "max_length": "sequence_len",
        f"{_FSDP}cpu_offload": f"{_FSDP}offload_params",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "dp_shard_size",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "dp_replicate_size",
        "PARALLELISM_CONFIG_TP_SIZE": "tensor_parallel_size",
        "PARALLELISM_CONFIG_CP_SIZE": "context_parallel_size",
    },
    completed=completed,
    derived=derived,
)
